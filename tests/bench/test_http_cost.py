"""The bench of the HTTP side: every case runs through the real app, and each event is counted once."""

from __future__ import annotations

import json
from pathlib import Path

from bench import http_cost


def test_a_row_for_each_case(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    http_cost.main(["--streams", "3", "--tokens", "6", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["case"], row["events"]) for row in rows] == [(case, 3 * 5) for case in http_cost.CASES]
    assert all(0 < row["us_quiet"] <= row["us_an_event"] for row in rows)
