"""DeepInfer: an offline inference engine for DeepSeek-V4.1-Flash.

Public names are loaded on first use, so that `import deepinfer` imports no torch and touches no
device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.config.engine import EngineConfig
    from deepinfer.engine.request import Completion, Request, SamplingParams
    from deepinfer.engine.snapshot import State
    from deepinfer.errors import DeepInferError
    from deepinfer.grammar.spec import Structured
    from deepinfer.llm import LLM

__version__ = "0.1.0.dev0"

__all__ = [
    "LLM",
    "Completion",
    "DeepInferError",
    "EngineConfig",
    "Request",
    "SamplingParams",
    "State",
    "Structured",
    "__version__",
]

_HOME = {
    "LLM": "deepinfer.llm",
    "Completion": "deepinfer.engine.request",
    "DeepInferError": "deepinfer.errors",
    "EngineConfig": "deepinfer.config.engine",
    "Request": "deepinfer.engine.request",
    "SamplingParams": "deepinfer.engine.request",
    "State": "deepinfer.engine.snapshot",
    "Structured": "deepinfer.grammar.spec",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'deepinfer' has no attribute '{name}'")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(set(globals()) | set(__all__))
