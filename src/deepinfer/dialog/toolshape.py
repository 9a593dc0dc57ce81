"""The shape of tool calls: a grammar in which calls of strict tools satisfy their own schemas.

In the model's format a string stands raw between tags and every other value is JSON, so no JSON
Schema can say what a call looks like: the parameters' schemas become rules of one grammar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from deepinfer.chat.messages import Tool
from deepinfer.chat.render import CALLS_END, DSML
from deepinfer.errors import RequestError
from deepinfer.grammar.jsonrules import json_rules
from deepinfer.grammar.nodes import (
    EMPTY,
    Chars,
    Node,
    Ref,
    Repeat,
    alt,
    chars,
    complement,
    gbnf,
    literal,
    merge,
    seq,
)
from deepinfer.grammar.schema import rewrite
from deepinfer.grammar.spec import Structured
from deepinfer.grammar.verdict import make_test

__all__ = ["tool_shape"]

_MAX_WHITESPACE: Final = 1
_PARAMETER_END: Final = f"</{DSML} parameter>"
_BREAK: Final = literal("\n")


def tool_shape(tools: Sequence[Tool], *, is_inside: bool, mark_id: int | None) -> Structured | None:
    """Return the shape that holds calls to the schemas of strict tools, None when none is strict.

    is_inside  the answer begins inside the block of calls, as a required call does
    mark_id    the id of the markup token: output is free until the model writes it
    Raises RequestError for a schema that cannot be enforced.
    """
    if not any(tool.strict for tool in tools) or (not is_inside and mark_id is None):
        return None
    rules: dict[str, Node] = {}
    problems: list[str] = []
    invokes = [_invoke(place, tool, rules, problems) for place, tool in enumerate(tools)]
    if problems:
        raise RequestError("strict tools cannot be enforced", problems)
    calls = seq(Repeat(alt(*invokes), 1, None), literal(CALLS_END))
    root = calls if is_inside else seq(literal(" calls>\n"), calls)
    text = gbnf({"root": root, **rules}, "root")
    return Structured(ebnf=text, trigger=() if is_inside or mark_id is None else (mark_id,))


def _invoke(place: int, tool: Tool, rules: dict[str, Node], problems: list[str]) -> Node:
    """Return one call of a tool."""
    schema = tool.parameters if isinstance(tool.parameters, Mapping) else {}
    if tool.strict:
        inside = _parameters(f"t{place}", tool.name, schema, rules, problems)
    else:
        rules.setdefault("json", _any_json(rules))
        name = Repeat(Chars(complement(merge([(0x0A, 0x0A), (0x22, 0x22)]))), 1, None)
        either = alt(_typed("true", _raw_text()), _typed("false", Ref("json")))
        one = seq(literal(f'<{DSML} parameter name="'), name, literal('"'), either)
        inside = alt(EMPTY, seq(one, Repeat(seq(_BREAK, one), 0, None)))
    head = literal(f'<{DSML} invoke name="{tool.name}">\n')
    return seq(head, inside, literal(f"\n</{DSML} invoke>\n"))


def _parameters(
    prefix: str,
    tool: str,
    schema: Mapping[str, Any],
    rules: dict[str, Node],
    problems: list[str],
) -> Node:
    """Return the parameters of a call in the order of the schema, those not required optional."""
    properties, needed = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(needed, list | tuple):
        problems.append(f"tool {tool!r}: `properties` must be an object, `required` a list")
        return EMPTY
    required = {str(name) for name in needed}
    missing = sorted(required - properties.keys())
    problems += [f"tool {tool!r}: {name!r} is required, but not described" for name in missing]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    entries = []
    for place, (name, inner) in enumerate(properties.items()):
        what = f"tool {tool!r}, {name!r}"
        value = _value(f"{prefix}p{place}", what, inner, shared, rules, problems)
        entries.append((seq(literal(f'<{DSML} parameter name="{name}"'), value), name in required))
    # What may follow once something is written, and what may come first, from the back.
    later: Node = EMPTY
    first: Node = EMPTY
    for entry, is_required in reversed(entries):
        begun = seq(entry, later)
        first = begun if is_required else alt(begun, first)
        following = seq(_BREAK, begun)
        later = following if is_required else alt(following, later)
        name = f"{prefix}r{len(rules)}"
        rules[name] = later
        later = Ref(name)
    return first


def _value(
    prefix: str,
    what: str,
    schema: Any,
    shared: Mapping[str, Any],
    rules: dict[str, Node],
    problems: list[str],
) -> Node:
    """Return the flag and the value of a parameter: strings raw, all else as JSON."""
    texts, rest = _split(schema)
    ways: list[Node] = []
    if texts is not None:
        ways.append(_typed("true", texts))
    if rest is not None:
        found = _json(prefix, what, rest, shared, rules, problems)
        if found is not None:
            ways.append(_typed("false", found))
    return alt(*ways)


def _split(schema: Any) -> tuple[Node | None, Any]:
    """Return which raw texts satisfy a schema, and the schema of other values; None is none."""
    if schema is True or schema == {}:
        return _raw_text(), {"type": ["null", "boolean", "object", "array", "number"]}
    if not isinstance(schema, Mapping):
        return None, schema
    kinds = schema.get("type")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        texts = [v for v in values if isinstance(v, str) and kinds in (None, "string")]
        others = [v for v in values if not isinstance(v, str)]
        raw = alt(*map(literal, texts)) if texts else None
        return raw, {**schema, "enum": others} if others else None
    listed = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(listed, list) or "string" not in listed:
        return None, schema
    others = [kind for kind in listed if kind != "string"]
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    raw = _raw_text() if not low and high is None else Repeat(_ONE_SAFE, low, high)
    return raw, {**schema, "type": others} if others else None


def _json(
    prefix: str,
    what: str,
    schema: Any,
    shared: Mapping[str, Any],
    rules: dict[str, Node],
    problems: list[str],
) -> Node | None:
    """Add the rules of a schema under a prefix and return their start."""
    whole = {**schema, **shared} if isinstance(schema, Mapping) else schema
    found = rewrite(json.dumps(whole))
    bad = found.report.problems(False)
    if bad:
        problems += [f"{what}: {problem}" for problem in bad]
        return None
    inner, _ = json_rules(found.schema, _MAX_WHITESPACE, make_test(found.schema))
    for name, node in inner.items():
        rules[f"{prefix}-{name}"] = _renamed(node, prefix)
    return Ref(f"{prefix}-root")


def _renamed(node: Node, prefix: str) -> Node:
    """Return a node whose references carry a prefix."""
    if isinstance(node, Ref):
        return Ref(f"{prefix}-{node.name}")
    if isinstance(node, Repeat):
        return Repeat(_renamed(node.item, prefix), node.low, node.high)
    if isinstance(node, Chars):
        return node
    return type(node)(tuple(_renamed(item, prefix) for item in node.items))


def _any_json(rules: dict[str, Node]) -> Node:
    """Return any JSON."""
    found = _json("any", "any", True, {}, rules, [])
    assert found is not None
    return found


def _typed(flag: str, value: Node) -> Node:
    return seq(literal(f' string="{flag}">'), value, literal(_PARAMETER_END))


def _raw_text() -> Node:
    """Return any text that does not hold the beginning of the closing tag, `</｜`."""
    open_, slash, mark = literal("<"), literal("/"), DSML[0]
    some = Repeat(open_, 1, None)
    opened = Repeat(seq(some, slash), 0, None)
    unit = alt(
        Chars(complement(merge([(ord("<"), ord("<"))]))),
        seq(opened, some, Chars(complement(chars("</").ranges))),
        seq(Repeat(seq(some, slash), 1, None), Chars(complement(chars("<" + mark).ranges))),
    )
    return seq(Repeat(unit, 0, None), opened, Repeat(open_, 0, None))


_ONE_SAFE: Final = Chars(complement(chars("<").ranges))
