"""Scheduler and simulated device as a state machine: whatever happens, in any order, each request's tokens are its solo ones."""

from __future__ import annotations

import contextlib

from fakes_scheduling import NAN_ID, VOCAB, Simulation, make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from llmjax.errors import QueueFullError
from llmjax.scheduling.lane_config import FIFO, LaneConfig
from llmjax.scheduling.speculation_config import SpeculationConfig

LANES = (
    FIFO,
    (LaneConfig(name="all", depth=3, timeout=4.0),),
    (LaneConfig(name="short", max_tokens=24, weight=3), LaneConfig(name="long")),
    (LaneConfig(name="short", max_tokens=8, weight=3, timeout=4.0), LaneConfig(name="long", depth=2, timeout=4.0)),
    (LaneConfig(name="s", max_tokens=8), LaneConfig(name="m", max_tokens=32, weight=2), LaneConfig(name="l", weight=1)),
)


class SchedulerMachine(RuleBasedStateMachine):
    """The pool is one to four times the longest request: preemption is the rule, not the exception."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16, 32, 64]),
        longest_pages=st.integers(2, 5),
        spare=st.integers(0, 12),
        max_sequences=st.integers(1, 6),
        extra_budget=st.integers(0, 40),
        chunk=st.sampled_from([1, 2, 3, 7, 16, 50]),
        decode_steps=st.sampled_from([1, 2, 4, 8]),
        deterministic=st.booleans(),
        lanes=st.sampled_from(LANES),
        max_wait=st.sampled_from([0.0, 3.0, 100.0]),
        prefix_cache=st.booleans(),
        drafts=st.sampled_from([0, 0, 1, 3, 8]),
        method=st.sampled_from(["ngram", "draft"]),
        seed=st.integers(0, 2**20),
    )
    def start(
        self, page_size, longest_pages, spare, max_sequences, extra_budget, chunk, decode_steps, deterministic, lanes, max_wait,
        prefix_cache, drafts, method, seed,
    ):  # fmt: skip
        self.longest = longest_pages * page_size
        self.sim = Simulation(
            num_pages=1 + longest_pages + spare,
            page_size=page_size,
            max_sequences=max_sequences,
            max_tokens_per_step=max_sequences + extra_budget,
            prefill_chunk=chunk,
            decode_steps=decode_steps,
            deterministic=deterministic,
            lanes=lanes,
            max_wait=max_wait,
            prefix_cache=prefix_cache,
            speculative=SpeculationConfig(method=method, tokens=drafts) if drafts else None,
            seed=seed,
        )

    def live(self):
        return [r for r in self.sim.requests if not r.finished]

    @rule(data=st.data(), seed=st.integers(0, 2000), stop=st.sets(st.integers(0, VOCAB - 1), max_size=2))
    def add(self, data, seed, stop):
        prompt = data.draw(st.integers(1, self.longest - 1), label="prompt")
        limit = data.draw(st.integers(0, min(self.longest, 40)), label="limit")
        request = make_request(
            f"r{len(self.sim.requests)}",
            prompt,
            limit,
            seed=seed,
            stop_ids=sorted(stop),
            min_tokens=data.draw(st.integers(0, limit), label="min_tokens"),
            salt=data.draw(st.sampled_from([None, None, "a"]), label="salt"),
        )
        request.priority = data.draw(st.sampled_from([0, 0, 0, -1, 1]), label="priority")
        if data.draw(st.integers(0, 19), label="NaN") == 0:
            request.prompt_ids[data.draw(st.integers(0, prompt - 1), label="place")] = NAN_ID
        with contextlib.suppress(QueueFullError):
            self.sim.add(request)
        self.sim.check()

    @rule(seconds=st.floats(0.0, 2.0))
    def wait(self, seconds):
        self.sim.now += seconds
        for request in self.sim.expire():
            assert self.sim.now - request.arrival_time > 4.0

    @precondition(lambda self: self.sim.requests)
    @rule(data=st.data(), turn=st.integers(0, 9), seed=st.integers(0, 2000))
    def next_turn(self, data, turn, seed):
        """A conversation goes on, or a prompt is sent again, also while the first one runs."""
        before = data.draw(st.sampled_from(self.sim.requests))
        history = [*before.prompt_ids, *before.output_ids, *range(turn)][: self.longest - 1]
        with contextlib.suppress(QueueFullError):
            self.sim.add(make_request(f"r{len(self.sim.requests)}", history, 1 + turn, seed=seed, salt=before.params.cache_salt))

    @rule()
    def new_weights(self):
        """What is in the cache is of the old ones: nobody may find it, nor what running requests make of it."""
        self.sim.new_weights()

    @precondition(lambda self: len(self.sim.device.launches) < 3)
    @rule()
    def launch(self):
        self.sim.launch()

    @rule()
    def read(self):
        self.sim.read()

    @rule(turns=st.integers(1, 12))
    def run(self, turns):
        for _ in range(turns):
            self.sim.step()

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data):
        self.sim.scheduler.abort(data.draw(st.sampled_from(self.live())).request_id)
        self.sim.check()

    @precondition(lambda self: any(r.output_ids for r in self.live()))
    @rule(data=st.data())
    def stop_string(self, data):
        """The text ended: reported as an abort here, because the oracle knows no text; the tokens are a prefix either way."""
        request = data.draw(st.sampled_from([r for r in self.live() if r.output_ids]))
        self.sim.scheduler.finish(request, "abort")
        self.sim.check()

    def teardown(self):
        if hasattr(self, "sim"):
            self.sim.drain()
            assert not self.sim.config.deterministic or not any(r.num_preemptions for r in self.sim.requests)


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestSchedulerMachine = SchedulerMachine.TestCase
