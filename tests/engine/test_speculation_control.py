"""The control inside an engine: what requests are told of their drafts, what is counted, when it is off, and changing it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import jax.numpy as jnp
import pytest
from fakes_scheduling import make_request
from remembering_model import RememberingConfig, greedy_after, make_table

from llmjax.engine import runner as runner_module
from llmjax.engine.config import EngineConfig
from llmjax.engine.draft_model import DraftModel
from llmjax.engine.engine import Engine
from llmjax.engine.engine_view import picture_json, read_engine, take_picture
from llmjax.engine.launch_timer import LaunchTimer
from llmjax.engine.outputs import RequestOutput
from llmjax.errors import ConfigError
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.request_speculation import WARM_UP
from llmjax.scheduling.speculation import LaunchSeconds, Speculation
from llmjax.scheduling.speculation_config import SpeculationConfig

CONFIG = RememberingConfig()
TABLE = make_table(5)
BUILT = SpeculationConfig(method="draft", tokens=3, disable_above_batch=2)
CHEAP = LaunchSeconds({4: 1.0}, {(4, 2): 1.2, (4, 3): 1.3})
LIMIT = 60


@pytest.fixture(scope="module")
def made() -> Engine:
    options = EngineConfig(
        max_context=96, max_sequences=4, max_tokens_per_step=32, prefill_chunk=24, decode_steps=1, row_buckets=(4,),
        token_buckets=(32,), speculative=BUILT,
    )  # fmt: skip
    draft = DraftModel(CONFIG, {"table": jnp.asarray(TABLE)})
    return Engine(CONFIG, {"table": jnp.asarray(TABLE)}, None, options, draft=draft)


@pytest.fixture
def engine(made: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A draft that is always right, nothing known of acceptance, and costs that the machine does not move."""
    monkeypatch.setattr(Speculation, "measured", lambda self, kind, rows, size, seconds, at_most=False: None)
    made.runner._draft_params = {"table": jnp.asarray(TABLE)}
    made.runner.launch_seconds = CHEAP
    made.speculation = made._paused = None
    made.set_policy(speculative=BUILT)
    return made


def ask(engine: Engine, count: int, limit: int = LIMIT) -> list[RequestOutput]:
    """So many prompts at a time; their outputs, which are those of the model alone."""
    params = SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True)
    prompts = [[random.randrange(CONFIG.num_tokens) for _ in range(9 + index)] for index in range(count)]
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step(closed=True) if output.finished}
    for name, prompt in zip(ids, prompts, strict=True):
        assert done[name].outputs[0].token_ids == greedy_after(TABLE, prompt, limit, CONFIG.num_tokens)
    return [done[name] for name in ids]


def always_wrong(engine: Engine) -> None:
    """The draft's next token is the one that the model finds least likely."""
    engine.runner._draft_params = {"table": jnp.asarray(-TABLE)}


def value(engine: Engine, name: str, **labels: str) -> float | None:
    return engine.metrics.registry.get_sample_value(f"llmjax:spec_decode_{name}", labels)


def test_good_drafts_are_used_and_told(engine: Engine) -> None:
    launches = engine.stats.launches
    outputs = ask(engine, 2)
    assert engine.stats.launches - launches < LIMIT / 2
    for output in outputs:
        told = output.speculation
        assert told is not None
        assert (told.off, told.drafted) == (None, told.accepted)
        assert told.rounds + told.accepted <= LIMIT
    assert value(engine, "num_drafts_total") == sum(one.speculation.rounds for one in outputs if one.speculation)
    assert value(engine, "num_accepted_tokens_total") == value(engine, "num_draft_tokens_total") > LIMIT
    assert value(engine, "acceptance") == value(engine, "acceptance_by_class", prompt_class="tokens") == 1.0
    assert value(engine, "acceptance_by_lane", lane="all") == 1.0
    assert (engine.stats.drafted, engine.stats.accepted) == (value(engine, "num_draft_tokens_total"),) * 2
    shown = json.loads(json.dumps(picture_json(take_picture(engine), read_engine(engine))))["speculation"]
    assert shown["accepted_at"][0] == shown["rounds"]
    assert shown["off"] is None


@pytest.mark.parametrize("count", [1, 2])
def test_b62_bad_drafts_are_off_within_the_window_and_the_reason_is_told(engine: Engine, count: int) -> None:
    always_wrong(engine)
    launches = engine.stats.launches
    outputs = ask(engine, count)
    for output in outputs:
        told = output.speculation
        assert told is not None
        assert told.off == "acceptance"
        assert WARM_UP <= told.rounds <= WARM_UP + 2  # those in flight
    assert value(engine, "switches_total", to="off", reason="acceptance") == count
    assert engine.stats.launches - launches <= LIMIT + 3 * count, "every launch but the prompts' gives a token"


def test_a_large_batch_is_told_too(engine: Engine) -> None:
    outputs = ask(engine, 4)
    assert [output.speculation and output.speculation.off for output in outputs].count("batch") >= 3
    assert value(engine, "num_drafts_total") == 0
    assert value(engine, "active") == 0
    assert value(engine, "switches_total", to="off", reason="batch") == 1


