"""`run_batch` over a fake engine: formats, bad lines, resuming, and being killed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fakes_engine import FakeLLM

from llmjax.engine.config import EngineConfig
from llmjax.engine.outputs import RequestOutput
from llmjax.errors import ConfigError, QueueFullError, StoreError
from llmjax.pipeline import batch_input
from llmjax.pipeline.batch_runner import BatchReport, run_batch


def openai_line(name: Any, body: Any = None, **fields: Any) -> str:
    body = {"prompt": f"text of {name}", "max_tokens": 4} if body is None else body
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} | fields)


def write(path: Path, lines: list[str | bytes]) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def batch(tmp_path: Path, lines: list[str | bytes], llm: Any = None, **options: Any) -> tuple[list[dict[str, Any]], BatchReport]:
    source = write(tmp_path / "in.jsonl", lines)
    report = run_batch(llm or FakeLLM(), input=source, output=tmp_path / "out.jsonl", **options)
    return records(tmp_path / "out.jsonl"), report


# -- formats


def test_openai_lines_are_answered_as_the_api_would(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 2, "model": "whatever"}
    out, report = batch(tmp_path, [openai_line("a"), openai_line("b", chat, url="/v1/chat/completions"), "", "  "])
    by_id = {record["custom_id"]: record for record in out}
    assert set(by_id) == {"a", "b"}
    for record in out:
        assert set(record) == {"id", "custom_id", "response", "error"}
        assert record["error"] is None
        assert set(record["response"]) == {"status_code", "request_id", "body"}
        assert record["response"]["status_code"] == 200
    body = by_id["a"]["response"]["body"]
    assert (body["object"], body["model"], body["choices"][0]["text"]) == ("text_completion", "fake-model", "text")
    assert by_id["b"]["response"]["body"]["choices"][0]["message"]["content"] == "<u"
    assert (report.answered, report.failed, report.lines) == (2, 0, 2)
    assert (report.prompt_tokens, report.output_tokens) == (17, 6)
    assert len({record["id"] for record in out}) == 2


def test_plain_prompts_in_all_their_forms(tmp_path: Path) -> None:
    lines = [
        '"just text"',
        '{"prompt": "named", "id": "x", "max_tokens": 5}',
        '{"messages": [{"role": "user", "content": "hi"}], "id": 7}',
        '{"prompt": [97, 98], "n": 2, "logprobs": 0}',
    ]
    out, _ = batch(tmp_path, lines, defaults={"max_tokens": 3, "temperature": 0})
    by_id = {record["id"]: record for record in out}
    assert set(by_id) == {"line-1", "x", "7", "line-4"}
    assert by_id["line-1"] == {
        "id": "line-1",
        "prompt": "just text",
        "text": "jus",
        "finish_reason": "length",
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 3,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "error": None,
    }
    assert by_id["x"]["text"] == "named"
    assert (by_id["7"]["text"], by_id["7"]["messages"]) == ("<us", [{"role": "user", "content": "hi"}])
    assert [choice["text"] for choice in by_id["line-4"]["choices"]] == ["aba", "bab"]
    assert by_id["line-4"]["choices"][0]["logprobs"]["tokens"] == ["a", "b", "a"]


def test_a_body_with_several_prompts_has_an_answer_with_all_choices(tmp_path: Path) -> None:
    out, _ = batch(tmp_path, [openai_line("a", {"prompt": ["xy", "a"], "n": 2, "max_tokens": 2})])
    choices = out[0]["response"]["body"]["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "xy"), (1, "yx"), (2, "aa"), (3, "aa")]


def test_results_keep_the_scripts_of_the_world(tmp_path: Path) -> None:
    """Report B43: names and texts that are not ASCII, in file names too; readable in the output."""
    folder = tmp_path / "模型 é"
    folder.mkdir()
    source = write(folder / "입력.jsonl", [json.dumps({"prompt": "漢字🔥", "id": "ключ"}, ensure_ascii=False)])
    run_batch(FakeLLM(), input=source, output=folder / "вывод.jsonl", defaults={"max_tokens": 10})
    text = (folder / "вывод.jsonl").read_text("utf-8")
    assert "ключ" in text
    assert "漢字🔥" in text


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ('{"custom_id": "a"}', "openai"),
        ('{"body": {}}', "openai"),
        ('"x"', "prompts"),
        ('{"prompt": "x"}', "prompts"),
        ("5", "prompts"),
    ],
)
def test_the_format_is_told_from_the_first_line_that_is_json(tmp_path: Path, first: str, expected: str) -> None:
    source = write(tmp_path / "in.jsonl", [b"\xff\xfe", "{broken", "", first, '{"custom_id": "b"}'])
    with contextlib.closing(batch_input.BatchInput(source)) as opened:
        assert opened.format == expected
        assert opened.facts.lines == 4


def test_a_byte_order_mark_and_windows_line_ends_are_no_mistakes(tmp_path: Path) -> None:
    out, report = batch(tmp_path, [b"\xef\xbb\xbf" + b'"one"\r', b'"two"\r', b"\r"])
    assert (len(out), report.failed) == (2, 0)


# -- bad lines


def test_a_bad_line_is_a_record_and_the_others_go_on(tmp_path: Path) -> None:
    lines: list[str | bytes] = [
        openai_line("good 1"),
        "{not json",
        b'{"custom_id": "\xff"}',
        "[1, 2]",
        openai_line("wrong url", url="/v1/embeddings"),
        openai_line("odd url", url=["/v1/completions"]),
        openai_line("wrong method", method="GET"),
        openai_line("no body", body={"prompt": "x"}).replace('"body"', '"bodi"'),
        openai_line(5),
        openai_line(""),
        json.dumps({"custom_id": "a\ud800", "url": "/v1/completions", "body": {"prompt": "x"}}),
        openai_line("bad field", {"prompt": "x", "temperature": -1}),
        openai_line("unknown field", {"prompt": "x", "max_new_token": 1}),
        openai_line("streams", {"prompt": "x", "stream": True}),
        openai_line("too long", {"prompt": "x" * 64}),
        openai_line("one of three too long", {"prompt": ["x", "y", "x" * 64]}),
        openai_line("good 1"),
        openai_line("good 2"),
    ]
    out, report = batch(tmp_path, lines)
    assert (report.answered, report.failed, report.lines) == (2, 16, 18)
    good = [record for record in out if record["error"] is None]
    bad = {record["line"]: record for record in out if record["error"] is not None}
    assert sorted(record["custom_id"] for record in good) == ["good 1", "good 2"]
    assert sorted(bad) == list(range(2, 18))
    for number, record in bad.items():
        assert record["error"]["message"].startswith(f"line {number}: ")
        assert (record["response"] is None) == (record["error"]["code"] == "invalid_line")
    assert {number: record["custom_id"] for number, record in bad.items()} == {
        **dict.fromkeys((2, 3, 4, 9, 10, 11, 17)),  # no id of their own
        5: "wrong url",
        6: "odd url",
        7: "wrong method",
        8: "no body",
        12: "bad field",
        13: "unknown field",
        14: "streams",
        15: "too long",
        16: "one of three too long",
    }
    assert bad[12]["response"]["status_code"] == 400
    assert bad[12]["response"]["body"]["error"]["param"] == bad[12]["error"]["param"] == "temperature"
    assert bad[15]["error"]["code"] == "context_length_exceeded"
    assert "good 1" in bad[17]["error"]["message"]


@pytest.mark.parametrize(
    "line",
    ["5", "null", '{"id": "a"}', '{"prompt": "x", "messages": []}', '{"prompt": ["a", "b"]}', '{"prompt": "x", "id": true}',
     '{"prompt": "x", "id": "line-1"}', '{"prompt": "\\ud800"}', '{"messages": []}', '{"prompt": ""}'],
)  # fmt: skip
def test_bad_prompt_lines(tmp_path: Path, line: str) -> None:
    out, report = batch(tmp_path, ['"fine"', line, '"fine too"'])
    assert (report.answered, report.failed) == (2, 1)
    (bad,) = [record for record in out if record["error"] is not None]
    assert bad["line"] == 2
    assert set(bad) == {"id", "error", "line"}


def test_errors_have_a_file_of_their_own_when_one_is_named(tmp_path: Path) -> None:
    out, report = batch(tmp_path, ['"a"', "{", '"b"'], errors=tmp_path / "err.jsonl")
    assert [record["error"] for record in out] == [None, None]
    assert [record["line"] for record in records(tmp_path / "err.jsonl")] == [2]
    assert report.failed == 1


def test_a_line_that_is_too_long_is_never_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_input, "MAX_LINE_BYTES", 1 << 20)
    out, report = batch(tmp_path, ['"a"', b'"' + b"x" * (3 << 20) + b'"', '"b"', b'"' + b"y" * (2 << 20)])
    assert (report.answered, report.failed) == (2, 2)
    assert sorted(record["line"] for record in out if record["error"]) == [2, 4]
    assert max(map(len, (tmp_path / "out.jsonl").read_text().splitlines())) < 1000


def test_a_request_the_engine_gives_up_is_a_server_error(tmp_path: Path) -> None:
    out, report = batch(tmp_path, [openai_line("a"), openai_line("bad")], FakeLLM(fail_on="of bad"))
    record = next(record for record in out if record["custom_id"] == "bad")
    assert (record["response"]["status_code"], record["error"]["code"]) == (500, "internal_error")
    assert "NaN" in record["error"]["message"]
    assert (report.answered, report.failed) == (1, 1)


# -- the engine's side


def test_a_full_queue_fails_no_line_and_loses_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of several prompts too: what ends while a later prompt waits for room belongs to its line."""
    llm = FakeLLM()
    add, refused = llm.engine._add, []

    def bounded(*args: Any) -> str:
        if len(llm.engine._live) >= 2:
            refused.append(args)
            raise QueueFullError("2 requests wait in lane 'short', as many as may: try again later", "short")
        return add(*args)

    monkeypatch.setattr(llm.engine, "_add", bounded)
    body = {"prompt": ["ab", "cde", "f", "ghij"], "max_tokens": 2}
    lines: list[str | bytes] = [openai_line("many", body), *(openai_line(f"l{i}") for i in range(5))]
    out, report = batch(tmp_path, lines, llm)
    assert refused
    assert (report.answered, report.failed) == (6, 0)
    many = next(record for record in out if record["custom_id"] == "many")
    assert [choice["text"] for choice in many["response"]["body"]["choices"]] == ["ab", "cd", "ff", "gh"]
    wrong = {"prompt": ["ab", "cd", "ef", [300]], "max_tokens": 2}
    out, report = batch(tmp_path, [openai_line("wrong", wrong), openai_line("fine")], llm, resume="replace")
    assert {record["custom_id"]: record["error"] is None for record in out} == {"wrong": False, "fine": True}
    assert llm.engine.num_running == 0


