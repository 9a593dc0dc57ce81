"""JSON Schemas: checked, resolved, reduced to what grammars can say, and reported on (pure).

A schema is rewritten to a small vocabulary in which every `$ref` points into `$defs`. Keywords
that no grammar expresses are left out and reported as approximated: what remains allows more, never
less, and the finished output is checked against the schema as given (`grammar/verdict.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, islice
from json import loads
from typing import Any, Final

from deepinfer.config.fields import near_matches
from deepinfer.errors import UnsupportedError
from deepinfer.grammar.formats import PATTERNS
from deepinfer.grammar.nodes import size
from deepinfer.grammar.regex import PatternError, parse_regex
from deepinfer.grammar.report import Finding, Report, Status

__all__ = ["DRAFTS", "PLACE", "Loosened", "Rewritten", "Schema", "escape", "rewrite"]

Schema = dict[str, Any] | bool

DRAFTS: Final = (
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
)
_NEWEST: Final = DRAFTS[0]
_REF_ALONE: Final = DRAFTS[2:]  # there, a $ref makes its neighbours meaningless
_ITEMS_ARE_TUPLES: Final = DRAFTS[1:]

_KEPT: Final = frozenset(
    """
    type enum const multipleOf minimum maximum exclusiveMinimum exclusiveMaximum required
    """.split()
)
_COUNTS: Final = frozenset(
    "minLength maxLength minItems maxItems minProperties maxProperties".split()
)
_ANNOTATIONS: Final = frozenset(
    """
    $schema $id $anchor $comment $defs definitions title description default examples deprecated
    readOnly writeOnly contentEncoding contentMediaType contentSchema minContains maxContains then
    else additionalItems $recursiveAnchor $dynamicAnchor
    """.split()
)
# Keywords that say nothing a grammar can: why, and whether they apply to the same value.
_BEYOND: Final[Mapping[str, tuple[str, bool]]] = {
    "not": ("a grammar has no negation", True),
    "if": ("a grammar has no conditions", True),
    "contains": ("a grammar does not look for items", False),
    "uniqueItems": ("a grammar does not compare items", False),
    "dependentRequired": ("a grammar has no conditions", False),
    "dependentSchemas": ("a grammar has no conditions", True),
    "dependencies": ("a grammar has no conditions", True),
    "propertyNames": ("names are not constrained apart from values", False),
    "unevaluatedProperties": ("a grammar does not know what was evaluated", False),
    "unevaluatedItems": ("a grammar does not know what was evaluated", False),
}
_REFUSED: Final[Mapping[str, str]] = {
    "$dynamicRef": "dynamic references are not followed: use $ref",
    "$recursiveRef": "recursive references are not followed: use $ref",
    "$vocabulary": "a schema that changes what keywords mean is not followed",
}
_FORMATS: Final = frozenset("email hostname uri".split())  # left to a library
_OTHERS: Final = frozenset(
    """
    $ref properties patternProperties additionalProperties items prefixItems anyOf oneOf allOf
    pattern format
    """.split()
)
_KNOWN: Final = frozenset(
    _KEPT | _COUNTS | _ANNOTATIONS | _BEYOND.keys() | _REFUSED.keys() | _OTHERS
)
_TYPES: Final = ("null", "boolean", "object", "array", "number", "string", "integer")
PLACE: Final = "x-place"
"""The key under which a rewritten schema keeps the pointer to its original."""
_MAX_DEPTH: Final = 100
_MAX_PROBLEMS: Final = 10
_MOST_BRANCHES: Final = 256
_NUMBERS: Final = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split())
_WIDE: Final = 2**53


@dataclass(frozen=True, slots=True)
class Loosened:
    """What a library turned out not to express, and is therefore left out.

    counts     minProperties and maxProperties
    patterns   patternProperties, with additionalProperties
    formats    format
    multiples  multipleOf
    wide       bounds and multiples of 2^53 or more
    """

    counts: bool = False
    patterns: bool = False
    formats: bool = False
    multiples: bool = False
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A schema in the small vocabulary.

    schema      with `$defs` at its top where there are references
    original    as it was given
    num_states  characters of its patterns, repetitions written out
    """

    schema: Schema
    original: Schema
    draft: str
    report: Report
    num_states: int


def escape(part: object) -> str:
    """Spell one step of a JSON pointer."""
    return str(part).replace("~", "~0").replace("/", "~1")