def test_the_policy_of_a_running_engine_changes_and_counts_stay(engine: Engine) -> None:
    ask(engine, 1)
    drafted = value(engine, "num_draft_tokens_total")
    engine.set_policy(speculative=None)
    (plain,) = ask(engine, 1)
    assert plain.speculation is None
    assert value(engine, "num_draft_tokens_total") is None
    engine.set_policy(speculative=dataclasses.replace(BUILT, tokens=2, adaptive=False, temperature=0.5))
    assert engine.runner._pack.draft_temperature == 0.5
    (shorter,) = ask(engine, 1)
    assert shorter.speculation is not None
    assert shorter.speculation.drafted <= 2 * shorter.speculation.rounds
    assert value(engine, "num_draft_tokens_total") == drafted + shorter.speculation.drafted
    assert engine.runner.compiles_after_ready == 0
    for other in ({"tokens": 4}, {"tokens": 2}, {"method": "ngram"}, {"disable_above_batch": 3}):
        with pytest.raises(ConfigError, match=r"the engine has no programs for .*build a new engine"):
            engine.set_policy(speculative=dataclasses.replace(BUILT, **other))  # type: ignore[arg-type]


@pytest.fixture
def never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are timed that follow another without a pause. On a busy machine none may: here all count that followed one."""
    launched = LaunchTimer.launched
    monkeypatch.setattr(
        LaunchTimer, "launched", lambda self, program, now_ns, *, late: launched(self, program, now_ns, late=False)
    )


@pytest.mark.usefixtures("never_late")
def test_what_launches_take_is_measured_and_followed(made: Engine) -> None:
    made.speculation = made._paused = None
    made.runner.warm_up()
    made.set_policy(speculative=dataclasses.replace(BUILT, adaptive=False))
    assert made.speculation is not None
    seconds = made.speculation.launch_seconds
    before = seconds.of(2, 3)
    assert 0 < before < 10
    ask(made, 2)
    assert seconds.of(2, 3) != before
    assert seconds.of(5, 3) == float("inf")


class Machine:
    """A host and a device in virtual time: the host takes `host` seconds to launch, the device what the program takes."""

    def __init__(self, host: float, programs: dict[str, float]) -> None:
        self.host, self.programs = host, programs
        self.now = self.free = 0.0

    def launch(self, kind: str) -> None:
        self.now += self.host
        self.free = max(self.now, self.free) + self.programs[kind]

    def wait(self) -> None:
        self.now = max(self.now, self.free)


@pytest.mark.parametrize("host", [0.1, 3.0])
def test_the_first_estimate_is_of_a_launch_among_others(made: Engine, monkeypatch: pytest.MonkeyPatch, host: float) -> None:
    """Of one launch alone the host's part would count as much as the device's."""
    machine, runner = Machine(host, {"decode": 4.0, "speculate": 5.0}), made.runner
    monkeypatch.setattr(runner, "_launch", lambda key, packed: machine.launch(key[0]))
    monkeypatch.setattr(runner_module.time, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(runner_module.jax, "block_until_ready", lambda arrays: machine.wait())
    assert runner._seconds(("decode", 4, 1)) == pytest.approx(4.0)
    assert runner._seconds(("speculate", 4, 3)) == pytest.approx(5.0)


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("host", [0.5, 1.5, 6.0])
def test_estimates_are_what_launches_take_and_good_drafts_are_found(rows: int, host: float) -> None:
    """Whatever the start had said, and also where the host is slower than a round: then a round takes what the host takes."""
    device = Machine(host, {"decode": 8 * 1.9, "speculate": 4.9})
    config = dataclasses.replace(BUILT, disable_above_batch=32)
    seconds = LaunchSeconds({1: 2.0, 32: 2.0}, {(size, length): 9.4 for size in (1, 32) for length in (2, 3)})
    speculation, timer = Speculation(config, seconds), LaunchTimer()
    requests = [make_request(str(row), 5, 10**6) for row in range(rows)]
    for request in requests:
        request.num_left = 10**6
    in_flight: list[tuple[str, int, float, bool]] = []
    kinds, last = [""], "decode"
    for _ in range(900):
        drafting = speculation.plan(requests)
        kind, size = ("decode", 8) if drafting is None else ("speculate", drafting.length)
        kinds.append(kind)
        before = device.free
        device.launch(kind)
        timer.launched((kind, size), round(device.now * 1e6), late=bool(in_flight) and before < device.now)
        in_flight.append((kind, size, device.free, bool(drafting)))
        if len(in_flight) == 2:
            kind, size, ended, drafts = in_flight.pop(0)
            device.now = max(device.now, ended)
            took = timer.read(round(device.now * 1e6))
            catches_up, last = (last, kind) == ("decode", "speculate"), kind  # a draft model does, and such a round is no measure
            if took is not None and not catches_up:
                speculation.measured(kind, rows, size, took.seconds * 1e3, at_most=took.waited)
            for request in requests if drafts else ():
                speculation.observe(request, size, size)
    assert seconds.of(rows, 0) == pytest.approx(1.9, rel=0.05)
    assert seconds.of(rows, 3) == pytest.approx(max(4.9, host), rel=0.05)
    assert kinds[-100:].count("speculate") >= 98


@pytest.mark.usefixtures("never_late")
def test_a_launch_before_which_the_draft_model_catches_up_is_no_measure(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would make rounds look dear just when they are tried again after many plain steps."""
    kinds: list[str] = []
    monkeypatch.setattr(Speculation, "measured", lambda self, kind, rows, size, seconds, at_most: kinds.append(kind))
    turns = itertools.count()
    always = Speculation.plan
    monkeypatch.setattr(Speculation, "plan", lambda self, decoding: always(self, decoding) if next(turns) % 6 == 5 else None)
    (told,) = ask(engine, 1)
    assert told.speculation is not None
    assert told.speculation.rounds >= 5
    assert set(kinds) == {"decode"}
    kinds.clear()
    monkeypatch.setattr(Speculation, "plan", always)
    ask(engine, 1)
    assert "speculate" in kinds
