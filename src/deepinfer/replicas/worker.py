"""A rank that another process of ours has started: `python -m deepinfer.replicas.worker`.

The first line of its input says which rank it is; the input stays open as long as its parent lives.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Final

__all__ = ["main"]

_PARENT_GONE: Final = 71


def main() -> int:
    """Serve until rank 0 stops; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        return _PARENT_GONE
    threading.Thread(target=_follow_parent, daemon=True).start()

    from deepinfer.cluster.launch import Started
    from deepinfer.config.engine import EngineConfig
    from deepinfer.errors import DeepInferError
    from deepinfer.llm import LLM

    started = Started(**json.loads(line))
    try:
        llm = LLM(
            started.model,
            started.device,
            EngineConfig.from_dotted(started.config),
            _started=started,
        )
        with llm:
            llm.serve()
    except DeepInferError as error:
        print(f"deepinfer: rank {started.rank}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _follow_parent() -> None:
    """End with the parent, however that ends: the system closes its end of the pipe."""
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(_PARENT_GONE)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of libraries need not be waited for
