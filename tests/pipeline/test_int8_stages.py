"""The stages calibrate, quantize and gate: what the file says, what lies in the store, who is served. A tiny random model."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import Field

from llmjax.errors import StoreError
from llmjax.model.checkpoint.orbax import read_orbax_config
from llmjax.model.param_spec import param_bytes
from llmjax.pipeline import ConfigErrors, RunResult, load, plan, run, stages
from llmjax.pipeline.memory_plan import memory_plan
from llmjax.pipeline.model_source import StoredModel, TokenizerFiles
from llmjax.pipeline.quantize_runner import read_report
from llmjax.pipeline.schema import StageSection
from llmjax.pipeline.stages import StageContext, StageInput, StageKind
from llmjax.pipeline.stages.gate import GateSection
from llmjax.pipeline.stages.quantize import QuantizeKind
from llmjax.pipeline.stored_calibration import StoredCalibration

Write = Callable[..., Path]

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (
    "{family: llama, vocab_size: 97, hidden_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1, head_dim: 16, mlp_size: 48, "
    "max_positions: 128}"
)
BASE = f"runtime: {{platform: cpu}}\nstages:\n  base: {{uses: model, source: {{random: {{scale: 0.3, config: {SHAPE}}}}}}}\n"
CALIBRATE = "  calibrate: {data: {path: seen.jsonl}, samples: 6, sequence_length: 48}\n"
INT8 = "  int8: {uses: quantize, model: base, scheme: w8a16}\n"
READS = "outputs: 0, min_tokens: 50, limits: [{metric: loop_rate_increase, max: null}]"
GATE = f"  gate: {{baseline: base, candidate: int8, data: {{path: held.jsonl}}, {READS}}}\n"
NEVER = ["stages.gate.limits=[{metric: loop_rate_increase, max: null}, {metric: kl, max: 0}]"]


@pytest.fixture(autouse=True)
def texts(tmp_path: Path) -> None:
    """Token ids in two files, beside the pipeline."""
    for name, seed in (("seen", 1), ("held", 2)):
        draw = random.Random(seed)
        lines = [json.dumps({"prompt_ids": [draw.randrange(97) for _ in range(draw.randrange(20, 40))]}) for _ in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


class TakeSection(StageSection):
    """Takes a model."""

    model: str | None = Field(None, description="Stage with a model.")


class TakeKind(StageKind[TakeSection]):
    """Notes which model it was given."""

    name = "take"
    section = TakeSection
    gives = "nothing"
    inputs: ClassVar = (StageInput("model", "model"),)

    def __init__(self) -> None:
        self.taken: list[tuple[str, str | None]] = []

    def run(self, context: StageContext[TakeSection]) -> Any:
        self.taken.append((context.name, context.inputs["model"].name))


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> TakeKind:
    """Registers the kind `take` for one test."""
    kind = TakeKind()
    monkeypatch.setitem(stages._registered, kind.name, kind)
    return kind


def statuses(result: RunResult) -> dict[str, str]:
    return {stage.name: stage.status for stage in result.stages}


def stored(kind: str) -> list[Path]:
    """Complete results of a kind in the store."""
    return sorted(path.parent for path in Path(".llmjax/store", kind).glob("*/manifest.json"))


class Heard:
    """A reporter that keeps messages and progress."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.done: list[tuple[str, int, int | None]] = []

    def stage(self, name: str, event: str, text: str = "", figures: Any = None) -> None: ...

    def progress(self, name: str, done: int, total: int | None) -> None:
        self.done.append((name, done, total))

    def message(self, level: str, text: str) -> None:
        self.messages.append(text)

    def close(self) -> None: ...


def keys(path: Path, *sets: str) -> dict[str, str | None]:
    return {stage.name: stage.key for stage in plan(load(path, sets=list(sets))).stages}


