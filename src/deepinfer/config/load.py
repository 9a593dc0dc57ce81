"""The edge: files, command-line texts and the environment become validated settings (pure).

Only this module reads the environment. The documented switches of the original engine are aliases
of settings here and show up in the printed configuration like any other value.
"""

from __future__ import annotations

import json
import os
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Final

from deepinfer.config.engine import EngineConfig, flatten, parse_set
from deepinfer.config.fields import near_matches
from deepinfer.config.model import ModelConfig
from deepinfer.errors import ConfigError, json_kind, json_problem, unique_keys

__all__ = [
    "DEMO_MODEL",
    "GOLDEN_MODEL",
    "PACKAGED_MODELS",
    "cache_dir",
    "environment_settings",
    "load_engine_config",
    "load_model_config",
    "log_level",
    "read_json",
    "released_config",
    "resolve_model",
]

DEMO_MODEL: Final = "demo"
GOLDEN_MODEL: Final = "golden"
PACKAGED_MODELS: Final[Mapping[str, str]] = {DEMO_MODEL: "demo", GOLDEN_MODEL: "alpha"}
"""Name -> folder below `data/`. `demo` is trained and writes English; `golden` has random weights
and recorded values."""
_PREFIX: Final = "DEEPINFER_"
_OWN: Final = ("LOG_LEVEL", "CACHE_DIR")
_LEVELS: Final = ("debug", "info", "warning", "error")

# Switches of the original engine that are settings here, by their names without the prefix.
_ALIASES: Final[Mapping[str, str]] = {
    "USE_NEXTN_DECODE": "speculation.num_drafts",
    "ENABLE_MTP_VARLEN": "speculation.variable",
    "DFLASH_CONFIDENCE_HEAD_TEMPERATURE": "speculation.confidence_temperatures",
    "DECODE_PERF_CACHE_TTL_SEC": "speculation.cost_cache_seconds",
    "MAX_BACKTRACKING_TOKENS": "cache.max_rollback",
    "ZERO_OVERHEAD_SCHEDULING": "scheduling.overlap",
    "YOCO_PREFILL_TRUNCATION_MODE": "replay.mode",
    "YOCO_PREFILL_KEEP_TOKENS": "replay.keep_tokens",
    "BATCH_INVARIANT": "numerics.batch_invariant",
    "DECODE_TOKEN_BLACKLIST": "sampling.banned_token_ids",
    "LOGGING_INTERVAL_STEP": "log.interval_steps",
}
# Switches of the original engine without a setting in this version.
_WITHOUT_SETTING: Final = frozenset(
    """
    ACCELERATOR JIT_CACHE_DIR HF_MODEL_DIR DECODE_PERF_CACHE_DIR
    PREFILL_ATTEMPT_INTERVAL PREFILL_ANY_ATTEMPT_INTERVAL PREFILL_MAX_SUM_SEQLEN_K
    INDEX_ATTN_MEMORY_LIMIT SAMPLER_FORCE_TOPK COMPUTE_SUM_SMALLER_PROBS ENFORCE_EAGER
    DFLASH_ENFORCE_EAGER CUDAGRAPH_BATCH_SIZE_INTERVAL DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL
    NUM_STATE_SLOTS_RATIO PREFILL_STORE_EXTRA_STATE PREFILL_STORE_EXTRA_SIZE XGRAMMAR_TIMEOUT
    XGRAMMAR_DISABLE_CACHE XGRAMMAR_CACHE_LIMIT_BYTES XGRAMMAR_DEBUG SO_BUILDER_CPUS
    OVERRIDE_NUM_EXTRA_EXPERTS EXPERT_REARRANGEMENT_STEP_INTERVAL EXPERT_COUNT_WINDOW_SIZE
    REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE REARRANGE_P2P_GROUPS NCCL_NUM_SMS USERBUFFER_COMM_SMS
    MOE_LB_STAT_INTERVAL SHOW_EPLB_DETAIL FORCE_LOAD_BALANCE FORCE_IMBALANCE_RATIO GLOO_TIMEOUT
    RINGBUFFER_WARNING_INTERVAL ENGRAM_PAD_TOKEN ENGRAM_FORCE_GPU_STORAGE
    NCCL_MEMORY_SAMPLE_INTERVAL_STEPS GC_INTERVAL_STEP PROFILE_HTTP_ENABLE PROFILE_HTTP_PORT_BASE
    TORCH_PROFILER_DIR PROFILE_TORCH_CUDA_MEMORY ENABLE_MEMORY_TRACING DISABLE_SYNC_GUARD
    USE_MULTIMODAL_POOL MULTIMODAL_POOL_SIZE_GB MULTI_MODAL_BUFFER_SIZE MULTI_MODAL_WORKER_TIMEOUT
    """.split()
)


