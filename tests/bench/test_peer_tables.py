"""The peers' tables: a row a figure, the peer's own beside it, and the requests that it was measured by."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from simulated_engine import SimulatedLLM

from bench import peer_tables


def test_every_figure_of_the_open_loop_stands_beside_the_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llm = SimulatedLLM(num_pages=4000, max_sequences=64)
    real = peer_tables.EngineTarget
    sent = []

    class Target(real):
        def submit(self, request):
            sent.append((len(request.prompt), request.output_tokens))
            return super().submit(request)

    monkeypatch.setattr(peer_tables, "_llm", lambda args: llm)
    monkeypatch.setattr(peer_tables, "EngineTarget", lambda engine: Target(engine, clock=engine.clock, sleep=engine.sleep))
    out = tmp_path / "out.json"
    peer_tables.main(["--tables", "open", "--rates", "32", "--json", str(out)])
    rows = [row for row in json.loads(out.read_text())["rows"] if "what" in row]
    assert len(rows) == 5 * 3
    known = {row["what"]: row["vllm"] for row in rows}
    assert known["poisson 32/s ttft p50, ms"] == 33.4
    assert known["poisson 32/s itl p99, ms"] == known["poisson 32/s itl_token p99, ms"] == 28.2
    assert known["poisson 32/s e2e p99, ms"] == 4792
    assert all(row["of_vllm"] == pytest.approx(row["ours"] / row["vllm"], rel=1e-3, abs=1e-4) for row in rows)
    random = np.random.default_rng(0)
    prompts = np.clip(np.round(random.lognormal(np.log(256), 1.0, 512)), 16, 3072)
    outputs = np.clip(np.round(random.lognormal(np.log(128), 0.8, 512)), 8, 1024)
    assert sent == [*zip(prompts[:160], outputs[:160], strict=True)]
