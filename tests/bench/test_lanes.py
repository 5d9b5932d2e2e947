"""The bench of the lanes' promises: in virtual time they hold, and its verdicts are false where they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from simulated_engine import SimulatedLLM

from bench import lanes
from bench.traffic import read_lanes
from llmjax.loadtest import subjects
from llmjax.loadtest.driver import Record
from llmjax.scheduling.lane_config import LaneConfig


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *, order: str = lanes.LANES, **options: Any) -> dict[str, dict[str, Any]]:
    """The rows of a run on a device of 10 ms a launch and 0.1 ms a token, by the first word of what they tell."""
    sizes = {"max_sequences": 128, "max_tokens_per_step": 256, "prefill_chunk": 128, "max_wait": 1.0}
    llm = SimulatedLLM(**{"num_pages": 4000, "a_token": 1e-4, "lanes": read_lanes(order, 8), **sizes, **options})
    real = subjects.EngineTarget
    monkeypatch.setattr(lanes, "_llm", lambda args: llm)
    monkeypatch.setattr(subjects, "EngineTarget", lambda engine: real(engine, clock=engine.clock, sleep=engine.sleep))
    out = folder / "out.json"
    lanes.main(["--preset", "tiny", "--documents", "30", "--shorts", "40", "--requests", "100", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    return {(row.get("run") or row.get("what") or next(iter(row))).split()[0]: row for row in rows}


def test_every_promise_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(monkeypatch, tmp_path)
    judged = [row for row in rows.values() if "held" in row]
    assert [row["held"] for row in judged] == [True] * 5
    step = rows["unloaded_ttft_p95_ms"]["chunk_step_ms"]
    assert step == pytest.approx(10 + 25.6, rel=0.03)
    assert rows["P95"]["bound"] == pytest.approx(rows["unloaded_ttft_p95_ms"]["unloaded_ttft_p95_ms"] + 2 * step, abs=0.01)
    assert rows["fifo"]["short_ttft_p95_ms"] > 5 * rows["P95"]["bound"], "without lanes it would not hold"
    assert rows["90"]["requests"] == 100
    assert "held" in capsys.readouterr().out


def test_a_queue_without_lanes_breaks_the_promise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A lane that holds both kinds is first come first served."""
    rows = run(monkeypatch, tmp_path, order="all:8000:3,rest")
    assert not rows["P95"]["held"]
    assert rows["documents'"]["is"] == pytest.approx(1.0, abs=0.01)


def test_clients_that_are_turned_away_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    impatient = LaneConfig(name="short", max_tokens=80, weight=3), LaneConfig(name="long", timeout=1.0)
    rows = run(monkeypatch, tmp_path, lanes=impatient, max_sequences=8)
    lost = rows["errors,"]["is"]
    assert rows["90"]["errors"] == {"timeout": lost}
    assert rows["allocation"]["is"] == pytest.approx(1 - lost / 100)
    assert not rows["errors,"]["held"]
    assert not rows["allocation"]["held"]


@pytest.mark.parametrize(
    ("lives", "longest"),
    [
        ([(0, 1), (0, 3), (0, 4)], 2),  # (came, had a row)
        ([(0, 1), (5, 5.5), (5, 6)], 1),  # nobody waited between 1 and 5
        ([(0, 9), (1, 2)], 7),  # passed by a later one
        ([], 0),
    ],
)
def test_the_longest_turn(lives: list[tuple[float, float]], longest: float) -> None:
    records = [Record(came, 1, sent=came, queue_seconds=row - came, ended=99.0) for came, row in lives]
    assert lanes.longest_turn(records) == longest
    records.append(Record(0.0, 1, sent=0.0, queue_seconds=50.0, ended=99.0, preemptions=1))  # its row came earlier than that
    assert lanes.longest_turn(records) == longest
