"""A decode step of the released dimensions on a card that is not there: what it would launch.

Tensors are on the device "meta", so nothing is computed or held. Kernels are counted where they are
launched, torch's by the operations that reach the dispatcher. Code that asks for a device of type
"cuda" is compiled again to ask for "meta"; what a card would be asked is answered like an H200.
"""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import deepinfer.kernels
from deepinfer.config import ModelConfig
from deepinfer.device.base import Capability
from deepinfer.kernels import libraries, nvcc, tiles
from deepinfer.kernels.packed import Decoded, Packed, kept

META = torch.device("meta")
_FREE = (
    "view _unsafe_view reshape expand slice select t transpose permute unsqueeze squeeze detach "
    "alias as_strided split chunk unbind unflatten split_with_sizes lift_fresh _reshape_alias "
    "empty empty_like empty_strided new_empty new_empty_strided scalar_tensor"
).split()
_VENDORS = ("vendor", "deepgemm", "humming", "cases")


class Launches(TorchDispatchMode):
    """Names of what was launched, in order; `layer` says in which part of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.layer = ""

    def add(self, name: str) -> None:
        self.found.append((self.layer, name))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        on_card = any(
            isinstance(t, torch.Tensor) and t.is_meta for t in tree_leaves((args, kwargs, out))
        )
        if on_card and name not in _FREE:
            self.add(name)
        return out

    def of(self, layer: str) -> list[str]:
        return [name for part, name in self.found if part == layer]


class _Card:
    torch_device = META
    capability = Capability(name="H200", arch="sm90", total_bytes=141 << 30)


class _Properties:
    name, major, minor, total_memory, multi_processor_count = "H200", 9, 0, 141 << 30, 132


class _Library:
    def __getitem__(self, name: str) -> object:
        return lambda *_: 30

    __getattr__ = __getitem__


class _Generator:
    def __init__(self, *_: object) -> None: ...

    def manual_seed(self, seed: int) -> None: ...


def _modules() -> None:
    for found in pkgutil.walk_packages(deepinfer.kernels.__path__, "deepinfer.kernels."):
        if not any(part in found.name for part in _VENDORS):
            import_module(found.name)


def _asks_for_a_card(module: ModuleType) -> bool:
    try:
        return '.device.type == "cuda"' in inspect.getsource(module)
    except (OSError, TypeError):
        return False


def _packed(decoded: Decoded, experts: int, outputs: int, inputs: int) -> Packed:
    data = torch.empty(experts, outputs // 256, 1, dtype=torch.uint8, device=META)
    return Packed(decoded, data, torch.empty(experts, outputs, device=META), inputs)


@contextlib.contextmanager
def card(launches: Launches) -> Iterator[None]:
    """Put the card that is not there in its place."""
    _modules()
    from deepinfer.kernels.paged_attention import sm90 as attention
    from deepinfer.model.fast.random import RandomLoader

    def launch(kernel: object, *_: object, **__: object) -> None:
        launches.add(getattr(kernel, "fn", kernel).__name__)

    def pack_fp4(codes, scale, decoded, *_):  # type: ignore[no-untyped-def]
        experts, outputs, halves = codes.shape
        return _packed(decoded, experts, outputs, 2 * halves)

    def put(values: object, *_: object, **options: object) -> torch.Tensor:
        made = np.asarray(values)
        dtype = options.get("dtype") or torch.from_numpy(made).dtype
        return torch.empty(made.shape, dtype=dtype, device=options.get("device") or "cpu")

    with contextlib.ExitStack() as stack:

        def instead(owner: object, **values: object) -> None:
            for name, value in values.items():
                stack.enter_context(patch.object(owner, name, value))

        mine = [m for n, m in sys.modules.items() if n.startswith("deepinfer.")]
        for module in mine:
            if vars(module).get("launch") is tiles.launch and module is not tiles:
                instead(module, launch=launch)
            if "pick_device" in vars(module):
                instead(module, pick_device=lambda name="auto": _Card())
        again: dict[object, object] = {}
        for module in mine:
            name = module.__name__
            helper = name.startswith(("deepinfer.kernels.", "deepinfer.sampling.sampler"))
            if (helper or name == "deepinfer.parallel.experts") and _asks_for_a_card(module):
                before = dict(vars(module))
                stack.callback(vars(module).update, before)
                text = inspect.getsource(module).replace('type == "cuda"', 'type == "meta"')
                exec(compile(text, module.__file__ or "", "exec"), vars(module))
                again |= {
                    before[key]: value
                    for key, value in vars(module).items()
                    if inspect.isfunction(value) or inspect.isclass(value)
                    if key in before and value is not before[key]
                }
        for module in mine:
            for key, value in list(vars(module).items()):
                if (inspect.isfunction(value) or inspect.isclass(value)) and value in again:
                    stack.enter_context(patch.dict(vars(module), {key: again[value]}))
        instead(
            nvcc,
            call=lambda library, name, *_: launches.add(name),
            load=lambda source: _Library(),
            processors=lambda device: 132,
            available=lambda: True,
        )
        instead(kept, pack_fp4=pack_fp4)
        instead(kept, pack_fp8=lambda c, s: _packed(Decoded.FP8_BF16, 1, *c.shape))
        instead(attention, _packed=lambda cache, form: True, _room=lambda device: (None, None))
        instead(
            torch.cuda,
            get_device_properties=lambda *_: _Properties(),
            device=lambda *_: contextlib.nullcontext(),
            empty_cache=lambda: None,
        )
        instead(
            RandomLoader,
            _bytes=lambda self, generator, size, low, high: torch.empty(
                size, dtype=torch.uint8, device=META
            ),
            _normal=lambda self, generator, size, gain, dtype: torch.empty(
                size, dtype=dtype, device=META
            ),
        )
        instead(torch, Generator=_Generator, tensor=put)
        instead(torch.Tensor, __int__=lambda self: 3, pin_memory=lambda self: self)
        libraries.why_not.cache_clear()
        stack.callback(libraries.why_not.cache_clear)
        yield


def decode_step(config: ModelConfig, sequences: int, rows: int, context: int) -> Launches:
    """Run the second decode step of a runner, greedy, all drafts verified and made again."""
    launches = Launches()
    with card(launches), torch.no_grad():
        from deepinfer.cache.layout import CacheLayout
        from deepinfer.cache.tensors import Caches
        from deepinfer.config.engine import NumericsConfig
        from deepinfer.engine.device_runner import DeviceRunner
        from deepinfer.engine.drafting import Drafter
        from deepinfer.engine.graphs import StepKey
        from deepinfer.engine.state import SlotState
        from deepinfer.model import dspark
        from deepinfer.model.fast import model as model_module
        from deepinfer.model.fast.random import random_model
        from deepinfer.sampling.sampler import Sampler

        model = random_model(
            config, META, (0, 48), numerics=NumericsConfig(batch_invariant=False), with_drafts=True
        )
        layout = CacheLayout.build(config, "official", 128)
        width, slots = context // 128 + 3, sequences + 1
        caches = Caches.allocate(layout, slots * width, slots, META)
        sampler = Sampler(config.vocab_size, slots, META, (), fixed=True)
        state = SlotState(slots, rows - 1, META)
        assert model.draft is not None
        drafter = Drafter(model.draft, sampler, state, [1.0] * (rows - 1))
        runner = DeviceRunner(
            model, caches, layout, sampler, state, META, drafter,
            max_sequences=sequences, max_blocks=width, graphs=False,
        )  # fmt: skip
        key = StepKey(sequences, sequences * rows, width * 128, True, False, True, "greedy")
        names = [f"{layer.layer_id} {layer.kind} {layer.ratio}" for layer in config.layers]

        def named(run, parts):  # type: ignore[no-untyped-def]
            def inner(*args):  # type: ignore[no-untyped-def]
                launches.layer = next(parts)
                found = run(*args)
                launches.layer = ""
                return found

            return inner

        for _ in range(2):
            launches.found.clear()
            drafts = (f"draft {i}" for i in range(config.num_nextn_predict_layers))
            with (
                patch.object(model_module, "run_open", named(model_module.run_open, iter(names))),
                patch.object(dspark, "run_open", named(dspark.run_open, drafts)),
                launches,
            ):
                runner._whole(key, ())
    return launches
