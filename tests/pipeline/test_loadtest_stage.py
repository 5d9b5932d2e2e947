"""The `loadtest` stage: what a file may say, what a run leaves on disk, exit codes. The engine is simulated, but for one."""

from __future__ import annotations

import html.parser
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raw_server import DONE, HEAD, LAST, chunk, raw_server, text, whole
from simulated_engine import SimulatedLLM
from tiny_models import CONFIGS, random_params

from llmjax.engine.llm import LLM
from llmjax.loadtest import subjects
from llmjax.pipeline import ConfigErrors, RunResult, load, loadtest_runner
from llmjax.pipeline import run as run_stages
from llmjax.pipeline.stages import engine as engine_stage

Write = Callable[..., Path]

STAGES = """\
stages:
  model: {source: {random: {preset: llama-8b}}}
  engine: {max_context: 512}
  loadtest:
    requests: 8
    prompts: {tokens: {median: 20, sigma: 0.5}}
    output_tokens: {median: 6}
"""


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> SimulatedLLM:
    """A simulated engine in place of the real one, and its clock in place of the machine's."""
    made = SimulatedLLM()
    in_virtual_time(monkeypatch, made)
    return made


def in_virtual_time(monkeypatch: pytest.MonkeyPatch, llm: SimulatedLLM) -> None:
    real = subjects.EngineTarget
    monkeypatch.setattr(engine_stage, "build_engine", lambda *args, **options: llm)
    monkeypatch.setattr(engine_stage.EngineKind, "summary", lambda self, value: {})
    monkeypatch.setattr(subjects, "EngineTarget", lambda engine: real(engine, clock=engine.clock, sleep=engine.sleep))


def run(path: Path, *sets: str) -> RunResult:
    return run_stages(load(path, sets=[f"stages.loadtest.{one}" for one in sets]))


def figures(name: str = "out/loadtest.json") -> Any:
    return json.loads(Path(name).read_text("utf-8"))


# -- what a file may say


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("profile: closed", "the profile closed needs 'concurrency'"),
        ("profile: poisson", "the profile poisson needs 'rate'"),
        ("profile: burst", "the profile burst needs 'burst'"),
        ("profile: sweep", "needs 'concurrency' or 'peak'"),
        ("profile: recorded", "needs 'prompts.file'"),
        ("profile: poison", "poison"),
        ("{profile: poisson, rate: 5, concurrency: 4}", "belongs to the profile closed or sweep, not to poisson"),
        ("{concurrency: 4, rate: 5}", "belongs to the profile poisson, not to closed"),
        ("concurrency: [4, 0]", "concurrency[1]: expected a number above 0"),
        ("{profile: poisson, rate: [1, -0.5]}", "rate[1]: expected a number above 0"),
        ("concurrency: [4, 4]", "the same value twice"),
        ("{concurrency: 1, baselines: [statik]}", "statik"),
        ("{concurrency: 1, slo: {ttft_p95: 500}}", "has no unit"),
        ("{concurrency: 1, slo: {ttft_p96: 500ms}}", "did you mean"),
        ("{concurrency: 1, prompts: {file: x.jsonl, tokens: {median: 3}}}", "either file or tokens"),
        ("{concurrency: 1, output_tokens: {median: 3, min: 9, max: 8}}", "max 8 is below min 9"),
        ("{concurrency: 1, prompts: {shared_prefix: {tokens: 9, share: 20}}}", "write 20%"),
        ("{concurrency: 1, requests: 0}", "must be at least 1, got 0"),
        ("{concurrency: 1, report: out/report}", "a name that ends in .html"),
        ("{concurrency: 1, duration: 60}", "has no unit"),
    ],
)
def test_one_mistake_is_one_line(write: Write, lines: str, message: str) -> None:
    body = lines if lines.startswith("{") else f"{{{lines}}}"
    with pytest.raises(ConfigErrors) as caught:
        load(write(f"stages:\n  model: {{source: {{package: p}}}}\n  engine: {{}}\n  loadtest: {body}\n"))
    (line,) = caught.value.messages
    assert ":5:" in line or ":6:" in line
    assert "stages.loadtest" in line
    assert message in line


