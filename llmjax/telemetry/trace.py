"""Chrome trace files, for https://ui.perfetto.dev or chrome://tracing: what host, device and each request did when.

One file holds several processes (a pipeline and its engines). It is the JSON array form of the format ("Trace Event Format",
Google, 2016), written as events come and readable before it is closed, so that a run that dies leaves what it had.
Owns the file; reads no clock: marks are nanoseconds of one monotonic clock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from llmjax.telemetry.timings import Segment

log = logging.getLogger(__name__)


class TraceWriter:
    """Writes a file. Raises `OSError` when it cannot be created; if writing fails later, tracing ends with a warning."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("w", encoding="utf-8")
        self._started = False
        self._processes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self.close()

    def process(self, name: str) -> ProcessTrace:
        """A new process of the file."""
        self._processes += 1
        self.write({"ph": "M", "name": "process_name", "pid": self._processes, "args": {"name": name}})
        return ProcessTrace(self, self._processes)

    def write(self, *events: Mapping[str, Any]) -> None:
        """Append events."""
        if self._file.closed:
            return
        text = "".join(f"{',' if self._started or i else '['}\n{json.dumps(event)}" for i, event in enumerate(events))
        self._started = True
        try:
            self._file.write(text)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Complete the file. A second call does nothing."""
        if self._file.closed:
            return
        try:
            self._file.write("\n]\n" if self._started else "[]\n")
            self._file.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.warning("the trace %s ends here: %s", self._path, error)
        with contextlib.suppress(OSError):  # what cannot be flushed is what was just told
            self._file.close()


class ProcessTrace:
    """One process of a file: tracks of spans, requests, and curves."""

    def __init__(self, writer: TraceWriter, pid: int) -> None:
        self._writer = writer
        self._pid = pid
        self._tracks: dict[str, int] = {}

    def span(self, track: str, name: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """Something that took from `start_ns` to `end_ns`. Spans of one track lie beside or inside each other."""
        tid = self._tracks.get(track)
        if tid is None:
            tid = self._tracks[track] = len(self._tracks) + 1
            self._writer.write({"ph": "M", "name": "thread_name", "pid": self._pid, "tid": tid, "args": {"name": track}})
        event = {"ph": "X", "name": name, "pid": self._pid, "tid": tid, "ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
        self._writer.write({**event, "args": args})

    def curve(self, name: str, at_ns: int, **values: float) -> None:
        """Values that hold from `at_ns` on."""
        self._writer.write({"ph": "C", "name": name, "pid": self._pid, "ts": at_ns / 1e3, "args": values})

    def request(self, name: str, marks: Sequence[tuple[Segment, int]], end_ns: int, **args: Any) -> None:
        """A finished request with the segments it went through: `marks` say when each began."""
        common = {"cat": "request", "id": name, "pid": self._pid, "tid": 0}
        ends = [*(start for _, start in marks[1:]), end_ns]
        events: list[dict[str, Any]] = [{"ph": "b", "name": name, "ts": marks[0][1] / 1e3, "args": args, **common}]
        for (segment, start), end in zip(marks, ends, strict=True):
            events.append({"ph": "b", "name": segment, "ts": start / 1e3, **common})
            events.append({"ph": "e", "name": segment, "ts": end / 1e3, **common})
        self._writer.write(*events, {"ph": "e", "name": name, "ts": end_ns / 1e3, **common})
