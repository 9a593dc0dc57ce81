"""Sampler: logits of a batch to one token a row, with logprobs.

Owns the per-slot parameters and the order of masks, filters and draw. A row's result depends on its
own logits, parameters and position only: every reduction runs over the last dimension and the top-p
mass is counted in integers. Two forms give the same tokens: on a CPU `host.py` looks at values to
save work, on other devices shapes are fixed and nothing waits. Source: runtime specification, 5.1,
5.3 and 5.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from deepinfer.errors import RequestError
from deepinfer.kernels.draw import largest
from deepinfer.sampling.host import MASS_ONE, draw_host, filter_host
from deepinfer.sampling.noise import LARGEST_UNIFORM, STREAM_TARGET
from deepinfer.sampling.rng import exponential

__all__ = [
    "LOGPROB_FLOOR",
    "LogitsProcessor",
    "Sampled",
    "Sampler",
    "SlotParams",
    "TokenMasks",
    "draw",
    "filter_logits",
    "stable_topk",
]

LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]
"""Takes all tokens so far, prompt included, and a row's logits [V] fp32; returns the logits to go
on with, of the same shape. It may change what it is given."""

TokenMasks = tuple[Tensor, Tensor]
"""Rows of the batch [R] int64, and for each which ids are allowed: bits [R, ceil(V/32)] int32, id v
is bit v % 32 of word v // 32. Other rows are free."""

LOGPROB_FLOOR = -9999.0
_MOST_BIAS = 1e30  # more would become infinite in fp32, and a difference of two of them NaN
_NOISE_GROUPS = 2**18  # groups of four ids whose noise is made at a time on a device
_HOST_FILTER_WIDTH = 4096  # from here on `filter_host` is faster than sorting whole rows
_SCORED_ROWS = 64
_FILTERED_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotParams:
    """How the request in one slot is sampled.

    temperature        0 for greedy
    top_p, top_k       1.0 and -1 for off
    seed               0..2^64-1
    num_prompt_tokens  position of the first generated token
    min_tokens         outputs before this one never are one of `ending_ids`
    forced_ids         output i is the i-th of them, as far as they go
    processors         applied in order after masks and bias, before temperature
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
    processors: tuple[LogitsProcessor, ...] = ()
    logprobs: bool = False
    num_top_logprobs: int = 0
    raw_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token a row, on the sampler's device.

    token_ids     [N]     int64; meaningless where `bad`
    bad           [N]     bool, the row's logits held NaN or infinity, or no token was allowed
    logprobs      [N]     fp32, or None when no row asked
    top_ids       [N, K]  int64, or None; K is the most any row asked
    top_logprobs  [N, K]  fp32, or None
    drawn_from    [N, V]  fp32, the filtered and tempered logits (greedy rows: the masked ones);
                          None unless asked
    spoilt        [N]     bool, the bad rows that are so by a logits processor's doing; None when
                          none ran
    """

    token_ids: Tensor
    bad: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    drawn_from: Tensor | None = None
    spoilt: Tensor | None = None


def _log_sum_exp(values: Tensor) -> Tensor:
    """Return log(sum(exp(row))), [N, 1]; a row's bits do not depend on the others."""
    if values.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.draw import triton

        return triton.log_sum_exp(values)
    return torch.logsumexp(values, dim=-1, keepdim=True)


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
    mass = torch.exp(ranked - ranked[:, :1]).mul_(MASS_ONE).round_().long()
    before = mass.cumsum(-1) - mass
    limit = torch.where(top_p < 1.0, top_p * mass.sum(-1), math.inf)
    rank = torch.arange(logits.shape[1], device=logits.device)
    most = torch.where(top_k < 0, logits.shape[1], top_k)
    keep = (before < limit.unsqueeze(1)) & (rank < most.unsqueeze(1))
    kept = ranked.masked_fill_(~keep, -math.inf)
    return torch.empty_like(logits).scatter_(1, ids, kept)


