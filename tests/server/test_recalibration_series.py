"""Series about recalibrations, read from the state's file when somebody asks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from prometheus_client.exposition import generate_latest

from llmjax.pipeline.recalibration import State
from llmjax.server.recalibration_series import RESULTS, recalibration_registry


def lines(path: Path) -> list[str]:
    text = generate_latest(recalibration_registry(path)).decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_counts_and_drift_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert lines(path) == [f'llmjax:recalibrations_total{{result="{name}"}} 0.0' for name in RESULTS]
    State(None, 7.0, 1, 2, 3, {"layers.0.mlp.down": 0.25, "lengths": 1.0}, 0.125).write(path)
    assert lines(path) == [
        'llmjax:recalibrations_total{result="passed"} 1.0',
        'llmjax:recalibrations_total{result="refused"} 2.0',
        'llmjax:recalibrations_total{result="failed"} 3.0',
        'llmjax:calibration_drift{of="layers.0.mlp.down"} 0.25',
        'llmjax:calibration_drift{of="lengths"} 1.0',
        "llmjax:calibration_drift_noise 0.125",
    ]


def test_a_damaged_file_gives_no_series_instead_of_a_reset(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for text in ("", "[]", "{}", json.dumps(dataclasses.asdict(State()) | {"drift": 3})):
        path.write_text(text)
        assert lines(path) == []
