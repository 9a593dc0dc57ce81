"""`LLM.chat`: conversations to prompts and parameters, completions to answers.

What a conversation needs from the engine stands in a `Turn`: its token ids, its parameters, and the
parser that takes the answer apart.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from deepinfer.chat.decode import Answer, AnswerParser, Event, parser_for
from deepinfer.chat.encode import Renderer, encode_prompt, refuse_images, render_conversation
from deepinfer.chat.messages import (
    Conversation,
    Message,
    MessageLike,
    ResponseFormat,
    Tool,
    ToolChoice,
)
from deepinfer.chat.render import DSML, END_THINK, Prompt
from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.dialog.toolshape import tool_shape
from deepinfer.engine.prompts import match_params
from deepinfer.engine.request import Chunk, Completion, FinishReason, SamplingParams
from deepinfer.errors import RequestError, UnsupportedError
from deepinfer.grammar.spec import Structured

__all__ = [
    "ChatCompletion",
    "ChatDelta",
    "ChatOptions",
    "Turn",
    "Turns",
    "answer",
    "check_options",
    "default_max_tokens",
    "finish_reason",
    "make_turn",
    "make_turns",
    "read_completion",
    "stream_answers",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What applies to every conversation of a call. Fields as in Conversation.

    structured  a shape for the answer; with thinking it holds from the end of the thinking on.
                None enforces the response format where that is JSON or an expression, and the
                schemas of strict tools in calls
    renderer    which renderer makes the prompt: `auto`, `own` or `companion`
    """

    thinking: bool = True
    effort: str | int | None = None
    tools: Sequence[Tool | Mapping[str, object]] = ()
    tool_choice: str = "auto"
    response_format: ResponseFormat | None = None
    structured: Structured | Mapping[str, object] | None = None
    renderer: Renderer = "auto"


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """What became of one conversation (of one sample of it, for n > 1).

    message        the answer as a message: append it to go on
    answer         its parts, and what could not be read
    finish_reason  as in `completion`, or `tool_calls` when the answer calls tools
    completion     the engine's result: ids, logprobs, times, error
    """

    answer: Answer
    finish_reason: str
    completion: Completion

    @property
    def message(self) -> Message:
        """The answer as a message."""
        return self.answer.message()

    @property
    def content(self) -> str:
        """The answer's text."""
        return self.answer.content

    @property
    def error(self) -> str | None:
        """One explanation when the conversation could not be answered, else None."""
        return self.completion.error


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What one step added to one answer; the last one carries the whole."""

    index: int
    events: tuple[Event, ...]
    result: ChatCompletion | None = None
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One conversation, ready for the engine."""

    conversation: Conversation
    prompt: Prompt
    prompt_token_ids: list[int]
    params: SamplingParams

    def new_parser(self) -> AnswerParser:
        """Return a parser for one answer."""
        return parser_for(self.conversation, self.prompt)


Turns = Sequence[Turn | ChatCompletion]
"""What each conversation of a call needs, or its result where it cannot be used."""


def answer(
    turns: Turns,
    generate: Callable[[list[list[int]], list[SamplingParams]], Iterable[Completion]],
) -> list[ChatCompletion]:
    """Answer every conversation, in order; the samples of one stand together.

    generate  prompts as ids and a SamplingParams for each -> their completions
    """
    answered = [[turn] if isinstance(turn, ChatCompletion) else [] for turn in turns]
    ready = [(place, turn) for place, turn in enumerate(turns) if isinstance(turn, Turn)]
    for completion in generate(*_inputs(ready)):
        place, turn = ready[completion.index]
        parser = turn.new_parser()
        answered[place].append(read_completion(replace(completion, index=place), parser))
    return [result for group in answered for result in group]


def stream_answers(
    turns: Turns,
    stream: Callable[[list[list[int]], list[SamplingParams]], Iterator[Chunk]],
) -> Generator[ChatDelta]:
    """Answer every conversation step by step; the last delta of an answer carries the whole.

    stream  prompts as ids and a SamplingParams for each -> their chunks; closed when left early
    """
    for place, turn in enumerate(turns):
        if isinstance(turn, ChatCompletion):
            yield ChatDelta(place, (), turn)
    ready = [(place, turn) for place, turn in enumerate(turns) if isinstance(turn, Turn)]
    if not ready:
        return
    parsers: dict[int, AnswerParser] = {}
    chunks = stream(*_inputs(ready))
    try:
        for chunk in chunks:
            place, turn = ready[chunk.index]
            if chunk.request_id not in parsers:
                parsers[chunk.request_id] = turn.new_parser()
            parser = parsers[chunk.request_id]
            events = parser.push(chunk.text)
            result = None
            if chunk.completion is not None:
                events += parser.finish()
                result = _result(parser, replace(chunk.completion, index=place))
            yield ChatDelta(place, tuple(events), result, chunk.sample_index)
    finally:
        if isinstance(chunks, Generator):
            chunks.close()


