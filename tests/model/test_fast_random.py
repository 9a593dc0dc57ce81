"""Models of random weights: any depth, a slice of the experts, finite everywhere."""

from __future__ import annotations

import pytest
import torch

from deepinfer.config.engine import NumericsConfig
from deepinfer.config.load import load_model_config
from deepinfer.errors import ConfigError
from deepinfer.model.fast.random import random_model, shallow
from deepinfer.model.fast.session import Session


def test_a_slice_of_the_experts_runs_with_drafts_at_any_depth(golden_checkpoint) -> None:
    whole = load_model_config(golden_checkpoint)
    config = shallow(whole, (1, 2, 3, 5, 7))
    assert config.num_hidden_layers == 5 and config.candidate_source_layer_id == 3
    model = random_model(config, "cpu", (2, 4), with_drafts=True)
    assert model.blocks[0].moe.w2.codes.shape[0] == 4
    session = Session(model, 60)
    logits = session.prefill(list(range(3, 50)))
    assert torch.isfinite(logits).all() and 0.3 < float(logits.std()) < 3.0
    assert torch.isfinite(session.decode(7)).all()
    assert session.draft(5)[0].shape == (config.dspark_block_size + 1,)
    again = Session(random_model(config, "cpu", (2, 4), with_drafts=True), 60)
    assert torch.equal(again.prefill(list(range(3, 50))), logits)


@pytest.mark.parametrize("mode", ["official", "noq"])
def test_drafts_in_the_rings_are_those_beside_them(golden_checkpoint, mode: str) -> None:
    """On a card a draft block's own entries go through the rings, where later steps never look."""
    numerics = NumericsConfig(mode=mode)
    model = random_model(
        load_model_config(golden_checkpoint), "cpu", with_drafts=True, numerics=numerics
    )
    for length in (3, 140):
        found = []
        for model.draft.paged in (False, True):
            session = Session(model, 180)
            session.prefill([(7 * i) % 280 + 3 for i in range(length)])
            found.append((*session.draft(7), session.decode(9)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_released_model_can_be_cut(real_config_file) -> None:
    config = shallow(load_model_config(real_config_file), (1, 2, 3, 20, 21, 24))
    kinds = [layer.kind for layer in config.layers]
    assert kinds == ["window", "full", "reuse", "full", "reuse", "reindex"]
    assert config.engram_layer_ids == (0,) and config.dspark_target_layer_ids == (3, 4, 5)
    with pytest.raises(ConfigError, match="kv_source_layer_ids"):
        shallow(config, (0, 2))
