"""Telling people and machines what a run does. Everything here goes to stderr; stdout is for results.

Three forms: rich progress on a terminal, one line an event otherwise, JSON lines for machines.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PROGRESS_SECONDS = 5.0

StageEvent = Literal["start", "done", "reuse", "off", "unused", "blocked", "rejected", "failed", "interrupted"]


class Reporter(Protocol):
    """What the orchestrator and the stages tell. Calls come from one thread; none of them raises."""

    def stage(self, name: str, event: StageEvent, text: str = "", figures: Mapping[str, Any] | None = None) -> None:
        """Something happened to a stage. `text` says why; `figures` are kind, seconds and the stage's summary."""

    def progress(self, name: str, done: int, total: int | None) -> None:
        """A stage has done so many of its parts; called as often as it likes."""

    def message(self, level: Literal["info", "warning", "error"], text: str) -> None:
        """Anything else, in one line."""

    def close(self) -> None:
        """The run is over."""


class SilentReporter:
    """Tells nothing."""

    def stage(self, name: str, event: StageEvent, text: str = "", figures: Mapping[str, Any] | None = None) -> None:
        """See `Reporter`."""

    def progress(self, name: str, done: int, total: int | None) -> None:
        """See `Reporter`."""

    def message(self, level: Literal["info", "warning", "error"], text: str) -> None:
        """See `Reporter`."""

    def close(self) -> None:
        """See `Reporter`."""


class MaskingReporter:
    """Passes everything on to `inner`, texts without secrets."""

    def __init__(self, inner: Reporter, mask: Callable[[str], str]) -> None:
        self.inner = inner
        self.mask = mask

    def stage(self, name: str, event: StageEvent, text: str = "", figures: Mapping[str, Any] | None = None) -> None:
        """See `Reporter`."""
        masked = {key: self.mask(value) if isinstance(value, str) else value for key, value in (figures or {}).items()}
        self.inner.stage(name, event, self.mask(text), masked)

    def progress(self, name: str, done: int, total: int | None) -> None:
        """See `Reporter`."""
        self.inner.progress(name, done, total)

    def message(self, level: Literal["info", "warning", "error"], text: str) -> None:
        """See `Reporter`."""
        self.inner.message(level, self.mask(text))

    def close(self) -> None:
        """See `Reporter`."""
        self.inner.close()


class LineReporter:
    """One line an event; progress at most every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._told: dict[str, float] = {}

    def stage(self, name: str, event: StageEvent, text: str = "", figures: Mapping[str, Any] | None = None) -> None:
        """See `Reporter`."""
        self._line(event_line(name, event, text, figures or {}))

    def progress(self, name: str, done: int, total: int | None) -> None:
        """See `Reporter`."""
        now = time.monotonic()
        if now - self._told.get(name, now - PROGRESS_SECONDS) >= PROGRESS_SECONDS or done == total:
            self._told[name] = now
            self._line(f"{name}: {done} of {total}" if total is not None else f"{name}: {done}")

    def message(self, level: Literal["info", "warning", "error"], text: str) -> None:
        """See `Reporter`."""
        self._line(text if level == "info" else f"{level}: {text}")

    def close(self) -> None:
        """See `Reporter`."""

    def _line(self, text: str) -> None:
        write_line(self.stream, text)


class JsonReporter:
    """One JSON object a line: `time` (seconds since the epoch), `event` and the rest."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._told: dict[str, float] = {}

    def stage(self, name: str, event: StageEvent, text: str = "", figures: Mapping[str, Any] | None = None) -> None:
        """See `Reporter`."""
        self._object({"event": f"stage.{event}", "stage": name, "text": text, **(figures or {})})

    def progress(self, name: str, done: int, total: int | None) -> None:
        """See `Reporter`."""
        now = time.monotonic()
        if now - self._told.get(name, now - 1.0) >= 1.0 or done == total:
            self._told[name] = now
            self._object({"event": "progress", "stage": name, "done": done, "total": total})

    def message(self, level: Literal["info", "warning", "error"], text: str) -> None:
        """See `Reporter`."""
        self._object({"event": "message", "level": level, "text": text})

    def close(self) -> None:
        """See `Reporter`."""

    def _object(self, fields: Mapping[str, Any]) -> None:
        write_line(self.stream, json.dumps({"time": round(time.time(), 3), **fields}, ensure_ascii=False, default=str))


class TerminalReporter:
    """Progress bars and coloured lines. rich is imported when the first one is made."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self.console = Console(file=stream)
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def stage(self, name: str, event: StageEvent, text: str = "", figures: Mapping[str, Any] | None = None) -> None:
        """See `Reporter`."""
        from rich.text import Text

        if event != "start":
            self._stop()
        colour = {"done": "green", "failed": "red", "rejected": "red", "interrupted": "red", "blocked": "yellow"}.get(
            event, "dim"
        )
        self.console.print(Text(event_line(name, event, text, figures or {}), style=colour))

    def progress(self, name: str, done: int, total: int | None) -> None:
        """See `Reporter`."""
        if self._bars is None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bars = Progress(*columns, console=self.console, transient=True)
            self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total)
        self._bars.update(self._tasks[name], completed=done, total=total)

    def message(self, level: Literal["info", "warning", "error"], text: str) -> None:
        """See `Reporter`."""
        from rich.text import Text

        style = {"info": "", "warning": "yellow", "error": "red"}[level]
        self.console.print(Text(text if level == "info" else f"{level}: {text}", style=style))

    def close(self) -> None:
        """See `Reporter`."""
        self._stop()

    def _stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars, self._tasks = None, {}


def make_reporter(log: Literal["text", "json"] = "text", *, stream: TextIO | None = None) -> Reporter:
    """The reporter for `stream` (default: stderr): JSON lines, or rich on a terminal, or plain lines."""
    target = sys.stderr if stream is None else stream
    if log == "json":
        return JsonReporter(target)
    return TerminalReporter(target) if target.isatty() else LineReporter(target)


def event_line(name: str, event: StageEvent, text: str, figures: Mapping[str, Any]) -> str:
    """One event for people: ``engine: done in 2.1 s, pages 512``."""
    rest = dict(figures)
    seconds, kind = rest.pop("seconds", None), rest.pop("kind", None)
    head = str(event)
    if event == "start" and kind is not None and kind != name:
        head += f" ({kind})"
    if seconds is not None:
        head += f" in {seconds:.1f} s"
    parts = [head, *(f"{key} {value}" for key, value in rest.items() if not isinstance(value, list))]  # lists are tables
    return f"{name}: {', '.join(parts)}" + (f": {text}" if text else "")


def write_line(stream: TextIO, text: str) -> None:
    """Writes one line at once. Characters that the stream's encoding lacks are escaped; a closed pipe is ignored."""
    line = " ".join(text.splitlines())
    encoding = getattr(stream, "encoding", None) or "utf-8"
    safe = line.encode(encoding, "backslashreplace").decode(encoding)
    try:
        stream.write(safe + "\n")
        stream.flush()
    except (BrokenPipeError, ValueError):
        return
