"""What a run does: one printable tree of frozen settings, addressed by dotted keys (pure).

Every group checks its values when it is built. "auto" is resolved by the part that knows the model
and the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Final, Literal, get_args, get_origin, get_type_hints

from deepinfer.config.fields import near_matches, show
from deepinfer.config.mesh import Mesh
from deepinfer.errors import ConfigError

__all__ = [
    "CacheConfig",
    "EngineConfig",
    "GrammarConfig",
    "LogConfig",
    "NumericsConfig",
    "ParallelConfig",
    "ReplayConfig",
    "SamplingConfig",
    "SchedulingConfig",
    "Setting",
    "SpeculationConfig",
    "Value",
    "WeightsConfig",
    "flatten",
    "parse_set",
    "settings",
]

Value = bool | int | float | str | tuple[int, ...] | tuple[float, ...]

_WORDS: Final = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_MAX_LISTED: Final = 1 << 20


def _about(doc: str, low: float | None = None, high: float | None = None) -> dict[str, object]:
    """Return a field's metadata: its meaning and the inclusive bounds of its number or items."""
    return {"doc": doc, "low": low, "high": high}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: where it stands, what it accepts, what it means.

    kinds     the Python types of a scalar, or of the items when `is_list`
    words     the accepted texts
    low, high inclusive bounds of a number or of each item, None = unbounded
    """

    key: str
    kinds: tuple[type, ...]
    words: tuple[str, ...]
    is_list: bool
    low: float | None
    high: float | None
    doc: str

    @property
    def name(self) -> str:
        """The field's name inside its group."""
        return self.key.partition(".")[2]

    @property
    def accepts(self) -> str:
        """Spell the accepted values."""
        bounds = "" if self.low is None else f" >= {self.low:g}"
        bounds += "" if self.high is None else f" and <= {self.high:g}"
        spelled = {bool: "true or false", int: f"an integer{bounds}", float: f"a number{bounds}"}
        parts = [spelled[kind] for kind in self.kinds]
        if self.is_list:
            parts = [f"a list; each item {part}" for part in parts]
        return " or ".join([*parts, *(show(word) for word in self.words)])

    def problem(self, value: object) -> str | None:
        """Return what is wrong with a typed value, None when nothing is."""
        if not self._fits(value):
            return f"{self.key}: found {show(value)}, expected {self.accepts}"
        return None

    def convert(self, value: object) -> object:
        """Turn text or a loosely typed value into the field's type, where it can be."""
        if isinstance(value, str):
            return value if value in self.words else self._parse(value.strip())
        if self.is_list:
            if isinstance(value, (list, tuple)):
                return tuple(self._widen(item) for item in value)
            return (self._widen(value),)
        return self._widen(value)

    def _widen(self, value: object) -> object:
        """Turn an integer into a float where only floats are meant."""
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if is_int and self.kinds == (float,):
            return float(value)  # type: ignore[arg-type]  # an int, as just tested
        return value

    def _parse(self, text: str) -> object:
        """Parse text by the field's type; text that does not parse comes back as it is."""
        if text in self.words:
            return text
        try:
            if self.is_list:
                return tuple(self._items(text))
            if bool in self.kinds:
                return _WORDS[text.lower()]
            if int in self.kinds:
                return int(text)
            if float in self.kinds:
                return float(text)
        except (ValueError, KeyError):
            pass
        return text

    def _items(self, text: str) -> list[object]:
        """Parse `1,2`, `[1, 2]` or, for integers, `0..3,7`."""
        if text.startswith("[") and text.endswith("]"):
            text = text[1:-1]
        items: list[object] = []
        for part in filter(None, (p.strip() for p in text.split(","))):
            first, dots, last = part.partition("..")
            if dots and int in self.kinds:
                span = range(int(first), int(last) + 1)
                if not 0 < len(span) <= _MAX_LISTED:
                    raise ValueError(part)
                items.extend(span)
            else:
                items.append(float(part) if float in self.kinds else int(part))
        return items

    def _fits(self, value: object) -> bool:
        """Tell whether a value has the field's type and lies within its bounds."""
        if self.is_list:
            return isinstance(value, tuple) and all(self._fits_one(item) for item in value)
        if isinstance(value, str):
            return value in self.words
        return self._fits_one(value)

    def _fits_one(self, value: object) -> bool:
        if isinstance(value, bool):
            return bool in self.kinds
        if isinstance(value, int):
            if not (int in self.kinds or float in self.kinds):
                return False
        elif not (isinstance(value, float) and float in self.kinds and math.isfinite(value)):
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


