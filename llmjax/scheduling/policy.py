"""What the scheduler decides from numbers alone: how many steps a launch has, and who loses its row. No state in here."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Protocol

from llmjax.scheduling.buckets import FEW_TOKENS
from llmjax.scheduling.lane_config import LaneConfig
from llmjax.scheduling.page_pool import PagePool
from llmjax.scheduling.request import Request
from llmjax.scheduling.speculation_config import SpeculationConfig

IDLE_SHARE = 1 / 8
"""Row steps of a K-step launch that may lie idle behind rows at their limit while requests wait."""

FILLED = 3 / 4
"""Tokens of a launch that are not padding, at least, where prompts could fill a smaller one. Buckets are a factor of two to four
apart: what is left over costs no more in a launch of its own than the padding would."""


class SchedulerConfig(Protocol):
    """The numbers a scheduler needs; `EngineConfig` has them, and has checked them."""

    @property
    def max_sequences(self) -> int:
        """Device rows: requests running at once, at most."""

    @property
    def max_tokens_per_step(self) -> int:
        """Tokens of an extend launch, at most; not below `max_sequences`."""

    @property
    def token_buckets(self) -> Sequence[int]:
        """The sizes that extend launches are padded to, rising; the last is `max_tokens_per_step`."""

    @property
    def prefill_chunk(self) -> int:
        """Tokens of one prompt in one launch, at most."""

    @property
    def decode_steps(self) -> int:
        """K: decode steps of one launch when no waiting request could be taken in before it ends, and none is likely to come."""

    @property
    def deterministic(self) -> bool:
        """Whether the launches of a request must not depend on other requests."""

    @property
    def reserve_full_length(self) -> bool:
        """Whether a request is admitted only when the pool holds all of its full length (as in a deterministic engine)."""

    @property
    def prefix_cache(self) -> bool:
        """Whether pages of earlier requests are read again by later ones that begin alike."""

    @property
    def lanes(self) -> Sequence[LaneConfig]:
        """The lanes of the queue, shortest requests first."""

    @property
    def max_wait(self) -> float:
        """Seconds after which a lane that nobody was taken from is next."""

    @property
    def speculative(self) -> SpeculationConfig | None:
        """How tokens are drafted; None: not at all."""


def drafts_apart(request: Request, config: SpeculationConfig) -> int | None:
    """How many tokens a request of a deterministic engine drafts: as many as it may, by what is so of it whatever runs beside it.
    None: that is known only when what is in flight has been read."""
    longest, known = config.max_length, request.num_tokens - 1
    if longest is not None and known >= longest:
        return 0
    at_most = request.num_computed_tokens  # more than it may turn out to be
    unsure = request.num_left <= config.tokens or (longest is not None and at_most >= longest)
    if request.num_in_flight and unsure:
        return None
    return min(config.tokens, request.num_left - 1)


def reserves_full_length(config: SchedulerConfig) -> bool:
    """Whether every running request can grow to its limit without another page being found."""
    return config.deterministic or config.reserve_full_length


def full_launch(decoding: int, prompts: int, buckets: Sequence[int]) -> int:
    """Tokens of the next extend launch, when `decoding` rows take one each and `prompts` tokens of prompts could be computed.

    All of them, or the size of a smaller bucket where the one that holds them all would be padded too much.

    Not where decoding rows would take most of the smaller one, nor where it would be a launch of few tokens.
    """
    wanted = decoding + prompts
    place = bisect.bisect_left(buckets, wanted)
    if place in (0, len(buckets)) or wanted >= FILLED * buckets[place]:
        return wanted
    smaller = buckets[place - 1]
    return smaller if smaller >= _least(decoding) else wanted


def may_be_cut(decoding: int, buckets: Sequence[int]) -> bool:
    """Whether there are prompts for which `full_launch` takes less than all of them."""
    return len(buckets) > 1 and buckets[-2] >= _least(decoding)


def _least(decoding: int) -> int:
    """Tokens of the smallest bucket that a launch is cut to."""
    return max(FEW_TOKENS, 2 * decoding)


def can_idle(running: Sequence[Request], steps: int) -> bool:
    """Whether a launch of `steps` steps pays although requests wait that no row or page is free for.

    They wait at most that long, and rows that are certain to end (at their limit) would lie idle: up to `IDLE_SHARE` of the
    launch that is less than what one-step launches cost. An end by a stop id cannot be foreseen, and is not waited for.
    """
    idle = sum(steps - r.num_left for r in running if r.num_left < steps)
    return idle <= IDLE_SHARE * steps * len(running)


def has_work_and_pages(decoding: Sequence[Request], steps: int, pool: PagePool) -> bool:
    """Whether rows that decode fill at least half of `steps` steps, and the pages for all of them are free."""
    if 2 * max(r.num_left for r in decoding) <= steps:
        return False  # every row ends in the first half
    taken = 0
    for r in decoding:
        taken += max(0, pool.pages_for(r.num_computed_tokens + min(steps, r.num_left)) - len(r.pages))
    return taken <= pool.num_free


def takes_turns_alone(running: Sequence[Request]) -> bool:
    """Whether all who run are stepwise and past their prompts. Launched as their tokens are read, some would be in every other
    launch and the rest in those between; together they take half as many launches, each about as long."""
    return all(r.stepwise and r.num_computed_tokens >= r.num_prefill_tokens for r in running)


def choose_victim(running: Sequence[Request], lanes: Sequence[LaneConfig]) -> Request:
    """Who loses its row when the pages run out: by lane, age and lost work.

    Only the last of a lane (in its order: priority, then arrival) can; of several lanes' last ones the one whose tokens, to be
    computed again, weigh least, by the weight of its lane. The oldest of all is spared if another lane has one, so that
    somebody always gets to the end.
    """
    last: dict[int, Request] = {}
    for request in running:
        other = last.get(request.lane)
        if other is None or (request.priority, request.ticket) > (other.priority, other.ticket):
            last[request.lane] = request
    oldest = min(running, key=lambda r: r.ticket)
    may_go = [r for r in last.values() if r is not oldest] or [oldest]
    return min(may_go, key=lambda r: (r.num_computed_tokens * lanes[r.lane].weight, -r.ticket))
