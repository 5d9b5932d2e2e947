"""The process beside a service that looks at its traffic from time to time, and calibrates, quantises and judges a model anew.

It holds no model: what it runs are processes of their own (`recalibration_run`), of the lowest priority, which end with it. It
ends with its supervisor, and the service goes on without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any

from llmjax.server.control import Control, leave_signals_to_the_supervisor
from llmjax.server.engine_front import ORPHANED
from llmjax.server.supervisor import python_command

log = logging.getLogger(__name__)

RUN = "llmjax.cli.recalibration_run"
_LOWEST = 19


def main(handle: int) -> None:
    """Work for the supervisor at the other end of this descriptor, until that closes."""
    leave_signals_to_the_supervisor()
    os.nice(_LOWEST)  # it reads a log of gigabytes, and what it starts is no more urgent
    control = Control.inherited(handle)
    received = control.receive()
    if received is None:
        os._exit(ORPHANED)
    (_, job), _ = received
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(control, answers), name="llmjax-control", daemon=True).start()
    _look_for_ever(job, control, answers)


def run_beside(options: Mapping[str, Any], values: Mapping[str, Any], until: str) -> int:
    """Run a pipeline to a stage in a process of its own, and wait. Its exit code."""
    ours, theirs = Control.pair()
    with contextlib.closing(ours):
        with theirs:
            handle = theirs.fileno()
            process = subprocess.Popen(
                python_command(RUN, handle), pass_fds=(handle,), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        names = ("file", "sets", "overlays")
        ours.send("job", {name: options[name] for name in names} | {"values": dict(values), "until": until})
        return process.wait()


def _look_for_ever(engine_job: dict[str, Any], control: Control, answers: queue.SimpleQueue[bool]) -> None:
    from llmjax.pipeline import Pipeline, load
    from llmjax.pipeline.recalibration import Recalibration, State, chain_of, state_path
    from llmjax.pipeline.recalibration_runs import Runs
    from llmjax.telemetry.logs import configure_logging

    options = engine_job["run"]

    def load_with(values: Mapping[str, Any]) -> Pipeline:
        return load(options["file"], overlays=options["overlays"], sets=options["sets"], values=values)

    def swap_to(values: Mapping[str, Any]) -> bool:
        control.send("replace", engine_job | {"run": options | {"values": dict(values), "force": ()}})
        return answers.get()

    pipeline = load_with(options["values"])
    configure_logging(pipeline.runtime.log, verbose=True)
    chain, _ = chain_of(pipeline.stages)
    assert chain is not None, "the service starts this process for a pipeline that has one"
    path = state_path(pipeline)
    runs = Runs(chain, options["values"], load_with, lambda values, until: run_beside(options, values, until), swap_to)
    state = State.read(path)
    runs.forget_all_but(state.data)
    recalibration = Recalibration(chain.rule, runs, state, lambda state: state.write(path))
    while True:
        time.sleep(chain.rule.check)
        try:
            recalibration.look()
        except Exception as error:  # whatever it is, the next look may do better, and the service is not concerned
            log.error("recalibration: a look at the traffic failed", exc_info=error)


def _listen(control: Control, answers: queue.SimpleQueue[bool]) -> None:
    while (received := control.receive()) is not None:
        (what, *rest), _ = received
        if what == "replaced":
            answers.put(rest[0])
    os._exit(ORPHANED)
