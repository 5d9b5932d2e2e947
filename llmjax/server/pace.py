"""When events of a stream go out: `Pace` for one that is behind, `Alarm` and `Wake` for what streams wait on.

One event a step, at once, is the rule. A stream is behind when several steps were waiting for it: its client does not take what
is sent, or the event loop has more streams than it can serve. Each event costs the same whatever is in it, so those of such a
stream are merged and go out `APART` seconds apart; it has caught up when it is on time for one of them. The first event and the
end of a stream never wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

APART = 0.02
LATE = 0.005
"""Seconds behind its own time after which an event that was held back shows that the stream is still behind."""


class Pace:
    """Of one stream. Is told the time, in seconds, and knows no clock."""

    def __init__(self) -> None:
        self._until: float | None = None

    @property
    def until(self) -> float | None:
        """When the next event may go out; None: at once."""
        return self._until

    def went(self, now: float, steps: int) -> None:
        """An event of `steps` steps goes out at `now`."""
        behind = steps > 1 if self._until is None else now - self._until > LATE
        self._until = now + APART if behind else None


class Wake(asyncio.Event):
    """The event that the engine's steps set; counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def set(self) -> None:
        """A step brought something, or a stream failed."""
        self.steps += 1
        super().set()

    def take(self) -> int:
        """Clear it; how many steps there were since the last time."""
        steps, self.steps = self.steps, 0
        self.clear()
        return steps

    def ring(self) -> None:
        """Wake the waiter without a step."""
        super().set()


class Alarm:
    """Rings when it is `seconds` after its last start. Starting costs nothing: the timer looks at it when it fires.

    Args:
        ring: called once; then the alarm is off until it is started again.
    """

    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        self._since: float | None = None  # of the loop's clock
        self._seconds = seconds
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds, self._look)

    @property
    def off(self) -> bool:
        """It was never started, was stopped or has rung."""
        return self._since is None

    def start(self, now: float) -> None:
        """From `now`, the loop's time, on; also when it is on."""
        self._since = now

    def stop(self) -> None:
        """Until it is started again."""
        self._since = None

    def close(self) -> None:
        """Never again."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self._since is None else self._since
        if since + self._seconds <= now:
            self._since = None
            self._ring()
            since = now
        self._timer = self._loop.call_at(since + self._seconds, self._look)
