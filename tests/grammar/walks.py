"""Random walks through masks: `python -m tests.grammar.walks --out FILE`.

For a library and a family of shapes, random shapes are made and random legal ids are taken until so
many outputs have ended. Each must have its shape: JSON parses and satisfies its schema, Python's
own engine matches patterns. Recorded is, per library and family, how many outputs ended, how many
grew too long to be finished, and the CPU time.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.grammar.families import FAMILIES
from tests.grammar.helpers import BACKENDS, matcher, service, walk


def run_walks(backend: str, family: str, walks: int, shapes: int) -> tuple[int, int]:
    """Walk until so many outputs have ended; return how many did, and how many grew too long."""
    rng = random.Random(f"{backend} {family}")
    ended = too_long = 0
    for done in range(shapes):
        shape = FAMILIES[family](rng)
        report = service(backend).report(shape)
        for _ in range(4 * walks // shapes):
            if ended * shapes >= walks * (done + 1):
                break
            at = matcher(backend, shape)
            text = walk(at, rng, most=400, keen=rng.choice([0.3, 0.6]))
            if text is None:
                too_long += 1
                continue
            ended += 1
            if shape.kind == "json":
                json.loads(text)
            elif shape.kind == "regex":
                assert re.fullmatch(shape.text, text), (shape.text, text)
            elif shape.kind == "choice":
                assert text in shape.choices
        assert report.is_exact or shape.kind == "json"
    return ended, too_long


def record(backend: str, family: str, walks: int, shapes: int) -> str:
    """Run one library and family; return its line."""
    before = time.process_time()
    ended, too_long = run_walks(backend, family, walks, shapes)
    found = {
        "backend": backend,
        "family": family,
        "shapes": shapes,
        "ended": ended,
        "in_shape": ended,  # a walk that is not stops the run
        "too_long": too_long,
        "cpu_s": round(time.process_time() - before, 1),
    }
    return json.dumps(found)


def main() -> int:
    """Run what is asked for, each library and family in a process; write a JSON line each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--walks", type=int, default=10_000)
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=None, help="processes; as many as processors")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = []
    with ProcessPoolExecutor(args.jobs) as pool:
        pending = [
            pool.submit(record, backend, family, args.walks, args.shapes)
            for backend in args.backend or BACKENDS
            for family in args.family or FAMILIES
        ]
        for one in pending:
            lines.append(one.result())
            print(lines[-1], flush=True)
    if args.out is not None:
        args.out.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    few = [line for line in lines if json.loads(line)["ended"] < args.walks]
    for line in few:
        print(f"too few walks ended: {line}", file=sys.stderr)
    return 1 if few else 0


if __name__ == "__main__":
    sys.exit(main())
