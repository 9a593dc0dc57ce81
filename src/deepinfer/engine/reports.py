"""Reports: what requests have gained and how they ended, kept until somebody asks. Pure."""

from __future__ import annotations

from deepinfer.engine.request import Chunk, Completion
from deepinfer.engine.sequence import Sequence

__all__ = ["Reports"]


class Reports:
    """Turns sequences into completions, and the tokens of streamed ones into chunks."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._completions: list[Completion] = []

    def end(self, sequence: Sequence) -> Completion:
        """Return the completion of a finished sequence; a streamed one gets its last chunk."""
        completion = sequence.completion()
        if sequence.request.streams:
            self.progress(sequence, completion)
        return completion

    def keep(self, completion: Completion) -> None:
        """Keep the completion of a request that ended outside `apply`."""
        self._completions.append(completion)

    def progress(self, sequence: Sequence, completion: Completion | None = None) -> None:
        """Note what a streamed sequence has gained since it was last noted."""
        start = sequence.num_reported
        new_ids = tuple(sequence.token_ids[sequence.num_prompt_tokens + start :])
        sequence.num_reported += len(new_ids)
        logprobs, top = sequence.logprobs, sequence.top_logprobs
        text = sequence.text.take() if sequence.text is not None else ""
        if new_ids or text or completion is not None:
            request = sequence.request
            self._chunks.append(
                Chunk(
                    index=request.index,
                    request_id=request.request_id,
                    token_ids=new_ids,
                    text=text,
                    completion=completion,
                    sample_index=request.sample_index,
                    logprobs=None if logprobs is None else tuple(logprobs[start:]),
                    top_logprobs=None if top is None else tuple(top[start:]),
                )
            )

    def take_chunks(self) -> list[Chunk]:
        """Return what streamed requests gained since the last call."""
        chunks, self._chunks = self._chunks, []
        return chunks

    def take_completions(self) -> list[Completion]:
        """Return the completions that were kept since the last call."""
        completions, self._completions = self._completions, []
        return completions
