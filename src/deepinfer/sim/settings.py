"""What a simulated run is made of, read from a file or given by name (pure)."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Literal, get_args, get_origin, get_type_hints

from deepinfer.config.fields import near_matches, show
from deepinfer.errors import ConfigError, UnsupportedError, json_problem

__all__ = ["Settings", "load_settings", "parse_setting"]

Fabric = Literal["node", "domain", "pair"]
Draw = Literal["auto", "exact", "normal"]
Policy = Literal["none", "totals", "steps"]
Verify = Literal["none", "fixed", "rank", "group"]
Place = Literal["pull", "fixed"]

_CHECKED: Final = {"gpus", "expert", "layers", "counted_layers", "experts", "active", "seqs"}


def _about(text: str) -> dict[str, str]:
    return {"about": text}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One simulated cluster and its load. Defaults are the model's own dimensions.

    Every field says what it is in its metadata, which `deepinfer sim run --help` prints. Raises
    ConfigError naming all values that do not fit.
    """

    gpus: int = field(default=64, metadata=_about("ranks in all"))
    expert: int = field(default=64, metadata=_about("ranks of one expert group; divides gpus"))
    copies: int = field(default=64, metadata=_about("redundant experts of a layer, rounded up"))
    layers: int = field(default=40, metadata=_about("layers with experts"))
    counted_layers: int = field(
        default=40,
        metadata=_about("layers simulated; each stands for layers / counted_layers of its kind"),
    )
    experts: int = field(default=384, metadata=_about("routed experts of a layer"))
    active: int = field(default=6, metadata=_about("experts of a token"))
    fabric: Fabric = field(
        default="node",
        metadata=_about(
            "node: links reach 8 ranks, beyond them a network; domain: all; pair: two, as measured"
        ),
    )
    overlap: float = field(
        default=0.0,
        metadata=_about("share of the shared expert's time behind which exchange hides, 0 to 1"),
    )
    seqs: int = field(default=64, metadata=_about("sequences that a rank runs at once"))
    requests: int = field(default=0, metadata=_about("requests in all; 0 = an endless queue"))
    place: Place = field(
        default="pull",
        metadata=_about("pull: ranks take from one queue; fixed: request number modulo ranks"),
    )
    prefill: bool = field(default=False, metadata=_about("ranks also prefill what they run"))
    patience: int = field(
        default=16,
        metadata=_about("steps that prompts wait before fewer than half of the ranks may prefill"),
    )
    batched: int = field(default=8192, metadata=_about("tokens of one prefill step of a rank"))
    prompt: float = field(default=4096.0, metadata=_about("median length of prompts"))
    prompt_spread: float = field(default=0.0, metadata=_about("spread of its logarithm"))
    output: float = field(default=1024.0, metadata=_about("median length of outputs"))
    output_spread: float = field(default=0.0, metadata=_about("spread of its logarithm"))
    drafts: int = field(default=5, metadata=_about("drafts of a sequence and step"))
    acceptance: float = field(
        default=0.75,
        metadata=_about("median chance that a draft is accepted when those before it are"),
    )
    difficulty: float = field(
        default=0.0, metadata=_about("spread of that chance's logit between requests")
    )
    doubt: float = field(default=0.0, metadata=_about("and between the drafts of a request"))
    verify: Verify = field(
        default="fixed",
        metadata=_about("drafts verified: none, all (fixed), each rank's best, the group's best"),
    )
    lag: int = field(default=0, metadata=_about("steps by which the group's choice is late"))
    hot: float = field(
        default=4.0, metadata=_about("load of the hottest expert over the mean; 1 = even")
    )
    change: float = field(default=0.05, metadata=_about("change of a share from step to step"))
    drift: float = field(
        default=0.0, metadata=_about("slow change of a share's logarithm (its spread)")
    )
    drift_steps: float = field(default=2000.0, metadata=_about("steps over which it forgets"))
    policy: Policy = field(default="steps", metadata=_about("how experts are placed"))
    window: int = field(default=96, metadata=_about("steps that a plan is made from"))
    interval: int = field(
        default=2000, metadata=_about("steps between plans; the first after a window")
    )
    staged: bool = field(default=True, metadata=_about("move experts while steps run"))
    draw: Draw = field(
        default="auto", metadata=_about("rows of slots: exact multinomial or its normal limit")
    )
    jitter: float = field(
        default=0.0, metadata=_about("spread of the logarithm of the host's time a step")
    )
    steps: int = field(default=400, metadata=_about("steps of a run without a number of requests"))
    warmup: int = field(default=120, metadata=_about("of these, steps that are not counted"))
    device: str = field(default="h200", metadata=_about("times: a packaged name or a file"))

    def __post_init__(self) -> None:
        """Check types, ranges and how sizes fit together."""
        problems = [*_type_problems(self)]
        if not problems:
            problems = [*_size_problems(self)]
        if problems:
            raise ConfigError("the simulated cluster does not fit together", problems)

    def but(self, **values: object) -> Settings:
        """Return a copy with some values changed."""
        return dataclasses.replace(self, **values)  # type: ignore[arg-type]

    @property
    def groups(self) -> int:
        """The number of expert groups."""
        return self.gpus // self.expert