def rewrite(
    text: str, *, closed: bool = False, max_states: int = 100_000, loosened: Loosened | None = None
) -> Rewritten:
    """Check and rewrite a schema; what cannot be used is in the report, as refused.

    text  JSON
    """
    document: Schema = loads(text)
    findings: list[Finding] = []
    draft = _draft(document, findings)
    if not findings:
        findings += _meta_problems(document, draft)
    schema: Schema = True
    num_states = 0
    if not findings:
        rewriter = _Rewriter(document, draft, closed, max_states, loosened or Loosened())
        schema = rewriter.run()
        findings = rewriter.findings
        num_states = rewriter.num_states
    return Rewritten(schema, document, draft, Report(tuple(findings)), num_states)


def _draft(document: Schema, findings: list[Finding]) -> str:
    named = document.get("$schema", _NEWEST) if isinstance(document, dict) else _NEWEST
    name = named.rstrip("#") if isinstance(named, str) else named
    if name in DRAFTS:
        return str(name)
    note = f"found {named!r}, accepted are {', '.join(DRAFTS)}"
    findings.append(Finding("/$schema", "$schema", Status.REFUSED, note))
    return _NEWEST


def _meta_problems(document: Schema, draft: str) -> Iterator[Finding]:
    """Yield where a schema is not one."""
    from deepinfer.grammar.verdict import meta_errors

    for path, message in islice(meta_errors(document, draft), _MAX_PROBLEMS):
        pointer = "".join(f"/{escape(part)}" for part in path)
        keyword = next((str(part) for part in reversed(path) if isinstance(part, str)), "")
        yield Finding(pointer, keyword, Status.REFUSED, message)


@dataclass
class _Frame:
    """Where the rewriter is: the place, what names mean there, and whether findings count."""

    pointer: str
    resolver: Any
    quiet: bool = False
    depth: int = 0

    def down(self, *parts: object, quiet: bool = False) -> _Frame:
        pointer = self.pointer + "".join(f"/{escape(part)}" for part in parts)
        return _Frame(pointer, self.resolver, self.quiet or quiet, self.depth + 1)


