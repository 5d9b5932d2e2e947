"""Recalibration: when it is due by a fake clock, from what, and what becomes of the served model. A tiny random model."""

from __future__ import annotations

import json
import os
import random
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llmjax.errors import ConfigError, GateRejectedError, LlmjaxError
from llmjax.pipeline import ConfigErrors, load, plan, run
from llmjax.pipeline.recalibration import Chain, Recalibration, State, chain_of, check_service, state_path, with_data
from llmjax.pipeline.recalibration_runs import Runs
from llmjax.pipeline.stages.calibrate import RecalibrateSection
from llmjax.pipeline.traffic_sample import traffic_files, write_sample
from llmjax.quantization.drift import Drift

Write = Callable[..., Path]
LINEARS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
DAY = 86400.0
SHAPE = (
    "{family: llama, vocab_size: 97, hidden_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1, head_dim: 16, mlp_size: 48, "
    "max_positions: 128}"
)
LOOSE = (
    "[{metric: loop_rate_increase, max: null}, {metric: perplexity_ratio, max: 9}, {metric: top1_agreement, min: 0}, "
    "{metric: kl, max: 9}, {metric: kl_p99, max: 9}]"
)
PIPELINE = f"""\
stages:
  base: {{uses: model, source: {{random: {{scale: 0.3, config: {SHAPE}}}}}}}
  calibrate:
    data: {{path: seen.jsonl, column: prompt_ids, limit: 8}}
    samples: 6
    sequence_length: 48
    recalibrate: {{drift_above: 0.6, every: 7d}}
  int8: {{uses: quantize, model: base, scheme: w8a16, smoothing: 0.5}}
  gate: {{baseline: base, candidate: int8, data: {{path: held.jsonl}}, outputs: 0, min_tokens: 50, limits: {LOOSE}}}
  engine: {{model: gate, max_context: 64}}
  serve: {{port: 0, traffic: {{path: traffic.jsonl, sample: 100%}}}}
"""


def ids(draw: random.Random, short: int, long: int) -> list[int]:
    return [draw.randrange(97) for _ in range(draw.randrange(short, long))]


@pytest.fixture
def file(write: Write, tmp_path: Path) -> Path:
    """The pipeline, with texts beside it."""
    for name, seed in (("seen", 1), ("held", 2)):
        draw = random.Random(seed)
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt_ids": ids(draw, 20, 40)}) + "\n" for _ in range(8)))
    return write(PIPELINE)


def line(moment: float, prompt: list[int]) -> str:
    return (
        json.dumps({"time": moment, "endpoint": "completions", "prompt_ids": prompt, "output": "", "output_ids": [1, 2]}) + "\n"
    )


