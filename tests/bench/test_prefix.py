"""The bench of the prefix cache: its runs compute the same tokens, and it tells hit rates that can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import CONFIGS, random_params

from bench import prefix
from llmjax.model.checkpoint.load import LoadedModel


def test_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    loaded = LoadedModel(config=config, params=random_params(config), path=None, kind="random", eos_token_ids=())
    monkeypatch.setattr(prefix, "load_model", lambda **options: loaded)
    out = tmp_path / "out.json"
    sizes = {"--requests": 5, "--shared": 40, "--own": 6, "--output": 3, "--tokens-per-step": 16, "--prefill-chunk": 16}
    prefix.main([str(part) for pair in sizes.items() for part in pair] + ["--json", str(out)])
    rows = {row["run"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {"off", "cold", "warm"}
    assert all(row["equal_outputs"] == 5 for row in rows.values())
    # Pages of 16: 32 of 46 tokens are found. The first prompt takes three launches; the second begins with the last of these.
    assert rows["off"]["hit_rate"] == 0
    assert rows["warm"]["hit_rate"] == pytest.approx(5 * 32 / (5 * 46), abs=1e-4)
    assert 0 < rows["cold"]["hit_rate"] < rows["warm"]["hit_rate"]
