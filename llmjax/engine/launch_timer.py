"""`LaunchTimer`: what launches take that follow one another without a pause. Reads no clock."""

from __future__ import annotations

import collections


class LaunchTimer:
    """Told of launches and of their results, both in order."""

    def __init__(self) -> None:
        self._behind: collections.deque[bool] = collections.deque()  # of launches in flight: another one was when it was made
        self._last_read_ns: int | None = None

    def launched(self) -> None:
        """One more is in flight."""
        self._behind.append(bool(self._behind))

    def read(self, now_ns: int) -> float | None:
        """The oldest has ended. Returns its seconds; None where the device had waited for it."""
        behind, before_ns = self._behind.popleft(), self._last_read_ns
        self._last_read_ns = now_ns
        return (now_ns - before_ns) * 1e-9 if behind and before_ns is not None else None
