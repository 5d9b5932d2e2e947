"""One run of a pipeline for `recalibration_process`: of its priority, told in the service's log, gone with its parent."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmjax.errors import LlmjaxError
from llmjax.server.control import Control, leave_signals_to_the_supervisor
from llmjax.server.engine_front import ORPHANED

log = logging.getLogger(__name__)

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def main(handle: int) -> None:
    """Run what the process at the other end of this descriptor says. Ends this one with the pipeline's exit code."""
    leave_signals_to_the_supervisor()
    control = Control.inherited(handle)
    received = control.receive()
    if received is None:
        os._exit(ORPHANED)
    (_, job), _ = received
    threading.Thread(target=_end_with, args=(control,), name="llmjax-control", daemon=True).start()
    try:
        code = run(**job)
    except LlmjaxError as error:
        log.error("recalibration: %s", error)
        code = error.exit_code
    except Exception as error:  # a bug of ours: the traceback helps to report it
        log.error("recalibration: the run failed", exc_info=error)
        code = LlmjaxError.exit_code
    sys.stderr.flush()
    os._exit(code)  # threads that still load or compile are not waited for


def run(*, file: str, sets: Sequence[str], overlays: Sequence[Path], values: Mapping[str, Any], until: str) -> int:
    """Run a pipeline to a stage; its exit code. Raises `ConfigErrors`."""
    from llmjax.pipeline import load
    from llmjax.pipeline import run as run_stages
    from llmjax.telemetry.logs import configure_logging

    pipeline = load(file, overlays=overlays, sets=sets, values=values)
    configure_logging(pipeline.runtime.log, verbose=True)
    return run_stages(pipeline, until=until, reporter=_Logged()).exit_code


class _Logged:
    """A `Reporter` that writes to the log, without progress."""

    def stage(self, name: str, event: str, text: str = "", figures: Mapping[str, Any] | None = None) -> None:
        """What became of a stage."""
        level = logging.WARNING if event in ("failed", "rejected") else logging.INFO
        log.log(level, "recalibration: %s: %s%s", name, event, f": {text}" if text else "")

    def progress(self, name: str, done: int, total: int | None) -> None:
        """Nobody watches."""

    def message(self, level: str, text: str) -> None:
        """A line."""
        log.log(_LEVELS[level], "recalibration: %s", text)

    def close(self) -> None:
        """Nothing is held."""


def _end_with(control: Control) -> None:
    while control.receive() is not None:
        pass
    os._exit(ORPHANED)
