"""`LaunchTimer`: what launches take that follow one another without a pause, and so when the next one is to be decided. Reads no
clock."""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import NamedTuple

SAMPLES = 8
"""Of a program's launches so many are remembered, and the next one is expected to be as quick as a quarter of them: pauses of the
host lengthen what is measured, and contexts change slowly."""

MARGIN_NS = (1_000_000, 20_000_000)
"""The next launch is decided so long before the device wants it, at least and at most."""

_LONGER, _SHORTER = 2.0, 0.99


class Took(NamedTuple):
    """What a launch has taken.

    Attributes:
        seconds: of it.
        waited: the device had waited for the host, so that the program takes this at most.
    """

    seconds: float
    waited: bool


class _Launch(NamedTuple):
    program: Hashable
    made_ns: int
    behind: bool  # another one ran when it was made


class LaunchTimer:
    """Told of launches and of their results, both in order.

    The launch behind the one that runs is best decided just before the device wants it: whoever comes meanwhile is in it, and
    need not wait for another one. How long before is learned: twice as long whenever the device had to wait after all, a little
    less whenever it had not.
    """

    def __init__(self) -> None:
        self._in_flight: collections.deque[_Launch] = collections.deque()
        self._last_read_ns: int | None = None
        self._gap: tuple[Hashable, int] | None = None  # between the last two reads; the program of the latter
        self._times: dict[Hashable, collections.deque[int]] = {}
        self._margin_ns = float(MARGIN_NS[0])
        self._put_off = False

    def launched(self, program: Hashable, now_ns: int, *, late: bool) -> None:
        """One more is in flight, of `program`. `late`: the one in front of it had ended by then."""
        if self._in_flight and (late or self._put_off):
            least, most = MARGIN_NS
            self._margin_ns = min(max(self._margin_ns * (_LONGER if late else _SHORTER), least), most)
        self._put_off = False
        self._in_flight.append(_Launch(program, now_ns, bool(self._in_flight) and not late))

    def read(self, now_ns: int) -> Took | None:
        """The oldest has ended. Returns what it has taken; None where that cannot be told.

        Where the host is slower than the device, every launch is late. Then the time between two reads is what a launch takes,
        host and all; but a pause that lengthens one such time shortens the next, so that the longer of two counts.
        """
        launch, before_ns = self._in_flight.popleft(), self._last_read_ns
        self._last_read_ns = now_ns
        before, self._gap = self._gap, None
        if before_ns is None:
            return None
        took_ns = now_ns - before_ns
        if launch.made_ns <= before_ns:
            self._gap = launch.program, took_ns
        if launch.behind:
            self._times.setdefault(launch.program, collections.deque(maxlen=SAMPLES)).append(took_ns)
            return Took(took_ns * 1e-9, waited=False)
        if self._gap is None or before is None or before[0] != launch.program:
            return None
        return Took(max(took_ns, before[1]) * 1e-9, waited=True)

    def put_off_ns(self, now_ns: int) -> int:
        """How much longer the next launch can be put off. 0: not at all, as where nothing runs or it is not known how long."""
        if len(self._in_flight) != 1 or not (times := self._times.get(self._in_flight[0].program)):
            return 0
        began_ns = max(self._in_flight[0].made_ns, self._last_read_ns or 0)
        expected_ns = sorted(times)[len(times) // 4]
        left_ns = max(0, int(began_ns + expected_ns - self._margin_ns) - now_ns)
        self._put_off |= left_ns > 0
        return left_ns
