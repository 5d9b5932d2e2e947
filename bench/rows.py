"""What every bench shares: the facts of the machine beside each figure, one JSON row a figure, and a table last."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def command_line(argv: Iterable[str]) -> str:
    """A command to be written down: files by their names alone, not by the folders of one machine."""

    def told(argument: str) -> str:
        option, equals, value = argument.rpartition("=")
        return f"{option}{equals}{Path(value).name}" if value.startswith("/") else argument

    return shlex.join(map(told, argv))


def machine() -> dict[str, Any]:
    """Device, driver, clocks and power as the card reports them; processor only where there is no card."""
    import jax

    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": command_line(sys.argv),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    query = "driver_version,clocks.sm,clocks.mem,power.draw"
    try:
        line = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.splitlines()[0]
        facts |= dict(zip(query.split(","), (part.strip() for part in line.split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, IndexError):
        facts["processor"] = platform.processor() or platform.machine()
    return facts


class Rows:
    """Collects figures; prints each as a JSON line at once, and a table at the end."""

    def __init__(self, json_path: str | None) -> None:
        self._path = json_path
        self._rows: list[dict[str, Any]] = []
        self._machine = machine()
        print(json.dumps(self._machine), flush=True)

    def add(self, **row: Any) -> None:
        """One figure with what it was measured on."""
        row = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        self._rows.append(row)
        print(json.dumps(row), flush=True)
        self._write(self._machine)  # a run that is cut off keeps what it has

    def close(self, columns: Iterable[str]) -> None:
        """Print the table (`columns` of the rows that have the first), and write everything to the JSON file."""
        names = list(columns)
        table = [[_cell(row.get(name)) for name in names] for row in self._rows if names[0] in row]
        widths = [max(len(cell) for cell in column) for column in zip(names, *table, strict=True)]
        for line in [names, *table]:
            print(" | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        at_work = machine()  # the clocks and power of a card at work, not of an idle one
        print(json.dumps(at_work), flush=True)
        self._write(at_work)

    def _write(self, facts: dict[str, Any]) -> None:
        if self._path is not None:
            Path(self._path).write_text(json.dumps({"machine": facts, "rows": self._rows}, indent=1) + "\n")


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