def test_from_a_float_model_to_answers_of_an_int8_one(write: Write) -> None:
    engine = (
        "  engine: {model: gate, max_context: 64, kv_cache: {dtype: int8, memory: 64KiB}, batching: {max_sequences: 1, "
        "max_tokens_per_step: 64, buckets: {tokens: 64}}}\n"
        "  batch: {input: ask.jsonl, output: out.jsonl, resume: replace, defaults: {max_tokens: 4, temperature: 0}}\n"
    )
    options = (
        "smoothing: fitted, max_sensitivity: 0.5, kl_samples: 0, sensitivity_samples: 3, max_perplexity_ratio: 1.5, "
        "keep: {mlp.down: bfloat16}, export: out/int8}"
    )
    path = write(f"{BASE}{CALIBRATE}{INT8.replace('w8a16}', f'w8a8, {options}')}{GATE}{engine}")
    (path.parent / "ask.jsonl").write_text('{"prompt": [5, 6, 7]}\n', "utf-8")
    heard = Heard()
    loose = ["stages.gate.limits=[{metric: loop_rate_increase, max: null}, {metric: perplexity_ratio, max: 9}, "
             "{metric: top1_agreement, min: 0}, {metric: kl, max: 9}, {metric: kl_p99, max: 9}]"]  # fmt: skip
    (expected,) = memory_plan(load(path, sets=loose))
    limits = "max_sensitivity and max_perplexity_ratio"
    assert expected.assumed == f"int8 is not made yet: what {limits} keep in float32 is counted as int8"
    first = run(load(path, sets=loose), reporter=heard)
    assert first.ok, [stage.error for stage in first.stages]
    assert first.stage("calibrate").summary["samples"] == 6
    assert first.stage("int8").summary["int8 linears"] == "3 of 4"
    assert first.stage("gate").summary == {"model": "llama-w8a8"}
    assert ("calibrate", 6, 6) in heard.done
    (answer,) = [json.loads(line) for line in Path("out.jsonl").read_text("utf-8").splitlines()]
    assert answer["usage"]["completion_tokens"] == 4

    (int8,), (verdict,) = stored("quantize"), stored("gate")
    told = json.loads((verdict / "verdict.json").read_text("utf-8"))
    assert (told["passed"], told["version"]) == (True, 1)
    assert told["quality"]["agreement"]["perplexity_ratio"] != 1  # another model was read than the baseline
    assert told["quality"]["blocks"].keys() == {"layers.0.attention", "layers.0.mlp"}
    assert all(0.1 < error < 3 for error in told["quality"]["blocks"].values())
    assert any(line.split()[:2] == ["perplexity_ratio", "ok"] for line in heard.messages)
    assert (verdict / "report.html").read_text("utf-8").count("The candidate passed the gate.") == 1
    (known,) = memory_plan(load(path, sets=loose))  # nothing was kept for its sensitivity, so that it was expected right
    assert known == dataclasses.replace(expected, assumed="")
    assert known.plan.weights == param_bytes(read_orbax_config(int8 / "model")[0])
    assert known.plan.page_bytes == 2 * 16 * (16 + 4)  # keys and values of a head of 16, each with a scale
    report = read_report(int8)
    assert report is not None
    by_name = {layer.name: layer for layer in report.layers}
    assert (by_name["layers.0.mlp.down"].dtype_after, by_name["layers.0.mlp.down"].kept) == ("bfloat16", "kept by a pattern")
    decided = json.loads((int8 / "plan.json").read_text("utf-8"))
    assert (decided["max_perplexity_ratio"], report.facts["perplexity ratio"]) == (
        1.5,
        f"{decided['perplexity_ratio']:.4f}, at most 1.5",
    )
    assert 0.9 < decided["perplexity_ratio"] <= 1.5
    plan_of = decided["linears"]
    assert [decision["dtype"] for decision in plan_of.values()] == ["int8", "int8", "int8", "bfloat16"]
    qkv = by_name["layers.0.attention.qkv"]
    assert (qkv.dtype_before, qkv.dtype_after, qkv.bytes_before, qkv.bytes_after) == ("float32", "int8", 64 * 32 * 4, 64 * 36)
    assert qkv.relative_l2 is not None
    for layer in (layer for layer in report.layers if layer.linear):
        assert layer.error_before is not None
        assert layer.error_after is not None
        assert 0 < layer.error_before < 0.2
        assert 0 < layer.error_after < 0.2
    assert "Error of each layer" in (int8 / "report.html").read_text("utf-8")
    assert qkv.input_range is not None
    assert (Path("out/int8") / "model.safetensors").is_file()

    second = run(load(path, sets=loose), reporter=(again := Heard()))
    assert second.ok
    assert (statuses(second)["calibrate"], statuses(second)["int8"]) == ("reused", "reused")
    assert any("the verdict is in the store" in line for line in again.messages)
    assert json.loads(Path("out.jsonl").read_text("utf-8")) == answer


