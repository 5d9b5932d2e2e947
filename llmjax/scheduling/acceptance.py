"""`AcceptanceRates`: which share of drafts is accepted lately, of all requests, by lane and by class. Knows no requests."""

from __future__ import annotations

import dataclasses

from llmjax.scheduling.speculation_config import MAX_DRAFT_TOKENS

FIRST_GUESS = 0.7
"""Before anything was drafted: hopeful, so that it is tried."""
_KEPT = tuple((1 - 1 / 256) ** tested for tested in range(MAX_DRAFT_TOKENS + 1))  # of what is known, by drafts tested
_WEIGHT = 8.0  # drafts that the wider guess counts for


@dataclasses.dataclass(slots=True)
class Rate:
    """A share, the newest counting most: `accepted` of `tested`, both fading."""

    accepted: float = 0.0
    tested: float = 0.0

    def add(self, accepted: int, tested: int) -> None:
        """Of `tested` drafts `accepted` were."""
        kept = _KEPT[tested]
        self.accepted = self.accepted * kept + accepted
        self.tested = self.tested * kept + tested

    def drawn_to(self, guess: float) -> float:
        """The share, nearer to `guess` the less is known."""
        return (self.accepted + _WEIGHT * guess) / (self.tested + _WEIGHT)


class AcceptanceRates:
    """Of one engine. Lanes and classes appear when something of theirs is drafted."""

    def __init__(self) -> None:
        self._overall = Rate()
        self._lanes: dict[int, Rate] = {}
        self._classes: dict[str, Rate] = {}

    def add(self, lane: int, prompt_class: str, accepted: int, tested: int) -> None:
        """A round of a request: of the drafts that were tested so many were accepted."""
        self._overall.add(accepted, tested)
        self._lanes.setdefault(lane, Rate()).add(accepted, tested)
        self._classes.setdefault(prompt_class, Rate()).add(accepted, tested)

    def prior(self, lane: int, prompt_class: str) -> float:
        """What to expect of a new request: its class's acceptance; where little is known of that, its lane's, and that of all."""
        guess = self._overall.drawn_to(FIRST_GUESS)
        for rate in (self._lanes.get(lane), self._classes.get(prompt_class)):
            if rate is not None:
                guess = rate.drawn_to(guess)
        return guess

    def overall(self) -> float | None:
        """Of all; None before the first draft. This and the next two may be read from any thread."""
        return _share(self._overall)

    def by_lane(self) -> dict[int, float]:
        """By the lane's index."""
        return {lane: share for lane, rate in list(self._lanes.items()) if (share := _share(rate)) is not None}

    def by_class(self) -> dict[str, float]:
        """By the class of the prompt."""
        return {name: share for name, rate in list(self._classes.items()) if (share := _share(rate)) is not None}


def _share(rate: Rate) -> float | None:
    return rate.accepted / rate.tested if rate.tested else None
