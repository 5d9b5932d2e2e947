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

    def read(self, now_ns: int) -> float | None:
        """The oldest has ended. Returns its seconds; None where the device had waited for it."""
        launch, before_ns = self._in_flight.popleft(), self._last_read_ns
        self._last_read_ns = now_ns
        if not launch.behind or before_ns is None:
            return None
        self._times.setdefault(launch.program, collections.deque(maxlen=SAMPLES)).append(now_ns - before_ns)
        return (now_ns - before_ns) * 1e-9

    def put_off_ns(self, now_ns: int) -> int:
        """How much longer the next launch can be put off. 0: not at all, as where nothing runs or it is not known how long."""
        if len(self._in_flight) != 1 or not (times := self._times.get(self._in_flight[0].program)):
            return 0
        began_ns = max(self._in_flight[0].made_ns, self._last_read_ns or 0)
        expected_ns = sorted(times)[len(times) // 4]
        left_ns = max(0, int(began_ns + expected_ns - self._margin_ns) - now_ns)
        self._put_off |= left_ns > 0
        return left_ns
