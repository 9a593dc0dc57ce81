"""Muon for the matrices, Adam for the rest; both hold their state in flat dicts that are easy to save."""

from __future__ import annotations

import torch
from torch import Tensor

from demo.model import Params

_NS = (3.4445, -4.7750, 2.0315)


def is_matrix(name: str) -> bool:
    """Whether Muon updates this parameter: the large projections of attention, experts, Engram and drafts."""
    if name.endswith(("experts.w1", "experts.w2", "experts.w3")):
        return True
    if "indexer" in name or not name.endswith(".weight"):
        return False
    keys = (
        "attn.wq_",
        "attn.wkv",
        "attn.wo_",
        "compressor.w",
        "shared_experts",
        "engram.wkv",
        "main_proj",
    )
    return any(k in name for k in keys)


def orthogonalize(g: Tensor) -> Tensor:
    """Return an approximate orthogonal factor of every matrix in g [n, a, b] by Newton-Schulz steps in bf16."""
    x: Tensor = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-2, -1)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _NS
    for _ in range(5):
        s = x @ x.transpose(-2, -1)
        x = a * x + (b * s + c * s @ s) @ x
    return x.transpose(-2, -1) if tall else x


class Optimizer:
    """One step of Muon and Adam over a dict of parameters.

    `step(lr, grads)` scales both learning rates by `lr`, a number or a scalar on the device: with the latter nothing in a step waits
    for the host, and it can be recorded as a graph. Router biases have no gradient.
    """

    def __init__(
        self,
        params: Params,
        groups: int,
        muon_lr: float = 0.02,
        adam_lr: float = 3e-3,
        weight_decay: float = 0.1,
    ) -> None:
        self.params, self.groups = params, groups
        self.muon_lr, self.adam_lr, self.weight_decay = muon_lr, adam_lr, weight_decay
        self.momentum = {k: torch.zeros_like(p) for k, p in params.items() if p.requires_grad}
        self.second = {
            k: torch.zeros_like(p)
            for k, p in params.items()
            if p.requires_grad and not is_matrix(k)
        }
        device = next(iter(self.momentum.values())).device
        self.count = torch.zeros((), device=device)
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name in self.momentum:
            if is_matrix(name):
                by_shape.setdefault(tuple(self._matrices(name, params[name]).shape), []).append(
                    name
                )
        self.stacks = list(by_shape.values())
        self.adam = [k for k in self.momentum if not is_matrix(k)]

    def _matrices(self, name: str, p: Tensor) -> Tensor:
        if p.ndim == 3:
            return p
        if name.endswith("wo_a.weight"):
            return torch.unflatten(p, 0, (self.groups, -1))
        return p[None]

    def reset(self) -> None:
        """Forget all moments."""
        self.count.zero_()
        for moments in (self.momentum, self.second):
            for m in moments.values():
                m.zero_()

    @torch.no_grad()
    def step(self, lr: float | Tensor, grads: dict[str, Tensor | None]) -> None:
        """Update every parameter from its gradient; the gradients are used as scratch, what is not finite in them counts as 0."""
        self.count += 1
        for g in grads.values():
            if g is not None:
                torch.nan_to_num_(g, nan=0.0, posinf=0.0, neginf=0.0)
        names = [k for k in self.momentum if is_matrix(k)]
        if names:
            moments = [self.momentum[k] for k in names]
            gs = [
                torch.zeros_like(self.params[k]) if (given := grads[k]) is None else given
                for k in names
            ]
            torch._foreach_lerp_(moments, gs, 0.05)
            torch._foreach_lerp_(gs, moments, 0.95)
            blended = dict(zip(names, gs, strict=True))
            for stack in self.stacks:
                g = torch.cat([self._matrices(k, blended[k]) for k in stack])
                rows, cols = g.shape[-2:]
                update = orthogonalize(g).float() * (max(1.0, rows / cols) ** 0.5)
                first = 0
                for k in stack:
                    p = self._matrices(k, self.params[k])
                    part = update[first : first + len(p)]
                    first += len(p)
                    p.mul_(1 - lr * self.muon_lr * self.weight_decay).sub_(
                        part * (lr * self.muon_lr)
                    )
        b1, b2 = 0.9, 0.95
        found = {k: g for k in self.adam if (g := grads[k]) is not None}
        names = list(found)
        if names:
            ps, gs = [self.params[k] for k in names], list(found.values())
            m, v = [self.momentum[k] for k in names], [self.second[k] for k in names]
            torch._foreach_lerp_(m, gs, 1 - b1)
            torch._foreach_mul_(v, b2)
            torch._foreach_addcmul_(v, gs, gs, 1 - b2)
            denominator = torch._foreach_div(v, 1 - b2**self.count)
            torch._foreach_sqrt_(denominator)
            torch._foreach_add_(denominator, 1e-10)
            change = torch._foreach_div(m, denominator)
            torch._foreach_mul_(change, lr * self.adam_lr / (1 - b1**self.count))
            torch._foreach_sub_(ps, change)
