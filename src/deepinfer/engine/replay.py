"""Bounded replay: how many tokens at the end of a prompt the decoder half computes. Pure policy.

The decoder half reads compressed entries that the encoder half makes, and windows of its own. With
replay it runs the last `keep` tokens of a prompt only, and their windows hold nothing older: an
approximation, off unless asked for. Source: backbone specification, 7.
"""

from __future__ import annotations

from deepinfer.config.engine import EngineConfig
from deepinfer.config.model import ModelConfig
from deepinfer.engine.sizing import max_rollback
from deepinfer.errors import ConfigError

__all__ = ["exact_keep_tokens", "keep_tokens", "least_keep_tokens", "replay_floor"]

_ROUND_TO = 10


def least_keep_tokens(config: EngineConfig, model: ModelConfig) -> int:
    """Return the fewest tokens that may be kept: a full window after stepping back.

    A checkpoint with draft blocks needs room for one of them and its bonus, whether it drafts or
    not: what replay computes must not depend on speculation.
    """
    drafts = model.dspark_block_size + 1 if model.num_nextn_predict_layers else 0
    return model.sliding_window + max(max_rollback(config), drafts)


def exact_keep_tokens(model: ModelConfig) -> int:
    """Return the fewest tokens that leave the last row's logits as they are without replay.

    Every decoder layer sees one window further back than the next. Source: 7.3.
    """
    num_layers = model.num_hidden_layers - model.first_decoder_layer
    return model.sliding_window + (num_layers - 1) * (model.sliding_window - 1)


def keep_tokens(config: EngineConfig, model: ModelConfig) -> int | None:
    """Return the resolved `replay.keep_tokens`, None when replay is off.

    "auto" is the least number, rounded up to a multiple of ten: 140 at the released dims.
    Raises ConfigError when the number is too small or the model has no decoder half to shorten.
    """
    if config.replay.mode == "off":
        return None
    least = least_keep_tokens(config, model)
    given = config.replay.keep_tokens
    problems = []
    if model.first_decoder_layer >= model.num_hidden_layers:
        problems.append(
            f"replay.mode: found {config.replay.mode!r}, but no layer of the model has "
            "compress_ratio 1: only off works"
        )
    later = [i for i in model.kv_source_layer_ids if i > model.first_decoder_layer]
    if later:
        problems.append(
            f"replay.mode: found {config.replay.mode!r}, but layers {later} of the decoder half "
            "make compressed entries of all rows: only off works"
        )
    if given != "auto" and given < least:
        room = least - model.sliding_window
        problems.append(
            f"replay.keep_tokens: found {given}, expected at least {least}: sliding_window "
            f"{model.sliding_window} and {room} positions to step back"
        )
    if problems:
        raise ConfigError("replay does not work with these settings", problems)
    return -(-least // _ROUND_TO) * _ROUND_TO if given == "auto" else given


def replay_floor(num_prompt_tokens: int, keep: int | None) -> int:
    """Return the first position of a prompt that the decoder half computes, 0 for all.

    Depends on the prompt alone, so a sequence that is computed again after a preemption has the
    same one, whatever it has generated.
    """
    return 0 if keep is None else max(0, num_prompt_tokens - keep)
