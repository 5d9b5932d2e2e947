"""`Window`: rates and percentiles of the last minute, out of snapshots of the engine's counters. Pure: knows no clock, no HTTP.

A percentile is one of the values counted between two snapshots, to within a step of `SECONDS` (about 12 %).
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from llmjax.telemetry.histogram import SECONDS, SIZES, percentile

RATE_SECONDS = 5.0
PERCENTILE_SECONDS = 60.0
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

Snapshot = Mapping[str, Any]


class Window:
    """The snapshots of the last minute (see `EngineClient.snapshot`)."""

    def __init__(self) -> None:
        self._snapshots: collections.deque[Snapshot] = collections.deque()

    def add(self, now: Snapshot) -> dict[str, Any]:
        """Take in the next snapshot. Figures without a snapshot before it, or without values, are None.

        Returns:
            `output_rate` and `prompt_rate` (tokens a second, over the last seconds), `first` and `between` (seconds to the first
            token, and from token to token: `p50`, `p95`, `p99` of the last minute), `hit_rate` (of the prefix cache, 0 to 1,
            over the last minute), `accepted` (of the drafted tokens, 0 to 1) and `round_tokens` (of a round of drafts), likewise.
        """
        kept = self._snapshots
        if kept and now["started"] != kept[-1]["started"]:
            kept.clear()  # another engine: the one before was restarted
        kept.append(now)
        while now["taken"] - kept[0]["taken"] > PERCENTILE_SECONDS:
            kept.popleft()
        recent = next(one for one in kept if now["taken"] - one["taken"] <= RATE_SECONDS)
        oldest = kept[0]
        queried = now["prompt_tokens_queried"] - oldest["prompt_tokens_queried"]
        return {
            "output_rate": _rate(recent, now, "output_tokens"),
            "prompt_rate": _rate(recent, now, "prompt_tokens_computed", "prompt_tokens_cached"),
            "first": _percentiles(oldest["times"]["first"], now["times"]["first"]),
            "between": _percentiles(oldest["times"]["between"], now["times"]["between"]),
            "hit_rate": (now["prompt_tokens_cached"] - oldest["prompt_tokens_cached"]) / queried if queried > 0 else None,
            **_drafts(oldest.get("speculation"), now.get("speculation")),
        }


def _drafts(before: Snapshot | None, now: Snapshot | None) -> dict[str, float | None]:
    if before is None or now is None:
        return {"accepted": None, "round_tokens": None}
    rounds, drafted, accepted = (now[name] - before[name] for name in ("rounds", "drafted", "accepted"))
    return {"accepted": accepted / drafted if drafted else None, "round_tokens": 1 + accepted / rounds if rounds else None}


def bars(counts: Sequence[int]) -> list[tuple[int, int]]:
    """A histogram of `SIZES` as (upper bound, count), from the first bar that is not empty to the last."""
    pairs = list(zip((*SIZES, 2 * SIZES[-1]), counts, strict=True))
    filled = [index for index, (_, count) in enumerate(pairs) if count]
    return pairs[filled[0] : filled[-1] + 1] if filled else []


def _rate(before: Snapshot, now: Snapshot, *counters: str) -> float | None:
    seconds = now["taken"] - before["taken"]
    return sum(now[name] - before[name] for name in counters) / seconds if seconds > 0 else None


def _percentiles(before: Sequence[int], now: Sequence[int]) -> dict[str, float | None]:
    counts = [after - earlier for earlier, after in zip(before, now, strict=True)]
    return {name: percentile(SECONDS, counts, share) for name, share in SHARES.items()}
