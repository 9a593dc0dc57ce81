"""EXAMPLE, not part of the package: a dataset of 1,000 rows through two engines on Ray.

    python examples/ray_dataset.py

Rows carry an id, because they come back in any order; in the end each has exactly one answer. On
GPUs give `gpus=1`, and several of them to an engine with `config={"parallel.expert": 8}`.
"""

from __future__ import annotations

import sys
from collections import Counter

import ray

from deepinfer.replicas.ray import answer_dataset


def main(rows: int = 1000, model: str = "demo") -> int:
    """Answer the rows and count the answers of each."""
    ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=False)
    texts = [{"id": i, "prompt": f"The number {i} is", "seed": i} for i in range(rows)]
    answers = answer_dataset(
        ray.data.from_items(texts, override_num_blocks=8),
        model,
        replicas=2,
        device="cpu",
        config={"parallel.cpu_threads": 1},
        params={"max_tokens": 8, "temperature": 0.5},
        batch_size=64,
        cpus=0.5,
    )
    counts: Counter[int] = Counter()
    failed = 0
    for row in answers.iter_rows():
        counts[row["id"]] += 1
        failed += bool(row["error"])
    once = sum(count == 1 for count in counts.values())
    print(f"{rows} rows, {once} answered exactly once, {failed} failed")
    return int(once != rows or failed > 0)


if __name__ == "__main__":
    sys.exit(main())
