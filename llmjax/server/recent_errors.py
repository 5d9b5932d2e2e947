"""`RecentErrors`: the last answers that were errors, for the dashboard. Keeps nothing that a client wrote but its request id."""

from __future__ import annotations

import collections
import re
import time
from typing import Any

from llmjax.errors import LlmjaxError
from llmjax.server.http_errors import status_of

KEPT = 20
_QUOTED = re.compile(r"(?<!\w)(?:'(?:[^'\\]|\\.)*(?:'|$)|\"(?:[^\"\\]|\\.)*(?:\"|$))")  # a cut one ends with the message
_PATH = re.compile(r"(?<!\S)/.*")
_EXPLAINED = re.compile(r"^([^:]*: [^:]*: ).*")  # "regex: it cannot be compiled: what the library says"
_LONGEST = 300


class RecentErrors:
    """What went wrong lately, the newest last."""

    def __init__(self) -> None:
        self._errors: collections.deque[dict[str, Any]] = collections.deque(maxlen=KEPT)

    def add(self, request_id: str, error: Exception) -> None:
        """Remember an error that a client was told."""
        known = isinstance(error, LlmjaxError)
        message = str(error) if known else f"internal error ({type(error).__name__}); the log says more"
        self._errors.append(
            {"time": round(time.time(), 3), "id": request_id, "status": status_of(error), "message": without_quotes(message)}
        )

    def newest(self) -> list[dict[str, Any]]:
        """Them, the newest first."""
        return list(self._errors)[::-1]


def without_quotes(message: str) -> str:
    """The first line of a message, without what it quotes, paths, and what follows a second colon, which a library says: any of
    these may be a piece of what somebody sent.
    """
    line = _QUOTED.sub("'…'", message.partition("\n")[0])
    return _EXPLAINED.sub(r"\1…", _PATH.sub("…", line))[:_LONGEST]
