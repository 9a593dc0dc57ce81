"""One load of a model in a process of its own; prints its cost as JSON.

`python -m deepinfer.bench.load MODEL [KEY=VALUE]...`
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from deepinfer.bench.machine import peak_memory_bytes

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Load a model on the CPU, generate one token, and print `import_s`, `load_s`, `peak_bytes`."""
    start = time.perf_counter()
    from deepinfer.config.engine import parse_set
    from deepinfer.engine.request import SamplingParams
    from deepinfer.llm import LLM

    import_s = time.perf_counter() - start
    model, *sets = argv
    start = time.perf_counter()
    with LLM(model, device="cpu", config=dict(parse_set(text) for text in sets)) as llm:
        load_s = time.perf_counter() - start
        llm.generate([[0]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    times = {"import_s": import_s, "load_s": load_s, "peak_bytes": peak_memory_bytes()}
    print(json.dumps(times))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
