"""The traffic bench: a row a system and load, the baselines that differ, the reports' figures beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from simulated_engine import SimulatedLLM

from bench import traffic
from llmjax.loadtest import subjects
from llmjax.loadtest.target import TrafficRequest
from llmjax.scheduling.lane_config import LaneConfig


def test_a_run_has_a_row_for_each_system_and_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    llm = SimulatedLLM(num_pages=60, max_sequences=8)
    real = subjects.EngineTarget
    monkeypatch.setattr(traffic, "_llm", lambda *args, **options: llm)
    monkeypatch.setattr(subjects, "EngineTarget", lambda engine: real(engine, clock=engine.clock, sleep=engine.sleep))
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    traffic.main(
        [
            "--preset",
            "tiny",
            "--clients",
            "6,18",
            "--requests",
            "40",
            "--static-batch",
            "4",
            "--json",
            str(out),
            "--html",
            str(page),
        ]
    )
    rows = json.loads(out.read_text())["rows"]
    figures = {(row["system"], row["clients"]): row for row in rows if "clients" in row}
    assert set(figures) == {(system, clients) for system in ("engine", "static", "whole_length") for clients in (6, 18)}
    assert figures["static", 18]["queue_ms"] > 1.5 * figures["engine", 18]["queue_ms"]
    assert figures["engine", 18]["requests_per_second"] > 1.5 * figures["static", 18]["requests_per_second"]
    reserved = figures["whole_length", 18]
    assert reserved["pages_used"] < reserved["pages_reserved"] <= 1.0
    assert figures["engine", 18]["pages_used"] == figures["engine", 18]["pages_reserved"] > reserved["pages_used"]
    assert "900 -> < 200 ms" in figures["static", 6]["reported"]
    assert any(row.get("not_run") == "fifo" and "same policy" in row["why"] for row in rows)
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert "queue_ms" in capsys.readouterr().out


def test_lanes_are_read_and_then_first_come_is_a_system_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lanes = traffic.read_lanes("short:384:3,long", 8)
    assert lanes == (LaneConfig(name="short", max_tokens=48, weight=3), LaneConfig(name="long"))
    llm = SimulatedLLM(num_pages=60, max_sequences=8, lanes=lanes)
    real = subjects.EngineTarget
    monkeypatch.setattr(traffic, "_llm", lambda *args, **options: llm)
    monkeypatch.setattr(subjects, "EngineTarget", lambda engine: real(engine, clock=engine.clock, sleep=engine.sleep))
    out = tmp_path / "out.json"
    traffic.main(["--preset=tiny", "--clients=18", "--requests=40", "--json", str(out)])
    rows = {row["system"]: row for row in json.loads(out.read_text())["rows"] if "clients" in row}
    assert set(rows) == {"engine", "static", "whole_length", "fifo"}
    assert rows["engine"] != rows["fifo"] | {"system": "engine"}


def test_the_demand_is_in_whole_pages() -> None:
    requests = [TrafficRequest([1] * 16, 1, 99), TrafficRequest([1] * 10, 6, 99)]
    assert traffic._demand(requests, 10, 16) == pytest.approx(15.0)