def _group_settings(group: type[_Group]) -> tuple[Setting, ...]:
    """Describe the fields of a group from their annotations and metadata."""
    hints = get_type_hints(group)
    prefix = group.__name__.removesuffix("Config").lower()
    found = []
    for f in fields(group):
        hint = hints[f.name]
        is_list = get_origin(hint) is tuple
        options = (get_args(hint)[0],) if is_list else _options(hint)
        found.append(
            Setting(
                key=f"{prefix}.{f.name}",
                kinds=tuple(option for option in options if isinstance(option, type)),
                words=tuple(option for option in options if isinstance(option, str)),
                is_list=is_list,
                low=f.metadata["low"],
                high=f.metadata["high"],
                doc=f.metadata["doc"],
            )
        )
    return tuple(found)


def _options(hint: object) -> tuple[object, ...]:
    """Return the types and texts that an annotation allows."""
    if isinstance(hint, type):
        return (hint,)
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(option for part in get_args(hint) for option in _options(part))


@dataclass(frozen=True, slots=True)
class _Group:
    """What all groups share: every field is checked when the group is built."""

    def __post_init__(self) -> None:
        """Raise ConfigError with every bad value of the group."""
        problems = [
            problem
            for setting in _group_settings(type(self))
            if (problem := setting.problem(getattr(self, setting.name))) is not None
        ]
        if problems:
            raise ConfigError("the engine settings are not valid", problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingConfig(_Group):
    """Who runs in a step, and how much of it."""

    overlap: bool | Literal["auto"] = field(
        default="auto",
        metadata=_about(
            "plan the next step while this one runs; auto = on, but for narrow models on a CPU"
        ),
    )
    cuda_graphs: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata=_about("record decode steps on a card; auto = where they can be, on = or fail"),
    )
    graph_branches: bool = field(
        default=True, metadata=_about("recorded steps run independent chains of kernels together")
    )
    max_num_seqs: int = field(default=64, metadata=_about("most sequences running at a time", 1))
    max_num_batched_tokens: int | Literal["auto"] = field(
        default="auto", metadata=_about("most prompt tokens computed in one step", 1)
    )
    max_model_len: int | Literal["auto"] = field(
        default="auto",
        metadata=_about("most tokens of a sequence that are fed: all but its last", 1),
    )
    chunk_size: int | Literal["auto"] = field(
        default="auto", metadata=_about("most tokens of one prompt computed in one step", 1)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig(_Group):
    """How much is cached, and in what pieces."""

    tokens_per_block: int = field(default=128, metadata=_about("tokens of one cache block", 1))
    num_blocks: int | Literal["auto"] = field(
        default="auto", metadata=_about("blocks in the pool; auto follows the memory settings", 1)
    )
    memory_bytes: int | Literal["auto"] = field(
        default="auto", metadata=_about("bytes of the block pool; auto follows the fraction", 1)
    )
    memory_fraction: float = field(
        default=0.9, metadata=_about("share of the device memory that may be used", 0.01, 1.0)
    )
    max_rollback: int | Literal["auto"] = field(
        default="auto", metadata=_about("positions that a sequence can step back", 0)
    )
    dequantized_bytes: int = field(
        default=1 << 30,
        metadata=_about("most bytes of decoded entries that a CPU keeps for speed", 0),
    )
    prefix: bool = field(default=False, metadata=_about("reuse the blocks of equal prefixes"))
    prefix_checkpoints: int | Literal["auto"] = field(
        default="auto",
        metadata=_about("prefixes whose state is kept; auto = scheduling.max_num_seqs", 1),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationConfig(_Group):
    """Drafting tokens and checking them."""

    num_drafts: int = field(default=0, metadata=_about("tokens drafted a step; 0 = off", 0))
    variable: bool = field(default=False, metadata=_about("verify as many drafts as pay off"))
    method: Literal["coupled", "rejection"] = field(
        default="coupled", metadata=_about("the rule that accepts a draft")
    )
    confidence_temperatures: tuple[float, ...] = field(
        default=(), metadata=_about("confidence calibration; empty = the checkpoint's", 1e-5)
    )
    cost_cache_seconds: int = field(
        default=86400,
        metadata=_about("seconds that step costs kept on disk serve; 0 = measure at each start", 0),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig(_Group):
    """Running a bounded run of rows in the decoder half instead of all; approximate by design."""

    mode: Literal["off", "mask", "compact"] = field(
        default="off", metadata=_about("which rows the decoder half runs in prefill")
    )
    keep_tokens: int | Literal["auto"] = field(
        default="auto", metadata=_about("last prompt tokens that the decoder half keeps", 1)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsConfig(_Group):
    """Which arithmetic runs; `docs/numerics.md` says what each choice changes."""

    mode: Literal["official", "noq"] = field(
        default="official", metadata=_about("official rounding, or fp32 without any rounding")
    )
    output_projection: Literal["auto", "bf16", "fp8"] = field(
        default="auto", metadata=_about("operands of the grouped output projection")
    )
    index_scores: Literal["auto", "reference", "final"] = field(
        default="auto", metadata=_about("round index scores at every step, or once at the end")
    )
    expert_products: Literal["exact", "w4a8"] = field(
        default="exact",
        metadata=_about("products of routed experts: exact, or in e4m3 where a card has them"),
    )
    dense_copies: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata=_about(
            "bf16 copies of FP8 matrices on a card, for steps of many rows; auto = where they take "
            "at most an eighth of its memory and batch_invariant is false"
        ),
    )
    batch_invariant: bool = field(
        default=True, metadata=_about("a row's bits do not depend on its batch")
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig(_Group):
    """Ranks along each axis."""

    data: int | Literal["auto"] = field(
        default="auto",
        metadata=_about("attention replicas; auto = as many as the ranks of `expert` take", 1),
    )
    context: int = field(default=1, metadata=_about("ranks that share a prompt's prefill", 1))
    context_exchange: Literal["entries", "all"] = field(
        default="entries",
        metadata=_about("what these ranks exchange: compressed entries, or all rows' inputs"),
    )
    expert: int = field(default=1, metadata=_about("ranks that share the experts", 1))
    engram: int = field(default=1, metadata=_about("ranks that share the Engram tables", 1))
    engram_rows: Literal["auto", "device", "host", "mapped", "shards"] = field(
        default="auto",
        metadata=_about(
            "Engram tables on the device; in mapped host memory, read by a thread (host) or by the "
            "GPU (mapped); or cut into the shards of `engram`"
        ),
    )
    copies: int = field(
        default=0, metadata=_about("experts of a layer held twice, rounded up to whole ranks", 0)
    )
    balance_interval: int = field(
        default=2000,
        metadata=_about("steps of a kind between two plans of where experts are; 0 = they stay", 0),
    )
    balance_window: int = field(
        default=128, metadata=_about("steps that such a plan is made from", 4, 4096)
    )
    balance_horizon: int = field(
        default=2000, metadata=_about("steps within which moving experts must pay", 1)
    )
    balance_spare: int = field(
        default=1, metadata=_about("experts that a rank has spare memory for while they move", 1)
    )
    balance_gb_s: float = field(
        default=45.0,
        metadata=_about("GB/s that a rank receives while they move, on average; 0 = no limit", 0),
    )
    backend: Literal["auto", "exact", "fixed", "gathered", "symm", "deepep"] = field(
        default="auto", metadata=_about("how rows travel between the ranks of `expert`")
    )
    capacity_factor: float = field(
        default=0.0,
        metadata=_about("rows of a piece of `fixed`, in even shares; 0 = all that can come", 0, 64),
    )
    placement: Literal["work", "fixed"] = field(
        default="work", metadata=_about("requests go to the least loaded replica, or in turn")
    )
    timeout_s: float = field(
        default=120.0, metadata=_about("seconds after which a step or a meeting has failed", 1)
    )
    cpu_threads: int | Literal["auto"] = field(
        default="auto",
        metadata=_about(
            "threads of one operation on a CPU; auto = 1 where a model is small", 1, 1024
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsConfig(_Group):
    """How weights are held."""

    dequantized_bytes: int = field(
        default=134217728,
        metadata=_about("most bytes of fp32 copies that a CPU keeps for speed", 0),
    )
    keep_stored: bool = field(
        default=False,
        metadata=_about("keep stored weights in a card's memory beside their packed form"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig(_Group):
    """What holds for every request's draws."""

    banned_token_ids: tuple[int, ...] = field(
        default=(), metadata=_about("ids that are never generated", 0)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarConfig(_Group):
    """How structured outputs are compiled and enforced."""

    backend: Literal["llguidance", "xgrammar"] = field(
        default="llguidance", metadata=_about("the library that enforces structured outputs")
    )
    threads: int | Literal["auto"] = field(
        default="auto", metadata=_about("threads that compile and fill masks; auto = cores", 1, 256)
    )
    compile_timeout_s: float = field(
        default=20.0, metadata=_about("seconds after which a compilation is given up", 0.01)
    )
    cache_bytes: int = field(
        default=1 << 28, metadata=_about("most bytes of compiled grammars that are kept", 1)
    )
    max_source_bytes: int = field(
        default=1 << 20, metadata=_about("most bytes of a schema, pattern or grammar", 1)
    )
    max_states: int = field(
        default=100_000,
        metadata=_about("most characters of a pattern or grammar, repetitions written out", 1),
    )
    max_whitespace: int = field(
        default=16,
        metadata=_about(
            "most white space in one place of JSON: one space, or a line break and indent", 0
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig(_Group):
    """What is reported while running."""

    interval_steps: int = field(
        default=100, metadata=_about("steps between two statistics lines; 0 = none", 0)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """All settings of a run. Raises ConfigError when groups do not fit together."""

    scheduling: SchedulingConfig = SchedulingConfig()
    cache: CacheConfig = CacheConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    replay: ReplayConfig = ReplayConfig()
    numerics: NumericsConfig = NumericsConfig()
    parallel: ParallelConfig = ParallelConfig()
    weights: WeightsConfig = WeightsConfig()
    sampling: SamplingConfig = SamplingConfig()
    grammar: GrammarConfig = GrammarConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        """Check what involves several groups or fields."""
        problems = [
            f"{f.name}: found {show(value)}, expected {_GROUPS[f.name].__name__}"
            for f in fields(self)
            if not isinstance(value := getattr(self, f.name), _GROUPS[f.name])
        ]
        if not problems:
            problems = _conflicts(self)
        if problems:
            raise ConfigError("the engine settings are not valid", problems)

    @property
    def mesh(self) -> Mesh:
        """The ranks of this engine."""
        return _mesh(self.parallel)

    @property
    def keeps_stored(self) -> bool:
        """Whether stored weights stay beside a card's packed ones.

        Experts that move do so packed, which needs the same form on every rank: exact products
        have one form, others fall back layer by layer.
        """
        moves = self.parallel.expert > 1 and self.parallel.balance_interval > 0
        return self.weights.keep_stored or (moves and self.numerics.expert_products != "exact")

    @classmethod
    def from_dotted(cls, values: Mapping[str, object]) -> EngineConfig:
        """Build a config from dotted keys; see `with_dotted`."""
        return cls().with_dotted(values)

    def with_dotted(
        self, values: Mapping[str, object], origins: Mapping[str, str] | None = None
    ) -> EngineConfig:
        """Return this config with some settings replaced.

        values   dotted key -> value; texts are parsed by the setting's type, nested mappings are
                 flattened
        origins  dotted key -> where the value came from, for messages
        Raises ConfigError listing every unknown key (with near matches) and every bad value.
        """
        known = settings()
        problems: list[str] = []
        chosen: dict[str, object] = dict(self.to_dotted())
        for key, value in flatten(values).items():
            setting = known.get(key)
            if setting is None:
                problem: str | None = f"{key}: unknown setting{_hint(key, known)}"
            else:
                chosen[key] = setting.convert(value)
                problem = setting.problem(chosen[key])
            if problem is not None:
                origin = (origins or {}).get(key)
                problems.append(problem + (f" (from {origin})" if origin else ""))
        if problems:
            raise ConfigError("the engine settings are not valid", problems)
        groups = {name: _build(name, chosen) for name in _GROUPS}
        return EngineConfig(**groups)  # type: ignore[arg-type]  # each group by its name

    def to_dotted(self) -> dict[str, Value]:
        """Return every setting by its dotted key, in the order of declaration."""
        return {
            key: getattr(getattr(self, key.partition(".")[0]), setting.name)
            for key, setting in settings().items()
        }


_GROUPS: Final[Mapping[str, type[_Group]]] = {
    "scheduling": SchedulingConfig,
    "cache": CacheConfig,
    "speculation": SpeculationConfig,
    "replay": ReplayConfig,
    "numerics": NumericsConfig,
    "parallel": ParallelConfig,
    "weights": WeightsConfig,
    "sampling": SamplingConfig,
    "grammar": GrammarConfig,
    "log": LogConfig,
}


@cache
def settings() -> Mapping[str, Setting]:
    """Return every setting by its dotted key, in the order of declaration."""
    return {s.key: s for group in _GROUPS.values() for s in _group_settings(group)}


def parse_set(text: str) -> tuple[str, str]:
    """Split `key=value` of the command line; raises ConfigError when there is no `=` or no key."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r}: expected key=value, as in --set numerics.mode=noq")
    return key.strip(), value.strip()


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Turn nested mappings into dotted keys."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _build(name: str, chosen: Mapping[str, object]) -> _Group:
    """Build one group from checked dotted values."""
    group = _GROUPS[name]
    return group(**{s.name: chosen[s.key] for s in _group_settings(group)})


def _hint(key: str, known: Iterable[str]) -> str:
    """Return the known keys near an unknown one: in its group, elsewhere, or what there is."""
    group, _, last = key.rpartition(".")
    parts = [k.partition(".") for k in known]
    inside = [name for of, _, name in parts if of == group]
    elsewhere = [f"{of}.{name}" for of, _, name in parts if name == last]
    if elsewhere:
        return f" (did you mean {' or '.join(elsewhere)}?)"
    hint = near_matches(last, inside, f"{group}.") if inside else near_matches(key, known)
    if hint:
        return hint
    if inside:
        return f"; {group} has {', '.join(inside)}"
    return f"; the groups are {', '.join(_GROUPS)}"


def _mesh(parallel: ParallelConfig) -> Mesh:
    """Return the mesh of some sizes; raises ConfigError when they do not fit together."""
    return Mesh.fit(
        data=0 if parallel.data == "auto" else parallel.data,
        context=parallel.context,
        expert=parallel.expert,
        engram=parallel.engram,
    )


def _conflicts(config: EngineConfig) -> list[str]:
    """Return the problems between settings."""
    problems: list[str] = []
    try:
        _mesh(config.parallel)
    except ConfigError as error:
        problems += error.problems
    where, shards = config.parallel.engram_rows, config.parallel.engram
    if where != "auto" and (where == "shards") != (shards > 1):
        problems.append(
            f'parallel.engram_rows: found "{where}" with parallel.engram {shards}; "shards" goes '
            "with more than one rank there, and the others with one"
        )
    numerics = config.numerics
    if numerics.mode == "noq" and numerics.output_projection == "fp8":
        problems.append(
            'numerics.output_projection: found "fp8", expected "auto" or "bf16" under '
            'numerics.mode "noq", which quantizes nothing'
        )
    if config.speculation.variable and config.speculation.num_drafts == 0:
        problems.append("speculation.variable: found true, expected speculation.num_drafts > 0")
    given = len(config.speculation.confidence_temperatures)
    if given > 1 and given != config.speculation.num_drafts:
        problems.append(
            f"speculation.confidence_temperatures: found {given} values, expected none, one or "
            f"speculation.num_drafts ({config.speculation.num_drafts})"
        )
    if numerics.batch_invariant and numerics.dense_copies == "on":
        problems.append(
            'numerics.dense_copies: found "on" under numerics.batch_invariant: the library that '
            'multiplies with copies sums in an order that depends on the batch; expected "auto" or '
            '"off", or batch_invariant false'
        )
    if (
        numerics.batch_invariant
        and config.speculation.variable
        and config.speculation.method == "rejection"
    ):
        problems.append(
            'speculation.method: found "rejection" with speculation.variable under '
            "numerics.batch_invariant: which drafts are verified depends on other requests, and "
            'rejection lets that reach the output; expected "coupled", or variable false, or '
            "batch_invariant false"
        )
    return problems