def _type_problems(settings: Settings) -> list[str]:
    problems = []
    hints = get_type_hints(Settings)
    for each in fields(Settings):
        value, kind = getattr(settings, each.name), hints[each.name]
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                accepted = ", ".join(map(show, get_args(kind)))
                problems.append(f"{each.name}: found {show(value)}, expected one of {accepted}")
        elif kind is bool:
            if not isinstance(value, bool):
                problems.append(f"{each.name}: found {show(value)}, expected true or false")
        elif kind is str:
            if not isinstance(value, str):
                problems.append(f"{each.name}: found {show(value)}, expected a string")
        else:
            whole = kind is int
            numbers = (int,) if whole else (int, float)
            least = 1 if each.name in _CHECKED else 0
            good = isinstance(value, numbers) and not isinstance(value, bool)
            if not good or not least <= value < 1e9:
                form = "an integer" if whole else "a number"
                problems.append(f"{each.name}: found {show(value)}, expected {form} >= {least}")
    return problems


def _size_problems(s: Settings) -> list[str]:
    problems = []
    if s.gpus % s.expert:
        problems.append(f"expert: found {s.expert}, expected a divisor of gpus ({s.gpus})")
    if s.layers % s.counted_layers:
        problems.append(
            f"counted_layers: found {s.counted_layers}, expected a divisor of layers ({s.layers})"
        )
    if s.active > s.experts:
        problems.append(f"active: found {s.active}, expected at most experts ({s.experts})")
    if s.copies > s.experts * (s.expert - 1):
        problems.append(f"copies: found {s.copies}, more than ranks can hold of distinct experts")
    if not 1 <= s.hot <= s.experts / s.active:
        problems.append(
            f"hot: found {s.hot}, expected 1 to {s.experts / s.active:g}: no expert gets more than "
            "every token"
        )
    if not s.overlap <= 1:
        problems.append(f"overlap: found {s.overlap}, expected at most 1")
    if not 0 < s.acceptance < 1:
        problems.append(f"acceptance: found {s.acceptance}, expected more than 0 and less than 1")
    if s.requests == 0 and s.warmup >= s.steps:
        problems.append(f"warmup: found {s.warmup}, expected less than steps ({s.steps})")
    if s.window < 4 or s.batched < 1:
        problems.append("window must be at least 4 and batched at least 1")
    if min(s.prompt, s.output) < 1:
        problems.append("prompt and output: expected at least 1")
    return problems


def load_settings(file: Path | None, sets: Sequence[str] = ()) -> Settings:
    """Return the settings of a TOML, JSON or YAML file with some of them set by `KEY=VALUE`.

    Raises ConfigError for unknown keys and bad values, UnsupportedError for YAML without its
    package.
    """
    values: dict[str, object] = dict(_read(file)) if file is not None else {}
    values.update(parse_setting(text) for text in sets)
    known = [each.name for each in fields(Settings)]
    unknown = [
        f"{key}: unknown setting{near_matches(key, known)}" for key in values if key not in known
    ]
    if unknown:
        raise ConfigError(
            "unknown settings of a simulation; `deepinfer sim run --help` lists all", unknown
        )
    hints = get_type_hints(Settings)
    for key, value in values.items():
        if hints[key] is float and isinstance(value, int) and not isinstance(value, bool):
            values[key] = float(value)
    return Settings(**values)  # type: ignore[arg-type]


def parse_setting(text: str) -> tuple[str, object]:
    """Read `KEY=VALUE`; the value is JSON, or a string where it is none."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise ConfigError(f"found {show(text)}, expected KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _read(file: Path) -> Mapping[str, object]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {file}: {json_problem(error)}") from error
    try:
        if file.suffix == ".toml":
            found: object = tomllib.loads(text)
        elif file.suffix in (".yaml", ".yml"):
            found = _read_yaml(text)
        else:
            found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be parsed: {json_problem(error)}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{file}: expected an object of settings, found {show(found)}")
    return {str(key): value for key, value in found.items()}


def _read_yaml(text: str) -> object:
    try:
        import yaml
    except ModuleNotFoundError:
        raise UnsupportedError.missing_extra("pyyaml", "sim", "reading YAML") from None
    try:
        found: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    return found
