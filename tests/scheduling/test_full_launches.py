"""Launches that compute prompts are as large as a bucket where more tokens wait than it holds, and little padded elsewhere."""

from __future__ import annotations

import pytest
from fakes_scheduling import Simulation, make_request

from llmjax.scheduling.lane_config import LaneConfig
from llmjax.scheduling.policy import full_launch

BUCKETS = (128, 512, 2048)


@pytest.mark.parametrize(
    ("decoding", "prompts", "tokens"),
    [
        (0, 1, 1),
        (0, 100, 100),
        (0, 300, 300),  # rather padded to 512 than 128 tokens, which cost as much
        (0, 512, 512),
        (0, 513, 512),
        (40, 1400, 512),
        (40, 1496, 1536),  # three quarters of 2048
        (255, 500, 512),
        (257, 500, 757),  # 512 would be decoding rows for the most part
        (0, 2048, 2048),
        (300, 9000, 9300),  # more than any launch holds
    ],
)
def test_the_tokens_of_a_launch(decoding: int, prompts: int, tokens: int) -> None:
    assert full_launch(decoding, prompts, BUCKETS) == tokens


def test_without_buckets_a_launch_takes_all() -> None:
    assert full_launch(3, 700, ()) == 703


@pytest.mark.parametrize("lanes", [None, (LaneConfig(name="short", max_tokens=200, weight=3), LaneConfig(name="long", weight=1))])
def test_a_burst_fills_its_launches(lanes: tuple[LaneConfig, ...] | None) -> None:
    sizes = {"max_tokens_per_step": 1024, "token_buckets": (256, 1024), "prefill_chunk": 1024, "num_pages": 400}
    sim = Simulation(**sizes, max_sequences=16, **({} if lanes is None else {"lanes": lanes}))
    for index, prompt in enumerate((150, 90, 130, 100, 40, 60)):  # 570 tokens: not worth 1024
        sim.add(make_request(f"r{index}", prompt=prompt, limit=4))
    sim.drain()
    launches = [batch.num_tokens for batch in sim.batches if batch.kind == "extend"]
    assert launches[:2] == [256, 256]
    assert sum(launches) < 256 * 3
    assert max(launches) <= 256
