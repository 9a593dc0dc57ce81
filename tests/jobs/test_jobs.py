"""Jobs: every row is answered exactly once, whatever kills the run, and every mistake is told."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.jobs.engine import CONTEXT, ToyEngine, continuation, run

from deepinfer.chat import companion
from deepinfer.errors import DeepInferError, RequestError, UnsupportedError
from deepinfer.jobs import ledger, runner, source
from deepinfer.jobs.output import Output
from deepinfer.jobs.rows import Context, Row, Work, failure, prepare, read_row
from deepinfer.jobs.source import Line, Source

Rows = list[dict[str, Any]]


def write(path: Path, rows: Rows | list[str]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def plain(count: int) -> Rows:
    """Return rows whose answers differ."""
    return [
        {"custom_id": f"r{i}", "prompt": [10 + i % 50, i % 7], "max_tokens": 3}
        for i in range(count)
    ]


def check(rows: Rows, records: Rows) -> None:
    """Every row has one record, and it is the right one."""
    counts = Counter(record["custom_id"] for record in records)
    assert counts == Counter(row["custom_id"] for row in rows)
    by_id = {record["custom_id"]: record for record in records}
    for row in rows:
        expected = continuation(tuple(row["prompt"]), row["max_tokens"])
        assert by_id[row["custom_id"]]["token_ids"] == list(expected)


def test_rows_are_answered_and_skipped_the_next_time(tmp_path: Path) -> None:
    rows, out = plain(50), tmp_path / "out"
    file = write(tmp_path / "in", rows)
    engine = ToyEngine()
    totals = run(file, out, engine)
    check(rows, read(out))
    assert (totals.done, totals.failed, totals.skipped) == (50, 0, 0)
    assert (totals.prompt_tokens, totals.output_tokens) == (100, 150)
    assert totals.acceptance == 0.75 and engine.max_live == 8
    assert totals.summary()["acceptance"] == 0.75
    before = out.read_bytes()
    totals = run(file, out, engine)
    assert (totals.done, totals.skipped) == (0, 50) and out.read_bytes() == before
    assert engine.num_submitted == 50


def test_more_rows_later(tmp_path: Path) -> None:
    rows, out = plain(20), tmp_path / "out"
    run(write(tmp_path / "in", rows[:7]), out)
    totals = run(write(tmp_path / "in", [*reversed(rows)]), out)
    assert (totals.done, totals.skipped) == (13, 7)
    check(rows, read(out))


def test_rows_without_custom_id_are_known_by_their_line(tmp_path: Path) -> None:
    rows = [{"prompt": [5, i]} for i in range(4)]
    file, out = write(tmp_path / "in", ["", *map(json.dumps, rows)]), tmp_path / "out"
    run(file, out)
    assert sorted(record["run"]["line"] for record in read(out)) == [2, 3, 4, 5]
    assert run(file, out).skipped == 4
    write(tmp_path / "in", rows)  # now every row is one line earlier
    with pytest.raises(RequestError, match="line 2 differs from what"):
        run(file, out)


@pytest.mark.parametrize("change", ["row", "settings"])
def test_changed_rows_stop_the_run(tmp_path: Path, change: str) -> None:
    rows, out = plain(10), tmp_path / "out"
    file = write(tmp_path / "in", rows)
    run(file, out)
    before = out.read_bytes()
    if change == "row":
        rows[5]["max_tokens"] = 4
        write(file, rows)
    with pytest.raises(
        RequestError, match=r"line . \(custom_id 'r.'\) differs from what .* given?"
    ):
        run(file, out, settings="t" if change == "settings" else "s")
    assert out.read_bytes() == before


def test_the_form_of_a_line_does_not_matter(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(write(tmp_path / "in", ['{"custom_id":"a","prompt":[5],"max_tokens":2}']), out)
    text = '  {"max_tokens": 2, "prompt": [5], "custom_id": "a"}  '
    assert run(write(tmp_path / "in", [text]), out).skipped == 1


def test_answers_without_rows_are_counted(tmp_path: Path) -> None:
    rows, out = plain(6), tmp_path / "out"
    run(write(tmp_path / "in", rows), out)
    assert run(write(tmp_path / "in", rows[:2]), out).unmatched == 4


def test_duplicates_are_errors_of_their_rows(tmp_path: Path) -> None:
    rows = plain(5)
    file = write(tmp_path / "in", [*rows, rows[2], {"custom_id": "r2", "prompt": "other"}])
    out = tmp_path / "out"
    totals = run(file, out)
    assert (totals.done, totals.failed) == (5, 2)
    errors = [r["error"]["message"] for r in read(out) if r["error"]]
    assert errors == ["custom_id 'r2' is that of line 3: give every row its own"] * 2
    again = run(file, out)
    assert (again.done, again.failed, again.skipped, again.failed_before) == (0, 0, 7, 2)


BAD_LINES = [
    ("{", "the line is no JSON"),
    ("[1]", "must hold a JSON object, not a list"),
    ('"x"', "must hold a JSON object, not a text"),
    ("{}", "the row must hold url and body, prompt, or messages"),
    ('{"custom_id": [1], "prompt": [5]}', "custom_id must be a text"),
    ('{"prompt": ""}', "the prompt is empty"),
    ('{"prompt": 3}', "a prompt must be text or token ids"),
    ('{"prompt": [null]}', "token ids must be integers, not None"),
    ('{"prompt": [99999]}', "token id 99999 is outside the vocabulary"),
    ('{"prompt": "\\ud800"}', "lone surrogates"),
    ('{"prompt": [5], "colour": 1}', "unknown keys: colour; accepted are ignore_eos, "),
    ('{"prompt": [5], "max_token": 1}', "unknown keys: max_token (did you mean max_tokens"),
    ('{"prompt": [5], "messages": []}', "the row holds prompt and messages: give one of them"),
    ('{"prompt": [5], "prompt": [6]}', "the line is no JSON: repeated key prompt"),
    ('{"prompt": [5], "temperature": -1}', "temperature must be"),
    ('{"prompt": [5], "n": 0}', "n must be an integer"),
    ('{"prompt": [5], "logit_bias": {"a": 1}}', "logit_bias must map"),
    ('{"prompt": [5], "structured": {"regex": 3}}', "regex must be a text"),
    ('{"messages": 3}', "messages must be a list"),
    ('{"messages": [{"role": "wizard"}]}', "unknown role 'wizard'"),
    ('{"messages": [{"role": "user"}]}', "content is missing"),
    ('{"messages": [{"role": "tool", "content": "", "tool_call_id": "1"}]}',
     "tool result without a call"),
    ('{"messages": [{"role": "user", "content": "u"}], "thinking": 3}', "thinking must be True or"),
    ('{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',  # noqa: E501
     "holds an image, and this model takes text only"),
    ('{"messages": [{"role": "user", "content": "u"}], "response_format": "x"}',
     "response_format must"),
    ('{"url": 3, "body": {}}', "url must be a text"),
    ('{"url": "/v1/chat/completions", "body": 3}', "body must be a JSON object"),
    ('{"url": "/v1/embeddings", "body": {}}', "/v1/embeddings cannot be served"),
    ('{"url": "/v1/completions", "method": "GET", "body": {}}', "method must be POST"),
    ('{"url": "/v1/completions", "body": {}, "x": 1}', "unknown keys: x"),
    ('{"prompt": [' + "5, " * 150 + "5]}", "the prompt is too long"),
    ("[" * 100000, "the line is no JSON"),
]  # fmt: skip


def test_bad_lines_are_records_of_their_rows(tmp_path: Path) -> None:
    file = write(tmp_path / "in", [*(line for line, _ in BAD_LINES), '{"prompt": [5]}'])
    out = tmp_path / "out"
    totals = run(file, out)
    assert (totals.done, totals.failed) == (1, len(BAD_LINES))
    found = {r["run"]["line"]: r["error"] for r in read(out)}
    for number, (line, problem) in enumerate(BAD_LINES, 1):
        assert problem in found[number]["message"], line[:80]
    assert found[len(BAD_LINES) + 1] is None
    assert run(file, out).skipped == len(BAD_LINES) + 1


_json = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-5, 2**70), st.floats(), st.text(max_size=3),
        st.sampled_from(["auto", "user", "json_schema", "regex", "function", "f", "high"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(
            "role content type text name function arguments parameters id json schema regex "
            "tool_calls tool_call_id json_schema properties required strict choice trigger".split()
        ), inner, max_size=4),
    ),
    max_leaves=12,
)  # fmt: skip
_user = st.fixed_dictionaries({"role": st.just("user"), "content": st.just("u")})
_keys = (
    "prompt messages url body method temperature top_p top_k max_tokens seed stop stop_token_ids "
    "ignore_eos logprobs top_logprobs logit_bias n structured timeout_s thinking effort tools "
    "tool_choice response_format input model stream thinking reasoning suffix echo best_of "
    "max_completion_tokens stream_options instructions system"
).split()
_fields = st.dictionaries(st.sampled_from(_keys), _json, max_size=3)
_contents = st.one_of(
    st.tuples(st.just({"prompt": [5]}), _fields),
    st.tuples(_user.map(lambda m: {"messages": [m]}), _fields),
    st.tuples(st.lists(_json, max_size=3).map(lambda m: {"messages": m}), _fields),
    st.tuples(
        st.sampled_from(["chat/completions", "completions", "responses", "messages"]),
        st.tuples(_user, _fields),
    ).map(
        lambda t: ({"url": f"/v1/{t[0]}", "body": {
            "prompt": "x", "messages": [t[1][0]], "input": "x", "max_tokens": 3, **t[1][1],
        }}, {})
    ),
)  # fmt: skip


@settings(max_examples=150)
@given(_contents)
def test_whatever_a_row_holds_is_work_or_an_error(content: tuple[Any, Any]) -> None:
    """No row can end a run: what cannot be served raises our own errors only."""
    line = Line(1, json.dumps(content[0] | content[1]).encode())
    row = read_row(line, "s")
    try:
        work = prepare(row, CONTEXT)
    except DeepInferError as error:
        assert failure(row, error)["error"]["message"]
    else:
        assert len(work.prompts) == len(work.params) >= 1


@pytest.mark.parametrize("most", [0, 3])
def test_max_errors(tmp_path: Path, most: int) -> None:
    file = write(tmp_path / "in", [*map(json.dumps, plain(20)), *["{"] * 50])
    out = tmp_path / "out"
    engine = ToyEngine()
    totals = run(file, out, engine, max_errors=most)
    assert totals.stopped == "max_errors" and totals.failed == most + 1
    assert not engine.live and len(read(out)) == totals.done + totals.failed
    totals = run(file, out)
    assert totals.stopped is None and len(read(out)) == 70


def test_stopping_between_steps(tmp_path: Path) -> None:
    rows, out = plain(60), tmp_path / "out"
    file = write(tmp_path / "in", rows)
    engine = ToyEngine()
    reports: list[int] = []
    while True:
        stops = len(reports) + 3
        totals = run(
            file, out, engine,
            report=lambda t: reports.append(t.done), is_stopped=lambda n=stops: len(reports) >= n,
        )  # fmt: skip
        assert not engine.live
        if totals.stopped is None:
            break
        assert totals.stopped == "interrupted"
    check(rows, read(out))
    assert engine.cancelled


@pytest.mark.parametrize("torn", [1, 7, 40, 200])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: int) -> None:
    rows, out = plain(9), tmp_path / "out"
    file = write(tmp_path / "in", rows)
    run(file, out)
    last = len(out.read_bytes().splitlines(keepends=True)[-1])
    with open(out, "r+b") as damaged:
        damaged.truncate(out.stat().st_size - min(torn, last - 1))
    totals = run(file, out)
    assert totals.torn_bytes == last - min(torn, last - 1) and totals.done == 1
    check(rows, read(out))


def test_a_power_cut_leaves_zeros(tmp_path: Path) -> None:
    rows, out = plain(9), tmp_path / "out"
    file = write(tmp_path / "in", rows)
    run(file, out)
    with open(out, "ab") as damaged:
        damaged.write(bytes(4000))
    assert run(file, out).torn_bytes == 4000
    check(rows, read(out))


def test_failed_rows_are_answered_again(tmp_path: Path) -> None:
    rows, out = plain(6), tmp_path / "out"
    bad: Rows = [{"custom_id": "bad", "prompt": []}, {"custom_id": "long", "prompt": [5] * 200}]
    run(write(tmp_path / "in", [*rows, *bad]), out)
    out.chmod(0o640)
    assert run(tmp_path / "in", out).failed_before == 2
    totals = run(tmp_path / "in", out, retries=True)
    assert (totals.retried, totals.failed_before, totals.failed, totals.skipped) == (2, 0, 2, 6)
    bad = [{"custom_id": "bad", "prompt": [5], "max_tokens": 2}, {**bad[1], "prompt": [6]}]
    with pytest.raises(RequestError, match="differs from what"):
        run(write(tmp_path / "in", [*rows, *bad]), out)
    totals = run(tmp_path / "in", out, retries=True)
    assert (totals.retried, totals.failed, totals.done, totals.skipped) == (2, 0, 2, 6)
    assert Counter(r["custom_id"] for r in read(out)).most_common(1)[0][1] == 1
    assert len(read(out)) == 8 and out.stat().st_mode & 0o777 == 0o640
    assert run(tmp_path / "in", out, retries=True).retried == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_taking_errors_out_keeps_the_lock_and_the_torn_line_out(tmp_path: Path) -> None:
    out, link = tmp_path / "out", tmp_path / "link"
    run(write(tmp_path / "in", [{"prompt": []}, {"prompt": [5], "max_tokens": 1}]), out)
    link.symlink_to(out)
    with open(out, "ab") as damaged:
        damaged.write(b'{"custom_id": "x", "te')
    with Output(link) as output:
        assert output.drop_failed() == 1
        with pytest.raises(RequestError, match="another run is writing it"):
            Output(out)
        assert [record["token_ids"] for record in output.recover()] == [[25]]
        output.append([{"a": 1}])
    assert link.is_symlink() and len(out.read_text().splitlines()) == 2


def test_a_mistake_of_ours_costs_its_row_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(row: Row, context: Context) -> Work:
        if row.line == 2:
            raise TypeError("an 'int' cannot be cast")
        return prepare(row, context)

    monkeypatch.setattr(runner, "prepare", failing)
    totals = run(write(tmp_path / "in", plain(3)), tmp_path / "out")
    assert (totals.done, totals.failed) == (2, 1)
    (error,) = [r["error"] for r in read(tmp_path / "out") if r["error"]]
    message = "internal error: TypeError: an 'int' cannot be cast"
    assert error == {"code": "server_error", "message": message}
    assert "Traceback" in caplog.text


def test_texts_far_too_long_are_refused_before_they_are_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object) -> list[int]:
        raise AssertionError("encoded")

    monkeypatch.setattr(type(CONTEXT.tokenizer), "encode", encode)
    text = "x" * 2**20
    user = {"role": "user", "content": text}
    off = {"type": "disabled"}
    rows: Rows = [{"prompt": text}, {"messages": [user]}]
    rows += [{"url": "/v1/completions", "body": {"prompt": text}}]
    rows += [{"url": "/v1/chat/completions", "body": {"messages": [user], "thinking": off}}]
    totals = run(write(tmp_path / "in", rows), tmp_path / "out")
    assert totals.failed == 4
    for record in read(tmp_path / "out"):
        assert "tokens, and the context holds 2048" in record["error"]["message"]


def test_messages_of_errors_are_bounded(tmp_path: Path) -> None:
    run(write(tmp_path / "in", [{"prompt": [5], "max_tokens": "9" * 10**5}]), tmp_path / "out")
    (record,) = read(tmp_path / "out")
    assert record["error"]["message"].startswith("SamplingParams cannot be used")
    assert len(record["error"]["message"]) < 2100


ROOT = Path(__file__).parents[2]
CHILD = """
import sys
sys.path[:0] = [{root!r}]
from tests.jobs.engine import ToyEngine, run
from pathlib import Path
engine = ToyEngine(seed=int(sys.argv[3]), {engine})
run(sys.argv[1], Path(sys.argv[2]), engine, window={window})
"""


def test_kills_at_random_moments(tmp_path: Path) -> None:
    rows, out = plain(1500), tmp_path / "out"
    file = write(tmp_path / "in", rows)
    code = CHILD.format(root=str(ROOT), engine="step_s=0.002", window=8)
    chance = random.Random(5)
    kills = 0
    for attempt in range(30):
        command = [sys.executable, "-c", code, str(file), str(out), str(attempt)]
        with subprocess.Popen(command) as process:
            start = time.monotonic()
            while not out.exists() and process.poll() is None and time.monotonic() - start < 30:
                time.sleep(0.01)
            try:
                process.wait(timeout=chance.uniform(0.0, 0.5) if attempt < 6 else 60)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                kills += 1
            process.wait()
        if process.returncode == 0:
            break
        if (
            out.exists() and out.stat().st_size and chance.random() < 0.5
        ):  # as a power cut leaves it
            with open(out, "r+b") as damaged:
                damaged.truncate(out.stat().st_size - chance.randint(1, 30))
    assert process.returncode == 0 and kills >= 3
    check(rows, read(out))


def test_two_runs_never_share_an_output(tmp_path: Path) -> None:
    with Output(tmp_path / "out"), pytest.raises(RequestError, match="another run is writing it"):
        Output(tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"a": 1}\n', "line 1 is no record of a run"),
        ("text\n", "line 1 is no record of a run"),
        ("text without an end", "line 1 is no record of a run"),
        ('{"a": 1', "line 1 is no record of a run"),
        ('{"custom_id": "a", "prompt": [5]}', "line 1 is no record of a run"),
        ('{"run": {"key": "a", "request": "b"}}\n' * 2, "answers 'a' twice"),
    ],
)
def test_other_files_are_not_appended_to(tmp_path: Path, content: str, problem: str) -> None:
    out = tmp_path / "out"
    out.write_text(content)
    with pytest.raises(RequestError, match=problem):
        run(write(tmp_path / "in", plain(1)), out)
    assert out.read_text() == content


def test_outputs_that_are_no_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(RequestError, match=r"cannot write .*: it is no file that"):
            Output(path)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot write .*: No such file or directory"):
        Output(tmp_path / "nowhere" / "out")
    with pytest.raises(RequestError, match=r"cannot write .*: Is a directory"):
        Output(tmp_path)
    with pytest.raises(RequestError, match=r"cannot read .*: No such file or directory"):
        Source(str(tmp_path / "nothing"))
    with pytest.raises(RequestError, match=r"cannot read .*: Is a directory"):
        Source(str(tmp_path))


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    output = Output(tmp_path / "out")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, output._file)
    os.close(full)
    with pytest.raises(RequestError, match="No space left on device; what is written stays"):
        output.append([{"a": 1}])


@pytest.mark.parametrize("kind", ["gz", "zst", "plain", "members"])
def test_compressed_input(tmp_path: Path, kind: str) -> None:
    rows = plain(30)
    data = write(tmp_path / "in", rows).read_bytes()
    if kind == "gz":
        data = gzip.compress(data)
    elif kind == "members":
        data = gzip.compress(data[:100]) + gzip.compress(data[100:])
    elif kind == "zst":
        zstandard = pytest.importorskip("zstandard")
        data = zstandard.compress(data[:100]) + zstandard.compress(data[100:])
    (tmp_path / "packed").write_bytes(data)
    totals = run(tmp_path / "packed", tmp_path / "out")
    check(rows, read(tmp_path / "out"))
    assert totals.fraction == 1.0


@pytest.mark.parametrize("keep", [0.001, 0.5, 0.999])
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_cut_compressed_input(tmp_path: Path, kind: str, keep: float) -> None:
    data = write(tmp_path / "in", plain(3000)).read_bytes()
    pack = gzip.compress if kind == "gz" else pytest.importorskip("zstandard").compress
    data = pack(data)
    (tmp_path / "packed").write_bytes(data[: max(12, int(len(data) * keep))])
    with pytest.raises(RequestError, match=r"cannot read .* to its end"):
        run(tmp_path / "packed", tmp_path / "out", ToyEngine(width=100), window=200)


def test_damaged_compressed_input(tmp_path: Path) -> None:
    data = pytest.importorskip("zstandard").compress(
        write(tmp_path / "in", plain(3000)).read_bytes()
    )
    for bad in (data[:40] + b"\xff" * 40 + data[80:], data + b"and more"):
        (tmp_path / "packed").write_bytes(bad)
        with pytest.raises(RequestError, match=r"cannot read .* to its end"):
            run(tmp_path / "packed", tmp_path / "out", ToyEngine(width=100), window=200)


def test_zstandard_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packed").write_bytes(b"\x28\xb5\x2f\xfd0000")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UnsupportedError, match=r"deepinfer\[jobs\]"):
        Source(str(tmp_path / "packed"))


def test_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = plain(12)
    data = write(tmp_path / "in", rows).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
    assert run("-", tmp_path / "out").fraction is None
    check(rows, read(tmp_path / "out"))


def test_a_slow_input_does_not_stop_what_is_in_flight(tmp_path: Path) -> None:
    rows, out = plain(6), tmp_path / "out"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    seen: list[int] = []

    def produce() -> None:
        with open(pipe, "w", buffering=1) as lines:
            for row in rows[:5]:
                lines.write(json.dumps(row) + "\n")
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and (not out.exists() or len(read(out)) < 5):
                time.sleep(0.01)
            seen.append(len(read(out)))
            lines.write(json.dumps(rows[5]) + "\n")

    producer = threading.Thread(target=produce)
    producer.start()
    run(pipe, out)
    producer.join()
    assert seen == [5]
    check(rows, read(out))


def test_long_lines_are_errors_of_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "MAX_LINE_BYTES", 200)
    rows: list[Any] = ["x" * 199, "x" * 200, "x" * 2000, json.dumps(plain(1)[0])]
    run(write(tmp_path / "in", rows), tmp_path / "out")
    found = {r["run"]["line"]: r["error"] for r in read(tmp_path / "out")}
    assert "no JSON" in found[1]["message"] and found[4] is None
    assert all("the line is longer than" in found[i]["message"] for i in (2, 3))


def test_memory_does_not_grow_with_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resident memory after a sixth of the rows and at their end."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    monkeypatch.setattr(ledger, "_CACHE_KIB", 64)
    sizes: list[int] = []

    def watch(totals: runner.Totals) -> None:
        if totals.done > 2000 * (1 + 5 * len(sizes)):
            status = Path("/proc/self/status").read_text()
            sizes.append(int(status.split("VmRSS:")[1].split()[0]))

    file = write(tmp_path / "in", plain(12_500))
    run(file, tmp_path / "out", ToyEngine(width=64), window=256, report=watch)
    assert len(sizes) == 2 and sizes[1] - sizes[0] < 1000, sizes  # KiB


@pytest.mark.skipif(not companion.is_installed(), reason="needs deepinfer[chat]")
def test_batch_requests(tmp_path: Path) -> None:
    user = [{"role": "user", "content": "u"}]
    rows = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": user, "n": 2, "max_tokens": 4, "thinking": {"type": "disabled"}}},
        {"custom_id": "plain", "url": "/v1/completions", "body": {"prompt": ["a", "b"], "max_tokens": 4}},  # noqa: E501
        {"custom_id": "responses", "url": "/v1/responses", "body": {"input": "u", "max_output_tokens": 4}},  # noqa: E501
        {"custom_id": "messages", "url": "/v1/messages", "body": {"messages": user, "max_tokens": 4}},  # noqa: E501
        {"custom_id": "bad", "url": "/v1/chat/completions", "body": {"messages": []}},
        {"custom_id": "long", "url": "/v1/completions", "body": {"prompt": [5] * 150}},
        {"custom_id": "talk", "messages": user, "max_tokens": 2, "n": 2},
    ]  # fmt: skip
    totals = run(write(tmp_path / "in", rows), tmp_path / "out")
    assert (totals.done, totals.failed) == (5, 2)
    found = {r["custom_id"]: r for r in read(tmp_path / "out")}
    assert len(found["chat"]["response"]["body"]["choices"]) == 2
    assert len(found["plain"]["response"]["body"]["choices"]) == 2
    assert found["responses"]["response"]["body"]["object"] == "response"
    assert found["messages"]["response"]["body"]["type"] == "message"
    assert [s["message"]["role"] for s in found["talk"]["samples"]] == ["assistant"] * 2
    for name in ("chat", "plain", "responses", "messages"):
        response = found[name]["response"]
        assert response["status_code"] == 200 and found[name]["error"] is None
        assert response["request_id"] in response["body"]["id"]
    for name in ("bad", "long"):
        assert found[name]["response"]["status_code"] == 400
        assert found[name]["response"]["body"]["error"]["message"]
        assert found[name]["error"]["code"] == "invalid_request"


def test_defaults_of_plain_rows(tmp_path: Path) -> None:
    rows = [{"prompt": [5]}, {"prompt": [5], "max_tokens": 2}, {"prompt": [5], "max_tokens": None}]
    run(write(tmp_path / "in", rows), tmp_path / "out", defaults={"max_tokens": 6})
    lengths = {r["run"]["line"]: len(r["token_ids"]) for r in read(tmp_path / "out")}
    assert lengths == {1: 6, 2: 2, 3: 6}


def test_errors_of_the_engine_leave_a_whole_output(tmp_path: Path) -> None:
    class Broken(ToyEngine):
        def step(self) -> Any:
            if self.num_submitted > 20 and self.live:
                raise RuntimeError("it broke")
            return super().step()

    rows, out = plain(40), tmp_path / "out"
    file = write(tmp_path / "in", rows)
    with pytest.raises(RuntimeError, match="it broke"):
        run(file, out, Broken())
    assert 0 < len(read(out)) < 40
    run(file, out)
    check(rows, read(out))


def test_the_window_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_MAX_LIVE_BYTES", 150)
    engine = ToyEngine(width=1)
    run(write(tmp_path / "in", plain(20)), tmp_path / "out", engine, window=50)
    assert engine.max_live <= 4
