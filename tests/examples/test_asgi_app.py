"""The example server, called without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from examples.asgi_app import App

from deepinfer.chat import companion

pytestmark = pytest.mark.skipif(
    not companion.is_installed(), reason="needs deepseek-recipe: pip install 'deepinfer[chat]'"
)


async def call(app: App, path: str, body: Any, method: str = "POST") -> tuple[int, bytes]:
    """Send a request in two pieces; return status and body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    half = len(data) // 2
    parts = iter([(data[:half], True), (data[half:], False)])
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        piece, more = next(parts)
        return {"type": "http.request", "body": piece, "more_body": more}

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "method": method, "path": path}, receive, send)
    assert sent[0]["type"] == "http.response.start" and not sent[-1].get("more_body")
    return sent[0]["status"], b"".join(m["body"] for m in sent[1:])


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    found = App("demo")
    yield found
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    sent: list[str] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    asyncio.run(found({"type": "lifespan"}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "thinking": {"type": "disabled"},
    "temperature": 0,
    "max_tokens": 6,
}


def test_whole_and_streamed_answers_together(app: App) -> None:
    async def both() -> Any:
        return await asyncio.gather(
            call(app, "/v1/chat/completions", BODY),
            call(app, "/v1/chat/completions", BODY | {"stream": True}),
            call(app, "/v1/completions", {"prompt": "Once upon", "max_tokens": 3}),
        )

    (status, whole), (status_streamed, streamed), (status_plain, plain) = asyncio.run(both())
    assert (status, status_streamed, status_plain) == (200, 200, 200)
    said = json.loads(whole)["choices"][0]["message"]["content"]
    lines = streamed.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines[:-2]]
    assert said and "".join(d.get("content") or "" for d in deltas) == said
    assert json.loads(plain)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "body", "method", "status"),
    [
        ("/v1/chat/completions", b"{", "POST", 400),
        ("/v1/chat/completions", BODY | {"messages": []}, "POST", 400),
        ("/v1/chat/completions", BODY | {"max_tokens": 5000, "stream": True}, "POST", 400),
        ("/v1/embeddings", {}, "POST", 404),
        ("/v1/chat/completions", {}, "GET", 404),
    ],
)
def test_refusals(app: App, path: str, body: Any, method: str, status: int) -> None:
    found, answer = asyncio.run(call(app, path, body, method))
    assert found == status and json.loads(answer)["error"]["message"]
