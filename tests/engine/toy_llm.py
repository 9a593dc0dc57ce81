"""The public class on the toy device, with single letters as text."""

from __future__ import annotations

from collections.abc import Sequence

from toy import BLOCK, ToyRunner, expected_tokens

from deepinfer.config.engine import EngineConfig
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.device import pick_device
from deepinfer.device.queue import InlineQueue, ThreadQueue
from deepinfer.engine.executor import InProcessExecutor
from deepinfer.engine.request import Completion, Request, SamplingParams
from deepinfer.engine.scheduler import Limits
from deepinfer.engine.shapes import Shapes
from deepinfer.engine.sizing import Sizes
from deepinfer.llm import LLM

VOCAB = 288
MAX_LEN = 60
PARAMS = SamplingParams(seed=3, max_tokens=6)


class Letters:
    """A tokenizer of single characters; id 255 begins a two-byte character."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) % VOCAB for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    def stream(self) -> LetterStream:
        return LetterStream()


class LetterStream:
    def push(self, token_id: int) -> str:
        return chr(97 + token_id % 26)

    def finish(self) -> str:
        return ""


class ToyLLM(LLM):
    """The public class on a toy runner instead of a model."""

    def __init__(
        self, with_text: bool = True, banned: tuple[int, ...] = (), overlap: bool = True
    ) -> None:
        self._loop = None
        self.config = EngineConfig.from_dotted(
            {
                "scheduling.max_num_seqs": 3,
                "cache.tokens_per_block": BLOCK,
                "sampling.banned_token_ids": banned,
                "scheduling.overlap": overlap,
            }
        )
        self.device = pick_device("cpu")
        self.model_config = load_model_config(resolve_model("golden"))
        self.tokenizer = Letters() if with_text else None  # type: ignore[assignment]
        self.sizes = Sizes(
            num_blocks=40,
            num_slots=4,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=16,
            chunk_tokens=8,
        )
        limits = Limits(
            max_num_seqs=3,
            max_num_batched_tokens=16,
            max_model_len=MAX_LEN,
            chunk_tokens=8,
            eos_token_id=1,
        )
        self._shapes = Shapes(
            self.config.grammar,
            self.tokenizer,
            self.model_config.vocab_size,
            self.model_config.eos_token_id,
        )
        self.planner = None
        self.runner = ToyRunner(limits, 40)
        self._start(InProcessExecutor(self.runner, ThreadQueue() if overlap else InlineQueue()))


def expected(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    request = Request(
        request_id=0, prompt_token_ids=tuple(prompt), params=params, seed=params.seed or 0
    )
    return expected_tokens(request, MAX_LEN)


def finish(llm: ToyLLM) -> list[Completion]:
    """Step until nothing is left."""
    done = []
    while llm.has_work:
        done += llm.step()
    return done