def test_scalars_are_lists_of_one(write: Write) -> None:
    config = (
        load(write(STAGES), sets=["stages.loadtest.concurrency=4", "stages.loadtest.baselines=static"]).stage("loadtest").config
    )
    assert (config.concurrency, config.baselines) == ([4], ["static"])  # type: ignore[union-attr]


def test_a_target_must_be_an_engine(write: Write) -> None:
    with pytest.raises(ConfigErrors, match="the stage 'model' gives a model, and this has to be an engine"):
        load(write(STAGES), sets=["stages.loadtest.concurrency=4", "stages.loadtest.target=model"])


def test_a_target_may_be_a_url_or_a_server(write: Write) -> None:
    path = write("stages:\n  loadtest: {target: 'http://localhost:1', concurrency: 1}\n")
    assert load(path).stage("loadtest").inputs == {}
    served = STAGES.replace("  loadtest:", "  api: {uses: serve}\n  loadtest:")
    assert load(write(served), sets=["stages.loadtest={target: api, concurrency: 1}"]).stage("loadtest").inputs == {
        "target": "api"
    }
    with pytest.raises(ConfigErrors, match="gives a model, and this has to be an engine or a serve"):
        load(write(STAGES), sets=["stages.loadtest.concurrency=4", "stages.loadtest.target=model"])
    with pytest.raises(ConfigErrors, match="there is no stage 'localhost:8000'"):
        load(path, sets=["stages.loadtest.target=localhost:8000"])


# -- what a run leaves


def test_a_server_is_loaded_over_http_and_a_baseline_of_engines_refused(write: Write) -> None:
    answer = HEAD + b"".join(map(chunk, (text("a", tokens=1), text("b", reason="length", tokens=2), DONE))) + LAST
    refused = whole(b'{"error": {"message": "the queue is full"}}', "429 Too Many Requests", "retry-after: 0")
    with raw_server(refused, answer) as server:
        path = write(
            f"stages:\n  loadtest: {{target: '{server.url}', concurrency: 2, requests: 5, output_tokens: {{median: 2}},\n"
            "    prompts: {tokens: {median: 5}}}\n"
        )
        result = run(path, "slo={errors: 0}", "baselines=[static]")
        assert result.exit_code == 4
        assert "closed 2: 1 requests failed" in result.stage("loadtest").error
        one, static = figures()["runs"]
        assert one["figures"]["errors"] == {"HTTP 429": 1}
        assert (one["figures"]["completed"], static["figures"]["completed"]) == (4, 5)
        assert one["figures"]["latencies"]["queue"]["count"] == 0  # a server does not tell
        assert "only static works over HTTP" in run(path, "baselines=[fifo]").stage("loadtest").error


def test_a_sweep_beside_baselines(write: Write, llm: SimulatedLLM) -> None:
    result = run(write(STAGES), "profile=sweep", "peak=2", "baselines=[static, fifo, whole_length]", "static_batch=2")
    assert result.ok, result.stage("loadtest").error
    assert llm.engine.config.reserve_full_length is False  # as it was before
    found = figures()
    assert [(one["load"], one["system"]) for one in found["runs"]] == [
        (f"closed {n}", system) for n in (1, 2, 4, 6) for system in ("engine", "static", "whole_length")
    ]
    assert all(one["figures"]["completed"] == 8 for one in found["runs"])
    fifo = next(one for one in found["systems"] if one["name"] == "fifo")
    assert fifo["same_as"] == "engine"
    assert "same policy" in fifo["about"]
    assert {"ttft", "tpot", "goodput"} <= set(found["formulas"])
    rows = result.stage("loadtest").summary["runs"]
    assert len(rows) == 12
    assert rows[0]["completed"] == "8 of 8"
    assert rows[0]["queue ms"] == "0.0"
    by_system = {one["system"]: one["figures"] for one in found["runs"] if one["load"] == "closed 6"}
    assert by_system["static"]["latencies"]["queue"]["mean"] > by_system["engine"]["latencies"]["queue"]["mean"]


