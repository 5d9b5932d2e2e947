"""Logging of a process that llmjax owns (the command line, a server): lines for people or JSON objects for machines, on stderr.

A library must not configure logging, so nothing but an entry point calls this.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Literal, TextIO


class JsonFormatter(logging.Formatter):
    """One JSON object a record: `time` (seconds since the epoch), `event`, level, logger, message, traceback.

    The event is "log", unless the record says another (`extra={"event": …, "fields": {…}}`): then the fields follow, and say
    all that the message does.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        fields = {
            "time": round(record.created, 3),
            "event": getattr(record, "event", "log"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        extra = getattr(record, "fields", None)
        fields |= {"message": record.getMessage()} if extra is None else extra
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """The message; the level before it when it is a warning or worse."""

    def format(self, record: logging.LogRecord) -> str:
        """The record, with its traceback if it has one."""
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


def configure_logging(form: Literal["text", "json"] = "text", *, verbose: bool = False, stream: TextIO | None = None) -> None:
    """Send llmjax's records to `stream` (default: stderr), warnings only unless `verbose`. A second call replaces the first."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter("%(message)s"))
    logger = logging.getLogger("llmjax")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    logger.propagate = False
