"""The process that runs a pipeline for a service: the command `run` once more, with its HTTP side in other processes."""

from __future__ import annotations

import logging
import os
import sys

import typer

from llmjax.cli.pipelines import run_here
from llmjax.cli.terminal import safe_streams, tell
from llmjax.errors import LlmjaxError
from llmjax.server.control import Control
from llmjax.server.engine_front import ORPHANED, EngineFront

_INTERRUPTED = 130


def main(handle: int) -> None:
    """Run the pipeline that the supervisor at the other end of this descriptor names. Ends the process with its exit code."""
    safe_streams()
    control = Control.inherited(handle)
    received = control.receive()
    if received is None:
        os._exit(ORPHANED)
    (_, job), _ = received
    code = _INTERRUPTED
    try:
        front = EngineFront(control, job["url"])
        code = run_here(**job["run"], front=front)
    except LlmjaxError as error:
        tell(error)
        code = error.exit_code
    except typer.Exit as stop:
        code = stop.exit_code
    except KeyboardInterrupt:
        pass
    except Exception as error:  # a bug of ours: the traceback helps to report it
        logging.getLogger("llmjax").error("the pipeline failed", exc_info=error)
        code = LlmjaxError.exit_code
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)  # threads that still load or compile are not waited for
