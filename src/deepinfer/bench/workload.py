"""Seeded mixes of requests: the same arguments give the same work (pure)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Job", "log_normal_mix", "longest_first"]


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a mix: a prompt, and how many tokens it generates."""

    prompt: tuple[int, ...]
    output: int


def log_normal_mix(
    count: int,
    vocab_size: int,
    *,
    seed: int,
    prompt_median: float = 32.0,
    output_median: float = 32.0,
    sigma: float = 0.8,
    longest: int = 256,
) -> list[Job]:
    """Return jobs whose lengths are log-normal: most are short, a few are long.

    sigma    spread of the logarithm of both lengths
    longest  most tokens of a prompt and of an output
    """
    rng = random.Random(seed)

    def length(median: float) -> int:
        return min(longest, max(1, round(rng.lognormvariate(math.log(median), sigma))))

    jobs = []
    for _ in range(count):
        size, output = length(prompt_median), length(output_median)
        jobs.append(Job(tuple(rng.randrange(3, vocab_size) for _ in range(size)), output))
    return jobs


def longest_first(jobs: Sequence[Job]) -> list[Job]:
    """Return jobs in the order of a packer that knows every length: the longest outputs start
    first, so that nothing long is left alone at the end.
    """
    return sorted(jobs, key=lambda job: (-job.output, -len(job.prompt)))
