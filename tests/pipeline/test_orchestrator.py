"""Running: order, outcomes, exit codes, gates, lifetimes, reports (rules 4, 11, 12, 13, 18, 19)."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import stage_kinds

import llmjax.errors
from llmjax.pipeline import load, make_reporter, run
from llmjax.pipeline.report import JsonReporter, LineReporter, StageEvent, TerminalReporter, event_line

Write = Callable[..., Path]
THINGS = "stages:\n  base: {uses: thing}\n  new: {uses: thing}\n  gate: {baseline: base, candidate: new, good: %s, on_fail: %s}\n"


def statuses(path: Path, **options: Any) -> tuple[int, dict[str, str]]:
    result = run(load(path, **options))
    return result.exit_code, {stage.name: stage.status for stage in result.stages}


def test_stages_run_in_the_order_of_the_file_and_are_closed_after_their_last_use(write: Write, kinds: stage_kinds.Log) -> None:
    path = write(
        "stages:\n  a: {uses: thing}\n  u1: {uses: use}\n  b: {uses: thing}\n"
        "  u2: {uses: use, thing: a}\n  u3: {uses: use, thing: b}\n"
    )
    assert statuses(path)[0] == 0
    assert kinds.events == ["run a", "run u1 with a", "run b", "run u2 with a", "close a", "run u3 with b", "close b"]


def test_exit_codes(write: Write, kinds: stage_kinds.Log, caplog: pytest.LogCaptureFixture) -> None:
    path = write("stages:\n  thing: {}\n  use: {}\n")
    codes = {fail: statuses(path, sets=[f"stages.thing.fail={fail}"])[0] for fail in ("'no'", "error", "level", "interrupt")}
    assert codes == {"'no'": 0, "error": 5, "level": 4, "interrupt": 130}
    with caplog.at_level(logging.CRITICAL, "llmjax.pipeline.orchestrator"):
        assert statuses(path, sets=["stages.thing.fail=bug"])[0] == 5
    assert [
        e.exit_code for e in (llmjax.errors.ConfigError, llmjax.errors.GateRejectedError, llmjax.errors.ServiceLevelError)
    ] == [2, 3, 4]
    assert {llmjax.errors.StoreError.exit_code, llmjax.errors.ModelError.exit_code, llmjax.errors.LlmjaxError.exit_code} == {5}


def test_a_failing_stage_stops_only_what_needs_it(write: Write, kinds: stage_kinds.Log) -> None:
    path = write(
        "stages:\n  a: {uses: thing}\n  bad: {uses: use, fail: true}\n  after: {uses: make, needs: bad}\n  far: {uses: refine}\n"
        "  other: {uses: use}\n"
    )
    result = run(load(path))
    assert {s.name: s.status for s in result.stages} == {
        "a": "done",
        "bad": "failed",
        "after": "blocked",
        "far": "blocked",
        "other": "done",
    }
    assert (result.exit_code, result.ok) == (5, False)
    assert (result.stage("bad").error, result.stage("far").error) == ("cannot use it", "'after' did not succeed")
    assert kinds.events == ["run a", "run bad with a", "run other with a", "close a"]


def test_an_interrupt_closes_what_is_alive_and_keeps_what_is_done(write: Write, kinds: stage_kinds.Log) -> None:
    path = write("stages:\n  make: {}\n  a: {uses: thing}\n  b: {uses: thing, fail: interrupt}\n  u: {uses: use, thing: a}\n")
    code, found = statuses(path)
    assert (code, found) == (130, {"make": "done", "a": "done", "b": "interrupted", "u": "blocked"})
    assert kinds.events[-1] == "close a"
    assert statuses(path, sets=["stages.b.fail='no'"]) == (0, {"make": "reused", "a": "done", "b": "done", "u": "done"})


def test_a_gate_that_accepts_passes_its_candidate_on(write: Write, kinds: stage_kinds.Log) -> None:
    path = write(THINGS % ("true", "stop") + "  u: {uses: use, thing: gate}\n  v: {uses: use, thing: new}\n")
    assert statuses(path)[0] == 0
    assert "run u with new" in kinds.events
    assert "run v with new" in kinds.events
    assert sorted(e for e in kinds.events if e.startswith("close")) == ["close base", "close new"]


def test_a_gate_that_stops(write: Write, kinds: stage_kinds.Log) -> None:
    path = write(
        THINGS % ("false", "stop")
        + "  u: {uses: use, thing: gate}\n  v: {uses: use, thing: new}\n  w: {uses: use, thing: base}\n"
    )
    code, found = statuses(path)
    assert code == 3
    assert [found[name] for name in ("gate", "u", "v", "w")] == ["rejected", "blocked", "blocked", "done"]
    assert run(load(path)).stage("gate").error == "perplexity_ratio 1.4 is above 1.02"


def test_a_gate_that_falls_back(write: Write, kinds: stage_kinds.Log) -> None:
    path = write(
        THINGS % ("false", "fallback")
        + "  u: {uses: use, thing: gate}\n  v: {uses: use, thing: new}\n  v2: {uses: thing, needs: new}\n"
    )
    code, found = statuses(path)
    assert code == 3
    assert [found[name] for name in ("gate", "u", "v", "v2")] == ["rejected", "done", "blocked", "blocked"]
    assert "run u with base" in kinds.events  # the rejected one never runs
    assert run(load(path)).stage("v").error == "'gate' rejected 'new'"


def test_a_server_serves_later_stages_and_the_last_one_stays(write: Write, kinds: stage_kinds.Log) -> None:
    path = write("stages:\n  thing: {}\n  hold: {}\n  c1: {uses: call}\n  c2: {uses: call}\n")
    assert statuses(path)[0] == 0
    assert kinds.events == ["run thing", "run hold", "run c1", "run c2", "close hold", "close thing"]
    kinds.events.clear()
    assert statuses(path, sets=["stages.c1=null", "stages.c2=null"])[0] == 0
    assert kinds.events == ["run thing", "run hold", "wait hold", "close hold", "close thing"]


@dataclasses.dataclass
class Report:
    """What a batch runner gives back."""

    answered: int
    failed: int

    def summary(self) -> dict[str, int]:
        return dataclasses.asdict(self)


def test_a_batch_runs_every_time_and_counts_bad_lines(
    write: Write, kinds: stage_kinds.Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad line is a record, the exit is 0 and the count is printed; the stage is never skipped."""
    import llmjax.pipeline.batch_runner
    from llmjax.pipeline.stages import engine

    calls: list[tuple[object, dict[str, Any]]] = []

    def run_batch(llm: object, *, progress: Callable[[int, int], None], **options: Any) -> Report:
        progress(3, 3)
        calls.append((llm, options))
        return Report(2, 1)

    monkeypatch.setattr(llmjax.pipeline.batch_runner, "run_batch", run_batch)
    monkeypatch.setattr(engine, "build_engine", lambda reference, config, context, draft: "an engine")
    monkeypatch.setattr(engine.EngineKind, "summary", lambda self, value: {})
    (tmp_path / "i.jsonl").write_text("")
    path = write(
        "stages:\n  model: {source: {random: {preset: llama-8b}}}\n  engine: {}\n"
        "  batch: {input: i.jsonl, output: o.jsonl, resume: true, defaults: {temperature: 0}}\n"
    )
    stream = io.StringIO()
    for _ in range(2):
        result = run(load(path), reporter=LineReporter(stream))
        assert (result.exit_code, result.stage("batch").summary) == (0, {"answered": 2, "failed": 1})
    assert "failed 1" in stream.getvalue()
    assert "batch: 3 of 3" in stream.getvalue()
    assert len(calls) == 2
    llm, options = calls[0]
    assert llm == "an engine"
    assert options == {
        "input": str(tmp_path / "i.jsonl"), "output": "o.jsonl", "errors": None, "format": None, "resume": True,
        "checkpoint_every": 16, "defaults": {"temperature": 0}, "tool_parser": "auto",
    }  # fmt: skip


