"""Training the draft blocks: attention, guarded steps, anchors, and what the confidence is fitted on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer.config.engine import EngineConfig

pytest.importorskip("tokenizers")
from demo import synth
from demo.confidence import KEPT_FROM, PROMPT, Continuations, gather
from demo.draft import Drafter, Pool, Trainer, Writer, block_attention
from demo.model import Backbone, Shape, init_backbone, init_drafts
from demo.optim import Optimizer
from demo.shape import constants, official_config
from demo.tokens import IMAGE

from deepinfer.bench.evalmodel import EvalModel

LENGTH = 32


def _parts() -> tuple[Shape, Backbone, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    compressed = np.arange(3072, dtype=np.int32) // 2
    config = official_config(int(compressed.max()) + 1, {synth.SYSTEM: 3, IMAGE: 19})
    shape = Shape(config["text_config"])  # type: ignore[arg-type]
    tensors = {k: torch.from_numpy(v) for k, v in constants(config, compressed).items()}
    model = Backbone(shape, tensors, LENGTH, torch.device("cpu"), False, False)
    drafts = {
        n: v.requires_grad_(not n.endswith(("gate.bias", "confidence_head.proj.weight")))
        for n, v in init_drafts(shape).items()
    }
    return shape, model, init_backbone(shape), drafts


def test_block_attention_is_one_softmax_over_window_and_block() -> None:
    g = torch.Generator().manual_seed(0)
    q, kv, window = (torch.randn(s, generator=g) for s in ((2, 3, 5, 4, 8), (2, 3, 5, 8), (2, 3, 7, 8)))  # fmt: skip
    allowed = torch.rand(2, 3, 7, generator=g) < 0.5
    allowed[0, 0] = False  # nothing before the block
    o, lse = block_attention(q, kv, window, allowed)
    keys = torch.cat([window, kv], 2)
    scores = torch.einsum("bakhd,basd->bahks", q, keys) * 8**-0.5
    seen = torch.cat([allowed, torch.ones(2, 3, 5, dtype=torch.bool)], -1)[:, :, None, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(o, torch.einsum("bahks,basd->bahkd", scores.softmax(-1), keys))


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    shape, model, backbone, drafts = _parts()
    trainer = Trainer(
        Drafter(shape, model, False), drafts, backbone, Optimizer(drafts, shape.o_groups)
    )
    trainer.lr.fill_(1.0)
    ids = torch.randint(3, 3000, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    taps, hidden, _ = Writer(model, backbone, False)(ids[:, :-1], ids[:, :1] * 0)
    anchors = torch.tensor([[0, 3, 9], [5, 8, 20]])
    assert bool(trainer(ids, taps, hidden, anchors).isfinite().all())
    before = {n: p.detach().clone() for n, p in drafts.items()}
    for p in drafts.values():
        p.grad = None
    broken = taps.clone()
    broken[1] = float("nan")
    assert not bool(trainer(ids, broken, hidden, anchors)[0].isfinite())
    assert all(torch.equal(before[n], p) for n, p in drafts.items())
    assert int(trainer.skipped) == 1 and float(trainer.blamed.sum()) > 0
    for p in drafts.values():
        p.grad = None
    trainer(ids, taps, hidden, anchors)
    assert all(bool(p.isfinite().all()) for p in drafts.values())
    assert sum(not torch.equal(before[n], p) for n, p in drafts.items()) > len(drafts) / 2


def test_a_pool_draws_only_allowed_anchors_of_sound_rows() -> None:
    _, model, backbone, _ = _parts()
    pool = Pool(0)
    ids = torch.randint(3, 3000, (2, LENGTH + 1))
    pool.add(Writer(model, backbone, False), ids, [np.array([4, 7, 9]), np.zeros(0, np.int64)])
    *_, anchors = pool.draw(64)
    assert set(anchors[0].tolist()) == {4, 7, 9} and set(anchors[1].tolist()) == {0}


def test_gathered_rows_hold_what_a_draft_block_sees(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("demo.confidence.CONTINUED", 8)
    model = EvalModel(demo_folder, EngineConfig())
    prompt = model.tokenizer.encode("The whale " * 30)
    short = model.tokenizer.encode("Fellow citizens, the state of the union is")
    rows = gather(model, [prompt, short])
    for text, row in zip((prompt, short), rows, strict=True):
        first = max(0, len(text) - (PROMPT - KEPT_FROM))
        streams = model.streams(1, 512)
        ids = row["ids"].tolist()
        assert ids[: len(text) - first] == text[first:]
        logits = streams.prefill(0, text[:first] + ids[:-1])
        greedy = logits.argmax(-1).tolist()[len(text) - 1 :]
        assert greedy == ids[len(text) - first :]
        head = model.model.head
        kept = model.model.ops.dense_linear(row["hidden"].float(), head, torch.float32)
        assert kept.argmax(-1).tolist()[-len(greedy) :] == greedy
        assert row["taps"].shape == (len(ids) - 1, 3 * model.config.hidden_size)
    found = Continuations(rows, model.config.dspark_block_size)
    assert found.start == [len(prompt) - 1 - max(0, len(prompt) - 67), len(short) - 1]


def test_blocks_begin_where_an_engine_begins_them() -> None:
    """Every start alike, then one block behind the other; the mean counts blocks, not positions."""
    from demo.tune import accepted_length, visits

    accepted = np.array([2, 1, 6, 1, 3, 1, 1, 1])
    every = sum(_walk(accepted, first) for first in range(6)) / 6
    np.testing.assert_allclose(visits(accepted, 5), every)
    assert accepted_length([accepted], 5) == pytest.approx((every * accepted).sum() / every.sum())


def _walk(accepted: np.ndarray, position: int) -> np.ndarray:
    found = np.zeros(len(accepted))
    while position < len(accepted):
        found[position] += 1
        position += accepted[position]
    return found


def test_a_draft_teaches_as_far_as_it_is_reached() -> None:
    """Behind a draft that is surely wrong, others count 0.3 of what they count behind a right one."""
    from demo.tune import DECAY, reached_loss

    teacher = torch.tensor([[[[20.0, 0], [20, 0]]]])
    sides = {"right": 20.0, "wrong": -20.0}
    for side, value in sides.items():
        logits = torch.tensor([[[[value, 0], [0.0, 0]]]], requires_grad=True)
        (gradient,) = torch.autograd.grad(reached_loss(logits, teacher), logits)
        weight = DECAY * (1.0 if side == "right" else 0.3)
        assert gradient[0, 0, 1, 0].item() == pytest.approx(-weight / (1 + weight) / 2, rel=1e-3)
