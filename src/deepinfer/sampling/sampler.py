"""Sampler: logits of a batch to one token a row, with logprobs.

Owns the per-slot parameters and the order of masks, filters and draw. A row's result depends on its
own logits, parameters and position only: every reduction runs over the last dimension and the top-p
mass is counted in integers. Source: runtime specification, 5.1, 5.3 and 5.5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.sampling.rng import MAX_LOG_NOISE, MIN_LOG_NOISE, exponential

__all__ = [
    "LOGPROB_FLOOR",
    "Sampled",
    "Sampler",
    "SlotParams",
    "draw",
    "filter_logits",
    "stable_topk",
]

LOGPROB_FLOOR = -9999.0
_MOST_BIAS = 1e30  # more would become infinite in fp32, and a difference of two of them NaN
_MASS_ONE = 2.0**31  # fixed point of the likeliest token's mass
_HOPELESS = MIN_LOG_NOISE - MAX_LOG_NOISE - 0.1  # a logit this far below the largest never wins


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotParams:
    """How the request in one slot is sampled.

    temperature        0 for greedy
    top_p, top_k       1.0 and -1 for off
    seed               0..2^64-1
    num_prompt_tokens  position of the first generated token
    min_tokens         outputs before this one never are one of `ending_ids`
    forced_ids         output i is the i-th of them, as far as they go
    num_top_logprobs   alternatives to report, 0 for none
    raw_logprobs       report the model's own distribution, not the one drawn from
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0
    num_prompt_tokens: int = 0
    min_tokens: int = 0
    ending_ids: tuple[int, ...] = ()
    forced_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] | None = None
    logprobs: bool = False
    num_top_logprobs: int = 0
    raw_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token a row, on the sampler's device.

    token_ids     [N]     int64; meaningless where `bad`
    bad           [N]     bool, the row's logits held NaN or infinity
    logprobs      [N]     fp32, or None when no row asked
    top_ids       [N, K]  int64, or None; K is the most any row asked
    top_logprobs  [N, K]  fp32, or None
    """

    token_ids: Tensor
    bad: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def stable_topk(values: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest values of each row, in order, ties to the lower id.

    values [N, V] fp32 without NaN; returns [N, count] int64.
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(values.shape[1], device=values.device)
    key = order * 2**32 + (2**32 - 1 - ids)
    return 2**32 - 1 - (key.topk(count, dim=-1).values & (2**32 - 1))


def filter_logits(logits: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Keep the likeliest tokens of each row: first by mass, then by count; the rest become -inf.

    logits   [N, V]  fp32, tempered
    top_p    [N]     float64; the token whose mass crosses it is kept; 1 keeps all
    top_k    [N]     int64; -1 keeps all
    returns  [N, V]  fp32
    Equal logits are taken in order of their ids.
    """
    ranked, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    mass = torch.exp(ranked - ranked[:, :1]).mul_(_MASS_ONE).round_().long()
    before = mass.cumsum(-1) - mass
    limit = torch.where(top_p < 1.0, top_p * mass.sum(-1), math.inf)
    rank = torch.arange(logits.shape[1], device=logits.device)
    most = torch.where(top_k < 0, logits.shape[1], top_k)
    keep = (before < limit.unsqueeze(1)) & (rank < most.unsqueeze(1))
    kept = ranked.masked_fill_(~keep, -math.inf)
    return torch.empty_like(logits).scatter_(1, ids, kept)


def draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token a row from softmax(logits) by the Gumbel-max rule, ties to the lower id.

    logits     [N, V]  fp32, -inf where not allowed
    seeds      [N]     int64, the 64 bits of each seed
    positions  [N]     int64, absolute position of the token drawn
    returns    [N]     int64
    Noise is bounded, so only tokens near the largest logit can win; the others get none.
    """
    lead = logits - logits.amax(dim=-1, keepdim=True)
    width = logits.shape[1]
    if width % 4:
        lead = torch.nn.functional.pad(lead, (0, -width % 4), value=-math.inf)
    lead = lead.view(len(logits), -1, 4)
    rows, groups = torch.nonzero((lead >= _HOPELESS).any(dim=-1), as_tuple=True)
    noise = torch.log(exponential(seeds[rows], positions[rows], groups))
    score = torch.full(lead.shape, -math.inf, dtype=torch.float64, device=logits.device)
    score[rows, groups] = lead[rows, groups] - noise
    return score.flatten(1).argmax(dim=-1)


class Sampler:
    """Holds the parameters of every slot and samples whole batches.

    banned_ids  never generated, whatever a request says (except by force)
    """

    def __init__(
        self, vocab_size: int, num_slots: int, device: torch.device, banned_ids: Sequence[int] = ()
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._banned = torch.tensor(sorted(set(banned_ids)), dtype=torch.int64, device=device)
        self._params: list[SlotParams] = [SlotParams(temperature=0.0)] * num_slots
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_p = np.ones(num_slots, np.float64)
        self._top_k = np.full(num_slots, -1, np.int64)
        self._seed = np.zeros(num_slots, np.uint64)
        self._logprobs = np.zeros(num_slots, np.bool_)
        self._raw = np.zeros(num_slots, np.bool_)
        self._num_top = np.zeros(num_slots, np.int64)
        self._first = np.zeros(num_slots, np.int64)  # position of the first output
        self._ending_until = np.zeros(num_slots, np.int64)  # positions below it mask ending ids
        self._forced_until = np.zeros(num_slots, np.int64)  # positions below it are forced
        self._biased = np.zeros(num_slots, np.bool_)

    def admit(self, slot: int, params: SlotParams) -> None:
        """Set the parameters of a slot for the life of its next request."""
        first = params.num_prompt_tokens
        self._params[slot] = params
        self._temperature[slot] = min(params.temperature, 1e30)  # -inf divided must stay -inf
        self._top_p[slot] = params.top_p
        self._top_k[slot] = params.top_k
        self._seed[slot] = params.seed
        self._logprobs[slot] = params.logprobs
        self._raw[slot] = params.raw_logprobs
        self._num_top[slot] = min(params.num_top_logprobs, self._vocab_size)
        self._first[slot] = first
        self._ending_until[slot] = first + (params.min_tokens if params.ending_ids else 0)
        self._forced_until[slot] = first + len(params.forced_ids)
        self._biased[slot] = bool(params.logit_bias)
        if params.logit_bias:
            self._bias[slot] = (
                torch.tensor(list(params.logit_bias), dtype=torch.int64, device=self._device),
                torch.tensor(
                    [max(-_MOST_BIAS, min(b, _MOST_BIAS)) for b in params.logit_bias.values()],
                    dtype=torch.float32,
                    device=self._device,
                ),
            )

    def params(self, slot: int) -> SlotParams:
        """Return the parameters of the slot's request."""
        return self._params[slot]

    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> Sampled:
        """Choose one token for each row.

        logits     [N, V]  fp32, left as it is
        slots      N slots, each admitted before
        positions  N absolute positions of the tokens being chosen
        """
        slot = np.asarray(slots, np.int64)
        position = np.asarray(positions, np.int64)
        low, high = torch.aminmax(logits, dim=-1)
        bad = ~(torch.isfinite(low) & torch.isfinite(high))
        masked = self._mask(logits, slot, position)
        drawn_from, tokens = self._choose(masked, slot, position)
        tokens = self._force(tokens, slot, position)
        if not self._logprobs[slot].any():
            return Sampled(tokens, bad)
        if self._raw[slot].any():
            raw = torch.from_numpy(self._raw[slot]).to(self._device)
            drawn_from = torch.where(raw.unsqueeze(1), logits, drawn_from)
        norm = torch.logsumexp(drawn_from, dim=-1, keepdim=True)
        chosen = drawn_from.gather(1, tokens.unsqueeze(1)) - norm
        logprobs = chosen.clamp_(min=LOGPROB_FLOOR).squeeze(1)
        count = int(self._num_top[slot].max())
        if count == 0:
            return Sampled(tokens, bad, logprobs)
        top_ids = stable_topk(drawn_from, count)
        top = (drawn_from.gather(1, top_ids) - norm).clamp_(min=LOGPROB_FLOOR)
        return Sampled(tokens, bad, logprobs, top_ids, top)

    def _mask(self, logits: Tensor, slot: np.ndarray, position: np.ndarray) -> Tensor:
        """Apply banned ids, biases and the wait for `min_tokens`, on a copy when any applies."""
        biased = np.flatnonzero(self._biased[slot])
        waiting = np.flatnonzero(position < self._ending_until[slot])
        if not (len(self._banned) or len(biased) or len(waiting)):
            return logits
        masked = logits.clone()
        for row in biased:
            ids, values = self._bias[int(slot[row])]
            masked[row, ids] += values
        if len(self._banned):
            masked[:, self._banned] = -math.inf
        for row in waiting:
            masked[row, list(self._params[slot[row]].ending_ids)] = -math.inf
        return masked

    def _choose(
        self, masked: Tensor, slot: np.ndarray, position: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Return the logits each row is drawn from (greedy rows: as given), and the tokens."""
        temperature = self._temperature[slot]
        sampling = np.flatnonzero(temperature > 0)
        if len(sampling) == 0:
            return masked, masked.argmax(dim=-1)
        whole = len(sampling) == len(slot)
        rows = torch.from_numpy(sampling).to(self._device)
        picked = slot[sampling]
        scale = torch.from_numpy(temperature[sampling]).to(self._device).unsqueeze(1)
        tempered = (masked if whole else masked[rows]) / scale
        top_p, top_k = self._top_p[picked], self._top_k[picked]
        filtering = np.flatnonzero((top_p < 1.0) | (top_k > 0))
        if len(filtering):
            part = torch.from_numpy(filtering).to(self._device)
            tempered[part] = filter_logits(
                tempered[part],
                torch.from_numpy(top_p[filtering]).to(self._device),
                torch.from_numpy(top_k[filtering]).to(self._device),
            )
        seeds = torch.from_numpy(self._seed[picked].view(np.int64)).to(self._device)
        drawn = draw(tempered, seeds, torch.from_numpy(position[sampling]).to(self._device))
        if whole:
            return tempered, drawn
        drawn_from = masked.clone()
        drawn_from[rows] = tempered
        tokens = masked.argmax(dim=-1)
        tokens[rows] = drawn
        return drawn_from, tokens

    def _force(self, tokens: Tensor, slot: np.ndarray, position: np.ndarray) -> Tensor:
        forced = np.flatnonzero(position < self._forced_until[slot])
        for row in forced:
            params = self._params[slot[row]]
            tokens[row] = params.forced_ids[int(position[row] - self._first[slot[row]])]
        return tokens