def test_who_is_blocked_and_who_is_served(write: Write, take: TakeKind) -> None:
    taking = "  a: {uses: take, model: gate}\n  b: {uses: take, model: int8}\n  c: {uses: take, model: base}\n"
    path = write(BASE + INT8 + GATE + taking)
    assert run(load(path)).ok
    assert take.taken == [("a", "llama-w8a16"), ("b", "llama-w8a16"), ("c", None)]
    take.taken.clear()
    for _ in range(2):  # the second time the verdict is in the store
        stopped = run(load(path, sets=NEVER))
        assert stopped.exit_code == 3
        assert statuses(stopped) == {
            "base": "done", "int8": "reused", "gate": "rejected", "a": "blocked", "b": "blocked", "c": "done",
        }  # fmt: skip
        assert stopped.stage("gate").error.startswith("the candidate is refused: kl ")
        assert take.taken == [("c", None)]
        take.taken.clear()
    fallen = run(load(path, sets=[*NEVER, "stages.gate.on_fail=fallback"]))
    assert (fallen.exit_code, statuses(fallen)["b"]) == (3, "blocked")
    assert take.taken == [("a", None), ("c", None)]  # the baseline
    decisions = [json.loads((folder / "verdict.json").read_text("utf-8"))["decision"] for folder in stored("gate")]
    assert sorted(decisions) == ["fallback", "pass", "stop"]


def test_a_forced_gate_measures_again_and_a_damaged_verdict_is_no_verdict(write: Write) -> None:
    path = write(BASE + INT8 + GATE)
    assert run(load(path)).ok
    (folder,) = stored("gate")
    (folder / "verdict.json").write_text('{"passed": 1}', "utf-8")
    damaged = run(load(path))
    assert (damaged.exit_code, "verdict.json is damaged; delete" in damaged.stage("gate").error) == (5, True)
    assert run(load(path), force=["gate"]).ok
    assert json.loads((folder / "verdict.json").read_text("utf-8"))["passed"] is True
    (folder / "verdict.json").write_text('{"passed": 1}', "utf-8")
    assert run(load(path), force=["int8"]).ok  # a candidate that is made again is measured again


def test_what_is_stored_is_what_rounding_gives(write: Write) -> None:
    import jax

    from llmjax.model.checkpoint.load import load_model
    from llmjax.pipeline.digest import Digests
    from llmjax.quantization.quantize import plan_quantization, quantize_params

    path = write(BASE + "  int8: {uses: quantize, model: base, scheme: w8a16, granularity: {weights: tensor}}\n")
    assert run(load(path)).ok
    (folder,) = stored("quantize")
    found = StoredModel.open(folder, "k").load(Digests())
    assert found.path is None  # so that nobody looks for a tokenizer that there is not
    section = load(path).stage("base").config
    model = load_model(random=section.source.random.config.shape("float32"), dtype="float32", scale=0.3)  # type: ignore[union-attr]
    decided = plan_quantization(model.config, "w8a16")
    params, config = quantize_params(model.params, model.config, decided, granularity="tensor")
    assert found.config == config
    for ours, wanted in zip(jax.tree.leaves(found.params.result()), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(wanted))