def test_a_line_that_waited_too_long_is_a_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM(fail_on="late")
    step = llm.engine.step

    def timing_out(**options: Any) -> list[RequestOutput]:
        outputs = step(**options)
        for choice in (choice for output in outputs for choice in output.outputs if choice.finish_reason == "error"):
            choice.finish_reason, choice.error = "timeout", "the request waited longer than 5 s"
        return outputs

    monkeypatch.setattr(llm.engine, "step", timing_out)
    late = {"prompt": "too late", "max_tokens": 2}
    out, report = batch(tmp_path, [openai_line("a", late), openai_line("b")], llm)
    failed = next(record for record in out if record["custom_id"] == "a")
    assert (report.answered, report.failed) == (1, 1)
    assert failed["response"]["status_code"] == 503
    assert failed["error"]["code"] == "queue_timeout"


def test_the_engine_holds_a_bounded_number_of_choices(tmp_path: Path) -> None:
    llm = FakeLLM(config=EngineConfig(max_context=64, max_sequences=4))
    lines = [json.dumps({"prompt": f"prompt {i}", "n": 1 + i % 3, "max_tokens": 1 + i % 7}) for i in range(200)]
    out, report = batch(tmp_path, lines, llm)
    assert (len(out), report.answered) == (200, 200)
    assert 8 <= llm.engine.most_choices < 8 + 3
    assert llm.engine.num_running == 0
    assert report.peak_pages_used == 4


