"""Turn: one thread at a time, in order, whatever interrupts the wait."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest

from deepinfer.engine.turn import Turn


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_one_at_a_time_and_again_inside() -> None:
    turn, inside, most = Turn(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(200):
            with turn, turn:
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                inside -= 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    finally:
        sys.setswitchinterval(before)
    assert not any(thread.is_alive() for thread in threads)
    assert (inside, most) == (0, 1)


def test_who_comes_back_at_once_waits_behind_the_others() -> None:
    turn, order = Turn(), []
    ready = threading.Event()

    def other() -> None:
        ready.set()
        with turn:
            order.append("other")

    with turn:
        thread = threading.Thread(target=other)
        thread.start()
        ready.wait()
        until(lambda: len(turn._waiting) == 1)
    with turn:
        order.append("again")
    thread.join()
    assert order == ["other", "again"]


def test_an_interrupt_while_waiting_loses_no_turn() -> None:
    turn = Turn()
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with turn:
            held.set()
            let_go.wait()

    def press() -> None:
        until(lambda: len(turn._waiting) == 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt), turn:
        pytest.fail("entered")
    presser.join()
    let_go.set()
    holder.join()
    with turn:
        pass


def test_a_check_comes_before_the_wait() -> None:
    def check() -> None:
        raise RuntimeError("never")

    with pytest.raises(RuntimeError, match="never"), Turn(check):
        pytest.fail("entered")
