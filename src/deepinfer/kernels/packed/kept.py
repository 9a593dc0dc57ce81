"""Packed copies of stored weights, made at a weight's first use and kept as long as it lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from deepinfer.errors import UnsupportedError
from deepinfer.kernels.packed import Decoded, Packed, accepts, pack_fp4, pack_fp8

__all__ = ["kept_fp4", "kept_fp8", "release", "released_form", "repack_fp4"]

Stored = tuple[Tensor, Tensor]
"""Codes and scales of a weight."""

_kept: dict[tuple[int, Decoded], Packed | None] = {}


def kept_fp4(codes: Tensor, scale: Tensor, decoded: Decoded) -> Packed | None:
    """Return the packed form of MXFP4 matrices [E, N, K/2], None where there is none.

    There is none for small sizes, and none as `decoded` where scales lie too far apart.
    """
    fits = accepts(codes.shape[1], 2 * codes.shape[2])
    return _find(codes, decoded, fits, lambda: pack_fp4(codes, scale, decoded))


def kept_fp8(codes: Tensor, scale: Tensor) -> Packed | None:
    """Return the packed form of an e4m3 matrix [N, K], None for sizes that have none."""
    fits = accepts(*codes.shape)
    return _find(codes, Decoded.FP8_BF16, fits, lambda: pack_fp8(codes, scale))


def repack_fp4(codes: Tensor, scale: Tensor, slot: int) -> None:
    """Pack an expert again whose stored form has changed, in place: graphs keep its address.

    A form that the new values do not allow is given up: products take another way from then on.
    """
    assert not _is_released(codes), "experts that move are kept in their stored form, too"
    for decoded in (Decoded.FP4_E4M3, Decoded.FP4_BF16):
        key = (id(codes), decoded)
        packed = _kept.get(key)
        if packed is None:
            continue
        try:
            part = pack_fp4(codes[slot : slot + 1], scale[slot : slot + 1], decoded)
        except UnsupportedError:
            _kept[key] = None
            continue
        packed.data[slot].copy_(part.data[0])
        packed.row_scale[slot].copy_(part.row_scale[0])


def release(*weights: Stored) -> int:
    """Free the stored bytes of weights if each has a packed form; return how many.

    The tensors stay, for their shapes and as names of the packed forms. Products that find no form
    of the kind they want raise UnsupportedError from then on. Not for weights whose values change.
    """
    packed = {key[0] for key, form in _kept.items() if form is not None}
    if not all(id(codes) in packed for codes, _ in weights):
        return 0
    freed = 0
    for part in (part for weight in weights for part in weight):
        storage = part.untyped_storage()
        if storage.resizable():  # not where it is a file's
            freed += storage.nbytes()
            storage.resize_(0)
    return freed


def released_form(codes: Tensor) -> Packed | None:
    """Return the packed form that took a weight's place; None where the stored bytes are there."""
    if not _is_released(codes):
        return None
    forms = (_kept.get((id(codes), decoded)) for decoded in Decoded)
    return next(form for form in forms if form is not None)


def _is_released(codes: Tensor) -> bool:
    return (
        codes.numel() > 0 and codes.device.type != "meta" and not codes.untyped_storage().nbytes()
    )


def _find(codes: Tensor, decoded: Decoded, fits: bool, make: Callable[[], Packed]) -> Packed | None:
    key = (id(codes), decoded)
    if key not in _kept:
        if _is_released(codes):
            raise UnsupportedError(
                f"a weight {tuple(codes.shape)} is wanted as {decoded.name}, but only another "
                "packed form of it is held: set weights.keep_stored"
            )
        packed = None
        if fits:
            try:
                packed = make()
            except UnsupportedError:
                packed = None
        _kept[key] = packed
        weakref.finalize(codes, _kept.pop, key, None)
    return _kept[key]