def make_turns(
    messages: Sequence[MessageLike] | Sequence[Sequence[MessageLike]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    options: ChatOptions,
    tokenizer: Tokenizer | None,
    max_model_len: int,
) -> Turns:
    """Return what each conversation needs; one that cannot be used does not stop the others.

    Raises what is wrong with the call as a whole: options, numbers, a model without conversations.
    """
    conversations = split_conversations(messages)
    given: Sequence[SamplingParams | None] = [None] * len(conversations)
    if sampling_params is not None:
        given = match_params(sampling_params, len(conversations))
    check_options(options)
    turns: list[Turn | ChatCompletion] = []
    for place, (entry, params) in enumerate(zip(conversations, given, strict=True)):
        try:
            turns.append(make_turn(entry, options, tokenizer, params, max_model_len))
        except RequestError as error:
            turns.append(failed(place, str(error)))
    return turns


def _inputs(
    ready: Sequence[tuple[int, Turn]],
) -> tuple[list[list[int]], list[SamplingParams]]:
    return [turn.prompt_token_ids for _, turn in ready], [turn.params for _, turn in ready]


def _result(parser: AnswerParser, completion: Completion) -> ChatCompletion:
    return ChatCompletion(parser.answer(), finish_reason(completion, parser), completion)


def split_conversations(
    messages: Sequence[MessageLike] | Sequence[Sequence[MessageLike]],
) -> list[Sequence[MessageLike]]:
    """Return one list of messages per conversation; a flat list is one. Raises RequestError."""
    if isinstance(messages, Message | Mapping | str) or not isinstance(messages, Iterable):
        raise RequestError(
            "messages must be a list of messages, or a list of such lists, "
            f"not {type(messages).__name__}"
        )
    entries = list(messages)
    nested = [isinstance(e, Sequence) and not isinstance(e, str) for e in entries]
    if entries and all(nested):
        return [entry for entry in entries if isinstance(entry, Sequence)]
    if any(nested):
        raise RequestError("messages mixes messages with lists of messages: give one or the other")
    return [[entry for entry in entries if not isinstance(entry, Sequence)]]


def check_options(options: ChatOptions) -> None:
    """Raise RequestError for options that no conversation can be answered under."""
    Conversation.of(
        [Message.user("")],
        thinking=options.thinking,
        effort=options.effort,
        tools=options.tools,
        tool_choice=options.tool_choice,
        response_format=options.response_format,
    )
    if options.structured is not None:
        Structured.of(options.structured)


def make_turn(
    messages: Sequence[MessageLike],
    options: ChatOptions,
    tokenizer: Tokenizer | None,
    params: SamplingParams | None,
    max_model_len: int,
) -> Turn:
    """Return what the engine needs to answer.

    params  None takes the model's defaults, with room for an answer
    Raises RequestError for a conversation that cannot be used, TokenizerError and UnsupportedError
    for a checkpoint without conversations.
    """
    if tokenizer is None:
        raise UnsupportedError("conversations need the checkpoint's tokenizer.json")
    conversation = Conversation.of(
        messages,
        thinking=options.thinking,
        effort=options.effort,
        tools=options.tools,
        tool_choice=options.tool_choice,
        response_format=options.response_format,
    )
    refuse_images(conversation)
    prompt = render_conversation(conversation, options.renderer)
    ids = encode_prompt(prompt, tokenizer, max_model_len)
    if params is None:
        limit = default_max_tokens(conversation.thinking, conversation.effort)
        params = SamplingParams(max_tokens=max(1, min(limit, max_model_len - len(ids))))
    thinks = parser_for(conversation, prompt).is_thinking
    if thinks and params.stop and not params.stop_after:  # stops end the answer, not the thinking
        params = replace(params, stop_after=END_THINK)
    structured = shape_of(conversation, options.structured)
    calls = tool_shape(
        conversation.shown_tools,
        is_inside=conversation.tool_choice is ToolChoice.REQUIRED,
        mark_id=tokenizer.token_id(DSML),
    )
    if calls is not None:
        if structured is not None:
            raise RequestError(
                "strict tools cannot be combined with a response format or a shape: a text has one"
            )
        params = replace(params, structured=calls)
    elif structured is not None:
        if thinks and structured.trigger == ():
            end = tokenizer.token_id(END_THINK)
            structured = replace(structured, trigger=(end,) if end is not None else END_THINK)
        params = replace(params, structured=structured)
    return Turn(conversation, prompt, ids, params)


def shape_of(
    conversation: Conversation, given: Structured | Mapping[str, object] | None
) -> Structured | None:
    """Return the shape that the answer must have, None for any. Raises RequestError."""
    if given is not None:
        return Structured.of(given)
    form = conversation.response_format
    if form.kind == "json_object":
        return Structured(json={"type": "object"})
    if form.kind == "json_schema":
        schema = form.schema
        return Structured(json=schema if isinstance(schema, bool | Mapping) else str(schema))
    return Structured(regex=form.regex) if form.kind == "regex" else None


def default_max_tokens(thinking: bool, effort: str | int | None) -> int:
    """Return how long an answer may become when nothing is said: 8192 tokens, 65536 with thinking,
    131072 with the most of it.
    """
    if not thinking:
        return 8192
    return 131072 if effort in ("max", 100) else 65536


def finish_reason(completion: Completion, parser: AnswerParser) -> str:
    """Return why an answer ended: that of the completion, or `tool_calls`."""
    if completion.finish_reason is FinishReason.STOP and parser.has_called:
        return "tool_calls"
    return str(completion.finish_reason)


def read_completion(completion: Completion, parser: AnswerParser) -> ChatCompletion:
    """Return the answer in a whole completion; the parser must be unused."""
    parser.push(completion.text or "")
    parser.finish()
    return _result(parser, completion)


def failed(index: int, error: str) -> ChatCompletion:
    """Return the result of a conversation that could not be put to the engine."""
    completion = Completion(
        index=index,
        request_id=-1,
        prompt_token_ids=(),
        text="",
        finish_reason=FinishReason.INVALID_REQUEST,
        error=error,
    )
    return ChatCompletion(Answer(None, ""), str(completion.finish_reason), completion)
