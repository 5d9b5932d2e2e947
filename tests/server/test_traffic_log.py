"""The traffic log: what a line holds and what it must not, which requests are kept, and a file that is whole whatever happens."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes_engine import FakeEngine, FakeTokenizer
from served import Served, run

from llmjax.engine.config import EngineConfig
from llmjax.engine.outputs import CompletionOutput, RequestOutput
from llmjax.errors import ConfigError
from llmjax.loadtest.workload import read_traffic
from llmjax.pipeline.stages.serve import ServeSection, traffic_config
from llmjax.server import redaction, traffic_log
from llmjax.server.protocol import parse_request
from llmjax.server.traffic_log import TrafficConfig, TrafficLog
from llmjax.telemetry.timings import Timings

CHAT = {"messages": [{"role": "user", "content": "call 555-1234"}], "max_tokens": 6, "n": 2, "stop": ["555-9999"]}


def opened(path: Path, **options: Any) -> TrafficLog:
    return TrafficLog(TrafficConfig(path=str(path), **options), FakeTokenizer().decode)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answer(text: str = "ab") -> RequestOutput:
    choice = CompletionOutput(0, text, list(text.encode()), finish_reason="length")
    return RequestOutput("r", "prompt", list(b"prompt"), [choice], finished=True)


def record(log: TrafficLog, response_id: str, text: str = "ab") -> None:
    log.record(parse_request("completions", {"prompt": "prompt"}), [answer(text)], response_id=response_id, model="m")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def serve_some(path: Path, *bodies: tuple[str, dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    served = Served(FakeEngine(EngineConfig(max_context=64, max_sequences=4)), traffic=TrafficConfig(path=str(path), **options))
    for index, (endpoint, body) in enumerate(bodies):
        response = served.post(endpoint, body, x_request_id=f"id-{index}")
        assert response.status_code in (200, 400), response.text
    served.app.state.service.close()
    served.engine.stop()
    return lines(path)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_line_holds(tmp_path: Path, stream: bool) -> None:
    before = time.time()
    one, two, three = serve_some(
        tmp_path / "t.jsonl",
        ("/v1/chat/completions", {**CHAT, "stream": stream}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 5, "temperature": 0, "stream": stream}),
        ("/v1/completions", {"prompt": "abc", "temperature": -1}),
    )
    assert (one["id"], one["endpoint"], one["model"], one["choice"], two["choice"]) == ("id-0", "chat", "tiny", 0, 1)
    assert one["messages"] == two["messages"] == CHAT["messages"]
    assert one["sampling"] == {"n": 2, "max_tokens": 6, "stop": ["555-9999"]}
    assert one["output"] == bytes(one["output_ids"]).decode() == "<user>"
    assert (one["output_tokens"], one["finish_reason"]) == (6, "length")
    assert before - 1 <= one["time"] <= time.time()
    assert (three["prompt_ids"], three["output"]) == (list(b"abc"), "abcab")
    assert three["sampling"] == {"max_tokens": 5, "temperature": 0.0}
    assert "messages" not in three
    assert stat.S_IMODE((tmp_path / "t.jsonl").stat().st_mode) == 0o600


def test_nothing_of_what_is_redacted_is_left_in_any_form(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    body = {"prompt": list(b"tell 555-1234"), "max_tokens": 30}
    found = serve_some(path, ("/v1/chat/completions", CHAT), ("/v1/completions", body), redact=(r"\d{3}-\d{4}", "(?i)TELL"))
    assert "555" not in path.read_text()
    assert found[0]["messages"] == [{"role": "user", "content": "call [redacted]"}]
    assert found[0]["sampling"]["stop"] == ["[redacted]"]
    assert found[2]["prompt"] == "[redacted] [redacted]"
    assert found[2]["output"].startswith("[redacted] [redacted]")
    assert not [key for line in found for key in line if key.endswith("ids")]


def test_forms_of_outputs_are_redacted_and_salts_never_written(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    schema = {"type": "object", "properties": {"a\n555-1234": {"const": "555-1234"}}}
    log = opened(path, redact=(r"\b\d{3}-\d{4}\b",))
    for form in ({"guided_choice": ["555-1234", "no"]}, {"guided_json": schema}):
        request = parse_request("completions", {"prompt": "prompt", "cache_salt": "my salt", **form})
        log.record(request, [answer()], response_id="id", model="m")
    log.close()
    one, two = lines(path)
    assert one["sampling"]["structured"] == {"choice": ["[redacted]", "no"]}
    assert two["sampling"]["structured"]["json_schema"]["properties"] == {"a\n[redacted]": {"const": "[redacted]"}}
    assert "salt" not in path.read_text()


def test_a_pattern_that_takes_for_ever_costs_its_own_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redaction, "SECONDS", 0.3)
    log = opened(tmp_path / "t", redact=("(a+)+b",))
    record(log, "slow", "a" * 200)
    record(log, "next", "aab")
    log.close(60)
    assert [(line["id"], line["output"]) for line in lines(tmp_path / "t")] == [("next", "[redacted]")]
    assert (log.written, log.dropped) == (1, 1)
    assert "could not be redacted" in caplog.text


def test_a_line_tells_when_its_request_came(tmp_path: Path) -> None:
    one = answer()
    hour = 3600 * 10**9
    one.timings = Timings(arrival_ns=time.monotonic_ns() - hour, ingress_ns=0, queue_ns=0, batch_ns=0, compute_ns=1, egress_ns=0)
    log = opened(tmp_path / "t")
    log.record(parse_request("completions", {"prompt": "p"}), [one], response_id="id", model="m")
    log.close()
    assert abs(lines(tmp_path / "t")[0]["time"] - (time.time() - 3600)) < 60


def test_a_path_without_a_suffix_leaves_the_names_of_full_files_alone(tmp_path: Path) -> None:
    first, second = (opened(tmp_path / "traffic", max_bytes=400, keep=1) for _ in range(2))
    for number in range(5):
        record(first, f"first-{number}")
    record(second, "second")
    first.close()
    second.close()
    assert sorted(os.listdir(tmp_path)) == ["traffic", "traffic-1", "traffic.1"]
    assert [line["id"] for line in lines(tmp_path / "traffic-1")] == ["second"]


def test_which_requests_are_kept_depends_on_their_ids_alone(tmp_path: Path) -> None:
    names = [f"{random.random()}" for _ in range(600)]
    kept = []
    for number, order in enumerate((names, names[::-1])):
        log = opened(tmp_path / str(number), sample=0.25)
        for name in order:
            record(log, name)
        log.close()
        kept.append({line["id"] for line in lines(tmp_path / str(number))})
    assert kept[0] == kept[1]
    assert 75 < len(kept[0]) < 240  # ten standard deviations around 150 would be 44..256
    assert not opened(tmp_path / "none", sample=1e-12)._samples("a")


def test_a_full_file_is_renamed_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "t.jsonl"
    log = opened(path, max_bytes=2000, keep=2)
    for number in range(60):
        record(log, f"id-{number}")
    log.close()
    assert sorted(os.listdir(path.parent)) == ["t.jsonl", "t.jsonl.1", "t.jsonl.2"]
    files = [path.parent / name for name in ("t.jsonl.2", "t.jsonl.1", "t.jsonl")]
    assert all(0 < file.stat().st_size <= 2000 for file in files)
    ids = [line["id"] for file in files for line in lines(file)]
    assert ids == [f"id-{number}" for number in range(60 - len(ids), 60)], "in order, without a gap"
    assert (log.written, log.dropped) == (60, 0)
    alone = opened(tmp_path / "alone", max_bytes=2000, keep=0)
    for number in range(60):
        record(alone, f"id-{number}")
    alone.close()
    assert lines(tmp_path / "alone")[-1]["id"] == "id-59"
    assert not (tmp_path / "alone.1").exists()


def test_a_line_larger_than_a_file_is_dropped(tmp_path: Path) -> None:
    log = opened(tmp_path / "t", max_bytes=1000)
    record(log, "long", "x" * 2000)
    record(log, "short")
    log.close()
    assert [line["id"] for line in lines(tmp_path / "t")] == ["short"]
    assert (log.written, log.dropped) == (1, 1)


def test_a_full_disk_leaves_whole_lines_one_message_and_a_server_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = 450
    write = os.write

    def limited(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        done = write(descriptor, data[:room])
        room -= done
        return done

    log = opened(tmp_path / "t")
    monkeypatch.setattr(traffic_log.os, "write", limited)
    with caplog.at_level(logging.ERROR):
        for number in range(5):
            record(log, f"id-{number}")
        until(lambda: log.written + log.dropped == 5)
        room = 10**6
        record(log, "after")
        log.close()
    found = [line["id"] for line in lines(tmp_path / "t")]
    assert found == [*(f"id-{number}" for number in range(len(found) - 1)), "after"]
    assert 1 < len(found) < 6
    assert log.dropped == 6 - len(found)
    assert len([one for one in caplog.records if "No space left" in one.getMessage()]) == 1


def test_what_cannot_be_kept_up_with_is_dropped_and_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, write = threading.Event(), os.write

    def held(descriptor: int, data: bytes) -> int:
        assert go.wait(60)
        return write(descriptor, data)

    log = opened(tmp_path / "t")
    monkeypatch.setattr(traffic_log.os, "write", held)
    monkeypatch.setattr(traffic_log, "_WAITING_TOKENS", 100)
    for number in range(50):
        record(log, f"id-{number}")
    assert log.dropped >= 50 - 1 - 100 // len("promptab") - 1
    go.set()
    log.close()
    assert log.written == len(lines(tmp_path / "t")) == 50 - log.dropped > 0
    record(log, "late")
    assert log.dropped + log.written == 51


def test_half_a_line_of_a_killed_process_goes_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for left, kept in ((b'{"id":"whole"}\n{"id":"ha', 1), (b'{"id"', 0), (b"", 0), (b'{"id":"whole"}\n' + b"x" * 200_000, 1)):
        path.write_bytes(left)
        path.chmod(0o644)
        log = opened(path)
        record(log, "new")
        log.close()
        assert [line["id"] for line in lines(path)] == ["whole"] * kept + ["new"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_each_process_has_a_file_of_its_own_and_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    """Locks are held by descriptors, so two logs of one process exclude each other as two processes do."""
    first, second = (opened(tmp_path / "t.jsonl", max_bytes=1000, keep=1) for _ in range(2))
    for number in range(10):
        record(first, f"first-{number}")
        record(second, f"second-{number}")
    first.close()
    third = opened(tmp_path / "t.jsonl")
    record(third, "third")
    second.close()
    third.close()
    assert sorted(os.listdir(tmp_path)) == ["t.1.jsonl", "t.1.jsonl.1", "t.jsonl", "t.jsonl.1"]
    assert [line["id"] for line in lines(tmp_path / "t.jsonl")][-2:] == ["first-9", "third"]
    assert lines(tmp_path / "t.1.jsonl")[-1]["id"] == "second-9"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sample": 0.0}, "sample must be above 0"),
        ({"redact": ("(",)}, "no regular expression"),
        ({"keep": -1}, "keep at least 0"),
        ({"path": "/proc/none/t"}, "cannot be written: .*choose another path"),
        ({"path": "/dev/null"}, "not a plain file"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrafficLog(TrafficConfig(**{"path": str(tmp_path / "t")} | wrong), FakeTokenizer().decode)


def test_the_block_of_a_pipeline_reaches_the_server() -> None:
    block = {"path": "t.jsonl", "sample": "5%", "max_bytes": "1MiB", "keep": 2, "redact": r"\d+"}
    section = ServeSection.model_validate({"traffic": block})
    assert section.traffic is not None
    config = TrafficConfig(path="t.jsonl", sample=0.05, max_bytes=2**20, keep=2, redact=(r"\d+",))
    assert traffic_config(section.traffic) == config
    assert ServeSection.model_validate({}).traffic is None
    with pytest.raises(ValueError, match="no regular expression"):
        ServeSection.model_validate({"traffic": {"path": "t", "redact": ["ok", "["]}})


def test_a_load_test_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    serve_some(path, ("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "abc", "max_tokens": 5}))
    chat, plain = read_traffic(path, output_tokens=99, limit=None)
    assert (chat.prompt, chat.output_tokens, chat.max_tokens) == (CHAT["messages"], 6, 6)
    assert (plain.prompt, plain.output_tokens) == (list(b"abc"), 5)
    assert 0.0 == chat.arrival < plain.arrival < 60


def test_the_series_count_lines(served: Served, tmp_path: Path) -> None:
    logged = served.with_options(traffic=TrafficConfig(path=str(tmp_path / "t")))
    logged.post("/v1/completions", {"prompt": "abc", "n": 2})
    logged.app.state.service.close()
    series = logged.get("/metrics").text.splitlines()
    assert 'llmjax:traffic_lines_total{result="written"} 2.0' in series
    assert 'llmjax:traffic_lines_total{result="dropped"} 0.0' in series


def test_the_end_of_the_app_writes_what_waits(tmp_path: Path) -> None:
    served = Served(FakeEngine(), traffic=TrafficConfig(path=str(tmp_path / "t")))

    async def life() -> None:
        async with served.app.router.lifespan_context(served.app):
            for _ in range(20):
                await served.request("POST", "/v1/completions", {"prompt": "abc"})

    run(life())
    served.engine.stop()
    assert len(lines(tmp_path / "t")) == 20
    assert re.fullmatch(r"[0-9a-f]{32}", lines(tmp_path / "t")[0]["id"])
