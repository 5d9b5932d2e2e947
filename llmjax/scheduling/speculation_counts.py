"""`SpeculationCounts`: what was drafted, accepted and switched since the start. One thread counts, any may read."""

from __future__ import annotations

from typing import Literal

SwitchReason = Literal["acceptance", "length", "batch", "cost"]


class SpeculationCounts:
    """Counters that never go back.

    Args:
        tokens: drafts a round, at most.

    Attributes:
        rounds: of all rows; a launch with drafts counts each row that had some. drafted, accepted: tokens.
        switches: by ("off" or "on", reason), "on" when the reason is over: acceptance and length are a request's own, batch and
            cost the engine's.
    """

    def __init__(self, tokens: int) -> None:
        self.rounds = 0
        self.drafted = 0
        self.accepted = 0
        self.switches: dict[tuple[str, SwitchReason], int] = {}
        self._by_accepted = [0] * (tokens + 1)  # rounds by how many were accepted

    def read(self, proposed: int, accepted: int) -> None:
        """A round of a row."""
        self.rounds += 1
        self.drafted += proposed
        self.accepted += accepted
        self._by_accepted[accepted] += 1

    def switched(self, to: Literal["off", "on"], reason: SwitchReason) -> None:
        """A request, or the engine, stops or begins drafting."""
        key = to, reason
        self.switches[key] = self.switches.get(key, 0) + 1

    def accepted_at(self) -> list[int]:
        """Rounds in which the first, second, ... draft was accepted."""
        rounds = list(self._by_accepted)
        return [sum(rounds[place + 1 :]) for place in range(len(rounds) - 1)]
