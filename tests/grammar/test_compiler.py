"""The service: one compilation for many, bounded memory, deadlines, errors of one request."""

from __future__ import annotations

import threading
import time

import pytest
from tests.grammar.helpers import END, vocabulary

from deepinfer import Structured
from deepinfer.config.engine import GrammarConfig
from deepinfer.errors import UnsupportedError
from deepinfer.grammar import compiler, llguidance, xgrammar
from deepinfer.grammar.backend import BackendError, Compiled, Program, Vocabulary
from deepinfer.grammar.compiler import GrammarService
from deepinfer.grammar.matcher import Matcher
from deepinfer.grammar.schema import Loosened


class Slow:
    """A library that waits to be told, counts, and makes grammars of a size."""

    limits = Loosened()
    wants_rules = False

    def __init__(self, num_bytes: int = 100) -> None:
        self.go = threading.Event()
        self.go.set()
        self.compiled: list[Program] = []
        self.num_bytes = num_bytes

    def loosen(self, error: BackendError, loosened: Loosened) -> Loosened | None:
        return None

    def compile(self, program: Program) -> Compiled:
        self.go.wait(10)
        self.compiled.append(program)
        if len(self.compiled) == 13:
            raise RuntimeError("something of its own")
        return self  # type: ignore[return-value]

    def start(self) -> None:
        return None


def make(slow: Slow, **settings: object) -> GrammarService:
    service = GrammarService(GrammarConfig(**settings), vocabulary)  # type: ignore[arg-type]
    service._vocabulary, service._backend = vocabulary(), slow  # type: ignore[assignment]
    return service


def wait(service: GrammarService, shape: Structured) -> Matcher | str:
    gate = service.gate(shape, (END,))
    until = time.monotonic() + 10
    while (found := gate.poll()) is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    return found


def test_equal_shapes_are_compiled_once() -> None:
    slow = Slow()
    slow.go.clear()
    service = make(slow, threads=2)
    gates = [service.gate(Structured(regex="a", trigger=[i]), (END,)) for i in range(20)]
    assert all(gate.poll() is None for gate in gates)
    slow.go.set()
    assert isinstance(wait(service, Structured(regex="a")), Matcher)
    assert all(isinstance(gate.poll(), Matcher) for gate in gates)
    assert len(slow.compiled) == 1
    service.close()


def test_what_is_kept_is_bounded_in_bytes() -> None:
    slow = Slow(num_bytes=10_000)
    service = make(slow, cache_bytes=25_000, threads=1)
    for letter in "abc":
        wait(service, Structured(regex=letter))
    assert 20_000 < service.num_bytes < 25_000  # the last word is counted as well
    wait(service, Structured(regex="c"))
    wait(service, Structured(regex="b"))
    assert len(slow.compiled) == 3
    wait(service, Structured(regex="a"))  # was dropped, and drops the one used longest ago
    wait(service, Structured(regex="b"))
    assert len(slow.compiled) == 4
    wait(service, Structured(regex="c"))
    assert len(slow.compiled) == 5
    service.close()
    assert service.num_bytes == 0


def test_a_grammar_larger_than_the_cache_is_not_kept_but_serves() -> None:
    service = make(Slow(num_bytes=1000), cache_bytes=250)
    assert isinstance(wait(service, Structured(regex="a")), Matcher)
    assert service.num_bytes == 0
    service.close()


def test_a_compilation_that_takes_too_long_is_given_up() -> None:
    slow = Slow()
    slow.go.clear()
    service = make(slow, compile_timeout_s=0.05, threads=1)
    told = wait(service, Structured(regex="a"))
    assert "not compiled within 0.05 s" in str(told) and "grammar.compile_timeout_s" in str(told)
    slow.go.set()
    service.close()


def test_loading_a_library_does_not_count_as_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: GrammarConfig, words: Vocabulary) -> Slow:
        time.sleep(0.3)
        return Slow()

    monkeypatch.setattr(compiler, "make_backend", load)
    service = GrammarService(GrammarConfig(compile_timeout_s=0.2, threads=2), vocabulary)
    gates = [service.gate(Structured(regex=letter), (END,)) for letter in "ab"]
    until = time.monotonic() + 10
    while any(gate.poll() is None for gate in gates) and time.monotonic() < until:
        time.sleep(0.001)
    assert all(isinstance(gate.poll(), Matcher) for gate in gates)
    service.close()


def test_a_shape_that_overran_is_not_compiled_again_while_it_still_runs() -> None:
    slow = Slow()
    slow.go.clear()
    service = make(slow, compile_timeout_s=0.05, threads=1)
    for _ in range(5):
        assert "not compiled within" in str(wait(service, Structured(regex="a")))
    slow.go.set()
    until = time.monotonic() + 10
    while not service.num_bytes and time.monotonic() < until:
        time.sleep(0.001)
    assert isinstance(wait(service, Structured(regex="a")), Matcher)
    assert len(slow.compiled) == 1
    service.close()


def test_others_do_not_wait_behind_one_that_overruns() -> None:
    slow = Slow()
    slow.go.clear()
    service = make(slow, compile_timeout_s=0.05, threads=1)
    first = service.gate(Structured(regex="a"), (END,))
    second = service.gate(Structured(regex="b"), (END,))
    until = time.monotonic() + 10
    while first.poll() is None and time.monotonic() < until:
        time.sleep(0.001)
    assert "not compiled within" in str(first.poll())
    while second.poll() is None and time.monotonic() < until:
        time.sleep(0.001)  # it runs in a thread of its own, and overruns there
    assert "not compiled within" in str(second.poll())
    slow.go.set()
    assert isinstance(wait(service, Structured(regex="c")), Matcher)
    service.close()


def test_whatever_a_library_throws_is_one_request_s_problem() -> None:
    slow = Slow()
    slow.compiled = [Program()] * 12
    service = make(slow)
    assert "RuntimeError: something of its own" in str(wait(service, Structured(regex="a")))
    assert isinstance(wait(service, Structured(regex="b")), Matcher)
    service.close()


def test_a_source_beyond_the_limit_is_refused() -> None:
    service = make(Slow(), max_source_bytes=100)
    told = str(wait(service, Structured(regex="a" * 101)))
    assert "101 bytes, at most 100" in told and "grammar.max_source_bytes" in told
    service.close()


@pytest.mark.parametrize("module", [llguidance, xgrammar])
def test_a_missing_package_names_its_extra(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    name = module.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, name, None)
    service = GrammarService(GrammarConfig(backend=name), vocabulary)
    extra = "grammar" if name == "llguidance" else name
    assert f"pip install 'deepinfer[{extra}]'" in str(wait(service, Structured(regex="a")))
    with pytest.raises(UnsupportedError):
        service.report(Structured(regex="a"))
    service.close()
