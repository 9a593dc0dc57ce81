"""The recipe of the demonstration model: rounding, gradients, overlap search, causality, export."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer.config.model import ModelConfig
from deepinfer.model.reference import ReferenceModel
from deepinfer.weights.export import to_fp8_block32, to_mxfp4
from deepinfer.weights.layout import expected_tensors

pytest.importorskip("tokenizers")
from demo import quant, synth
from demo.data import Document, clean, html_text, remove_overlap
from demo.draft import calibration_error, fit_confidence, stretch_anchors
from demo.export import official_tensors
from demo.model import Backbone, Shape, drafts_from, init_backbone, init_drafts, router_pressure
from demo.rows import CATEGORIES, Corpus, epoch, repeats
from demo.shape import constants, official_config
from demo.sinkhorn import sinkhorn
from demo.tokens import IMAGE
from demo.train import copy_accuracy, probe_positions

_COMPRESSED = np.arange(3072, dtype=np.int32) // 2


def _config() -> dict[str, object]:
    return official_config(int(_COMPRESSED.max()) + 1, {synth.SYSTEM: 3, IMAGE: 19})


def _backbone(length: int) -> tuple[Shape, Backbone]:
    config = _config()
    shape = Shape(config["text_config"])  # type: ignore[arg-type]
    arrays = constants(config, _COMPRESSED)
    tensors = {k: torch.from_numpy(v) for k, v in arrays.items()}
    return shape, Backbone(shape, tensors, length, torch.device("cpu"), False, False)


def test_weight_rounding_equals_the_exported_codes() -> None:
    w = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    codes, scale = to_fp8_block32(w)
    grid = (scale.int() - 127).float().exp2().repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert torch.equal(quant.weight8(w).float(), codes.float() * grid)
    packed, scale4 = to_mxfp4(w)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    both = torch.stack([values[(packed & 15).long()], values[(packed >> 4).long()]], -1).flatten(-2)
    steps = (scale4.int() - 127).float().exp2().repeat_interleave(32, 1)
    assert torch.equal(quant.weight4(w).float(), both * steps)


def test_rounding_passes_the_gradient_through() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    for rounding in (quant.act8, quant.act4_e8, quant.act4_e4, quant.rows8):
        (grad,) = torch.autograd.grad(rounding(x).float().sum(), x)
        assert torch.equal(grad, torch.ones_like(x))


def test_fp4_check_vector_of_the_specification() -> None:
    x = (0.1 * torch.arange(16) - 0.75).bfloat16()
    want = [-6, -6, -4, -4, -3, -2, -1, -0.5, 0.5, 1, 2, 3, 4, 4, 6, 6]
    assert (quant.act4_e4(x).float() / 0.125).tolist() == want


def test_sinkhorn_check_vector_and_gradient() -> None:
    raw = torch.tensor([[[2.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 3, 0], [1, 0, 0, 0]]])
    assert torch.allclose(
        sinkhorn(raw, 20, 1e-6)[0, 0], torch.tensor([0.5517, 0.1526, 0.0667, 0.2290]), atol=1e-4
    )
    x = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: sinkhorn(r, 20, 1e-6), (x,))


def test_no_future_token_reaches_an_earlier_position() -> None:
    shape, model = _backbone(160)
    params = init_backbone(shape)
    ids = torch.randint(20, 3000, (1, 160), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, 120] = 5
    with torch.no_grad():
        a, b = (model(params, i, top_k=64, qat=True)["hidden"] for i in (ids, other))
    assert torch.equal(a[:, :120], b[:, :120]) and not torch.equal(a[:, 120], b[:, 120])


def test_the_exported_model_computes_what_was_trained() -> None:
    shape, model = _backbone(96)
    config = ModelConfig.from_dict(_config())
    params = init_backbone(shape) | init_drafts(shape)
    tensors = official_tensors(config, params)
    assert set(tensors) == set(expected_tensors(config))
    ids = torch.randint(20, 3000, (96,), generator=torch.Generator().manual_seed(2))
    want = ReferenceModel(config, tensors, _COMPRESSED).forward(ids)
    with torch.no_grad():
        hidden = model(params, ids[None], top_k=64, qat=True)["hidden"][0]
    got = torch.nn.functional.linear(hidden, params["head.weight"].bfloat16()).float()
    assert (
        float(((got - want).square().mean(-1).sqrt() / want.std(-1)).median()) < 0.35
    )  # two unrelated models: 1.4


def test_overlap_search_finds_shared_runs_and_nothing_else() -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=6)) for _ in range(400)]
    shared = " ".join(words[:14]) + ". "
    train = [Document(source="s", name="t", text=" ".join(words[100:200]) + ". " + shared)]
    held = [Document(source="s", name="h", text=shared + " ".join(words[200:300]) + ".\n")]
    kept, left = remove_overlap(train, held)
    assert left == 0 and words[250] in kept[0].text and words[3] not in kept[0].text


def test_pages_become_text() -> None:
    page = "<head><title>x</title></head><body><p>a&nbsp;b <b>c</b></p><script>no</script><pre>d\n  e</pre></body>"
    assert clean(html_text(page)).split("\n") == ["a b c", "", "d", "  e", ""]


def test_rows_keep_generated_documents_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = np.array([700, 90, 60, 80], np.int32)
    categories = np.array(
        [CATEGORIES.index(c) for c in ("natural", "needle", "copy", "json")], np.uint8
    )
    ids = rng.integers(20, 3000, lengths.sum()).astype(np.uint16)
    starts = np.cumsum(lengths) - lengths
    ids[starts], ids[starts + lengths - 1] = 0, 1
    np.savez(tmp_path / "t.npz", ids=ids, lengths=lengths, bytes=lengths * 3, categories=categories)
    corpus = Corpus(tmp_path / "t.npz")
    rows = epoch(corpus, 128, 0.3, 0.5, seed=1)
    assert (rows[:, 0, 0] == 0).all()
    flat = [row.tobytes() for row in rows[:, 0]]
    for index in (1, 2, 3):
        document = corpus.document(index).tobytes()
        whole = any(document in row for row in flat)
        chosen = any(corpus.document(index)[1:6].tobytes() in row for row in flat)
        assert whole == chosen


@pytest.mark.parametrize(
    "maker",
    [synth.json_document, synth.json_chat, synth.arithmetic, synth.copy_task, synth.small_talk],
)
def test_generators_repeat_with_their_seed(maker: object) -> None:
    assert callable(maker)
    assert maker(random.Random(3)) == maker(random.Random(3))
    assert maker(random.Random(3)).startswith(synth.BOS)


def test_digits_of_retrieval_tasks_change_places_together(tmp_path: Path) -> None:
    ids = np.array([0, 40, 31, 32, 33, 34, 41, 31, 32, 33, 34, 1], np.uint16)
    needle = np.array([CATEGORIES.index("needle")], np.uint8)
    lengths = np.array([ids.size], np.int32)
    np.savez(tmp_path / "t.npz", ids=ids, lengths=lengths, bytes=lengths, categories=needle)
    corpus = Corpus(tmp_path / "t.npz")
    corpus.mark(set(range(30, 40)), 8)
    taken = [corpus.take(0, ids.size, np.random.default_rng(seed)) for seed in range(4)]
    assert all((t[2:6] == t[7:11]).all() and (t[[0, 1, 6, 11]] == ids[[0, 1, 6, 11]]).all() for t in taken)  # fmt: skip
    assert len({t.tobytes() for t in taken}) > 1
    assert corpus.marks[2:6].tolist() == [1] * 4 and corpus.marks[7:11].tolist() == [8] * 4


def test_half_of_the_queries_ask_where_a_row_asks() -> None:
    raw = np.ones((2, 2, 101), np.uint16)
    raw[1, 1, 61] = 8
    probes, weights = probe_positions(raw, 100, np.random.default_rng(0))
    assert (weights[0] == 1).all() and (weights[1] > 1).sum() == probes.shape[1] // 2
    asked = probes[1][weights[1] > 1]
    assert (asked == 60).sum() >= asked.size // 2 and asked.min() >= 52 and asked.max() == 60


def test_pressure_rests_on_experts_outside_the_band() -> None:
    share = torch.full((1, 4), 50.0, requires_grad=True)
    router_pressure(torch.tensor([[1500.0, 2400, 30, 70]]), share).backward()
    assert share.grad is not None
    signs = torch.sign(share.grad[0]).tolist()
    assert signs == [0, 1, -1, -1] or signs == [0.0, 1.0, -1.0, -1.0]


def test_draft_blocks_start_from_the_layers_they_resemble() -> None:
    shape, _ = _backbone(96)
    backbone = init_backbone(shape)
    drafts = drafts_from(shape, backbone)
    assert {k: v.shape for k, v in drafts.items()} == {k: v.shape for k, v in init_drafts(shape).items()}  # fmt: skip
    last = f"layers.{shape.num_hidden_layers - 1}."
    assert torch.equal(drafts["mtp.1.attn.wq_a.weight"], backbone[last + "attn.wq_a.weight"])
    assert torch.equal(drafts["mtp.0.attn.wq_a.weight"], backbone["layers.0.attn.wq_a.weight"])


def test_anchors_stay_inside_greedy_stretches_and_before_their_end() -> None:
    ids = np.full((1, 64), 50)
    ids[0, 30] = 1
    (anchors,) = stretch_anchors(ids, [np.array([9, 24])], 12, 5)
    assert anchors.tolist() == [*range(9, 16), 24]


def test_the_fitted_confidence_is_calibrated() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(20000, 1, 6, generator=g)
    truth = torch.tensor([1.0, -2, 0.5, 0, 0, 0.3])
    y = (torch.rand(20000, 1, generator=g) < torch.sigmoid(x @ truth)).float()
    weights = fit_confidence(x, y, torch.ones_like(y))
    assert (weights - truth).abs().max() < 0.1
    logit = (x @ weights)[:, 0].numpy()
    assert calibration_error(logit, y[:, 0].numpy(), 1.0) < 0.03


def _copies(tmp_path: Path, lists: int = 3) -> Corpus:
    rng = np.random.default_rng(1)
    texts = []
    for _ in range(lists):
        words = rng.integers(40, 60, 30)
        texts.append([0, 100, 101, *words, 102, 101, *words, 1])
    ids = np.concatenate([[0, *rng.integers(200, 300, 998), 1], *texts]).astype(np.uint16)
    lengths = np.array([1000, *(len(t) for t in texts)], np.int32)
    categories = np.array(
        [CATEGORIES.index("natural"), *[CATEGORIES.index("copy")] * lists], np.uint8
    )
    np.savez(tmp_path / "t.npz", ids=ids, lengths=lengths, bytes=lengths, categories=categories)
    corpus = Corpus(tmp_path / "t.npz")
    corpus.mark(set(range(30, 40)), 8, 3, [range(40, 50), range(50, 60)])
    return corpus


def test_repeats_tells_how_far_back_a_run_of_four_came_first() -> None:
    ids = np.array([5, 6, 7, 8, 9, 5, 6, 7, 8, 3, 5, 6, 7, 8], np.uint16)
    assert repeats(ids).tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 10]
    assert repeats(ids[:3]).tolist() == [0, 0, 0]


def test_what_is_copied_weighs_and_the_list_before_it_does_not(tmp_path: Path) -> None:
    corpus = _copies(tmp_path)
    marks = corpus.marks[corpus.starts[1] : corpus.starts[1] + corpus.lengths[1]]
    assert (marks[:37] == 0).all()  # the head, the list, and what nothing predicts yet
    assert (marks[37:-1] == 3).all() and marks[-1] == 1


def test_pieces_of_a_copied_list_change_places_within_their_set(tmp_path: Path) -> None:
    corpus = _copies(tmp_path)
    start, size = int(corpus.starts[2]), int(corpus.lengths[2])
    ids = corpus.document(2)
    taken = [corpus.take(start, size, np.random.default_rng(seed)) for seed in range(4)]
    assert len({t.tobytes() for t in taken}) == 4
    for t in taken:
        assert (t[3:33] == t[35:65]).all() and ((t < 50) == (ids < 50)).all()
        assert (t[[0, 1, 2, 33, 34, 65]] == ids[[0, 1, 2, 33, 34, 65]]).all()


def test_copies_take_their_share_again_and_again(tmp_path: Path) -> None:
    corpus = _copies(tmp_path)
    rows = epoch(corpus, 128, 0.5, 0.9, seed=1, copies=0.9)
    share = (rows[:, 1] == 3).sum() / 1000
    assert 0.3 < share < 0.6  # 900 of 1,900 tokens are copies, less than half of them weigh


def test_both_kinds_of_asking_tokens_get_their_queries() -> None:
    raw = np.ones((1, 2, 401), np.uint16)
    raw[0, 1, 101:301] = 3
    raw[0, 1, 350:354] = 8
    probes, weights = probe_positions(raw, 400, np.random.default_rng(0))
    asked = probes[0][weights[0] > 1]
    assert 16 <= (asked > 340).sum() <= 48


def test_copied_tokens_are_counted_by_distance() -> None:
    words = np.arange(40, 140)
    row = np.concatenate([[0], words, [7], words, np.full(55, 2)]).astype(np.uint16)[None]
    hits = np.ones((1, row.shape[1] - 1))
    hits[0, 110:120] = 0
    found = copy_accuracy(row, hits)
    assert found["copied<128_n"] == 97 and abs(found["copied<128"] - 87 / 97) < 1e-6