def test_an_engine_that_dies_leaves_results_and_no_requests_behind(tmp_path: Path) -> None:
    llm = FakeLLM()
    steps, step = 0, llm.engine.step

    def dying_step(**options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > 10:
            raise RuntimeError("gone")
        return step(**options)

    llm.engine.step = dying_step  # type: ignore[method-assign]
    source = write(tmp_path / "in.jsonl", [f'"{i}"' for i in range(50)])
    with pytest.raises(RuntimeError, match="gone"):
        run_batch(llm, input=source, output=tmp_path / "out.jsonl", checkpoint_every=1000, defaults={"max_tokens": 2})
    assert len(records(tmp_path / "out.jsonl")) == 20
    assert llm.engine.num_running == 0
    report = run_batch(FakeLLM(), input=source, output=tmp_path / "out.jsonl", resume=True, defaults={"max_tokens": 2})
    assert (report.skipped, report.answered) == (20, 30)


def test_progress_counts_every_line_once(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    batch(tmp_path, ['"a"', "{", '"b"'], progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == [1, 2, 3, 3]
    assert {total for _, total in told} == {3}


def test_the_report_has_the_figures_people_want(tmp_path: Path) -> None:
    _, report = batch(tmp_path, ['"abc"'], defaults={"max_tokens": 5})
    summary = report.summary()
    assert (summary["output tokens"], summary["prompt tokens"], summary["pages used"]) == (5, 3, "1 of 64")
    assert summary["tokens/s"] > 0
    assert BatchReport("x").tokens_per_second == 0.0


# -- running again: rule 12


def test_an_existing_output_is_an_error_unless_said_otherwise(tmp_path: Path) -> None:
    batch(tmp_path, ['"a"'])
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(StoreError, match="exists: resume: true"):
        batch(tmp_path, ['"a"'])
    assert (tmp_path / "out.jsonl").read_bytes() == before
    out, report = batch(tmp_path, ['"b"', '"c"'], resume="replace")
    assert (len(out), report.answered) == (2, 2)


def test_resuming_answers_what_is_missing(tmp_path: Path) -> None:
    lines: list[str | bytes] = [openai_line(str(i)) for i in range(10)] + ["{", openai_line("3")]
    llm = FakeLLM()
    whole, _ = batch(tmp_path, lines, llm)
    path = tmp_path / "out.jsonl"
    kept = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(kept[2:7]))
    out, report = batch(tmp_path, lines, resume=True)
    assert (report.skipped, report.answered + report.failed) == (5, 7)
    key = {(record["custom_id"], record.get("line")) for record in out}
    assert len(out) == 12
    assert key == {(record["custom_id"], record.get("line")) for record in whole}
    again = FakeLLM()
    out, report = batch(tmp_path, lines, again, resume=True)
    assert (len(out), report.skipped, again.engine.added) == (12, 12, 0)


@pytest.mark.parametrize("errors", [False, True])
def test_a_torn_last_line_is_cut_wherever_it_was_torn(tmp_path: Path, errors: bool) -> None:
    options: dict[str, Any] = {"errors": tmp_path / "err.jsonl"} if errors else {}
    lines: list[str | bytes] = [openai_line("a"), openai_line("b"), "{"]
    batch(tmp_path, lines, **options)
    path = tmp_path / ("err.jsonl" if errors else "out.jsonl")
    data = path.read_bytes()
    start = data[:-1].rfind(b"\n") + 1
    for end in range(start, len(data), 17):
        path.write_bytes(data[:end])
        _, report = batch(tmp_path, lines, resume=True, **options)
        assert (report.skipped, report.answered + report.failed) == (2, 1)
        assert len(path.read_bytes().splitlines()) == len(data.splitlines())
        records(path)
    path.write_bytes(data[:start] + b"\0" * 40 + b"\n")  # what a power cut may leave
    assert batch(tmp_path, lines, resume=True, **options)[1].skipped == 2


def test_what_is_not_ours_is_not_touched(tmp_path: Path) -> None:
    lines: list[str | bytes] = ['"a"', '"b"']
    batch(tmp_path, lines)
    path = tmp_path / "out.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"my notes\n" + second)
    with pytest.raises(StoreError, match=r"out\.jsonl:2 is not a result"):
        batch(tmp_path, lines, resume=True)
    assert b"my notes" in path.read_bytes()
    (tmp_path / "out.jsonl.state.json").unlink()
    with pytest.raises(StoreError, match="cannot be resumed"):
        batch(tmp_path, lines, resume=True)


@pytest.mark.parametrize(
    ("change", "options"),
    [("input", {}), ("defaults", {"defaults": {"max_tokens": 9}}), ("format", {"format": "openai"})],
)
def test_resuming_with_something_changed_is_refused(tmp_path: Path, change: str, options: dict[str, Any]) -> None:
    batch(tmp_path, ['"a"', '"b"'], defaults={"stop": ("x",), "logit_bias": {5: 1.0}})
    same: dict[str, Any] = {"defaults": {"stop": ["x"], "logit_bias": {5: 1.0}}}
    assert batch(tmp_path, ['"a"', '"b"'], resume=True, **same)[1].skipped == 2
    with pytest.raises(StoreError, match=f"another {change}"):
        batch(tmp_path, ['"a"', '"b"' if options else '"other"'], resume=True, **(same | options))
    other = FakeLLM()
    other.name = "another"
    with pytest.raises(StoreError, match="another model"):
        batch(tmp_path, ['"a"', '"b"'], other, resume=True, **same)


def test_resuming_nothing_is_starting(tmp_path: Path) -> None:
    out, _ = batch(tmp_path, ['"a"'], resume=True)
    assert len(out) == 1
    (tmp_path / "out.jsonl").write_bytes(b"")
    assert len(batch(tmp_path, ['"b"'], resume=False)[0]) == 1


def test_two_runs_cannot_write_one_output(tmp_path: Path) -> None:
    with open(tmp_path / "out.jsonl", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="another run"):
            batch(tmp_path, ['"a"'])


# -- files that refuse


def test_bad_paths_are_store_errors(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", ['"a"'])
    with pytest.raises(StoreError, match="cannot be read: No such file"):
        run_batch(FakeLLM(), input=tmp_path / "none.jsonl", output=tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(StoreError, match="cannot be read"):
        run_batch(FakeLLM(), input=tmp_path, output=tmp_path / "out.jsonl")
    with pytest.raises(StoreError, match="cannot be written"):
        run_batch(FakeLLM(), input=source, output=tmp_path)
    with pytest.raises(StoreError, match="cannot be written"):
        run_batch(FakeLLM(), input=source, output=source / "x" / "out.jsonl")
    with pytest.raises(StoreError, match="the input itself"):
        run_batch(FakeLLM(), input=source, output=source, resume="replace")
    with pytest.raises(StoreError, match="name two files"):
        run_batch(FakeLLM(), input=source, output=tmp_path / "o", errors=tmp_path / "o")
    assert source.read_text() == '"a"'


def test_a_full_disk_is_an_error_and_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str | bytes] = [f'"{i}"' for i in range(20)]
    written, write_bytes = 0, os.write

    def filling_write(fd: int, data: Any) -> int:
        nonlocal written
        if written >= 1000:
            raise OSError(28, "No space left on device")
        written += (count := write_bytes(fd, bytes(data)[: 1000 - written]))
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", filling_write)
        with pytest.raises(StoreError, match=r"out\.jsonl cannot be written: No space left"):
            batch(tmp_path, lines, checkpoint_every=3)
    assert 3 <= len(records(tmp_path / "out.jsonl")) < 20
    assert len(batch(tmp_path, lines, resume=True)[0]) == 20


def test_wrong_options_are_config_errors_and_create_nothing(tmp_path: Path) -> None:
    for options in ({"defaults": {"temperature": -1}}, {"defaults": {"zzz": 1}}, {"checkpoint_every": 0}):
        source = write(tmp_path / "in.jsonl", ['"a"'])
        with pytest.raises(ConfigError):
            run_batch(FakeLLM(), input=source, output=tmp_path / "out.jsonl", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out.jsonl").exists()


# -- kill -9

CHILD = """
import sys, time
sys.path.insert(0, sys.argv[3])
from fakes_engine import FakeLLM
from llmjax.pipeline.batch_runner import run_batch
llm = FakeLLM()
step = llm.engine.step
def slow_step(**options):
    time.sleep(0.001)
    return step(**options)
llm.engine.step = slow_step
run_batch(llm, input=sys.argv[1], output=sys.argv[2], errors=sys.argv[2] + ".errors", resume=True, checkpoint_every=3,
          defaults={"max_tokens": 3})
"""


def _killed_until_done(tmp_path: Path, *, lines: int, kills: int) -> None:
    source = write(
        tmp_path / "in.jsonl", ["{bad" if i % 10 == 9 else json.dumps({"prompt": f"{i}-", "id": f"n{i}"}) for i in range(lines)]
    )
    output = tmp_path / "out.jsonl"
    errors = Path(f"{output}.errors")
    command = [sys.executable, "-c", CHILD, str(source), str(output), str(Path(__file__).parents[1])]
    rng = random.Random(0)
    done, answerable = 0, lines - lines // 10
    for kill in range(kills):
        child = subprocess.Popen(command, cwd=Path(__file__).parents[2])
        deadline = time.monotonic() + 30
        goal = answerable * (kill + 1) // (kills + 2)
        while child.poll() is None and time.monotonic() < deadline:
            if output.exists() and len(output.read_bytes().splitlines()) >= goal:
                time.sleep(rng.random() * 0.01)
                break
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=30)
        data = output.read_bytes() if output.exists() else b""
        assert data.count(b"\n") >= done  # nothing is lost
        done = data.count(b"\n")
    assert done < answerable, "the last kill came too late to mean anything"
    assert subprocess.run(command, cwd=Path(__file__).parents[2], timeout=120, check=True).returncode == 0
    out = records(output)
    assert sorted(record["id"] for record in out) == sorted(f"n{i}" for i in range(lines) if i % 10 != 9)
    assert all(record["text"] == record["prompt"][:1] * 3 or record["text"] in record["prompt"] * 3 for record in out)
    assert sorted(record["line"] for record in records(errors)) == list(range(10, lines + 1, 10))


def test_killed_at_any_moment_a_resumed_run_loses_and_doubles_nothing(tmp_path: Path) -> None:
    _killed_until_done(tmp_path, lines=400, kills=5)


@pytest.mark.slow
def test_killed_many_times(tmp_path: Path) -> None:
    _killed_until_done(tmp_path, lines=2000, kills=25)


def test_a_state_that_cannot_be_written_leaves_nothing_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"state.json cannot be written: No space left"):
        batch(tmp_path, ['"one"'])
    assert not list(tmp_path.glob("*.tmp"))
    monkeypatch.undo()
    assert batch(tmp_path, ['"one"'])[1].answered == 1
