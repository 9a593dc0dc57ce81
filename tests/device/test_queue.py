"""Queues of device work: order, outcomes, ends; waits inside a launch."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from deepinfer.device.queue import DeviceQueue, InlineQueue, ThreadQueue, no_wait

QUEUES = [InlineQueue, ThreadQueue]


@pytest.mark.parametrize("kind", QUEUES)
def test_work_runs_in_order_and_returns_its_outcome(kind: type[InlineQueue]) -> None:
    queue: DeviceQueue = kind()
    seen: list[int] = []
    works = [queue.submit(lambda i=i: seen.append(i) or i * i) for i in range(20)]  # type: ignore[misc]
    assert works[7].wait() == 49
    assert works[7].is_done() and seen[:8] == list(range(8))
    queue.close()
    assert seen == list(range(20)) and [work.wait() for work in works[:3]] == [0, 1, 4]


@pytest.mark.parametrize("kind", QUEUES)
def test_an_error_is_raised_to_whoever_waits(kind: type[InlineQueue]) -> None:
    queue: DeviceQueue = kind()
    bad, good = queue.submit(lambda: 1 // 0), queue.submit(lambda: 5)
    with pytest.raises(ZeroDivisionError):
        bad.wait()
    assert good.wait() == 5
    queue.close()
    queue.close()


def test_inline_work_runs_in_the_waiting_thread_and_not_before() -> None:
    queue = InlineQueue()
    work = queue.submit(threading.get_ident)
    assert not work.is_done() and queue.busy_s == 0.0
    assert work.wait() == threading.get_ident()


def test_threaded_work_runs_beside_the_caller() -> None:
    queue = ThreadQueue()
    go = threading.Event()
    work = queue.submit(lambda: (go.wait(), time.sleep(0.02), threading.get_ident())[-1])
    assert not work.is_done()
    go.set()
    assert work.wait() != threading.get_ident()
    queue.close()
    assert queue.busy_s >= 0.02
    with pytest.raises(AssertionError, match="after close"):
        queue.submit(lambda: None)


def test_a_dropped_queue_ends_its_thread() -> None:
    before = threading.active_count()
    queue = ThreadQueue()
    queue.submit(lambda: None).wait()
    assert threading.active_count() == before + 1
    del queue
    gc.collect()
    for _ in range(200):
        if threading.active_count() == before:
            break
        time.sleep(0.01)
    assert threading.active_count() == before


@pytest.mark.parametrize("kind", QUEUES)
def test_waiting_inside_a_launch_raises(kind: type[InlineQueue]) -> None:
    queue: DeviceQueue = kind()
    with no_wait():
        work = queue.submit(lambda: 3)
        with pytest.raises(RuntimeError, match="a launch waited"):
            work.wait()
        with no_wait(), pytest.raises(RuntimeError):
            work.wait()
        with pytest.raises(RuntimeError):
            work.wait()
    assert work.wait() == 3
    queue.close()
