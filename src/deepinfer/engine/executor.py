"""Executor: whatever runs planned steps. Pure protocol, and the in-process one.

`launch` enqueues; the handle's `result` waits. A loop that overlaps calls `launch` for the next
step before `result` of the last one; executors over processes or hosts implement the same four
calls.
"""

from __future__ import annotations

from typing import Protocol

from deepinfer.engine.plan import StepPlan, StepResult

__all__ = ["Executor", "InProcessExecutor", "StepHandle", "StepRunner"]


class StepHandle(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step and return its outcome; asked once."""
        ...


class Executor(Protocol):
    """Runs steps in the order of their launches."""

    def start(self) -> None:
        """Get ready: weights loaded, caches allocated."""
        ...

    def launch(self, plan: StepPlan, /) -> StepHandle:
        """Begin a step."""
        ...

    def stop(self) -> None:
        """Let everything go. Any number of calls does the same as one."""
        ...


class StepRunner(Protocol):
    """What the in-process executor drives: `engine/runner.py`, or a toy in tests."""

    def launch(self, plan: StepPlan, /) -> StepHandle:
        """Begin a step."""
        ...


class InProcessExecutor:
    """Runs steps on a runner in this process."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner: StepRunner | None = runner

    def start(self) -> None:
        """Do nothing: the runner was built ready."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Begin a step on the runner."""
        assert self._runner is not None, "launch after stop"
        return self._runner.launch(plan)

    def stop(self) -> None:
        """Drop the runner, and with it weights and caches."""
        self._runner = None
