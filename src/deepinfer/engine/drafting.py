"""Drafter: proposes drafts for slots and decides which of them a step's rows confirm.

The device side of speculation: it reads and writes slot state, and runs on the device's queue.
How many drafts are worth verifying is `speculation.py`. Source: runtime specification, 5.4; weights
specification, 6.3 to 6.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from deepinfer.cache.tensors import Caches
from deepinfer.config.engine import SpeculationConfig
from deepinfer.config.model import ModelConfig
from deepinfer.engine.batch import Batch
from deepinfer.engine.state import SlotState
from deepinfer.model.dspark import DraftModel
from deepinfer.sampling.noise import STREAM_DRAFT, STREAM_TARGET
from deepinfer.sampling.sampler import Sampled, Sampler
from deepinfer.sampling.speculative import Windows, accept_equal, accept_rejection

__all__ = ["Drafter", "confidence_temperatures"]


def confidence_temperatures(config: SpeculationConfig, model: ModelConfig) -> list[float]:
    """Return one temperature per draft: the settings', or the checkpoint's, or 1."""
    given = config.confidence_temperatures or model.dspark_confidence_temperatures or (1.0,)
    values = given * config.num_drafts if len(given) == 1 else given
    return [max(value, 1e-5) for value in values[: config.num_drafts]]


class Drafter:
    """Drafts K tokens at a time for many slots.

    temperatures  K numbers that the confidence head's outputs are divided by
    method        the rule of acceptance
    ahead         told of every row that the next step may run: slots [N], positions [N] of their
                  last tokens, these and their drafts [N, 1+K]
    """

    def __init__(
        self,
        model: DraftModel,
        sampler: Sampler,
        state: SlotState,
        temperatures: Sequence[float],
        method: Literal["coupled", "rejection"] = "coupled",
        ahead: Callable[[Caches, Tensor, Tensor, Tensor], None] | None = None,
    ) -> None:
        self.ahead = ahead
        self.num_drafts = len(temperatures)
        self.rejects = method == "rejection"
        self.model = model
        self._sampler = sampler
        self._state = state
        device = state.length.device
        self.temperatures = torch.tensor(temperatures, dtype=torch.float32, device=device)
        self._logits: Tensor | None = None
        if self.rejects:
            shape = (*state.drafts.shape, model.config.vocab_size)
            self._logits = torch.zeros(shape, dtype=torch.float32, device=device)

    def propose(self, caches: Caches, slots: Tensor, names: Sequence[int] | None = None) -> bool:
        """Draft behind the last token of each slot that goes on; return whether any does.

        slots  [N] int64; their state is up to date and everything but their last token is cached
        names  the same slots on the host, in any order, as far as they are running: nothing waits
               for the device then
        """
        state = self._state
        room = state.limit[slots] - state.length[slots] - 1
        wanted = state.alive[slots] & (room > 0)
        if slots.device.type == "cpu":  # elsewhere a look at values would wait for the device
            slots, room = slots[wanted], room[wanted]
            wanted = wanted[wanted]
        if not len(slots):
            return False
        tokens, raw = self.draft(caches, slots, names)
        confidences = 1.0 / (1.0 + torch.exp(-raw / self.temperatures))
        confidences = confidences.nan_to_num(nan=0.0)  # damaged draft blocks only cost time
        counts = torch.where(wanted, room.clamp(0, self.num_drafts), 0)
        state.propose(slots, tokens, counts, confidences)
        return True

    def draft(
        self, caches: Caches, slots: Tensor, names: Sequence[int] | None
    ) -> tuple[Tensor, Tensor]:
        """Return drafts [N, K] and their raw confidences for slots as of `propose`."""
        state = self._state
        length = state.length[slots]
        on_device = None if names is None else slots
        known = slots.tolist() if names is None else names
        stream = STREAM_DRAFT if self.rejects else STREAM_TARGET

        def choose(place: int, logits: Tensor) -> Tensor:
            drawn = self._sampler.sample_drafts(
                logits,
                known,
                length + place,
                stream,
                keep_drawn_from=self.rejects,
                on_device=on_device,
            )
            if self._logits is not None and drawn.drawn_from is not None:
                self._logits[slots, place] = drawn.drawn_from
            return drawn.token_ids

        plain = not self.rejects and names is not None and self._sampler.takes_largest(names)
        tokens, raw, _ = self.model.propose(
            caches,
            slots,
            length - 2,
            state.last_token[slots],
            None if plain else choose,
            self.num_drafts,
            with_logits=False,
        )
        if self.ahead is not None:
            self.ahead(caches, slots, length - 1, tokens)
        return tokens[:, 1:], raw

    def accept(
        self, batch: Batch, logits: Tensor, sampled: Sampled
    ) -> tuple[Tensor, Tensor, Sampled]:
        """Decide which drafts of a step's windows stand.

        logits   [T, V]  of the windows' rows
        sampled  of the same rows
        returns  accepted [L], emitted [L, 1+K]; and `sampled` with the tokens that came out
        """
        windows = batch.windows
        if self._logits is None:
            accepted, emitted = accept_equal(sampled.token_ids, windows)
            return accepted, emitted, sampled
        assert sampled.drawn_from is not None
        names = batch.slots.tolist()
        params = [self._sampler.params(slot) for slot in names]
        # A forced token is compared, not tested: it is not a draw.
        exact = torch.tensor([p.temperature == 0 or bool(p.forced_ids) for p in params])
        accepted, emitted = accept_rejection(
            sampled.token_ids,
            sampled.drawn_from,
            self._logits[batch.slots],
            windows,
            self._sampler.seeds(batch.slots),
            torch.tensor(batch.positions, device=logits.device)[windows.first],
            exact.to(logits.device),
        )
        flat = _flatten(sampled.token_ids, emitted, windows)
        told = self._sampler.logprobs(logits, sampled.drawn_from, batch.row_slots, flat)
        return (
            accepted,
            emitted,
            replace(
                sampled, token_ids=flat, logprobs=told[0], top_ids=told[1], top_logprobs=told[2]
            ),
        )


def _flatten(token_ids: Tensor, emitted: Tensor, windows: Windows) -> Tensor:
    """Put the emitted tokens at their flat rows."""
    flat = token_ids.clone()
    real = torch.nn.functional.pad(windows.real(), (1, 0), value=True)
    flat[windows.rows()[real]] = emitted[real]
    return flat