def test_each_profile_runs(write: Write, llm: SimulatedLLM, tmp_path: Path) -> None:
    path = write(STAGES)
    for sets, name in (
        (["concurrency=3"], "closed 3"),
        (["profile=poisson", "rate=50", "burstiness=0.5"], "poisson 50/s"),
        (["profile=burst", "burst={size: 4, every: 1s}"], "bursts of 4"),
    ):
        assert run(path, *sets).ok
        (one,) = figures()["runs"]
        assert (one["load"], one["figures"]["completed"]) == (name, 8)
    (tmp_path / "t.jsonl").write_text('{"prompt": "ab", "arrival": 3}\n{"prompt": "c", "arrival": 5, "output_tokens": 2}\n')
    recorded = write(STAGES.replace("{tokens: {median: 20, sigma: 0.5}}", "{file: t.jsonl}"), "r.yaml")
    assert run(recorded, "profile=recorded").ok
    (one,) = figures()["runs"]
    assert (one["figures"]["completed"], one["figures"]["output_tokens"]["sum"]) == (2, 8)
    assert 2.0 < one["figures"]["duration"] < 2.2
    (tmp_path / "t.jsonl").write_text('"x"\n')
    result = run(recorded, "profile=recorded")
    assert "has no 'arrival'" in result.stage("loadtest").error


def test_missed_service_levels_are_exit_code_4_with_a_report(write: Write, llm: SimulatedLLM) -> None:
    result = run(write(STAGES), "profile=sweep", "concurrency=[1, 8]", "slo={ttft_p95: 40ms, errors: 0}", "peak=1")
    assert result.ok  # beyond the declared peak nothing is demanded
    result = run(write(STAGES), "profile=sweep", "concurrency=[1, 8]", "slo={ttft_p95: 40ms, errors: 0}")
    stage = result.stage("loadtest")
    assert (result.exit_code, stage.status) == (4, "failed")
    assert stage.error.startswith("closed 8: ttft P95")
    assert "is above 40 ms" in stage.error
    assert len(stage.summary["runs"]) == 2
    assert figures()["missed"] == [stage.error]
    assert stage.error in Path("out/loadtest.html").read_text("utf-8")
    assert figures()["runs"][0]["figures"]["goodput"] > 0