def test_a_calibration_that_was_cut_off_goes_on(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    from llmjax.pipeline.stages import calibrate as stage

    module = importlib.import_module("llmjax.quantization.calibrate")
    collect = module.collect
    calls = 0

    def counted(*args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        collect(*args, **options)

    monkeypatch.setattr(module, "collect", counted)
    monkeypatch.setattr(stage, "CHECKPOINT_EVERY", 1)
    path = write(BASE + CALIBRATE)
    cut = run(load(path))
    assert (cut.exit_code, statuses(cut)["calibrate"], stored("calibrate")) == (130, "interrupted", [])
    heard = Heard()
    assert run(load(path), reporter=heard).ok
    groups = calls - 1  # one was cut off
    assert heard.done[0] == ("calibrate", 2, 6)  # one sample of 20 to 39 tokens a group of 48
    assert not list(Path(".llmjax/partial").iterdir())
    (folder,) = stored("calibrate")
    resumed = StoredCalibration.open(folder)
    kept = resumed.statistics()
    assert resumed.samples(2) == resumed.samples(6)[:2]
    assert sum(len(sample) for sample in resumed.samples(6)) == kept.tokens == resumed.figures["tokens"]
    assert run(load(path), force=["calibrate"]).ok
    assert calls - 1 - groups == groups  # from the beginning
    fresh = StoredCalibration.open(folder).statistics()
    for name, linear in kept.linears.items():
        np.testing.assert_array_equal(linear.tensor.counts, fresh.linears[name].tensor.counts)
        np.testing.assert_array_equal(linear.channel_absmax, fresh.linears[name].channel_absmax)


def test_a_calibration_of_another_model_is_refused(write: Write) -> None:
    other = BASE.partition("stages:\n")[2].replace("base", "other").replace("scale: 0.3", "scale: 0.2")
    calibrate = CALIBRATE.replace("{data", "{model: other, data")
    result = run(load(write(BASE + other + calibrate + INT8)))
    assert result.exit_code == 2
    assert "the calibration is of another model" in result.stage("int8").error


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("keep: {mlp.up: bfloat16}", "pattern 'mlp.up' matches no weight"),
        ("dtypes: {embeddings: bfloat16}", "no weight would be int8"),
        ("export: there", "export: there exists already"),
    ],
)
def test_what_only_the_model_shows_fails_the_stage(write: Write, stage: str, error: str) -> None:
    Path("there").mkdir()
    result = run(load(write(f"{BASE}  int8: {{uses: quantize, scheme: w8a16, {stage}}}\n")))
    assert not result.ok
    assert error in result.stage("int8").error
    assert stored("quantize") == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (INT8.replace("w8a16", "w4a16"), "6:47: stages.int8.scheme: expected one of w8a16, w8a8, got 'w4a16'"),
        ("  int8: {uses: quantize}\n", "stages.int8.scheme: this key is required"),
        (INT8.replace("}", ", max_sensitivity: 0.1}"), "stages.int8.max_sensitivity: needs a calibration, and no earlier stage"),
        (INT8.replace("}", ", smoothing: 0.5}"), "stages.int8.smoothing: needs a calibration"),
        (INT8.replace("}", ", smoothing: 2}"), "stages.int8.smoothing: must be fitted, or a number from 0 to 1, got 2"),
        (INT8.replace("}", ", smoothing: fited}"), "stages.int8.smoothing: must be fitted, or a number from 0 to 1, got 'fited'"),
        (INT8.replace("}", ", granularity: {activations: tensor}}"), "stages.int8.granularity.activations: a scale for"),
        (INT8.replace("}", ", keep: {lm_head: int8}}"), "stages.int8.keep.lm_head: "),
        ("  calibrate: {samples: 4}\n", "stages.calibrate.data: this key is required"),
        (CALIBRATE.replace("samples: 6", "samples: 0"), "stages.calibrate.samples: "),
        (CALIBRATE.replace("samples: 6", "observer: median"), "stages.calibrate.observer: expected one of absmax,"),
        (CALIBRATE.replace("jsonl}", "jsonl, template: yes}"), "stages.calibrate.data.template: expected one of chat"),
        (INT8 + GATE.replace("loop_rate_increase", "perplexity"), "stages.gate.limits[0].metric: expected "),
        (INT8 + GATE.replace("max: null", "min: 1"), "stages.gate.limits[0]: the limit of loop_rate_increase has one bound"),
        (INT8 + GATE.replace("max: null", "max: -1"), "stages.gate.limits[0]: the limit of loop_rate_increase must be a"),
        (INT8 + GATE.replace("max: null", "max: 0.1"), "stages.gate.outputs: loop_rate_increase has a limit"),
        (INT8 + GATE.replace("null}", "null}, {metric: kl, max: 1}, {metric: kl, max: 2}"), "stages.gate.limits[2]: the limit"),
        (INT8 + GATE.replace("null}", "null}, {metric: arithmetic_drop, max: 0}"), "stages.gate.arithmetic: arithmetic_drop"),
        (GATE, "stages.gate.candidate: there is no stage 'int8'"),
        (INT8 + GATE.replace("baseline: base, ", ""), "stages.gate: several earlier stages give a model: base, int8; say which"),
    ],
)  # fmt: skip
def test_every_mistake_has_its_place(write: Write, text: str, error: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(write(BASE + text))
    assert len(caught.value.messages) == 1, caught.value.messages
    assert error in caught.value.messages[0]


def test_files_that_are_not_there_have_a_place_too(write: Write) -> None:
    text = BASE + CALIBRATE.replace("seen", "unseen") + INT8 + GATE.replace("held", "unheld")
    with pytest.raises(ConfigErrors) as caught:
        plan(load(write(text)))
    assert [message.split(": ")[1] for message in caught.value.messages] == [
        "stages.calibrate.data.path", "stages.gate.data.path",
    ]  # fmt: skip


def test_keys_follow_fields_and_inputs(write: Write, tmp_path: Path) -> None:
    path = write(BASE + CALIBRATE + INT8 + GATE)
    before = keys(path)

    def changed(*sets: str) -> list[str]:
        return [name for name, key in keys(path, *sets).items() if key != before[name]]

    everything = ["calibrate", "int8", "gate"]
    assert changed() == []
    assert changed("stages.base.source.random.seed=1") == ["base", *everything]
    for one in ("samples=5", "sequence_length=40", "observer=mse", "seed=1", "data.limit=7"):
        assert changed(f"stages.calibrate.{one}") == everything
    for one in (
        "scheme=w8a8", "granularity.weights=tensor", "smoothing=0.5", "max_sensitivity=0.1", "export=e",
        "keep={layers.0: float32}",
    ):  # fmt: skip
        assert changed(f"stages.int8.{one}") == ["int8", "gate"]
    for one in ("on_fail=fallback", "min_tokens=51", "sequence_length=30", "arithmetic=3", "data.limit=7"):
        assert changed(f"stages.gate.{one}") == ["gate"]
    (tmp_path / "held.jsonl").write_text('{"prompt_ids": [1, 2]}\n', "utf-8")
    assert changed() == ["gate"]
    (tmp_path / "seen.jsonl").write_text('{"prompt_ids": [1, 2]}\n', "utf-8")
    assert changed() == everything
    ways = ["{linear: int8, mlp: float32}", "{mlp: float32, linear: int8}"]
    assert len({keys(path, f"stages.int8.dtypes={way}")["int8"] for way in ways}) == 2  # a later pattern has the word


def test_a_calibration_is_taken_where_there_is_one(write: Write) -> None:
    assert dict(load(write(BASE + INT8)).stage("int8").inputs) == {"model": "base"}
    assert dict(load(write(BASE + CALIBRATE + INT8)).stage("int8").inputs) == {"model": "base", "calibration": "calibrate"}
    second = CALIBRATE.replace("calibrate: {", "second: {uses: calibrate, ")
    with pytest.raises(ConfigErrors, match="several earlier stages give a calibration: calibrate, second"):
        load(write(BASE + CALIBRATE + second + INT8))
    switched_off = CALIBRATE.replace("{data", "{when: never, data")
    assert QuantizeKind().check_inputs(load(write(BASE + switched_off + INT8)).stage("int8").config, {}) == []  # type: ignore[arg-type]
    with pytest.raises(ConfigErrors, match="smoothing: needs a calibration"):
        load(write(BASE + switched_off + INT8.replace("}", ", smoothing: 1}")))


def test_metrics_of_the_file_are_those_of_the_gate() -> None:
    from llmjax.pipeline.stages.gate import LimitSection
    from llmjax.quantization.gate import METRICS, Limits

    assert LimitSection.model_fields["metric"].annotation.__args__ == tuple(METRICS)  # type: ignore[union-attr]
    section = GateSection.model_validate({"data": {"path": "x"}, "min_outputs": 3, "limits": [{"metric": "kl", "max": None}]})
    limits = section.gate_limits()
    assert (limits.max_kl, limits.max_kl_p99, limits.min_outputs) == (None, Limits().max_kl_p99, 3)


def test_validate_and_plan_do_without_jax(write: Write) -> None:
    path = write(BASE + CALIBRATE + INT8 + GATE)
    code = (
        "import sys; from llmjax.pipeline import explain, json_schema, load, plan; "
        f"plan(load({str(path)!r})); explain('gate.limits'); json_schema(); print(*{{m.split('.')[0] for m in sys.modules}})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(ran.stdout.split())
    assert not loaded & {"jax", "jaxlib", "flax", "orbax", "torch", "transformers"}


def test_a_damaged_result_says_what_to_do(tmp_path: Path) -> None:
    for opened in (StoredModel.open, lambda folder, _: StoredCalibration.open(folder)):
        with pytest.raises(StoreError, match=r"is damaged .*; delete"):
            opened(tmp_path, "k")
    gone = StoredModel(tmp_path, "k", "tiny-w8a8", TokenizerFiles(tmp_path / "gone.gguf"))
    with pytest.raises(Exception, match=r"gone.gguf is gone, and tiny-w8a8 has its tokenizer there"):
        gone.tokenizer_files(None)  # type: ignore[arg-type]  # not looked at


def test_a_budget_without_samples_of_its_own_says_what_to_do(write: Write) -> None:
    path = write(BASE + CALIBRATE + INT8.replace("}", ", max_perplexity_ratio: 1.01, sensitivity_samples: 6, kl_samples: 0}"))
    result = run(load(path))
    assert "max_perplexity_ratio is measured on samples of the calibration behind the 6 of" in result.stage("int8").error
    with pytest.raises(ConfigErrors, match=r"max_perplexity_ratio.*needs a calibration"):
        load(write(BASE + INT8.replace("}", ", max_perplexity_ratio: 1.01}")))
