"""EXAMPLE, not part of the package: an ASGI application around the protocol conversion.

It shows how little a server needs. It has no authentication, no limits and no queue of its own; do
not put it on a network as it is. With any ASGI server, for instance:

    MODEL=demo uvicorn examples.asgi_app:app
    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hi"}]}'

All work of the engine happens in one thread. Requests take turns there, one step each, and every
step runs all of them as one batch.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deepinfer import LLM
from deepinfer.dialog.protocol import PATHS, BodyRequest, convert
from deepinfer.engine.request import Chunk, Completion
from deepinfer.errors import ProtocolError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
END = object()


class App:
    """Serves the paths that the conversion knows; the model is loaded with the first request."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._llm: LLM | None = None
        self._engine = ThreadPoolExecutor(1, thread_name_prefix="engine")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        if scope["method"] != "POST" or scope["path"] not in PATHS:
            return await reply(send, 404, ProtocolError(f"POST to one of {PATHS}").body)
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        try:
            request, chunks = await self._in_engine(self._begin, scope["path"], body)
            if request.streams:
                await self._stream(request, chunks, send)
            else:
                found = [chunk async for chunk in self._each(chunks)]
                whole: list[Completion | None] = [None] * len(request.prompts)
                for chunk in found:
                    whole[chunk.index] = chunk.completion or whole[chunk.index]
                answer = request.respond([c for c in whole if c is not None])
                await reply(send, 200, json.dumps(answer))
        except ProtocolError as error:
            await reply(send, error.status, error.body)

    def _begin(self, path: str, body: bytes) -> tuple[BodyRequest, Iterator[Chunk]]:
        self._llm = self._llm or LLM(self._model)
        assert self._llm.tokenizer is not None
        request = convert(
            path, body, self._llm.tokenizer, self._llm.max_model_len, default_model=self._model
        )
        return request, self._llm.stream(request.prompts, request.params)

    async def _stream(self, request: BodyRequest, chunks: Iterator[Chunk], send: Send) -> None:
        events = request.stream(chunks)
        try:
            first = await self._in_engine(next, events)  # a failure before it is still a reply
            await begin(send, 200, b"text/event-stream")
            await send({"type": "http.response.body", "body": first.sse(), "more_body": True})
            async for event in self._each(events):
                await send({"type": "http.response.body", "body": event.sse(), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:  # also when the client has gone: what is unfinished is cancelled
            await self._in_engine(events.close)

    async def _each(self, items: Iterator[Any]) -> Any:
        while (item := await self._in_engine(next, items, END)) is not END:
            yield item

    async def _in_engine(self, function: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._engine, lambda: function(*arguments))

    async def _live(self, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        if self._llm is not None:
            await self._in_engine(self._llm.close)
        await send({"type": "lifespan.shutdown.complete"})


async def begin(send: Send, status: int, kind: bytes) -> None:
    """Send the head of a response."""
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def reply(send: Send, status: int, body: str) -> None:
    """Send a whole response."""
    await begin(send, status, b"application/json")
    await send({"type": "http.response.body", "body": body.encode()})


app = App(os.environ.get("MODEL", "demo"))