def resolve_model(model: str | os.PathLike[str]) -> Path:
    """Return the folder that a model argument names; `demo` and `golden` are packaged checkpoints.

    Raises ConfigError when there is no such folder.
    """
    names = " or ".join(f"'{name}'" for name in PACKAGED_MODELS)
    if isinstance(model, str) and model in PACKAGED_MODELS:
        return Path(str(files("deepinfer") / "data" / PACKAGED_MODELS[model]))
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model must be a folder, {names}, not {type(model).__name__}")
    path = Path(model).expanduser()
    if str(model) and path.is_dir():
        return path
    what = "is a file" if path.is_file() else "does not exist"
    raise ConfigError(
        f"model '{model}' {what}; expected a checkpoint folder with a config.json, or {names}"
    )


def released_config() -> ModelConfig:
    """Return the config of the released model, for its dimensions; no weights come with it."""
    return load_model_config(str(files("deepinfer") / "data" / "released" / "config.json"))


def load_model_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Read and check the config of a checkpoint folder, or a `config.json` itself.

    Raises ConfigError when there is no such file, it is no JSON object, or it holds anything
    unsupported.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "config.json"
        if not file.is_file():
            raise ConfigError(f"{file.parent} holds no config.json; is it a checkpoint folder?")
    try:
        return ModelConfig.from_dict(read_json(file))
    except ConfigError as error:
        if not error.problems:
            raise
        raise ConfigError(f"{file}: {error.message}", error.problems) from None


def read_json(file: Path) -> dict[str, object]:
    """Read a JSON file of one object; raises ConfigError when it is none, or repeats a key."""
    try:
        value: object = json.loads(file.read_bytes(), object_pairs_hook=unique_keys)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {json_problem(error)}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds {json_kind(value)}, expected one JSON object")
    return value


def load_engine_config(
    *,
    toml: str | os.PathLike[str] | None = None,
    values: Mapping[str, object] | None = None,
    sets: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> EngineConfig:
    """Build the settings of a run; later sources win.

    environ  1. variables, `os.environ` by default
    toml     2. a file whose tables are the groups
    values   3. dotted keys
    sets     4. texts `key=value`
    Raises ConfigError with every unknown key and bad value, each with its source.
    """
    merged: dict[str, object] = {}
    origins: dict[str, str] = {}
    for name, (key, text) in environment_settings(environ).items():
        merged[key], origins[key] = text, name
    sources: list[tuple[Mapping[str, object], str]] = []
    if toml is not None:
        sources.append((_read_toml(Path(toml).expanduser()), str(toml)))
    if values is not None:
        sources.append((values, ""))
    sources.append((dict(parse_set(text) for text in sets), "--set"))
    for source, origin in sources:
        for key, value in flatten(source).items():
            merged[key], origins[key] = value, origin
    return EngineConfig().with_dotted(merged, origins)


def _read_toml(file: Path) -> dict[str, object]:
    """Read a TOML file; raises ConfigError when that fails."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid TOML: {json_problem(error)}") from error


def environment_settings(environ: Mapping[str, str] | None = None) -> dict[str, tuple[str, str]]:
    """Return variable -> (dotted key, text) for the aliases set; warn about unknown names."""
    environ = os.environ if environ is None else environ
    found: dict[str, tuple[str, str]] = {}
    for name in sorted(n for n in environ if n.startswith(_PREFIX)):
        short, text = name.removeprefix(_PREFIX), environ[name].strip()
        if short in _ALIASES:
            if text:
                key = _ALIASES[short]
                found[name] = (key, _translate(key, text))
        elif short in _WITHOUT_SETTING:
            warnings.warn(f"{name} has no effect in this version", stacklevel=2)
        elif short not in _OWN:
            hint = near_matches(short, [*_OWN, *_ALIASES])
            warnings.warn(f"{name} is no variable of DeepInfer{hint}", stacklevel=2)
    return found


def _translate(key: str, text: str) -> str:
    """Turn the original's spelling of a value into ours."""
    if key == "replay.keep_tokens" and text == "0":
        return "auto"
    if key == "log.interval_steps" and text.startswith("-"):
        return "0"
    return text


def log_level(environ: Mapping[str, str] | None = None) -> str:
    """Return the level of DEEPINFER_LOG_LEVEL, `warning` by default.

    Raises ConfigError on a word that is no level.
    """
    environ = os.environ if environ is None else environ
    level = environ.get(f"{_PREFIX}LOG_LEVEL", "").strip().lower() or "warning"
    if level not in _LEVELS:
        raise ConfigError(f"{_PREFIX}LOG_LEVEL: found '{level}', expected {', '.join(_LEVELS)}")
    return level


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of rebuildable files: DEEPINFER_CACHE_DIR, or the user's cache folder."""
    environ = os.environ if environ is None else environ
    own = environ.get(f"{_PREFIX}CACHE_DIR", "").strip()
    if own:
        return Path(own).expanduser()
    base = environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path("~/.cache").expanduser()) / "deepinfer"
