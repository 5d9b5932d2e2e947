"""`Redactor`: takes what matches some patterns out of every text of a JSON object, in a process of its own.

A pattern may take longer than anybody wants to wait, and holds the interpreter's lock all the while. So this file is also the
program of another process, which ends itself when an object takes too long. It imports nothing but the standard library.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

REDACTED = "[redacted]"
SECONDS = 1.0  # for one object


class RedactionError(Exception):
    """It took too long, or the process has gone."""


class Redactor:
    """To be used by one thread. The process starts with the first object, and again after one that took too long.

    Args:
        patterns: regular expressions.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = json.dumps(list(patterns))
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, line: bytes) -> bytes:
        """A JSON object on one line, and the same with `REDACTED` wherever a pattern matched. Raises `RedactionError`."""
        if self._process is None:
            command = [sys.executable, "-I", "-S", __file__, self._patterns, str(SECONDS)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
            found = self._process.stdout.readline()
        except OSError:
            found = b""
        if not found.endswith(b"\n"):
            self.close()
            raise RedactionError(f"its texts could not be redacted within {SECONDS:g} s")
        return found[:-1]

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def redacted(value: Any, patterns: Sequence[re.Pattern[str]]) -> Any:
    """The same with every text searched; the nesting is that of JSON bodies, which the parser has bounded."""
    if isinstance(value, str):
        for pattern in patterns:
            value = pattern.sub(REDACTED, value)
    elif isinstance(value, dict):
        return {redacted(name, patterns): redacted(item, patterns) for name, item in value.items()}
    elif isinstance(value, list):
        return [redacted(item, patterns) for item in value]
    return value


def _serve(patterns: Sequence[re.Pattern[str]], seconds: float) -> None:
    """Lines in, lines out. The alarm ends the process also inside of a search, and also when nobody waits for it any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its input
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all of a server's processes: its last lines are still to come
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        value = {name: redacted(item, patterns) for name, item in json.loads(line).items()}
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve([re.compile(pattern) for pattern in json.loads(sys.argv[1])], float(sys.argv[2]))
