"""The HTTP bench: the pipeline and the traffic it makes, and what it makes of the runs; the whole is a slow test."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_engine import SimulatedEngine

from bench import serve
from bench.made_tokenizer import text_of, write_tokenizer
from llmjax.engine.tokenizer import load_tokenizer
from llmjax.loadtest import arrivals
from llmjax.loadtest.driver import drive
from llmjax.loadtest.measure import ServiceLevels, measure
from llmjax.loadtest.target import EngineTarget
from llmjax.loadtest.workload import read_traffic
from llmjax.pipeline import load

SMALL = ["--preset=tiny", "--rates=10,20", "--requests=12", "--streams=4", "--rounds=2", "--rows=4", "--context=128"]


@pytest.mark.parametrize("vocab_size", [300, 1024, 20_000])
def test_texts_have_the_tokens_they_were_made_of(tmp_path: Path, vocab_size: int) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, vocab_size))
    assert tokenizer.vocab_size == vocab_size
    random = np.random.default_rng()
    for count in (1, 7, 200):
        text = text_of(random.integers(0, 2**31, count).tolist(), vocab_size)
        ids = tokenizer.encode(text)
        assert len(ids) == count
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode("Straße 語\n")) == "Straße 語\n"


def test_rows_and_ratios(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """Both sides get the same loads and the same pipeline; over HTTP everything takes twice as long here."""
    seen: list[list[str]] = []

    def bench(command: Sequence[str], folder: Path) -> list[dict[str, Any]]:
        seen.append(list(command))
        options = dict(zip(command[1::2], command[2::2], strict=True)) if command[0] == "serve" else {}
        slower = 2.0 if options else 1.0
        if not options:
            options = dict(zip(command[2::2], command[3::2], strict=True))
            stages = {stage.name: stage.config for stage in load(command[1]).stages}
            assert stages["engine"].kv_cache.prefix_cache is False  # type: ignore[union-attr]
        requests = read_traffic(Path(options["--dataset"]), output_tokens=1, limit=int(options["--num-prompts"]))
        rates = [float(rate) for name, rate in itertools.pairwise(command) if name == "--request-rate"]
        loads = [arrivals.poisson(rate, len(requests)) for rate in rates] or [arrivals.closed_loop(int(options["--concurrency"]))]
        runs = []
        for one in loads:
            engine = SimulatedEngine(fixed=0.01 * slower, max_context=4096)
            trace = drive(EngineTarget(engine, clock=engine.clock, sleep=engine.sleep), requests, one)
            runs.append({"load": one.name, "figures": measure(trace, ServiceLevels()).as_json()})
        return runs

    @contextlib.contextmanager
    def server(file: Path, args: Any, folder: Path) -> Iterator[str]:
        assert load(file).stage("serve").config.port == 0  # type: ignore[union-attr]
        yield "http://here"

    monkeypatch.setattr(serve, "_bench", bench)
    monkeypatch.setattr(serve, "_server", server)
    out = tmp_path / "out.json"
    serve.main([*SMALL, "--kv-gib=0.01", "--json", str(out)])
    assert [command[0] for command in seen] == ["serve", "serve", "latency", "latency"]
    assert [command[3:] for command in seen[:2]] == [command[2:] for command in seen[2:]]
    rows = json.loads(out.read_text())["rows"]
    cases = [(row["case"], row["load"], row["workers"]) for row in rows if "case" in row]
    names = ("poisson 10/s", "poisson 20/s", "closed 4")
    assert cases == [(case, name, workers) for case, workers in (("engine", 0), ("http", 1)) for name in names]
    assert all(row["completed"] == (8 if row["load"] == "closed 4" else 12) for row in rows if "case" in row)
    ratios = [row for row in rows if "itl_p99_ratio" in row]
    assert [row["load"] for row in ratios] == ["poisson 10/s", "poisson 20/s"]
    assert all(row["itl_p99_ratio"] == pytest.approx(2.0, rel=0.2) for row in ratios)
    (cost,) = [row["http_cost"] for row in rows if "http_cost" in row]
    assert cost == pytest.approx(0.5, abs=0.01)
    assert "itl_p99_ms" in capsys.readouterr().out


@pytest.mark.slow
def test_a_whole_run_on_a_cpu(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    out = tmp_path / "out.json"
    cache = request.config.cache.mkdir("bench-serve")
    serve.main([*SMALL, "--rates=10", "--kv-gib=0.01", "--artifacts", str(cache), "--json", str(out)])
    rows = [row for row in json.loads(out.read_text())["rows"] if "case" in row]
    assert [row["failed"] for row in rows] == [0] * 4
    assert [row["completed"] for row in rows] == [12, 8] * 2
