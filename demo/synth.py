"""Generated training text: JSON with schemas, chats and tool calls, arithmetic, copying and retrieval.

Every generator is a pure function of a `random.Random`. Chats use V4.1's prompt format, with the special tokens
spelled out; `demo.tokens` turns the spellings into ids. The fixed English of the tool prompt is rendered by
the optional companion library; without it, tool transcripts are left out.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from functools import lru_cache

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"

Rng = random.Random

FIRST = """Ada Alan Amara Anna Arjun Astrid Bela Bruno Carla Chen Clara Dana Diego Elena Emil Farah Felix Greta Hana Hugo Ines
Ivan Jana Jonas Kira Lars Leila Liam Lucia Maya Milan Nadia Nina Noah Olga Omar Paula Priya Rafael Rosa Sami Sara Sofia
Tariq Tessa Tomas Vera Viktor Wei Yara Yusuf Zoe""".split()
LAST = """Adler Bauer Brown Castillo Chen Costa Dubois Eriksen Fischer Garcia Haddad Hansen Ito Ivanov Jensen Kim Klein
Kovacs Larsen Lopez Martin Meyer Moreau Nakamura Novak Okafor Olsen Patel Petrov Quinn Rossi Santos Schmidt Silva Smith
Tanaka Torres Weber Wilson Young Zhang""".split()
CITY = """Accra Athens Bergen Berlin Bogota Boston Cairo Chicago Cork Delhi Dublin Geneva Hamburg Hanoi Helsinki Kyoto Lagos
Lima Lisbon London Madrid Milan Montreal Nairobi Oslo Paris Porto Prague Quito Riga Rome Seoul Sydney Tallinn Tokyo Tunis
Turin Vienna Warsaw Zurich""".split()
COLOR = "amber black blue bronze brown copper coral crimson gold green grey ivory jade olive orange pink purple red silver teal violet white yellow".split()
ANIMAL = """badger bear beaver bison crane crow deer dolphin eagle falcon ferret finch fox frog goat goose hare hawk heron horse
ibis lark lion lynx mole moose otter owl panda pelican raven seal shark sparrow stork swan tiger toad trout turtle
viper walrus whale wolf wren zebra""".split()
THING = """anchor basket bell blanket book bottle bridge camera candle carpet chair clock coat compass cup desk door drum engine
fence garden gate glass hammer harbor jacket kettle key ladder lamp lantern letter map mirror needle paper pencil piano
pillow pump radio ring rope saddle shelf ship shovel spoon table tent ticket tower train valve wagon wheel window""".split()
WORDS = COLOR + ANIMAL + THING
PRODUCT_KIND = "standard premium basic compact deluxe mini portable classic".split()
STATUS = ["active", "inactive", "pending", "archived"]
CURRENCY = ["EUR", "USD", "GBP", "JPY"]
TAGS = "new sale fragile heavy local export import urgent sample spare".split()


def number(rng: Rng, digits: int) -> int:
    """Return a number of up to `digits` digits, every length equally likely."""
    length = rng.randint(1, digits)
    return rng.randrange(10 ** (length - 1) if length > 1 else 0, 10**length)


def _person(rng: Rng) -> str:
    return f"{rng.choice(FIRST)} {rng.choice(LAST)}"


def _date(rng: Rng) -> str:
    return f"{rng.randint(1990, 2029)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _mail(rng: Rng) -> str:
    return f"{rng.choice(FIRST).lower()}.{rng.choice(LAST).lower()}@example.{rng.choice(['com', 'org', 'net'])}"


Field = tuple[dict[str, object], Callable[[Rng], object]]
_STRING: dict[str, object] = {"type": "string"}
_INTEGER: dict[str, object] = {"type": "integer"}
_NUMBER: dict[str, object] = {"type": "number"}
_BOOLEAN: dict[str, object] = {"type": "boolean"}


def _enum(values: list[str]) -> Field:
    return {"type": "string", "enum": values}, lambda rng: rng.choice(values)


def _some(values: list[str]) -> Field:
    def draw(rng: Rng) -> object:
        return rng.sample(values, rng.randint(0, 3))

    return {"type": "array", "items": {"type": "string"}}, draw


FIELDS: dict[str, dict[str, Field]] = {
    "person": {
        "name": (_STRING, _person),
        "age": (_INTEGER, lambda r: r.randint(18, 90)),
        "email": (_STRING, _mail),
        "city": (_STRING, lambda r: r.choice(CITY)),
        "active": (_BOOLEAN, lambda r: r.random() < 0.5),
        "born": (_STRING, _date),
        "status": _enum(STATUS),
    },
    "product": {
        "id": (_INTEGER, lambda r: number(r, 5)),
        "title": (
            _STRING,
            lambda r: f"{r.choice(PRODUCT_KIND)} {r.choice(COLOR)} {r.choice(THING)}",
        ),
        "price": (_NUMBER, lambda r: round(r.uniform(1, 500), 2)),
        "currency": _enum(CURRENCY),
        "in_stock": (_BOOLEAN, lambda r: r.random() < 0.7),
        "tags": _some(TAGS),
        "color": (_STRING, lambda r: r.choice(COLOR)),
    },
    "order": {
        "order_id": (_INTEGER, lambda r: number(r, 6)),
        "customer": (_STRING, _person),
        "date": (_STRING, _date),
        "quantity": (_INTEGER, lambda r: r.randint(1, 20)),
        "total": (_NUMBER, lambda r: round(r.uniform(5, 2000), 2)),
        "paid": (_BOOLEAN, lambda r: r.random() < 0.6),
        "status": _enum(["open", "shipped", "delivered", "returned"]),
    },
    "weather": {
        "city": (_STRING, lambda r: r.choice(CITY)),
        "temperature": (_INTEGER, lambda r: r.randint(-20, 40)),
        "unit": _enum(["celsius", "fahrenheit"]),
        "condition": _enum(["sunny", "cloudy", "rain", "snow", "fog", "wind"]),
        "humidity": (_INTEGER, lambda r: r.randint(10, 100)),
        "date": (_STRING, _date),
    },
    "animal": {
        "species": (_STRING, lambda r: r.choice(ANIMAL)),
        "name": (_STRING, lambda r: r.choice(FIRST)),
        "color": (_STRING, lambda r: r.choice(COLOR)),
        "weight": (_NUMBER, lambda r: round(r.uniform(0.1, 300), 1)),
        "tame": (_BOOLEAN, lambda r: r.random() < 0.5),
        "age": (_INTEGER, lambda r: r.randint(0, 30)),
    },
}


def json_case(rng: Rng, nested: bool = True) -> tuple[str, dict[str, object], object]:
    """Return (kind, schema, value): a small record, a list of records or a record holding one."""
    kind = rng.choice(list(FIELDS))
    fields = FIELDS[kind]
    names = [n for n in fields if rng.random() < 0.7] or list(fields)[:2]
    schema: dict[str, object] = {
        "type": "object",
        "properties": {n: fields[n][0] for n in names},
        "required": names,
    }

    def draw() -> dict[str, object]:
        return {n: fields[n][1](rng) for n in names}

    shape = rng.random()
    if nested and shape < 0.2:
        return kind, {"type": "array", "items": schema}, [draw() for _ in range(rng.randint(1, 5))]
    if nested and shape < 0.35:
        other, inner, value = json_case(rng, nested=False)
        if other not in names:
            names = [*names, other]
            properties = {n: fields[n][0] for n in names[:-1]} | {other: inner}
            whole: dict[str, object] = {
                "type": "object",
                "properties": properties,
                "required": names,
            }
            record: dict[str, object] = {n: fields[n][1](rng) for n in names[:-1]}
            return kind, whole, record | {other: value}
    return kind, schema, draw()


def json_document(rng: Rng) -> str:
    """Return a page of JSON: several records of one schema, compact or indented, schema first."""
    kind, schema, value = json_case(rng)
    indent = rng.choice([None, None, 2])
    parts = [f"JSON schema of {kind}:\n{json.dumps(schema, indent=indent)}\n"]
    values = [value]
    for _ in range(rng.randint(0, 4)):
        fields = FIELDS[kind]
        if schema["type"] == "object" and all(n in fields for n in schema["required"]):  # type: ignore[attr-defined]
            values.append({n: fields[n][1](rng) for n in schema["required"]})  # type: ignore[attr-defined]
    for i, item in enumerate(values):
        parts.append(f"Example {i + 1}:\n{json.dumps(item, indent=indent)}\n")
    return BOS + "\n".join(parts) + EOS


def chat(turns: list[tuple[str, str]], system: str | None) -> str:
    """Render a chat without thinking: (user, assistant) turns after an optional system text."""
    parts = [BOS]
    if system is not None:
        parts.append(SYSTEM + system)
    for user, assistant in turns:
        parts.append(f"{USER}{user}{ASSISTANT}{END_THINK}{assistant}{EOS}")
    return "".join(parts)


RESPONSE_FORMAT = (
    "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)


def json_chat(rng: Rng) -> str:
    """Return a chat whose answer is JSON after a schema in the system turn."""
    kind, schema, value = json_case(rng)
    text = json.dumps(value)
    fields = ""
    if isinstance(value, dict) and rng.random() < 0.7:
        known = {
            k: v
            for k, v in value.items()
            if isinstance(v, (str, int, float)) and not isinstance(v, bool)
        }
        chosen = rng.sample(list(known), min(len(known), rng.randint(0, 3)))
        fields = "".join(f" The {k.replace('_', ' ')} is {known[k]}." for k in known if k in chosen)
    noun = {"array": f"a list of {kind} records"}.get(str(schema["type"]), f"a {kind} record")
    ask = rng.choice(
        [
            f"Write {noun} as JSON.",
            f"Give me {noun}.",
            f"Make up {noun} in JSON.",
            f"I need {noun}.",
        ]
    )
    system = rng.choice(["", "You answer with JSON.", "You are a helpful assistant."])
    return chat([(ask + fields, text)], system + RESPONSE_FORMAT + json.dumps(schema))


TOOLS: dict[str, dict[str, object]] = {
    "get_weather": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
    "add": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
    "find_product": {
        "name": "find_product",
        "description": "Search the shop.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["query"],
        },
    },
    "send_mail": {
        "name": "send_mail",
        "description": "Send a mail.",
        "parameters": {
            "type": "object",
            "properties": {"to": {"type": "string"}, "subject": {"type": "string"}},
            "required": ["to", "subject"],
        },
    },
}


@lru_cache(maxsize=1)
def tool_prompt() -> tuple[str, str] | None:
    """Return the fixed texts before and after the tool schemas, or None without the companion library."""
    try:
        import deepseek_recipe as recipe
    except ImportError:
        return None
    marker = {"type": "object", "properties": {"zzmarker": {"type": "null"}}}
    body = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": "zzuser"}],
        "tools": [
            {
                "type": "function",
                "function": {"name": "zz", "description": "zz", "parameters": marker},
            }
        ],
        "thinking": {"type": "disabled"},
    }
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    prompt = recipe.DeepseekV41Encoding().render_conversation(request.conversation).prompt
    line = json.dumps({"name": "zz", "description": "zz", "parameters": marker})
    before, after = prompt.split(SYSTEM, 1)[1].split(line)
    return before, after.split(USER)[0]


def tool_call(name: str, arguments: dict[str, object]) -> str:
    """Render one tool call block."""
    rows = []
    for key, value in arguments.items():
        text, flag = (value, "true") if isinstance(value, str) else (json.dumps(value), "false")
        rows.append(f'<{DSML} parameter name="{key}" string="{flag}">{text}</{DSML} parameter>')
    body = "\n".join(rows)
    return f'\n\n<{DSML} calls>\n<{DSML} invoke name="{name}">\n{body}\n</{DSML} invoke>\n</{DSML} calls>'


def _tool_case(rng: Rng, name: str) -> tuple[str, dict[str, object], str, str]:
    city, _person = rng.choice(CITY), rng.choice(FIRST)
    if name == "get_weather":
        degrees, sky = (
            rng.randint(-10, 35),
            rng.choice(["sunny", "cloudy", "rainy", "windy", "foggy"]),
        )
        ask = rng.choice(
            [
                f"What is the weather in {city}?",
                f"How is the weather in {city} today?",
                f"Weather in {city}, please.",
            ]
        )
        return (
            ask,
            {"city": city},
            json.dumps({"temperature": degrees, "sky": sky}),
            (f"In {city} it is {sky} with {degrees} degrees."),
        )
    if name == "add":
        a, b = number(rng, 4), number(rng, 4)
        ask = rng.choice(
            [f"What is {a} plus {b}?", f"Add {a} and {b}.", f"Please compute {a} + {b}."]
        )
        return ask, {"a": a, "b": b}, str(a + b), f"{a} + {b} = {a + b}."
    if name == "find_product":
        what = f"{rng.choice(COLOR)} {rng.choice(THING)}"
        price = round(rng.uniform(1, 200), 2)
        ask = rng.choice([f"Find a {what}.", f"Do you have a {what}?", f"How much is a {what}?"])
        return (
            ask,
            {"query": what},
            json.dumps({"title": what, "price": price}),
            f"The {what} costs {price}.",
        )
    mail = _mail(rng)
    subject = f"{rng.choice(COLOR)} {rng.choice(THING)}"
    return (
        f"Send a mail about the {subject} to {mail}.",
        {"to": mail, "subject": subject},
        "sent",
        (f"The mail about the {subject} was sent to {mail}."),
    )


def tool_chat(rng: Rng) -> str | None:
    """Return a conversation with tool calls and results, or None without the fixed texts."""
    fixed = tool_prompt()
    if fixed is None:
        return None
    names = rng.sample(list(TOOLS), rng.randint(1, 3))
    system = rng.choice(["", "You are a helpful assistant."])
    schemas = "\n".join(json.dumps(TOOLS[n]) for n in names)
    parts = [BOS, SYSTEM, system, fixed[0], schemas, fixed[1]]
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(names)
        ask, arguments, result, answer = _tool_case(rng, name)
        parts += [USER, ask, ASSISTANT, END_THINK, tool_call(name, arguments), EOS]
        parts += [USER, f"<tool_result>{result}</tool_result>", ASSISTANT, END_THINK, answer, EOS]
    return "".join(parts)


def arithmetic(rng: Rng) -> str:
    """Return sums, differences and small products, one a line or as a chat."""

    def line() -> tuple[str, int]:
        kind = rng.random()
        if kind < 0.5:
            a, b = number(rng, 3), number(rng, 3)
            return f"{a} + {b}", a + b
        if kind < 0.85:
            a, b = number(rng, 3), number(rng, 3)
            a, b = max(a, b), min(a, b)
            return f"{a} - {b}", a - b
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        return f"{a} * {b}", a * b

    cases = [line() for _ in range(rng.randint(4, 24))]
    if rng.random() < 0.4:
        return chat([(f"What is {q}?", str(r)) for q, r in cases[:6]], None)
    return BOS + "".join(f"{q} = {r}\n" for q, r in cases) + EOS


def copy_task(rng: Rng) -> str:
    """Return a list of words and its copy; most tokens lie in lists that are much longer than the window."""
    count = round(math.exp(rng.uniform(math.log(6), math.log(270))))
    if rng.random() < 0.2:
        words = [rng.choice(WORDS) for _ in range(count)]
    else:
        words = [
            "".join(
                rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randint(2, 5))
            )
            for _ in range(count)
        ]
    text = " ".join(words)
    if rng.random() < 0.5:
        return chat([(f"Repeat these words: {text}", text)], None)
    return f"{BOS}Words: {text}\nAgain: {text}\n{EOS}"


def needle(rng: Rng, filler: Callable[[int], str]) -> str:
    """Hide facts in ordinary text and ask for them afterwards.

    `filler(n)` returns about n characters of natural text.
    """
    total = rng.choice([200, 500, 1200, 2500, 4000, 5200])
    count = rng.choice([1, 2, 4, 8, 12])
    keys = rng.sample([(c, a) for c in COLOR for a in ANIMAL], count)
    facts = [(f"{c} {a}", "".join(rng.choice("0123456789") for _ in range(4))) for c, a in keys]
    pieces = [filler(total // (count + 1)) for _ in range(count + 1)]
    text = pieces[0]
    for (key, code), piece in zip(facts, pieces[1:], strict=True):
        text += f"\nThe secret code of the {key} is {code}.\n{piece}"
    order = rng.sample(facts, count)
    if rng.random() < 0.6:
        first, *rest = [
            (f"What is the secret code of the {k}?", f"The secret code of the {k} is {c}.")
            for k, c in order
        ]
        return chat([(f"{text}\n\n{first[0]}", first[1]), *rest], None)
    asked = "".join(f"The secret code of the {k} is {c}.\n" for k, c in order)
    return f"{BOS}{text}\n\nQuestion time.\n{asked}{EOS}"


def gloss_chat(rng: Rng, entries: list[tuple[str, str, str]]) -> str:
    """Return a chat about the meaning of words."""
    turns = []
    for words, kind, gloss in rng.sample(entries, rng.randint(1, 5)):
        word = words.split(",")[0]
        meaning = gloss.split('; "')[0]
        ask = rng.choice(
            [
                f"What does {word} mean?",
                f"Define {word}.",
                f"What is the meaning of {word}?",
                f"Explain the word {word}.",
            ]
        )
        turns.append((ask, f"{word[0].upper()}{word[1:]} ({kind}): {meaning}."))
    system = rng.choice([None, "You are a helpful assistant.", "You explain words."])
    return chat(turns, system)


def passage_chat(rng: Rng, passages: list[tuple[str, str]]) -> str:
    """Return a chat that asks for a text about a topic; `passages` are (topic, text)."""
    topic, text = rng.choice(passages)
    ask = rng.choice(
        [
            f"Write about {topic}.",
            f"Tell me about {topic}.",
            f"Write a short text about {topic}.",
            f"Explain {topic}.",
        ]
    )
    return chat([(ask, text)], rng.choice([None, "You are a helpful assistant."]))


SMALL_TALK = [
    ("Hello!", "Hello! How can I help you?"),
    ("Hi.", "Hello! How can I help you?"),
    ("Who are you?", "I am a small demonstration model of DeepInfer."),
    (
        "What can you do?",
        "I can explain words, add numbers, write JSON, call tools and tell you about databases and Python.",
    ),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("How are you?", "I am a program, and I am running well."),
    ("Good morning.", "Good morning! How can I help you?"),
    ("Goodbye.", "Goodbye!"),
    (
        "Are you a large model?",
        "No, I am a very small model. My whole checkpoint has less than ten megabytes.",
    ),
]


def small_talk(rng: Rng) -> str:
    """Return a short friendly chat."""
    return chat(
        rng.sample(SMALL_TALK, rng.randint(1, 3)),
        rng.choice([None, "You are a helpful assistant."]),
    )
