"""Text in from stdin, text and tables out to stdout, and the trace file."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmjax.errors import ConfigError, LlmjaxError

if TYPE_CHECKING:
    from llmjax.telemetry.trace import TraceWriter


def stdin_text() -> str:
    """All of stdin as one prompt, without its last line end. Raises `ConfigError` when it is a terminal."""
    if sys.stdin.isatty():
        raise ConfigError("there is no prompt: give one as an argument or on stdin")
    return "".join(_stdin_lines()).removesuffix("\n")


def _stdin_lines() -> Iterator[str]:
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is not UTF-8: {error.reason} at byte {error.start}") from None


def turns() -> Iterator[str]:
    """Lines that say something: from a person, who is prompted, or from a pipe."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in _stdin_lines() if line.strip())
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() a history and line editing
    while True:
        try:
            line = input("> ")
        except EOFError:
            typer.echo()
            return
        if line.strip():
            yield line


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Show rows of texts; cells beyond the columns are left out."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    grid = Table(*columns, box=SIMPLE_HEAD)
    for row in rows:
        grid.add_row(*row[: len(columns)])
    width = None if sys.stdout.isatty() else 200  # a file is as wide as it must be
    Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False).print(grid)


def open_trace(path: Path | None) -> contextlib.AbstractContextManager[TraceWriter | None]:
    """A trace file that is complete when the block ends, or None without a path. Raises `ConfigError` if it cannot be written."""
    if path is None:
        return contextlib.nullcontext()
    from llmjax.telemetry.trace import TraceWriter

    try:
        return TraceWriter(path)
    except OSError as error:
        raise ConfigError(f"--trace {path} cannot be written: {error.strerror or error}") from None


def as_json(value: Any) -> str:
    """JSON for machines that a person can read too."""
    return json.dumps(value, ensure_ascii=False, indent=2)


def safe_streams() -> None:
    """Have characters that the terminal lacks escaped, so that the rest still shows."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def tell(error: LlmjaxError) -> None:
    """An error on stderr, in lines."""
    for line in str(error).splitlines():
        typer.echo(f"llmjax: {line}", err=True)


def warn(lines: Iterable[str]) -> None:
    """Tell warnings on stderr, a line each."""
    for line in lines:
        typer.echo(f"warning: {line}", err=True)