def draw(logits: Tensor, seeds: Tensor, positions: Tensor, stream: int = STREAM_TARGET) -> Tensor:
    """Draw one token a row from softmax(logits) by the Gumbel-max rule, ties to the lower id.

    logits     [N, V]  fp32, -inf where not allowed
    seeds      [N]     int64, the 64 bits of each seed
    positions  [N]     int64, absolute position of the token drawn
    returns    [N]     int64
    Fixed shapes, no look at values: every id gets its noise.
    """
    if logits.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.draw import triton

        return triton.draw(logits, seeds, positions, stream, LARGEST_UNIFORM)
    num, width = logits.shape
    num_groups = -(-width // 4)
    groups = torch.arange(num_groups, device=logits.device)
    step = max(1, _NOISE_GROUPS // num_groups)
    tokens = []
    for begin in range(0, num, step):
        part = logits[begin : begin + step]
        lead = part - part.amax(dim=-1, keepdim=True)
        noise = exponential(
            seeds[begin : begin + step].repeat_interleave(num_groups),
            positions[begin : begin + step].repeat_interleave(num_groups),
            groups.repeat(len(part)),
            stream,
        )
        score = lead - torch.log(noise).reshape(len(part), -1)[:, :width]
        tokens.append(score.argmax(dim=-1))
    return torch.cat(tokens) if tokens else logits.new_zeros(0, dtype=torch.int64)


class Sampler:
    """Holds the parameters of every slot and samples whole batches.

    banned_ids  never generated, whatever a request says (except by force)
    fixed       use the form with fixed shapes, which never waits for a device; None = except on a
                CPU
    """

    def __init__(
        self,
        vocab_size: int,
        num_slots: int,
        device: torch.device,
        banned_ids: Sequence[int] = (),
        fixed: bool | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._fixed = device.type != "cpu" if fixed is None else fixed
        self._banned = self._put(sorted(set(banned_ids)))
        self._params: list[SlotParams] = [SlotParams(temperature=0.0)] * num_slots

        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_slots,), value, dtype=dtype, device=device)

        self._temperature = column(0.0, torch.float32)
        self._top_p = column(1.0, torch.float64)
        self._top_k = column(-1, torch.int64)
        self._seed = column(0, torch.int64)  # the 64 bits
        self._raw = column(False, torch.bool)
        self._first = column(0, torch.int64)  # position of the first output
        self._ending_until = column(0, torch.int64)  # positions below it mask ending ids
        self._forced_until = column(0, torch.int64)  # positions below it are forced
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._ending: dict[int, Tensor] = {}
        self._forced: dict[int, Tensor] = {}

    def admit(self, slot: int, params: SlotParams) -> None:
        """Set the parameters of a slot for the life of its next request."""
        first = params.num_prompt_tokens
        self._params[slot] = params
        for column, value in (
            # -inf divided by the temperature must stay -inf
            (self._temperature, min(params.temperature, 1e30)),
            (self._top_p, params.top_p),
            (self._top_k, params.top_k),
            (self._seed, params.seed - (params.seed >> 63 << 64)),
            (self._raw, params.raw_logprobs),
            (self._first, first),
            (self._ending_until, first + params.min_tokens),
            (self._forced_until, first + len(params.forced_ids)),
        ):
            column[slot : slot + 1].fill_(value)
        for table in (self._bias, self._ending, self._forced):
            table.pop(slot, None)
        if params.logit_bias:
            values = [max(-_MOST_BIAS, min(b, _MOST_BIAS)) for b in params.logit_bias.values()]
            self._bias[slot] = (
                self._put(params.logit_bias),
                self._put(values, torch.float32),
            )
        if params.min_tokens and params.ending_ids:
            self._ending[slot] = self._put(params.ending_ids)
        if params.forced_ids:
            self._forced[slot] = self._put(params.forced_ids)

    def params(self, slot: int) -> SlotParams:
        """Return the parameters of the slot's request."""
        return self._params[slot]

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int] | Tensor,
        masks: TokenMasks | None = None,
        history: Callable[[int], Sequence[int]] | None = None,
        *,
        keep_drawn_from: bool = False,
        on_device: Tensor | None = None,
    ) -> Sampled:
        """Choose one token for each row.

        logits     [N, V]  fp32, left as it is
        slots      N slots, each admitted before; a slot may have several rows
        positions  N absolute positions of the tokens being chosen
        masks      what a grammar allows
        history    row -> all tokens before the one being chosen, for slots with processors
        on_device  [N] int64 slots of the rows, where the host does not know whose row is whose;
                   `slots` then names those that occur, none of them with processors. A mask's row
                   may be N: nowhere
        """
        rows = self._rows(slots, positions, on_device)
        first: Tensor | None = None
        if self._fixed:
            first, bad = largest(logits)
        else:
            low, high = torch.amin(logits, dim=-1), torch.amax(logits, dim=-1)
            bad = ~(torch.isfinite(low) & torch.isfinite(high))
        masked = self._mask(logits, rows, masks)
        if masks is not None:
            bad |= masked.amax(dim=-1) == -math.inf
        changed = self._process(masked, rows, history)
        spoilt = None
        if changed is not masked:
            most = changed.amax(dim=-1)  # NaN where one is
            spoilt = ~(bad | torch.isfinite(most))
            bad |= spoilt
        masked = changed
        known = first if masked is logits else None
        drawn_from, tokens = self._choose(masked, rows, STREAM_TARGET, known)
        tokens = self._force(tokens, rows)
        kept = drawn_from if keep_drawn_from else None
        told = self.logprobs(logits, drawn_from, slots, tokens, on_device)
        return Sampled(tokens, bad, *told, kept, spoilt)

    def logprobs(
        self,
        logits: Tensor,
        drawn_from: Tensor,
        slots: Sequence[int],
        token_ids: Tensor,
        on_device: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return what the slots asked for: logprobs, ids and logprobs of alternatives, as in
        `Sampled`.

        logits      [N, V]  the model's own
        drawn_from  [N, V]  as in `Sampled`
        token_ids   [N]     int64, the tokens that came out
        """
        params = [self._params[slot] for slot in slots]
        if not any(p.logprobs for p in params):
            return None, None, None
        if any(p.raw_logprobs for p in params):
            own = self._put(slots) if on_device is None else on_device
            raw = self._raw[own].unsqueeze(1)
            drawn_from = torch.where(raw, logits, drawn_from)
        norm = _log_sum_exp(drawn_from)
        chosen = drawn_from.gather(1, token_ids.unsqueeze(1)) - norm
        logprobs = chosen.clamp_(min=LOGPROB_FLOOR).squeeze(1)
        count = min(max(p.num_top_logprobs for p in params), self._vocab_size)
        if count == 0:
            return logprobs, None, None
        top_ids = stable_topk(drawn_from, count)
        top = (drawn_from.gather(1, top_ids) - norm).clamp_(min=LOGPROB_FLOOR)
        return logprobs, top_ids, top

    def sample_drafts(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int] | Tensor,
        stream: int = STREAM_TARGET,
        *,
        keep_drawn_from: bool = False,
        on_device: Tensor | None = None,
    ) -> Sampled:
        """Choose one draft for each row, with the parameters and, by default, the noise of targets.

        Arguments as of `sample`. Bans, bias, waiting for `min_tokens`, temperature and filters hold
        for drafts too; grammars, processors, forced ids and logprobs are the target's affair.
        """
        rows = self._rows(slots, positions, on_device)
        masked = self._mask(logits, rows, None)
        drawn_from, tokens = self._choose(masked, rows, stream)
        bad = torch.zeros_like(tokens, dtype=torch.bool)
        return Sampled(tokens, bad, drawn_from=drawn_from if keep_drawn_from else None)

    def score(self, logits: Tensor, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Return the logprob of a given token in each row, for the logprobs of prompts.

        logits     [N, V]  fp32
        slots      N slots; say which distribution: raw, or with bans, bias, temperature, filters
        token_ids  N ids
        returns    [N]     fp32, at least LOGPROB_FLOOR
        """
        scores = []
        ids = self._put(token_ids).unsqueeze(1)
        for begin in range(0, len(slots), _SCORED_ROWS):
            part = slots[begin : begin + _SCORED_ROWS]
            rows = self._rows(part, None)
            given = logits[begin : begin + _SCORED_ROWS]
            values = self._tempered(self._mask(given, rows, None), rows)
            if any(self._params[slot].raw_logprobs for slot in part):
                values = torch.where(self._raw[rows.slots].unsqueeze(1), given, values)
            chosen = values.gather(1, ids[begin : begin + _SCORED_ROWS])
            score = chosen - _log_sum_exp(values)
            scores.append(score.clamp_(min=LOGPROB_FLOOR).squeeze(1))
        return torch.cat(scores) if scores else logits.new_zeros(0)

    def seeds(self, slots: Tensor) -> Tensor:
        """Return the 64 bits of the seed of each slot."""
        return self._seed[slots]

    def _put(self, values: Iterable[float], dtype: torch.dtype = torch.int64) -> Tensor:
        """Bring numbers to the device without waiting for it."""
        tensor = torch.tensor(list(values), dtype=dtype)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def takes_largest(self, slots: Sequence[int]) -> bool:
        """Whether drafts of these slots are the largest logits, nothing banned."""
        return self.plainness(slots) == "greedy" and not self._banned.numel()

    def plainness(self, slots: Sequence[int]) -> str | None:
        """Say how rows of these slots are drawn where that takes nothing but numbers kept by slot:
        `greedy`, `draw` or `filter`; None where lists of their own or reports are involved.

        Steps of one kind launch the same operations, so that they can be recorded and repeated.
        """
        params = [self._params[slot] for slot in slots]
        for slot, p in zip(slots, params, strict=True):
            if p.logprobs or p.processors or slot in self._bias or slot in self._ending:
                return None
            if slot in self._forced:
                return None
        if all(p.temperature == 0 for p in params):
            return "greedy"
        return "filter" if any(p.top_p < 1.0 or p.top_k > 0 for p in params) else "draw"

    def _rows(
        self,
        slots: Sequence[int],
        positions: Sequence[int] | Tensor | None,
        on_device: Tensor | None = None,
    ) -> _Rows:
        if positions is not None and not isinstance(positions, Tensor):
            positions = self._put(positions)
        if on_device is not None:
            return _Rows(slots, on_device, positions, each=False)
        return _Rows(slots, self._put(slots), positions)

    def _mask(self, logits: Tensor, rows: _Rows, masks: TokenMasks | None) -> Tensor:
        """Apply banned ids, masks, the wait for `min_tokens` and biases, on a copy when any
        applies.
        """
        biased = rows.named(self._bias)
        waiting = [] if rows.positions is None else rows.named(self._ending)
        if not (len(self._banned) or biased or waiting or masks is not None):
            return logits
        masked = logits.clone()
        for slot in biased:
            ids, values = self._bias[slot]
            added = masked[:, ids] + values
            masked[:, ids] = torch.where(rows.of(slot), added, masked[:, ids])
        if len(self._banned):
            masked.index_fill_(1, self._banned, -math.inf)
        for slot in waiting:
            assert rows.positions is not None
            ids = self._ending[slot]
            early = (rows.positions < self._ending_until[slot]).unsqueeze(1)
            masked[:, ids] = masked[:, ids].masked_fill(rows.of(slot) & early, -math.inf)
        if masks is not None and len(masks[0]):
            where, bits = masks
            shifts = torch.arange(32, dtype=torch.int32, device=self._device)
            allowed = ((bits.unsqueeze(2) >> shifts) & 1).flatten(1)[:, : masked.shape[1]]
            if rows.each:
                masked[where] = masked[where].masked_fill(allowed == 0, -math.inf)
            else:
                place = where.new_full((len(masked) + 1,), -1)
                place[where] = torch.arange(len(where), device=self._device)
                own = place[:-1].unsqueeze(1)
                shut = (allowed[place[:-1].clamp(min=0)] == 0) & (own >= 0)
                masked.masked_fill_(shut, -math.inf)
        return masked

    def _process(
        self, masked: Tensor, rows: _Rows, history: Callable[[int], Sequence[int]] | None
    ) -> Tensor:
        """Run the requests' own processors, on a copy.

        Raises RequestError, which names it, when one fails or returns something else than logits.
        """
        having = [i for i, slot in enumerate(rows.host) if self._params[slot].processors]
        if not having:
            return masked
        assert rows.each, "a processor is called for a row that the host knows"
        assert history is not None, "slots with processors need the history of their tokens"
        changed = masked.clone()
        for row in having:
            values = changed[row].clone()
            for processor in self._params[rows.host[row]].processors:
                try:
                    found = processor(history(row), values)
                    if not isinstance(found, Tensor) or found.shape != values.shape:
                        given = (
                            f"a tensor of shape {list(found.shape)}"
                            if isinstance(found, Tensor)
                            else type(found).__name__
                        )
                        raise TypeError(
                            f"it returned {given}, not a tensor of shape {list(values.shape)}"
                        )
                except Exception as error:
                    name = getattr(processor, "__qualname__", type(processor).__qualname__)
                    raise RequestError(
                        f"the logits processor {name} failed: {type(error).__name__}: {error}"
                    ) from error
                values = found
            changed[row] = values
        return changed

    def _tempered(self, masked: Tensor, rows: _Rows) -> Tensor:
        """Divide by the temperature and filter; greedy rows are taken as they are."""
        params = [self._params[slot] for slot in rows.host]
        if all(p.temperature == 0 for p in params):
            return masked
        scale = self._temperature[rows.slots]
        tempered = masked / torch.where(scale > 0, scale, 1.0).unsqueeze(1)
        filtering = [i for i, p in enumerate(params) if p.top_p < 1.0 or p.top_k > 0]
        if not filtering:
            return tempered
        top_p, top_k = self._top_p[rows.slots], self._top_k[rows.slots]
        if len(filtering) == len(params) or not rows.each:
            return self._filter(tempered, top_p, top_k)
        part = self._put(filtering)
        tempered[part] = self._filter(tempered[part], top_p[part], top_k[part])
        return tempered

    def _filter(self, tempered: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
        if self._fixed:
            each = (torch.split(t, _FILTERED_ROWS) for t in (tempered, top_p, top_k))
            kept = [filter_logits(*part) for part in zip(*each, strict=True)]
            return kept[0] if len(kept) == 1 else torch.cat(kept)
        if tempered.shape[1] < _HOST_FILTER_WIDTH:
            return filter_logits(tempered, top_p, top_k)
        return torch.from_numpy(filter_host(tempered.numpy(), top_p.numpy(), top_k.numpy()))

    def _choose(
        self, masked: Tensor, rows: _Rows, stream: int, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the logits each row is drawn from (greedy rows: as given), and the tokens.

        first  [N] the largest of each row, where that is known
        """
        drawn_from = self._tempered(masked, rows)
        greedy = [i for i, slot in enumerate(rows.host) if self._params[slot].temperature == 0]
        if len(greedy) == len(rows.host):
            return masked, self._largest(masked) if first is None else first
        assert rows.positions is not None
        if not rows.each:
            drawn = draw(drawn_from, self._seed[rows.slots], rows.positions, stream)
            drawn = torch.where(self._temperature[rows.slots] > 0, drawn, self._largest(masked))
            return drawn_from, drawn
        sampling = self._put(sorted(set(range(len(rows.host))) - set(greedy)))
        some = drawn_from[sampling] if greedy else drawn_from
        seeds = self._seed[rows.slots[sampling]]
        positions = rows.positions[sampling]
        if self._fixed:
            drawn = draw(some, seeds, positions, stream)
        else:
            bits = seeds.numpy().view(np.uint64)
            drawn = torch.from_numpy(draw_host(some.numpy(), bits, positions.numpy(), stream))
        if not greedy:
            return drawn_from, drawn
        tokens = self._largest(masked)
        tokens[sampling] = drawn
        return drawn_from, tokens

    def _largest(self, logits: Tensor) -> Tensor:
        """Return the id of the largest logit of each row, the lowest on ties."""
        if self._fixed:
            return largest(logits)[0]
        return torch.from_numpy(logits.numpy().argmax(axis=1))

    def _force(self, tokens: Tensor, rows: _Rows) -> Tensor:
        assert rows.positions is not None
        for slot in rows.named(self._forced):
            ids = self._forced[slot]
            index = rows.positions - self._first[slot]
            forced = ids[index.clamp(0, len(ids) - 1)]
            inside = rows.of(slot).squeeze(1) & (rows.positions < self._forced_until[slot])
            tokens = torch.where(inside, forced, tokens)
        return tokens


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a batch: their slots, on the host and the device, and their positions.

    each  the host knows the slot of each row; else only which slots occur
    """

    host: Sequence[int]
    slots: Tensor
    positions: Tensor | None
    each: bool = True

    def named(self, table: Mapping[int, object]) -> list[int]:
        """Return the slots of the batch that have an entry in a table."""
        return sorted(set(self.host) & table.keys()) if table else []

    def of(self, slot: int) -> Tensor:
        """Return [N, 1], whether a row is of this slot."""
        return (self.slots == slot).unsqueeze(1)
