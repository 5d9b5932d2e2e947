"""`RequestSpeculation`: how a request's drafts fare, and whether they are a reason to draft. Knows no launches, rows or costs."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from typing import Literal

OffReason = Literal["acceptance", "length"]

WARM_UP = 8
"""Rounds before a request is judged: from here on it is off when its acceptance is two standard errors below the least."""
JUDGED = 32
"""Rounds from which on one standard error decides, either way."""
WINDOW = 64
"""The last rounds are judged."""
RECOVERY = 4
"""Rounds after which a request that is off may be on again: when its acceptance is 1.5 standard errors above the least."""

PRIOR_WEIGHT = 12.0
"""Drafts that the expectation of a new request counts for."""


@dataclasses.dataclass(slots=True)
class RequestSpeculation:
    """The record of one request.

    Acceptance is the share of *tested* drafts that were accepted: a draft is tested when all before it in its round were
    accepted, so that the share does not depend on how many there are a round. A round in which nothing was proposed counts as one
    draft that was not accepted.

    Attributes:
        prior: acceptance expected before anything is known of the request.
        rounds: launches it drafted in, as far as they were read. drafted, accepted: tokens proposed, and accepted.
        off: why it is no reason to draft, None while it is one.
        held: why no request drafted when it ended.
        expected: tokens it gives in a round beyond the one of a plain step, for each draft length of the engine; the control's.
        switches: times it was switched off or on.
    """

    prior: float
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    off: OffReason | None = None
    held: Literal["batch", "cost"] | None = None
    expected: tuple[float, ...] = ()
    switches: int = 0
    _window: deque[tuple[int, int]] = dataclasses.field(default_factory=deque)  # accepted and tested, by round
    _accepted: int = 0
    _tested: int = 0

    def read(self, proposed: int, accepted: int) -> int:
        """Take in a round. Returns how many of its drafts were tested."""
        tested = min(accepted + 1, proposed) if proposed else 1
        self.rounds += 1
        self.drafted += proposed
        self.accepted += accepted
        self._window.append((accepted, tested))
        self._accepted += accepted
        self._tested += tested
        if len(self._window) > WINDOW:
            old_accepted, old_tested = self._window.popleft()
            self._accepted -= old_accepted
            self._tested -= old_tested
        return tested

    @property
    def acceptance(self) -> float:
        """Expected of its next draft, 0 to 1: that of the last rounds, drawn to `prior` while there are few."""
        return (self._accepted + PRIOR_WEIGHT * self.prior) / (self._tested + PRIOR_WEIGHT)

    def fails(self, least: float) -> bool:
        """Whether its last rounds say that less than `least` (0 to 1) is accepted."""
        rounds = len(self._window)
        if rounds < WARM_UP:
            return False
        return self._accepted < least * self._tested - (1 if rounds >= JUDGED else 2) * self._doubt(least)

    def recovers(self, least: float) -> bool:
        """Whether the rounds in which it drafted since it was switched off say that more is accepted."""
        rounds = len(self._window)
        if rounds < RECOVERY:
            return False
        return self._accepted >= least * self._tested + (1 if rounds >= JUDGED else 1.5) * self._doubt(least)

    def _doubt(self, least: float) -> float:
        """A standard error of the number accepted, were `least` the acceptance."""
        return math.sqrt(least * (1 - least) * self._tested)

    def switch_off(self, reason: OffReason) -> None:
        """It is no reason to draft any more. What comes is judged without what was."""
        self.off = reason
        self.switches += 1
        self.forget()

    def forget(self) -> None:
        """Judge by what comes from now on."""
        self._window.clear()
        self._accepted = self._tested = 0

    def switch_on(self) -> None:
        """It is one again."""
        self.off = None
        self.switches += 1