def test_an_interrupt_writes_what_there_is(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = SimulatedLLM(interrupt_at=100.2)
    in_virtual_time(monkeypatch, llm)
    result = run(write(STAGES), "profile=sweep", "concurrency=[1, 2, 4]")
    assert (result.exit_code, result.stage("loadtest").status) == (130, "interrupted")
    found = figures()
    assert found["interrupted"]
    assert found["runs"][-1]["interrupted"]
    assert 0 < found["runs"][-1]["figures"]["completed"] < 8
    assert "Interrupted" in Path("out/loadtest.html").read_text("utf-8")
    assert not llm.engine.has_unfinished


def test_what_cannot_work_is_one_line_and_leaves_no_report(write: Write, llm: SimulatedLLM, tmp_path: Path) -> None:
    path = write(STAGES)
    (tmp_path / "t.jsonl").write_text('"fine"\n{"promt": 1}\n')
    file = write(STAGES.replace("{tokens: {median: 20, sigma: 0.5}}", "{file: t.jsonl}"), "f.yaml")
    for source, sets, why in (
        (path, ["output_tokens={median: 600}"], "max_context is 512"),
        (path, ["output_tokens={median: 6, max: 50}", "max_tokens=20"], "output_tokens.max 50 is above max_tokens 20"),
        (file, [], "t.jsonl:2: "),
    ):
        result = run(source, "concurrency=1", *sets)
        assert not result.ok
        error = result.stage("loadtest").error
        assert why in error
        assert len(error.splitlines()) == 1
        assert not Path("out/loadtest.html").exists()
    Path("file").write_text("")
    assert "cannot be made" in run(path, "concurrency=1", "report=file/x.html").stage("loadtest").error


def test_a_report_that_cannot_be_written_leaves_nothing_aside(
    write: Write, llm: SimulatedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def full(source: Any, target: Any) -> None:
        if "loadtest" in Path(target).name:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(loadtest_runner.os, "replace", full)
    result = run(write(STAGES), "concurrency=1")
    assert "No space left" in result.stage("loadtest").error
    assert list(Path("out").iterdir()) == []


class Page(html.parser.HTMLParser):
    """What a page refers to, and whether its tags are closed."""

    VOID = frozenset({"meta", "line", "circle", "polyline", "br", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.refers: list[str] = []
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.refers += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_stands_alone(write: Write, llm: SimulatedLLM) -> None:
    llm.name = "<script>alert(1)</script>"
    assert run(write(STAGES), "profile=sweep", "concurrency=[1, 4]", "baselines=static").ok
    text = Path("out/loadtest.html").read_text("utf-8")
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.refers == []
    assert not {"script", "link", "img", "iframe", "object"} & page.seen
    assert not any(word in text for word in ("http:", "https:", "url(", "@import", "//"))
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport"' in text
    assert text.count("<svg") >= 10
    assert "(e2e - ttft) / (output tokens - 1)" in text
    assert not re.search(r"\bnan\b|\binf\b|None", text)


def test_simulated_time_is_all_that_passes(llm: SimulatedLLM, write: Write) -> None:
    """The same file gives the same figures: nothing of the machine's own clock is in them."""
    first, second = [], []
    for found in (first, second):
        llm.engine.__init__()  # type: ignore[misc]
        assert run(write(STAGES), "profile=poisson", "rate=[20, 200]", "baselines=whole_length").ok
        found += figures()["runs"]
    assert first == second


@pytest.mark.slow
def test_a_tiny_model_end_to_end(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real engine: every baseline answers all requests on the programs that were compiled once."""
    config = CONFIGS["llama-mqa-rope"]  # and the sizes of tests/engine/test_multi_step.py: one compile for both
    llm = LLM(
        params=random_params(config), config=config, max_context=64, page_size=16, max_sequences=4, max_tokens_per_step=64,
        decode_steps=4, row_buckets=(4,), token_buckets=(64,),
    )  # fmt: skip
    monkeypatch.setattr(engine_stage, "build_engine", lambda *args, **options: llm)
    monkeypatch.setattr(engine_stage.EngineKind, "summary", lambda self, value: {})
    path = write(
        "stages:\n  model: {source: {random: {preset: llama-8b}}}\n  engine: {max_context: 64}\n"
        "  loadtest: {concurrency: 9, requests: 12, prompts: {tokens: {median: 9, sigma: 0.6, max: 30}}, "
        "output_tokens: {median: 4, sigma: 0.5, max: 12}, max_tokens: 30, baselines: [static, whole_length, fifo]}\n"
    )
    result = run_stages(load(path))
    assert result.ok, [stage.error for stage in result.stages]
    runs = {one["system"]: one["figures"] for one in figures()["runs"]}
    assert set(runs) == {"engine", "static", "whole_length"}
    for one in runs.values():
        assert (one["completed"], one["errors"]) == (12, {})
        assert one["output_tokens"]["sum"] == runs["engine"]["output_tokens"]["sum"]
        assert 0 < one["peak_pages_used"] <= one["peak_pages_reserved"] <= one["num_pages"]
    assert llm.engine.runner.compiles_after_ready == 0
    assert llm.engine.pool.num_used == 0