class FakeWorkshop:
    """Notes what is asked of it. `fails` names what raises, `d` is what drift is found."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.made: float | None = 0.0
        self.enough = True
        self.d = 0.1
        self.starts = True
        self.fails: dict[str, LlmjaxError] = {}
        self._number = 0

    def _note(self, what: str, *data: str | None) -> None:
        self.asked.append(" ".join([what, *map(str, data)]))
        if what in self.fails:
            raise self.fails[what]

    def begun(self, data: str | None) -> float | None:
        return self.made

    def sample(self, since: float) -> str | None:
        self._number += 1
        self.asked.append(f"sample {since:g}")
        return f"t{self._number}" if self.enough else None

    def calibrate(self, data: str) -> None:
        self._note("calibrate", data)

    def drift(self, served: str | None, live: str) -> Drift:
        self._note("drift", served, live)
        return Drift({"layers.0.mlp.down": self.d}, {"layers.0.mlp.down": 0.0}, 0.05, 0.02)

    def judge(self, data: str) -> None:
        self._note("judge", data)

    def swap(self, data: str) -> bool:
        self._note("swap", data)
        return self.starts

    def forget(self, data: str) -> None:
        self._note("forget", data)


class Case:
    """A recalibration over a `FakeWorkshop` with a clock that is set."""

    def __init__(self, **rule: Any) -> None:
        self.now = 0.0
        self.shop = FakeWorkshop()
        self.saved: list[State] = []
        section = RecalibrateSection.model_validate(rule)
        self.one = Recalibration(section, self.shop, State(), self.saved.append, lambda: self.now)

    def look(self, now: float) -> list[str]:
        """What is asked for at a time."""
        self.now = now
        self.shop.asked = []
        self.one.look()
        return self.shop.asked


def test_time_alone_makes_a_candidate_and_the_one_that_passes_is_swapped_in() -> None:
    case = Case(every="7d")
    assert case.look(7 * DAY - 1) == []
    assert case.look(7 * DAY) == ["sample 0", "judge t1", "swap t1"]
    assert (case.one.state.data, case.one.state.passed, case.one.state.attempted) == ("t1", 1, 7 * DAY)
    assert case.saved[-1] is case.one.state
    assert case.look(14 * DAY - 1) == []
    assert case.look(14 * DAY) == [f"sample {7 * DAY:g}", "judge t2", "swap t2", "forget t1"]


def test_a_refused_candidate_leaves_the_old_model_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(every="7d")
    case.shop.fails["judge"] = GateRejectedError("top1")
    with caplog.at_level("INFO", logger="llmjax"):
        assert case.look(8 * DAY) == ["sample 0", "judge t1", "forget t1"]
    assert "the gate refused the candidate, and the served model stays: top1" in caplog.text
    state = case.one.state
    assert (state.data, state.passed, state.refused, state.failed) == (None, 0, 1, 0)
    assert case.look(9 * DAY) == []  # not again before its time


@pytest.mark.parametrize("where", ["calibrate", "drift", "judge"])
def test_what_fails_is_counted_and_tried_again(where: str) -> None:
    case = Case(drift_above=0.2)
    case.shop.d = 0.3
    case.shop.fails[where] = LlmjaxError("no memory")
    assert case.look(DAY)[-1] == "forget t1"
    assert (case.one.state.failed, case.one.state.data) == (1, None)
    case.shop.fails.clear()
    assert case.look(2 * DAY)[-1] == "swap t2"


def test_a_model_that_does_not_start_is_not_remembered() -> None:
    case = Case(every="1h")
    case.shop.starts = False
    assert case.look(DAY) == ["sample 0", "judge t1", "swap t1", "forget t1"]
    assert (case.one.state.data, case.one.state.failed, case.one.state.passed) == (None, 1, 0)


def test_drift_is_measured_at_each_look_and_acted_on_above_the_limit() -> None:
    case = Case(drift_above=0.2)
    assert case.look(DAY) == ["sample 0", "calibrate t1", "drift None t1", "forget t1"]
    assert case.one.state.drift == {"layers.0.mlp.down": 0.1, "lengths": 0.05}
    case.shop.d = 0.21
    assert case.look(2 * DAY) == [f"sample {DAY:g}", "calibrate t2", "drift None t2", "judge t2", "swap t2"]
    assert case.look(3 * DAY)[2] == "drift t2 t3"  # from what is served now


def test_traffic_is_looked_at_once_but_age_asks_for_all_of_it() -> None:
    """Without new requests a look costs nothing. One that failed has not looked."""
    case = Case(drift_above=0.2, every="3d")
    case.shop.fails["drift"] = LlmjaxError("no memory")
    assert case.look(DAY)[0] == "sample 0"
    case.shop.fails.clear()
    assert case.look(1.5 * DAY)[0] == "sample 0"
    case.shop.enough = False
    assert case.look(2 * DAY) == [f"sample {1.5 * DAY:g}"]
    assert case.look(3 * DAY) == ["sample 0"]


def test_the_state_is_saved_before_what_it_no_longer_names_is_removed() -> None:
    case = Case(every="7d")
    case.look(7 * DAY)
    at_save: list[list[str]] = []
    case.one = Recalibration(
        case.one._rule, case.shop, case.one.state, lambda state: at_save.append(list(case.shop.asked)), lambda: case.now
    )
    assert case.look(14 * DAY)[-1] == "forget t1"
    assert at_save[-1][-1] == "swap t2"


def test_it_waits_for_the_first_model_and_for_enough_traffic() -> None:
    case = Case(every="1d")
    case.shop.made = None
    assert case.look(9 * DAY) == []
    case.shop.made, case.shop.enough = 0.0, False
    assert case.look(9 * DAY) == ["sample 0"]
    assert case.one.state == State()


def test_the_state_outlives_the_service(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a" / "state.json"
    assert State.read(path) == State()
    (tmp_path / "sample").touch()
    state = State(str(tmp_path / "sample"), 5.0, 1, 2, 3, {"lengths": 0.25}, 0.1, 6.0)
    state.write(path)
    assert State.read(path) == state
    (tmp_path / "sample").unlink()
    assert State.read(path).data is None
    assert "is gone" in caplog.text
    path.write_text("{")
    assert State.read(path) == State()


# -- what the file says


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("{drift_above: 0.6, every: 7d}", "{}", "say when: give drift_above, every or both"),
        ("0.6", "1.5", "must be at most 1, got 1.5"),
        (", traffic: {path: traffic.jsonl, sample: 100%}", "", "needs 'serve' with 'traffic'"),
        ("model: gate", "model: int8", "must take a gate over a quantised model"),
        (", smoothing: 0.5", "", "'int8' does not depend on it"),
    ],
)
def test_what_it_lacks_is_told_where_it_is_asked_for(file: Path, old: str, new: str, told: str) -> None:
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ConfigErrors, match=f"recalibrate.*{told}"):
        load(file)


@pytest.mark.parametrize("values", [{"stages.serve": None}, {"stages.serve.when": "never"}])
def test_without_its_server_the_pipeline_is_as_good_as_any(file: Path, values: Mapping[str, Any]) -> None:
    """`llmjax tune` and `llmjax bench` leave it out."""
    assert chain_of(load(file, values=values).stages) == (None, [])


def test_frozen_and_recalibrated_is_a_contradiction(file: Path) -> None:
    chain, _ = chain_of(load(file).stages)
    with pytest.raises(ConfigError, match=r"calibrate\.recalibrate changes it"):
        check_service(chain, frozen=True)


def test_asking_for_it_changes_no_key(file: Path) -> None:
    with_it = {stage.name: stage.key for stage in plan(load(file)).stages}
    file.write_text(file.read_text().replace("    recalibrate: {drift_above: 0.6, every: 7d}\n", ""))
    assert {stage.name: stage.key for stage in plan(load(file)).stages} == with_it


# -- the traffic


def test_a_sample_is_of_the_newest_requests_of_all_processes(tmp_path: Path) -> None:
    log = tmp_path / "traffic.jsonl"
    log.write_text("".join(line(t, [t]) for t in range(10, 30)) + '{"time": 99}\n' + "no json\n" + line(98, [98])[:-1])
    (tmp_path / "traffic.1.jsonl").write_text("".join(line(t, [t]) for t in range(30, 40)))
    (tmp_path / "traffic.jsonl.1").write_text("".join(line(t, [t]) for t in range(10)))
    (tmp_path / "traffic.other.jsonl").write_text(line(97, [97]))
    assert [one.name for one in traffic_files(log)] == ["traffic.1.jsonl", "traffic.jsonl", "traffic.jsonl.1"]
    target = tmp_path / "out" / "sample.jsonl"

    def times() -> list[float]:
        return [json.loads(text)["time"] for text in target.read_text().splitlines()]

    assert write_sample(log, target, count=40, since=-1)
    assert times() == list(range(40))
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert write_sample(log, target, count=5, since=-1)
    chosen = times()
    assert len(chosen) == 5
    assert chosen == sorted(chosen)
    assert min(chosen) >= 20  # of the newest twenty
    assert write_sample(log, target, count=5, since=34)
    assert times() == [35, 36, 37, 38, 39]
    assert not write_sample(log, target.with_name("none"), count=6, since=34)
    assert not target.with_name("none").exists()
    assert not write_sample(tmp_path / "nowhere" / "log", target, count=1, since=0)


# -- the whole of it, in this process


class Bench:
    """`Runs` over the pipeline whose runs are in this process."""

    def __init__(self, file: Path, **values: Any) -> None:
        self.file = file
        self.swapped: list[Mapping[str, Any]] = []
        chain, _ = chain_of(self.load(values).stages)
        assert chain is not None
        self.chain: Chain = chain
        self.values = values
        self.path = state_path(self.load(values))
        self.runs = Runs(chain, values, self.load, self.run, self.swap)
        self.one = Recalibration(chain.rule, self.runs, State(), lambda state: state.write(self.path))

    def load(self, values: Mapping[str, Any]) -> Any:
        return load(self.file, values=values)

    def run(self, values: Mapping[str, Any], until: str) -> int:
        return run(self.load(values), until=until).exit_code

    def swap(self, values: Mapping[str, Any]) -> bool:
        self.swapped.append(values)
        return True

    def traffic(self, moment: float, short: int, long: int) -> None:
        draw = random.Random(short)  # not by the time: now and then lengths would differ by chance
        Path("traffic.jsonl").write_text("".join(line(moment + n, ids(draw, short, long)) for n in range(12)))


def stored(kind: str) -> list[str]:
    return sorted(path.parent.name for path in Path(".llmjax/store", kind).glob("*/manifest.json"))


def test_traffic_becomes_the_model_that_the_same_pipeline_starts_with(file: Path) -> None:
    bench = Bench(file, **{"runtime.platform": "cpu"})
    bench.one.look()  # nothing is calibrated yet
    assert not bench.path.exists()
    assert bench.run(bench.values, "calibrate") == 0
    (calibration,) = stored("calibrate")
    folder = Path(".llmjax/store/calibrate", calibration)
    made = os.stat(folder / "manifest.json").st_mtime
    assert stat.S_IMODE(os.stat(folder / "samples.npz").st_mode) == 0o600  # it may be traffic
    lock = Path(".llmjax/test.lock.json").read_text()

    bench.traffic(made + 1, 18, 38)  # with its answers, lengths are as before
    bench.one.look()
    assert not bench.swapped
    assert sorted(bench.one.state.drift) == [*sorted(f"layers.0.{name}" for name in LINEARS), "lengths"]
    assert 0 < bench.one.state.drift["lengths"] < 0.6
    assert stored("calibrate") == [calibration]  # what was made to look is gone
    assert list(bench.path.parent.glob("*.jsonl")) == []

    bench.traffic(made + 1000, 2, 6)  # much shorter ones, and later
    bench.one.look()
    assert bench.one.state.drift["lengths"] == 1
    (values,) = bench.swapped
    state = State.read(bench.path)
    assert (state.passed, state.refused, state.failed) == (1, 0, 0)
    assert state.data is not None
    again = plan(bench.load(values))  # as the engine's process is started: nothing is to be made but the engine
    actions = {stage.name: stage.action for stage in again.stages}
    assert [actions[name] for name in ("calibrate", "int8")] == ["reuse", "reuse"]
    assert [next(stage.key for stage in again.stages if stage.name == "gate")] == stored("gate")
    assert with_data(bench.chain, bench.values, state.data) == values
    assert Path(".llmjax/test.lock.json").read_text() == lock  # a plan of the pipeline knows of none of it


@pytest.mark.parametrize(("code", "raised"), [(3, GateRejectedError), (5, LlmjaxError), (0, LlmjaxError)])
def test_a_run_that_leaves_no_passing_verdict_is_no_success(file: Path, code: int, raised: type[LlmjaxError]) -> None:
    """A refused candidate is removed, but for its verdict."""
    bench = Bench(file, **{"runtime.platform": "cpu"})
    sample = file.parent / "held.jsonl"
    keys = {stage.kind: stage.key for stage in plan(bench.load(with_data(bench.chain, bench.values, str(sample)))).stages}

    def leave(values: Mapping[str, Any], until: str) -> int:
        for kind in ("calibrate", "quantize", *(["gate"] if code == 3 else [])):
            folder = Path(".llmjax/store", kind, str(keys[kind]))
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text("{}")
        return code

    runs = Runs(bench.chain, bench.values, bench.load, leave, bench.swap)
    with pytest.raises(LlmjaxError) as error:
        runs.judge(str(sample))
    assert type(error.value) is raised
    runs.forget(str(sample))
    assert (stored("calibrate"), stored("quantize"), len(stored("gate"))) == ([], [], 1 if code == 3 else 0)
    assert not sample.exists()


def test_the_cpu_makes_what_a_gpu_would_ask_for(file: Path) -> None:
    """Runs are on the CPU; what they leave in the store has the keys of the machine that serves. Nothing else is run."""
    file.write_text(
        file.read_text().replace("  gate:", "  spare: {uses: engine, model: base, kv_cache: {fraction: 5%}}\n  gate:")
    )
    file.write_text(file.read_text().replace("serve: {", "serve: {engine: engine, "))
    seen: list[Mapping[str, Any]] = []
    bench = Bench(file, **{"runtime.platform": "cuda", "runtime.memory_fraction": 0.9})

    def note(values: Mapping[str, Any], until: str) -> int:
        seen.append(values)
        return 0

    runs = Runs(bench.chain, bench.values, bench.load, note, bench.swap)
    sample = str(file.parent / "held.jsonl")
    runs.calibrate(sample)
    served = plan(bench.load(with_data(bench.chain, bench.values, sample)))
    made = plan(bench.load(seen[0]))
    assert made.runtime.platform == "cpu"
    names = ("base", "calibrate", "int8", "gate")
    keys = [{stage.name: stage.key for stage in one.stages if stage.name in names} for one in (made, served)]
    assert keys[0] == keys[1]
    assert len(keys[0]) == 4
    assert [stage.name for stage in made.stages if stage.action == "off"] == ["spare"]


def test_what_a_look_left_that_was_cut_off_is_removed(file: Path) -> None:
    """The sample, and what was made of it, finished or half. What is served stays, and so do other pipelines' samples."""
    bench = Bench(file, **{"runtime.platform": "cpu"})
    folder = bench.path.parent
    folder.mkdir(parents=True)
    served, left, other = (folder / name for name in ("test-1.jsonl", "test-2.jsonl", "test-more-3.jsonl"))
    for number, path in enumerate((served, left, other)):
        path.write_text(line(number, [1, 2, 3]))
    made = {}
    for path in (served, left):
        keys = {stage.kind: stage.key for stage in plan(bench.load(with_data(bench.chain, bench.values, str(path)))).stages}
        calibrate, quantize = (Path(".llmjax/store", kind, str(keys[kind])) for kind in ("calibrate", "quantize"))
        half = quantize.with_name(f".{quantize.name[:12]}.0123abcd")
        made[path] = [calibrate, quantize, half, Path(".llmjax/partial", f"calibrate-{keys['calibrate']}")]
        for one in made[path]:
            one.mkdir(parents=True)
            (one / "manifest.json").write_text("{}")
    bench.runs.forget_all_but(str(served))
    assert sorted(folder.iterdir()) == [served, other]
    assert all(one.exists() for one in made[served])
    assert not any(one.exists() for one in made[left])
