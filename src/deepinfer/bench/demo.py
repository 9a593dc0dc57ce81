"""What `make demo` shows: text, a chat turn, JSON of a schema, tokens per second, accepted drafts.

`python -m deepinfer.bench.demo [PROMPT]`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Final

from deepinfer.bench.evaldata import held_out_documents, pick
from deepinfer.bench.evaluate import cut
from deepinfer.config.load import DEMO_MODEL
from deepinfer.engine.request import SamplingParams
from deepinfer.grammar.spec import Structured
from deepinfer.llm import LLM

__all__ = ["main"]

_PROMPT: Final = "Fellow citizens, "
_SYSTEM: Final = "You are a helpful assistant."
_QUESTION: Final = "What does harbor mean?"
_TEXT: Final = SamplingParams(temperature=0.7, top_p=0.95, seed=0, max_tokens=96)
_ANSWER: Final = SamplingParams(temperature=0, max_tokens=64)
_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "year": {"type": "integer", "minimum": 1700, "maximum": 2030},
        "tags": {"type": "array", "items": {"enum": ["sea", "land", "law"]}, "maxItems": 2},
    },
    "required": ["name", "year", "tags"],
    "additionalProperties": False,
}
_SHAPED: Final = SamplingParams(
    temperature=0.7, seed=3, max_tokens=64, structured=Structured(json=_SCHEMA)
)
_HELD_OUT: Final = 8
_PROMPT_TOKENS: Final = 128
_DRAFTED: Final = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
_DRAFTS: Final = 5


def main(argv: Sequence[str]) -> int:
    """Run the demonstration on a CPU and print it."""
    prompt = argv[0] if argv and argv[0] else _PROMPT
    start = time.perf_counter()
    with LLM(DEMO_MODEL, device="cpu", config={"grammar.max_whitespace": 0}) as llm:
        loaded = time.perf_counter()
        print(f"Loaded in {loaded - start:.1f} s: 8 million parameters, which know little.")
        print(f"\nText (temperature 0.7, seed 0):\n\n{prompt}", end="", flush=True)
        for chunk in llm.stream(prompt, _TEXT):
            print(chunk.text, end="", flush=True)
            done = chunk.completion
        assert done is not None and done.ttft_s is not None, done
        messages = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": _QUESTION},
        ]
        (reply,) = llm.chat(messages, _ANSWER, thinking=False)
        print(f"\n\nChat (greedy):\n\nUser: {_QUESTION}\nAssistant: {reply.content}")
        (shaped,) = llm.generate(["A record of the book:\n"], _SHAPED)
        print(f"\nJSON of a schema, without white space:\n\n{shaped.text or shaped.error}")
    speed = (len(done.token_ids) - 1) / (done.finish_s - done.ttft_s)
    print(f"\nSpeed of the text above: {speed:.1f} tokens/s, one stream, without drafts.")
    with LLM(DEMO_MODEL, device="cpu", config={"speculation.num_drafts": _DRAFTS}) as llm:
        assert llm.tokenizer is not None
        documents = pick(held_out_documents(), _HELD_OUT, lambda d: f"{d.source}/{d.name}")
        rows = [next(cut(document, llm.tokenizer, _PROMPT_TOKENS)) for document in documents]
        results = llm.generate([row.token_ids for row in rows], _DRAFTED)
    tokens = sum(len(result.token_ids) - 1 for result in results)
    steps = sum(result.num_steps - 1 for result in results)
    print(
        f"With {_DRAFTS} drafts a step: {tokens / max(steps, 1):.2f} tokens accepted a step, bonus "
        f"included (greedy, behind {len(rows)} held-out texts)."
    )
    print(f"All of it: {time.perf_counter() - start:.1f} s. `deepinfer eval` measures more.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
