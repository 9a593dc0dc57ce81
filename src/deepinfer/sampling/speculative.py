"""Which drafts are accepted: two rules over the rows of a verification step.

Coupled (the default): the target's own sample of every row stands, and a draft is accepted when it
equals it. Draft and target share the noise of a position, so they agree often, and the output does
not depend on drafts at all. Rejection: a draft x is accepted with probability min(1, p(x) / q(x)),
and the first refused one is replaced from the residual max(p - q, 0); the output follows p, but
which tokens come depends on the drafts. Greedy rows use equality under both.
Shapes are fixed and no value is looked at. Source: runtime specification, 5.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.sampling.noise import STREAM_ACCEPT, STREAM_RESIDUAL
from deepinfer.sampling.rng import exponential
from deepinfer.sampling.sampler import draw

__all__ = ["Windows", "accept_equal", "accept_rejection", "split_budget"]


@dataclass(frozen=True, slots=True)
class Windows:
    """The rows of N sequences in the flat order of a step: the last committed token, then drafts.

    first   [N]     int64, flat row of each sequence's first token
    drafts  [N, K]  int64, the tokens of the rows behind it
    counts  [N]     int64, how many of them are real, 0..K
    """

    first: Tensor
    drafts: Tensor
    counts: Tensor

    def real(self) -> Tensor:
        """Return [N, K] bool, the drafts that count."""
        places = torch.arange(self.drafts.shape[1], device=self.drafts.device)
        return places < self.counts.unsqueeze(1)

    def rows(self) -> Tensor:
        """Return [N, 1+K] int64, the flat row of each token; what is not real points at the last
        row that is.
        """
        places = torch.arange(1 + self.drafts.shape[1], device=self.drafts.device)
        return self.first.unsqueeze(1) + torch.minimum(places, self.counts.unsqueeze(1))


def _leading(accepted: Tensor) -> Tensor:
    """Return how many of each row's first entries hold."""
    return accepted.long().cumprod(dim=1).sum(dim=1)


def accept_equal(tokens: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """Accept the drafts that equal the target's samples.

    tokens   [T]       int64, the target's sample of every flat row
    returns  accepted [N] int64; emitted [N, 1+K] int64, of which the first accepted + 1 count
    """
    sampled = tokens[windows.rows()]
    hits = (sampled[:, :-1] == windows.drafts) & windows.real()
    return _leading(hits), sampled


def accept_rejection(
    tokens: Tensor,
    target: Tensor,
    draft: Tensor,
    windows: Windows,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept drafts with probability min(1, p / q) and replace the first refused one.

    tokens     [T]        int64, a plain sample of the target for every flat row
    target     [T, V]     fp32, the filtered and tempered logits they were drawn from
    draft      [N, K, V]  fp32, those that the drafts were drawn from; a draft whose logits are not
                          finite is refused
    seeds      [N]        int64, the 64 bits of each sequence's seed
    positions  [N]        int64, absolute position of the token that each first row draws
    greedy     [N]        bool, sequences that take the likeliest token: equality decides
    returns    as `accept_equal`
    """
    num, most = windows.drafts.shape
    emitted = tokens[windows.rows()]
    if most == 0:
        return torch.zeros_like(windows.counts), emitted
    rows = windows.rows()[:, :-1]
    log_p = torch.log_softmax(target[rows].double(), dim=-1)
    log_q = torch.log_softmax(draft.double(), dim=-1)
    at = windows.drafts.unsqueeze(2)
    ratio = (log_p.gather(2, at) - log_q.gather(2, at)).squeeze(2)
    where = (positions.unsqueeze(1) + torch.arange(most, device=tokens.device)).flatten()
    every = seeds.repeat_interleave(most)
    # -log of a uniform number is a unit exponential: U < r iff E > -log r.
    level = exponential(every, where, torch.zeros_like(where), STREAM_ACCEPT)[:, 0]
    hits = torch.where(
        greedy.unsqueeze(1), emitted[:, :-1] == windows.drafts, level.view(num, most) > -ratio
    )
    accepted = _leading(hits & windows.real())
    # The first refused row draws again, from what the draft gave too little.
    place = accepted.clamp(max=most - 1)
    pick = torch.arange(num, device=tokens.device)
    p, q = log_p[pick, place].exp(), log_q[pick, place].exp()
    residual = torch.log((p - q).clamp_(min=0.0)).float()
    # Nothing is left where p equals q (only rounding can refuse), or where q is not finite;
    # as such drafts are always refused, p itself is right.
    empty = ~(residual > -torch.inf).any(dim=1)
    residual = torch.where(empty.unsqueeze(1), log_p[pick, place].float(), residual)
    again = draw(residual, seeds, positions + place, STREAM_RESIDUAL)
    refused = (accepted < windows.counts) & ~greedy
    last = torch.where(refused, again, emitted[pick, accepted])
    out = torch.cat([windows.drafts, tokens.new_zeros(num, 1)], dim=1)
    out[pick, accepted] = last
    return accepted, torch.where(greedy.unsqueeze(1), emitted, out)


def split_budget(confidences: Tensor, valid: Tensor, budget: Tensor) -> Tensor:
    """Split a number of verified drafts among sequences by how likely each is to be reached.

    confidences  [N, K]  fp32, probability that a draft is accepted when those before it are
    valid        [N]     int64, drafts that each sequence has
    budget       []      int64, drafts to verify over all sequences
    returns      [N]     int64, at most `valid`, their sum at most `budget`
    Likelier first, ties to the earlier position of the earlier sequence. A sequence gets a prefix
    of its drafts, because being reached never becomes likelier from one draft to the next.
    """
    num, most = confidences.shape
    places = torch.arange(most, device=confidences.device)
    real = places < valid.unsqueeze(1)
    reach = torch.where(real, confidences.clamp(0.0, 1.0).double().cumprod(dim=1), -1.0)
    order = torch.sort(reach.flatten(), descending=True, stable=True).indices
    rank = torch.empty_like(order)
    rank[order] = torch.arange(num * most, device=order.device)
    return ((rank.view(num, most) < budget) & real).sum(dim=1)
