"""`StopStrings`: end a stream of text before the first stop string, without ever showing the beginning of one.

Works on text alone; knows nothing of tokens. One state a stop string and character (Knuth, Morris and Pratt 1977), so
the time is linear in the text however long or repetitive the stop strings are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence


class StopStrings:
    """Holds back the longest end of the text that may still become a stop string, and releases everything before it.

    The stop string that is complete first wins (the earliest end in the text, however the text was cut into deltas); of
    two that end at the same character the longer one, which starts earlier.

    Args:
        stops: none of them empty.
        include: keep the stop string that matched at the end of the text.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        assert all(stops)
        self._stops = tuple(stops)
        self._include = include
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._held = ""

    def feed(self, text_delta: str, *, active: bool) -> tuple[str, str | None]:
        """Add text; returns the text that may be shown now, and the stop string that matched (feed nothing after it).

        A stop string counts when its last character comes with `active`. One that is complete before that is ordinary
        text. A possible beginning is held back even while not active, since its end may come later.
        """
        if not self._held and self._first_chars.isdisjoint(text_delta):
            return text_delta, None
        for end, char in enumerate(text_delta, 1):
            winner = self._advance(char)
            if winner is not None and active:
                text = self._held + text_delta[:end]
                self._held = ""
                return text if self._include else text[: -len(winner)], winner
        text = self._held + text_delta
        released = len(text) - max(self._matched, default=0)
        self._held = text[released:]
        return text[:released], None

    def flush(self) -> str:
        """The text still held back, when no more comes."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        """The longest stop string that `char` completes."""
        winner = None
        for index, (stop, table) in enumerate(zip(self._stops, self._tables, strict=True)):
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = table[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                if winner is None or len(stop) > len(winner):
                    winner = stop
                matched = table[matched - 1]
            self._matched[index] = matched
        return winner


@functools.lru_cache(maxsize=256)  # the choices of a request, and most requests of a client, share their stop strings
def _failure_table(stop: str) -> tuple[int, ...]:
    """For each prefix of `stop`, the length of its longest proper end that is also a beginning."""
    table = [0]
    for char in stop[1:]:
        matched = table[-1]
        while matched and stop[matched] != char:
            matched = table[matched - 1]
        table.append(matched + 1 if stop[matched] == char else 0)
    return tuple(table)