def test_secrets_are_masked_in_reports_and_errors(write: Write, kinds: stage_kinds.Log) -> None:
    stream = io.StringIO()
    for log in ("text", "json"):
        for fail in ("'no'", "error"):
            path = write(f"stages:\n  thing: {{api_key: hunter2, fail: {fail}}}\n  use: {{}}\n")
            result = run(load(path), reporter=make_reporter(log, stream=stream))  # type: ignore[arg-type]
            assert "hunter2" not in "".join(stage.error for stage in result.stages)
    assert "hunter2" not in stream.getvalue()
    assert "using ********" in stream.getvalue()
    assert "the thing is broken ********" in stream.getvalue()


class Recorder:
    """A reporter of an application's own."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def stage(self, name: str, event: StageEvent, text: str = "", figures: Any = None) -> None:
        self.seen.append(f"{name} {event}")

    def progress(self, name: str, done: int, total: int | None) -> None:
        self.seen.append(f"{name} {done}/{total}")

    def message(self, level: Literal["info", "warning", "error"], text: str) -> None:
        self.seen.append(f"{level} {text}")

    def close(self) -> None:
        self.seen.append("close")


def test_a_reporter_hears_everything(write: Write, kinds: stage_kinds.Log) -> None:
    path = write("stages:\n  make: {}\n  off: {uses: make, when: never}\n  thing: {fail: error}\n  use: {}\n")
    recorder = Recorder()
    run(load(path), reporter=recorder)
    assert recorder.seen == ["make start", "make done", "off off", "thing start", "thing failed", "use blocked", "close"]
    again = Recorder()
    run(load(path), reporter=again, until="make")
    assert again.seen == ["make reuse", "close"]


def test_lines_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    reporter = make_reporter("json", stream=stream)
    reporter.stage("e", "done", "", {"seconds": 1.25, "pages": 3})
    reporter.progress("e", 1, 9)
    reporter.progress("e", 2, 9)
    reporter.progress("e", 9, 9)
    reporter.message("warning", "über\nzwei Zeilen")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert all(isinstance(line.pop("time"), float) for line in lines)
    assert lines == [
        {"event": "stage.done", "stage": "e", "text": "", "seconds": 1.25, "pages": 3},
        {"event": "progress", "stage": "e", "done": 1, "total": 9},
        {"event": "progress", "stage": "e", "done": 9, "total": 9},
        {"event": "message", "level": "warning", "text": "über\nzwei Zeilen"},
    ]
    assert event_line("e", "start", "not run before", {"kind": "engine"}) == "e: start (engine): not run before"
    assert event_line("e", "done", "", {"kind": "engine", "seconds": 1.25, "pages": 3}) == "e: done in 1.2 s, pages 3"
    plain = make_reporter()
    assert isinstance(plain, LineReporter)
    plain.message("error", "one\ntwo")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: one two\n")


def test_a_stream_that_cannot_write_every_letter() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    LineReporter(stream).message("info", "모델")
    assert raw.getvalue() == b"\\ubaa8\\ub378\n"
    assert isinstance(make_reporter("json", stream=stream), JsonReporter)


def test_rich_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    reporter = make_reporter(stream=stream)
    assert isinstance(reporter, TerminalReporter)
    reporter.stage("batch", "start", "", {"kind": "batch"})
    reporter.progress("batch", 1, 2)
    reporter.progress("batch", 2, 2)
    reporter.stage("batch", "done", "", {"seconds": 1.0, "path": "[red]not markup"})
    reporter.message("warning", "careful")
    reporter.close()
    text = stream.getvalue()
    assert "batch: done in 1.0 s, path [red]not markup" in text
    assert "warning: careful" in text
