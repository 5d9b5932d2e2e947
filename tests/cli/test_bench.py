"""`llmjax bench`: options become a load test of the right engine. The engine is simulated."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raw_server import DONE, HEAD, LAST, chunk, raw_server, text
from simulated_engine import SimulatedLLM

from llmjax import cli
from llmjax.loadtest import subjects
from llmjax.pipeline.stages import engine as engine_stage

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> SimulatedLLM:
    made = SimulatedLLM(max_sequences=8, max_context=2048)
    real = subjects.EngineTarget
    monkeypatch.setattr(engine_stage, "build_engine", lambda *args, **options: made)
    monkeypatch.setattr(engine_stage.EngineKind, "summary", lambda self, value: {})
    monkeypatch.setattr(subjects, "EngineTarget", lambda engine: real(engine, clock=engine.clock, sleep=engine.sleep))
    return made


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs `llmjax bench ARGS` in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLMJAX_MODEL", raising=False)

    def run_cli(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["llmjax", "bench", *map(str, args)])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run_cli


def figures(name: str = "out/bench.json") -> list[Any]:
    found: list[Any] = json.loads(Path(name).read_text("utf-8"))["runs"]
    return found


def test_throughput_sends_everything_at_once(run: Run, llm: SimulatedLLM) -> None:
    code, out, err = run(
        "throughput", "--random", "llama-8b", "--num-prompts=12", "--input-len", 16, "--output-len=5", "--baseline=static"
    )
    assert code == 0, err
    one, static = figures()
    assert (one["system"], static["system"]) == ("engine", "static")
    found = one["figures"]
    assert (found["completed"], found["peak_concurrency"]) == (12, 12)
    assert (found["prompt_tokens"]["p50"], found["output_tokens"]["max"]) == (16, 5)
    for column in ("requests/s", "output tokens/s", "ttft ms", "bursts of 12", "static"):
        assert column in out
    assert "bench: bursts of 12, engine: 12 of 12 requests" in err


def test_latency_of_clients_and_of_a_rate(run: Run, llm: SimulatedLLM) -> None:
    assert run("latency", "--random=llama-8b", "--num-prompts", 5)[0] == 0
    assert [one["load"] for one in figures()] == ["closed 1"]
    common = ("latency", "--random=llama-8b", "--num-prompts", 5, "--report", "other.html")
    assert run(*common, "--concurrency", 2, "--concurrency=4")[0] == 0
    assert [one["load"] for one in figures("other.json")] == ["closed 2", "closed 4"]
    assert run(*common, "--request-rate", 30, "--burstiness", "0.5")[0] == 0
    assert [one["load"] for one in figures("other.json")] == ["poisson 30/s"]


def test_a_dataset(run: Run, llm: SimulatedLLM) -> None:
    Path("d.jsonl").write_text('"abc"\n{"prompt": "defgh", "output_tokens": 2}\n')
    assert run("throughput", "--random=llama-8b", "--dataset", "d.jsonl", "--output-len", 4)[0] == 0
    found = figures()[0]["figures"]
    assert (found["prompt_tokens"]["sum"], found["output_tokens"]["sum"]) == (8, 6)


def test_the_engine_of_a_file_and_nothing_else_of_it(run: Run, llm: SimulatedLLM) -> None:
    Path("mine.yaml").write_text(
        "apiVersion: llmjax/v1\nname: mine\nstages:\n  m: {uses: model, source: {random: {preset: llama-8b}}}\n"
        "  e: {uses: engine, max_context: 128}\n  batch: {input: gone.jsonl, output: out.jsonl}\n"
        "  loadtest: {concurrency: 7}\n  bench: {uses: loadtest, profile: poisson, rate: 3, seed: 5}\n"
    )
    code, out, err = run("latency", "mine.yaml", "--num-prompts=3", "--concurrency=2", "--max-context=64", "--input-len=9")
    assert code == 0, err
    assert [one["load"] for one in figures()] == ["closed 2"]
    assert not Path("out.jsonl").exists()
    assert "off" in out


def test_what_the_command_line_says_wins_over_the_file_and_the_rest_is_the_files(run: Run, llm: SimulatedLLM) -> None:
    Path("d.jsonl").write_text('"abc"\n"defgh"\n')
    Path("mine.yaml").write_text(
        "apiVersion: llmjax/v1\nname: mine\nstages:\n  m: {uses: model, source: {random: {preset: llama-8b}}}\n"
        "  e: {uses: engine, max_context: 512}\n  bench: {uses: loadtest, concurrency: 7, requests: 6, duration: 100ms,\n"
        "    slo: {ttft_p95: 1ms}, prompts: {tokens: {median: 30, sigma: 1.0, max: 60}},\n"
        "    output_tokens: {median: 9, sigma: 1.0}}\n"
    )

    def lengths() -> tuple[int, float, float, float]:
        found = figures()[0]["figures"]
        prompts, outputs = found["prompt_tokens"], found["output_tokens"]
        return found["sent"], prompts["sum"], prompts["max"], outputs["max"]

    assert run("latency", "mine.yaml")[0] == 4  # its service level
    assert figures()[0]["load"] == "closed 1"
    assert lengths()[0] < 6  # its duration
    assert run("throughput", "mine.yaml")[0] == 4
    assert (figures()[0]["load"], lengths()[0]) == ("bursts of 6", 6)
    assert run("latency", "mine.yaml", "--num-prompts=5", "--input-len=12", "--output-len=4")[0] == 4
    assert lengths() == (5, 60, 12, 4)
    assert run("latency", "mine.yaml", "--num-prompts=2", "--dataset=d.jsonl", "--set=stages.bench.slo=null")[0] == 0
    assert lengths()[:3] == (2, 8, 5)


def test_a_server(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMJAX_API_KEY", "k-123")
    answer = HEAD + b"".join(map(chunk, (text("a", tokens=1), text("b", reason="length", tokens=2), DONE))) + LAST
    with raw_server(answer) as server:
        common = ("serve", "--base-url", server.url, "--num-prompts=4", "--output-len", 2)
        code, out, err = run(*common, "--concurrency=2", "--input-len=6")
        assert code == 0, err
        assert "closed 2" in out
        (one,) = figures()
        assert (one["system"], one["figures"]["completed"], one["figures"]["output_tokens"]["sum"]) == ("server", 4, 8)
        assert {len(body["prompt"]) for body in server.bodies} == {6}
        assert all("authorization: Bearer k-123" in head for head in server.heads)
        assert "k-123" not in out + err + Path("out/bench.json").read_text() + Path("out/bench.html").read_text()
        Path("d.jsonl").write_text('"abc"\n"def"\n')
        assert run(*common, "--request-rate=500", "--dataset=d.jsonl", "--endpoint=chat", "--model=m")[0] == 0
        assert figures()[0]["load"] == "poisson 500/s"
        assert server.bodies[-1]["messages"][0]["content"] in ("abc", "def")
        code, out, err = run(*common, "--model=other")
        assert code == 2
        assert "does not serve 'other'; it serves m" in out + err
        code, out, err = run(*common, "--input-len=200")
        assert code == 2
        assert "max_context is 128" in out + err


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("latency",), "name exactly one model"),
        (("latency", "m", "--random", "llama-8b"), "name exactly one model"),
        (("latency", "--random=llama-8b", "--concurrency=1", "--request-rate=2"), "--concurrency or --request-rate"),
        (("latency", "--random=llama-8b", "--burstiness=2"), "belongs to --request-rate"),
        (("throughput", "--random=llama-8b", "--dataset=x", "--input-len=3"), "--dataset or --input-len"),
        (("throughput", "--random=llama-8b", "--dataset=x.jsonl"), "no such file or folder"),
        (("throughput", "--random=llama-8b", "--baseline=statik"), "statik"),
        (("throughput", "--random=llama-8b", "--num-prompts=0"), "at least 1"),
        (("serve", "--concurrency=1", "--request-rate=2"), "--concurrency or --request-rate"),
        (("serve", "--endpoint=chats"), "chats"),
        (("serve", "--tokenizer=gone"), "no such file or folder"),
        (("throughput", "quickstart", "--random=llama-8b"), "give a pipeline, or"),
        (("throughput", "gone.yaml"), "gone.yaml"),
        (("throughput", "gone-model"), "no such file or folder"),
    ],
)
def test_what_cannot_work_exits_2_with_a_reason(run: Run, llm: SimulatedLLM, args: tuple[str, ...], why: str) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert why in err
    assert all(line.startswith("llmjax: ") for line in err.splitlines())
