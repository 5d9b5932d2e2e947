"""The trace file is what a viewer takes: JSON, spans of a track never half overlap, a request's segments follow each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmjax.telemetry.trace import TraceWriter


def test_what_is_written_can_be_read_before_and_after_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    with TraceWriter(path) as writer:
        one, other = writer.process("one"), writer.process("zwei „2“")
        one.span("host", "schedule", 1000, 3500, step=3)
        other.span("host", "dispatch", 2000, 2000)
        one.span("device", "decode", 5000, 9000)
        one.curve("pages", 5000, used=7)
        one.request("r1", [("ingress", 1000), ("queue", 1500), ("compute", 4000)], 9000, lane="short")
        writer._file.flush()
        early = json.loads(path.read_text("utf-8") + "]")
    events = json.loads(path.read_text("utf-8"))
    assert events == early
    names = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"}
    assert names == {(1, "one"), (2, "zwei „2“")}
    spans = [(event["pid"], event["tid"], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert spans == [(1, 1, "schedule", 1.0, 2.5), (2, 1, "dispatch", 2.0, 0.0), (1, 2, "decode", 5.0, 4.0)]
    request = [(event["ph"], event["name"], event["ts"]) for event in events if event.get("cat") == "request"]
    assert request == [
        ("b", "r1", 1.0), ("b", "ingress", 1.0), ("e", "ingress", 1.5), ("b", "queue", 1.5), ("e", "queue", 4.0),
        ("b", "compute", 4.0), ("e", "compute", 9.0), ("e", "r1", 9.0),
    ]  # fmt: skip


def test_a_run_that_wrote_nothing_leaves_a_valid_file(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "t.json").close()
    assert json.loads((tmp_path / "t.json").read_text()) == []


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = TraceWriter(tmp_path / "t.json")
    process = writer.process("one")

    class Full:
        closed = False

        def write(self, text: str) -> None:
            raise OSError("no space left")

        def close(self) -> None:
            self.closed = True
            raise OSError("no space left")

    real: Any = writer._file
    writer._file = Full()  # type: ignore[assignment]
    real.close()
    process.span("host", "schedule", 1, 2)
    process.span("host", "schedule", 3, 4)
    writer.close()
    assert [record.message for record in caplog.records] == [f"the trace {tmp_path / 't.json'} ends here: no space left"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        TraceWriter(tmp_path / "file" / "t.json")
