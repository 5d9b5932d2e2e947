"""What a lane of the queue is, as configuration. Imports nothing, so that reading a pipeline loads nothing."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaneConfig:
    """One lane of the queue.

    Attributes:
        name: for metrics and messages.
        max_tokens: prompt and expected output of the requests it takes, at most; None takes what the lanes before it do not.
        weight: its part of the tokens while others wait too.
        depth: requests that wait in it, at most; one more is refused. None sets no limit.
        timeout: seconds that a request waits for its first row, at most; None sets no limit.
    """

    name: str
    max_tokens: int | None = None
    weight: int = 1
    depth: int | None = None
    timeout: float | None = None


FIFO = (LaneConfig(name="all"),)
"""One lane without limits."""