class _Rewriter:
    def __init__(
        self, document: Schema, draft: str, closed: bool, max_states: int, loosened: Loosened
    ) -> None:
        self._document = document
        self._draft = draft
        self._closed = closed
        self._max_states = max_states
        self._loosened = loosened
        self._pointers = dict(_places(document, ""))
        self._names: dict[int, str] = {}
        self._defs: dict[str, Schema] = {}
        self._todo: list[tuple[str, dict[str, Any], _Frame]] = []
        self._in_place: dict[int, list[tuple[int, str]]] = {}
        self._num_schemas = 0
        self.num_states = 0
        self.findings: list[Finding] = []

    def run(self) -> Schema:
        """Return the rewritten document."""
        resolver = _resolver(self._document, self._draft)
        root = self._walk(self._document, _Frame("", resolver))
        while self._todo:
            name, schema, frame = self._todo.pop()
            self._defs[name] = self._walk(schema, frame)
        self._refuse_cycles()
        if not any(f.status is Status.REFUSED for f in self.findings):
            if not _finite(root, self._defs):
                self._note(_Frame("", None), "", Status.REFUSED, _ENDLESS)
        if isinstance(root, dict) and self._defs:
            return root | {"$defs": self._defs}
        return root

    def _note(self, frame: _Frame, keyword: str, status: Status, note: str = "") -> None:
        if frame.quiet and status is not Status.REFUSED:
            return
        pointer = frame.pointer + (f"/{escape(keyword)}" if keyword else "")
        finding = Finding(pointer, keyword, status, note)
        if finding not in self.findings:
            self.findings.append(finding)

    def _walk(self, schema: Schema, frame: _Frame) -> Schema:
        if isinstance(schema, bool):
            return schema
        self._num_schemas += 1
        if frame.depth > _MAX_DEPTH or self._num_schemas > self._max_states:
            self._note(frame, "", Status.REFUSED, "the schema is too large or nested too deeply")
            return True
        frame = self._enter(schema, frame)
        if "$ref" in schema and self._draft in _REF_ALONE:
            schema = {"$ref": schema["$ref"]}
        out: dict[str, Any] = {PLACE: frame.pointer}
        for keyword, value in schema.items():
            if keyword in _KEPT:
                self._keep(keyword, value, frame, out)
            elif keyword in _COUNTS:
                self._count(keyword, int(value), schema, frame, out)
            elif keyword in _BEYOND:
                self._beyond(keyword, value, schema, frame)
            elif keyword in _REFUSED:
                self._note(frame, keyword, Status.REFUSED, _REFUSED[keyword])
            elif keyword in _OTHERS:
                getattr(self, f"_on_{keyword.lstrip('$')}")(value, schema, frame, out)
            elif keyword not in _ANNOTATIONS:
                hint = near_matches(keyword, _KNOWN)
                note = f"not a keyword{hint}, so an annotation: nothing to enforce"
                self._note(frame, keyword, Status.ENFORCED, note)
        if self._closed and "properties" in schema:
            if not {"additionalProperties", "patternProperties", "$ref"} & schema.keys():
                out["additionalProperties"] = False
        return False if out.get("$ref") is False else out

    def _keep(self, keyword: str, value: Any, frame: _Frame, out: dict[str, Any]) -> None:
        if keyword == "multipleOf" and self._loosened.multiples:
            note = "the library does not divide by this"
            self._note(frame, keyword, Status.APPROXIMATED, note)
            return
        if self._loosened.wide and keyword in _NUMBERS and abs(value) >= _WIDE:
            note = "the library does not count so far"
            self._note(frame, keyword, Status.APPROXIMATED, note)
            return
        out[keyword] = value
        if keyword in ("enum", "const") and _has_controls(value):
            note = "control characters in texts are not told apart"
            self._note(frame, keyword, Status.APPROXIMATED, note)
        else:
            self._note(frame, keyword, Status.ENFORCED)

    def _enter(self, schema: dict[str, Any], frame: _Frame) -> _Frame:
        """Return the frame inside a schema, which may have an identity of its own."""
        if not isinstance(schema.get("$id"), str) or schema is self._document:
            return frame
        resource = _resource(schema, self._draft)
        resolver = frame.resolver.in_subresource(resource)
        return _Frame(frame.pointer, resolver, frame.quiet, frame.depth)

    def _inside(self, schema: Schema, parent: dict[str, Any], frame: _Frame) -> Schema:
        """Walk a schema that applies to the same value as its parent."""
        if isinstance(schema, dict):
            self._link(parent, schema, frame)
        return self._walk(schema, frame)

    def _link(self, parent: dict[str, Any], child: dict[str, Any], frame: _Frame) -> None:
        self._in_place.setdefault(id(parent), []).append((id(child), frame.pointer))

    def _on_ref(
        self, value: str, schema: dict[str, Any], frame: _Frame, out: dict[str, Any]
    ) -> None:
        target, resolver, problem = _look_up(frame.resolver, value)
        if problem is not None:
            self._note(frame, "$ref", Status.REFUSED, problem)
            return
        if isinstance(target, bool):
            if not target:
                out["$ref"] = False
            return
        if not isinstance(target, dict) or id(target) not in self._pointers:
            self._note(frame, "$ref", Status.REFUSED, f"{value!r} is no schema of this document")
            return
        original = self._original(schema, frame)
        self._link(original, target, frame.down("$ref"))
        name = self._names.get(id(target))
        if name is None:
            name = self._names[id(target)] = f"r{len(self._names)}"
            place = _Frame(self._pointers[id(target)], resolver)
            self._todo.append((name, target, place))
        out["$ref"] = f"#/$defs/{name}"
        self._note(frame, "$ref", Status.ENFORCED)

    def _original(self, schema: dict[str, Any], frame: _Frame) -> dict[str, Any]:
        """Return the schema of the document behind one whose neighbours of $ref were dropped."""
        if id(schema) in self._pointers:
            return schema
        return next(
            (node for node in _nodes(self._document) if self._pointers[id(node)] == frame.pointer),
            schema,
        )

    def _on_pattern(
        self, value: str, schema: dict[str, Any], frame: _Frame, out: dict[str, Any]
    ) -> None:
        if self._pattern(value, frame, "pattern"):
            out["pattern"] = value
            self._note(frame, "pattern", Status.ENFORCED)

    def _pattern(self, value: str, frame: _Frame, keyword: str) -> bool:
        try:
            node = parse_regex(value, whole=False, ecma=True)
        except PatternError as error:
            self._note(frame, keyword, Status.REFUSED, str(error))
            return False
        self.num_states += size(node)
        if self.num_states > self._max_states:
            note = f"larger than {self._max_states} characters with repetitions written out"
            self._note(frame, keyword, Status.REFUSED, f"{note} (grammar.max_states)")
            return False
        return True

    def _on_format(
        self, value: str, schema: dict[str, Any], frame: _Frame, out: dict[str, Any]
    ) -> None:
        pattern = PATTERNS.get(value)
        if pattern is not None:
            if "pattern" in schema:
                out.setdefault("allOf", []).append({PLACE: frame.pointer, "pattern": pattern})
            else:
                out["pattern"] = pattern
            self._note(frame, "format", Status.ENFORCED)
        elif value in _FORMATS and not self._loosened.formats:
            out["format"] = value
            self._note(frame, "format", Status.ENFORCED)
        else:
            note = f"{value!r} is not enforced, and not checked: a format is an annotation"
            self._note(frame, "format", Status.APPROXIMATED, note)

    def _on_properties(
        self, value: dict[str, Any], schema: dict[str, Any], frame: _Frame, out: dict[str, Any]
    ) -> None:
        out["properties"] = {
            name: self._walk(sub, frame.down("properties", name)) for name, sub in value.items()
        }
        self._note(frame, "properties", Status.ENFORCED)

    def _on_patternProperties(  # spelled as the keyword
        self, value: dict[str, Any], schema: dict[str, Any], frame: _Frame, out: dict[str, Any]
    ) -> None:
        place = frame.down("patternProperties")
        found = {
            pattern: self._walk(sub, place.down(pattern))
            for pattern, sub in value.items()
            if self._pattern(pattern, place, pattern)
        }
        if self._loosened.patterns:
            note = "the library does not separate these patterns"
            self._note(frame, "patternProperties", Status.APPROXIMATED, note)
        else:
            out["patternProperties"] = found
            self._note(frame, "patternProperties", Status.ENFORCED)

    def _on_additionalProperties(
        self, value: Schema, schema: dict[str, Any], frame: _Frame, out: dict[str, Any]
    ) -> None:
        dropped = self._loosened.patterns and "patternProperties" in schema
        walked = self._walk(value, frame.down("additionalProperties", quiet=dropped))
        if dropped:
            note = "needs patternProperties, which are approximated"
            self._note(frame, "additionalProperties", Status.APPROXIMATED, note)
        else:
            out["additionalProperties"] = walked
            self._note(frame, "additionalProperties", Status.ENFORCED)

    def _on_items(
        self, value: Any, schema: dict[str, Any], frame: _Frame, out: dict[str, Any]
    ) -> None:
        if isinstance(value, list) and self._draft in _ITEMS_ARE_TUPLES:
            out["prefixItems"] = [
                self._walk(sub, frame.down("items", idx)) for idx, sub in enumerate(value)
            ]
            if "additionalItems" in schema:
                rest = frame.down("additionalItems")
                out["items"] = self._walk(schema["additionalItems"], rest)
                self._note(frame, "additionalItems", Status.ENFORCED)
        else:
            out["items"] = self._walk(value, frame.down("items"))
        self._note(frame, "items", Status.ENFORCED)

    def _on_prefixItems(
        self, value: list[Any], schema: dict[str, Any], frame: _Frame, out: dict[str, Any]
    ) -> None:
        if self._draft != _NEWEST:
            return
        out["prefixItems"] = [
            self._walk(sub, frame.down("prefixItems", idx)) for idx, sub in enumerate(value)
        ]
        self._note(frame, "prefixItems", Status.ENFORCED)

    def _branches(
        self, keyword: str, value: list[Any], schema: dict[str, Any], frame: _Frame
    ) -> list[Schema]:
        return [
            self._inside(sub, schema, frame.down(keyword, idx)) for idx, sub in enumerate(value)
        ]

    def _on_allOf(
        self, value: list[Any], schema: dict[str, Any], frame: _Frame, out: dict[str, Any]
    ) -> None:
        out.setdefault("allOf", []).extend(self._branches("allOf", value, schema, frame))
        self._note(frame, "allOf", Status.ENFORCED)

    def _on_anyOf(
        self, value: list[Any], schema: dict[str, Any], frame: _Frame, out: dict[str, Any]
    ) -> None:
        out["anyOf"] = self._branches("anyOf", value, schema, frame)
        self._note(frame, "anyOf", Status.ENFORCED)

    def _on_oneOf(
        self, value: list[Any], schema: dict[str, Any], frame: _Frame, out: dict[str, Any]
    ) -> None:
        branches = self._branches("oneOf", value, schema, frame)
        out.setdefault("allOf", []).append({"anyOf": branches})
        if self._exclude(value, frame):
            self._note(frame, "oneOf", Status.ENFORCED)
        else:
            note = "taken as anyOf: its branches are not seen to exclude each other"
            self._note(frame, "oneOf", Status.APPROXIMATED, note)

    def _exclude(self, branches: list[Any], frame: _Frame) -> bool:
        """Tell whether no value satisfies two of the branches, as far as is easily seen."""
        if len(branches) > _MOST_BRANCHES:
            return False
        seen = [self._resolved(branch, frame) for branch in branches]
        return all(_disjoint(a, b) for a, b in combinations(seen, 2))

    def _resolved(self, schema: Any, frame: _Frame) -> Any:
        """Follow references that stand alone."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or set(schema) - _ANNOTATIONS != {"$ref"}:
                break
            schema, resolver, problem = _look_up(frame.resolver, schema["$ref"])
            if problem is not None:
                return True
            frame = _Frame(frame.pointer, resolver)
        return schema

    def _beyond(self, keyword: str, value: Any, schema: dict[str, Any], frame: _Frame) -> None:
        """Leave a keyword out, but look for what cannot be used inside it."""
        if keyword == "uniqueItems" and value is False:
            return
        why, in_place = _BEYOND[keyword]
        self._note(frame, keyword, Status.APPROXIMATED, why)
        for other in ("then", "else") if keyword == "if" else ():
            if other in schema:
                self._note(frame, other, Status.APPROXIMATED, why)
                self._quietly(schema[other], schema, frame.down(other), in_place)
        if keyword in ("dependentSchemas", "dependencies"):
            for name, sub in value.items():
                if isinstance(sub, dict | bool):
                    self._quietly(sub, schema, frame.down(keyword, name), in_place)
        elif isinstance(value, dict | bool) and keyword not in ("uniqueItems", "dependentRequired"):
            self._quietly(value, schema, frame.down(keyword), in_place)

    def _quietly(self, sub: Schema, parent: dict[str, Any], frame: _Frame, in_place: bool) -> None:
        frame.quiet = True
        if in_place:
            self._inside(sub, parent, frame)
        else:
            self._walk(sub, frame)

    def _count(
        self, keyword: str, value: int, schema: dict[str, Any], frame: _Frame, out: dict[str, Any]
    ) -> None:
        if value > self._max_states:
            note = (
                f"found {value}, at most {self._max_states} is accepted: leave the bound out, or "
                "raise grammar.max_states"
            )
            self._note(frame, keyword, Status.REFUSED, note)
            return
        if keyword in ("minProperties", "maxProperties"):
            if self._loosened.counts:
                note = "the library does not count properties here"
                self._note(frame, keyword, Status.APPROXIMATED, note)
                return
            repeats = schema.get("additionalProperties") is not False
            repeats = (repeats or "patternProperties" in schema) and not self._closed
            if keyword == "minProperties" and repeats and value > len(schema.get("required", ())):
                out[keyword] = value
                note = "a name that comes twice is counted twice"
                self._note(frame, keyword, Status.APPROXIMATED, note)
                return
        out[keyword] = value
        self._note(frame, keyword, Status.ENFORCED)

    def _refuse_cycles(self) -> None:
        """Refuse references that lead back to themselves without passing through a value."""
        open_: dict[int, bool] = {}  # schemas seen: whether the walk is still inside them
        for start in self._in_place:
            if start in open_:
                continue
            open_[start] = True
            stack = [(start, iter(self._in_place[start]))]
            while stack:
                node, edges = stack[-1]
                for target, pointer in edges:
                    if open_.get(target):
                        note = "a cycle of references that never reaches a value"
                        finding = Finding(pointer, "$ref", Status.REFUSED, note)
                        if finding not in self.findings:
                            self.findings.append(finding)
                    elif target not in open_:
                        open_[target] = True
                        stack.append((target, iter(self._in_place.get(target, ()))))
                        break
                else:
                    open_[node] = False
                    stack.pop()


_ENDLESS: Final = "no finite value satisfies it: something required contains itself"


def _places(value: Any, pointer: str) -> Iterator[tuple[int, str]]:
    """Yield the identity and pointer of every object of a document."""
    stack = [(value, pointer)]
    while stack:
        node, place = stack.pop()
        if isinstance(node, dict):
            yield id(node), place
            stack += [(item, f"{place}/{escape(key)}") for key, item in node.items()]
        elif isinstance(node, list):
            stack += [(item, f"{place}/{idx}") for idx, item in enumerate(node)]


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            stack += node.values()
        elif isinstance(node, list):
            stack += node


def _has_controls(value: Any) -> bool:
    """Tell whether some text in a value needs an escape that grammars do not write."""
    if isinstance(value, str):
        return any(c < " " and c not in "\b\f\n\r\t" for c in value)
    if isinstance(value, list):
        return any(map(_has_controls, value))
    return isinstance(value, dict) and any(map(_has_controls, [*value, *value.values()]))


def _disjoint(a: Any, b: Any) -> bool:
    """Tell whether no value satisfies both schemas, by types, values or a tag of objects."""
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    first, second = _values(a), _values(b)
    if first is not None and second is not None:
        return not any(_same(x, y) for x in first for y in second)
    kinds = _kinds(a) & _kinds(b)
    if kinds != {"object"}:
        return not kinds
    shared = set(a.get("required", ())) & set(b.get("required", ()))
    named = (a.get("properties", {}), b.get("properties", {}))
    return any(_disjoint(*(n.get(name, True) for n in named)) for name in shared)


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if "enum" in schema else None


def _kinds(schema: dict[str, Any]) -> set[str]:
    """Return the types that a schema allows; an integer is a number."""
    values = _values(schema)
    if values is not None:
        return {_kind(value) for value in values}
    named = schema.get("type", _TYPES)
    kinds = {named} if isinstance(named, str) else set(named)
    return {"number" if kind == "integer" else kind for kind in kinds}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _same(a: Any, b: Any) -> bool:
    return _kind(a) == _kind(b) and bool(a == b)


def _referencing() -> Any:
    try:
        import referencing
        import referencing.jsonschema
    except ImportError as error:
        raise UnsupportedError.missing_extra("jsonschema", "grammar", "a JSON Schema") from error
    return referencing


def _resource(schema: Schema, draft: str) -> Any:
    library = _referencing()
    return library.jsonschema.specification_with(draft).create_resource(schema)


def _resolver(document: Schema, draft: str) -> Any:
    """Return what looks up references inside the document, and nowhere else."""
    library = _referencing()
    resource = _resource(document, draft)
    uri = resource.id() or ""
    registry = library.Registry().with_resource(uri, resource)
    return registry.resolver(uri)


def _look_up(resolver: Any, reference: str) -> tuple[Any, Any, str | None]:
    """Return what a reference names and how names are looked up there, or what is wrong."""
    library = _referencing()
    try:
        found = resolver.lookup(reference)
    except library.exceptions.Unresolvable:
        inside = reference.startswith("#")
        what = "leads nowhere" if inside else "lies outside the schema, and nothing is fetched"
        return None, None, f"{reference!r} {what}"
    except Exception as error:  # a malformed URI or pointer
        return None, None, f"{reference!r} cannot be followed: {error}"
    return found.contents, found.resolver, None


def _finite(root: Schema, defs: Mapping[str, Schema]) -> bool:
    """Tell whether some finite value may satisfy a rewritten schema."""
    known: set[str] = set()
    changed = True
    while changed:
        changed = False
        for name, schema in defs.items():
            if name not in known and _ends(schema, known):
                known.add(name)
                changed = True
    return _ends(root, known)


def _ends(schema: Schema, known: set[str]) -> bool:
    if isinstance(schema, bool):
        return True  # a schema that nothing satisfies is another matter
    if "enum" in schema or "const" in schema:
        return True
    if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in known:
        return False
    if not all(_ends(sub, known) for sub in schema.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(_ends(sub, known) for sub in schema[keyword]):
            return False
    kinds = schema.get("type", _TYPES)
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    return any(_type_ends(kind, schema, known) for kind in kinds)


def _type_ends(kind: str, schema: dict[str, Any], known: set[str]) -> bool:
    if kind == "object":
        named = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        if "patternProperties" in schema:
            rest = True
        return all(_ends(named.get(name, rest), known) for name in schema.get("required", ()))
    if kind == "array":
        least = schema.get("minItems", 0)
        first = schema.get("prefixItems", [])[:least]
        more = least > len(first)
        return all(_ends(sub, known) for sub in first) and (
            not more or _ends(schema.get("items", True), known)
        )
    return True
