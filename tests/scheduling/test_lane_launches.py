"""What lanes and the prefix cache cost in launches: as full as with one lane, and made while another one is in flight."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_engine import SimulatedEngine

from bench.traffic import mixed_lengths, read_lanes
from llmjax.loadtest import arrivals
from llmjax.loadtest.driver import drive
from llmjax.loadtest.target import EngineTarget
from llmjax.loadtest.workload import Synthetic
from llmjax.scheduling.buckets import pick
from llmjax.scheduling.request import ScheduledBatch

SCALE = 8
BUCKETS = (8, 32, 64, 256)


class Counting(SimulatedEngine):
    """Launches of prompts take 10 to 41 ms. Counts their tokens, what these are padded to, and launches into an idle device."""

    def __init__(self, **options: Any) -> None:
        self.tokens, self.padded, self.into_idle = 0, 0, 0
        sizes = {"max_sequences": 32, "max_tokens_per_step": 256, "prefill_chunk": 256, "token_buckets": BUCKETS}
        super().__init__(num_pages=4000, fixed=0.01, a_token=1.2e-4, max_wait=10.0, **sizes, **options)

    def _dispatched(self, batch: ScheduledBatch) -> None:
        self.into_idle += not self._pending
        if batch.kind == "extend":
            self.tokens += batch.num_tokens
            self.padded += pick(BUCKETS, batch.num_tokens)
        super()._dispatched(batch)


def serve(clients: int, *, lanes: str, prefix_cache: bool) -> tuple[Counting, float]:
    """The mixed trace for so many clients, and the seconds it took."""
    engine = Counting(lanes=read_lanes(lanes, SCALE), prefix_cache=prefix_cache)
    requests = Synthetic(*mixed_lengths(SCALE)).requests(150, 100)
    began = engine.now
    drive(EngineTarget(engine, clock=engine.clock, sleep=engine.sleep), requests, arrivals.closed_loop(clients))
    return engine, engine.now - began


@pytest.mark.parametrize("clients", [12, 150])
def test_launches_are_as_full_and_as_early_as_with_one_lane(clients: int) -> None:
    alone, took = serve(clients, lanes="all", prefix_cache=False)
    engine, with_lanes = serve(clients, lanes="short:640:3,long", prefix_cache=True)
    assert (alone.into_idle, engine.into_idle) == (1, 1), "only the first launch finds the device idle"
    assert engine.tokens / engine.padded >= 0.97 * alone.tokens / alone.padded
    assert with_lanes <= 1.05 * took
