"""Prefill of many prompts on ranks that share experts: each its own in chunks, or shared (pure)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer.config.mesh import num_slots
from deepinfer.errors import ConfigError
from deepinfer.parallel.placement import initial_placement
from deepinfer.sim.routing import Routing
from deepinfer.sim.settings import Settings
from deepinfer.sim.times import KEPT, Times

__all__ = ["ENTRY_BYTES", "prompt_us", "simulate_prefill"]

Floats = NDArray[np.floating]

ENTRY_BYTES = 2600
"""Bytes that a token's compressed entries take between ranks that share its prompt."""
_LONGEST = 1 << 20


def simulate_prefill(
    settings: Settings, context: int, chunk: int, seed: int, times: Times
) -> dict[str, float]:
    """Prefill `settings.requests` prompts; returns prompt tokens per second and the mean wait.

    context  ranks that share a prompt; a step takes `chunk` tokens for each of them at most
    All groups of ranks step together, as one expert group does: those without work wait. Prompts
    are taken in order, each by the group that is free first; a step holds as many as fit, and the
    time of a first token counts from when its prompt was taken.
    """
    s = settings
    if s.expert % context:
        raise ConfigError(f"{context} ranks that share a prompt do not divide {s.expert} ranks")
    rng = np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed).spawn(1)[0]))
    lengths = s.prompt * np.exp(s.prompt_spread * rng.standard_normal(s.requests))
    waiting = np.clip(np.rint(lengths), 1, _LONGEST).astype(np.int64).tolist()
    total = sum(waiting)
    waiting.reverse()
    slots = num_slots(s.experts, s.expert, s.copies)
    placement = initial_placement(s.counted_layers, s.experts, s.expert, slots - s.experts)
    routing = Routing(s, rng)
    fabric = times.fabrics[s.fabric]
    groups = s.expert // context
    running: list[list[list[float]]] = [[] for _ in range(groups)]  # [left, done, began]
    clock = 0.0
    waits: list[float] = []
    while waiting or any(running):
        tokens, keys, kept = (np.zeros(groups) for _ in range(3))
        ended: list[float] = []
        for group, own in enumerate(running):
            room = float(chunk * context)
            while room > 0:
                open_ = next((each for each in own if each[0] > 0), None)
                if open_ is None:
                    if not waiting:
                        break
                    open_ = [float(waiting.pop()), 0.0, clock]
                    own.append(open_)
                take = min(room, open_[0])
                tokens[group] += take
                keys[group] += take * (open_[1] + take / 2)
                open_[0] -= take
                open_[1] += take
                room -= take
                if open_[0] == 0:
                    kept[group] += min(KEPT, open_[1])
                    ended.append(open_[2])
            running[group] = [each for each in own if each[0] > 0]
        step = 0.0
        shared = np.stack([tokens, keys, kept], axis=1) / context
        for second in (False, True):
            rows = shared[:, 2] if second else shared[:, 0]
            pairs = shared[:, 1] * (rows / np.maximum(shared[:, 0], 1))
            dense = times.prefill_layer(rows, pairs, second)
            sent = np.repeat(rows, context)
            routing.advance()
            drawn = routing.rows(placement, np.array([round(float(sent.sum()))]))[0]
            got = drawn.sum(axis=-2)
            net = times.exchange(fabric, s.expert, slots, s.active, sent[None], got)
            half = times.experts(drawn).max(axis=-1) + net
            step += float(dense.max()) * s.layers / 2
            step += float(half.sum()) * s.layers / 2 / s.counted_layers
        if context > 1:  # entries of all layers, started early, count where they are not hidden
            gathered = float(tokens.max()) * (1 - 1 / context) * ENTRY_BYTES / fabric.bytes_us
            step += max(0.0, gathered - 0.5 * step) + 4 * fabric.dispatch_us
        step += float(times.curves["head"](max(len(ended), 1)))
        clock += step
        waits.extend(clock - began for began in ended)
    return {
        "prompt_tokens_per_s": total / clock * 1e6 / s.expert,
        "first_token_ms": float(np.mean(waits)) * 1e-3,
    }


def prompt_us(times: Times, settings: Settings, length: int, context: int, chunk: int) -> float:
    """Return the dense time of one prompt alone, without experts and exchange (a closed form)."""
    done, total = 0, 0.0
    while done < length:
        take = min(chunk * context, length - done)
        rows = np.array([take / context])
        dense = times.prefill_layer(rows, rows * (done + take / 2), False)
        total += float(dense[0]) * settings.layers / 2
        done += take
    return total
