"""`Speculation`: whether the rows of a launch draft, and how many tokens each.

Knows the requests' own records and what launches cost; decides nothing about pages or rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from llmjax.scheduling.buckets import pick
from llmjax.scheduling.request import Request
from llmjax.scheduling.speculation_config import SpeculationConfig


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchSeconds:
    """What launches cost, in seconds.

    Attributes:
        plain: of one decode step, by row bucket.
        speculate: of a launch with drafts, by row bucket and number of drafts.
    """

    plain: Mapping[int, float]
    speculate: Mapping[tuple[int, int], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Drafting:
    """The decision for one launch.

    Attributes:
        length: drafts that the program makes.
        drafts: of each row at most, 0 to `length`.
    """

    length: int
    drafts: list[int]


class Speculation:
    """Decides for an engine, launch by launch."""

    def __init__(self, config: SpeculationConfig, launch_seconds: LaunchSeconds) -> None:
        self._config = config
        self._seconds = launch_seconds

    def plan(self, decoding: Sequence[Request], now: float) -> Drafting | None:
        """How many tokens each of these rows drafts in the next launch; None: nobody, it is a plain one."""
        if len(decoding) > self._config.disable_above_batch:
            return None
        drafts = [self._drafts(request) for request in decoding]
        if not any(drafts):
            return None
        return Drafting(pick(self._config.lengths, max(drafts)), drafts)

    def _drafts(self, request: Request) -> int:
        longest = self._config.max_length
        if request.stepwise or (longest is not None and request.num_computed_tokens >= longest):
            return 0
        return min(self._config.tokens, request.num_left - 1)

    def observe(self, request: Request, proposed: int, accepted: int) -> None:
        """A launch has been read in which `accepted` of the `proposed` drafts of a request were right."""

    def measured(self, kind: str, rows: int, length_or_steps: int, seconds: float) -> None:
        """A launch of `kind` "decode" or "speculate" in a row bucket took so long."""

    def ended(self, request: Request) -> None:
        """A request has ended, whatever ended it."""
