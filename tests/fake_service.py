"""A service of real processes around an engine that is a fake: the supervisor. The engine's process is `fake_service_engine`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from llmjax.errors import LlmjaxError
from llmjax.server.config import WorkerJob
from llmjax.server.listener import listen, url_of
from llmjax.server.supervisor import Program, Supervisor
from llmjax.telemetry.logs import configure_logging


@dataclasses.dataclass(frozen=True)
class FakeJob:
    """How the fake behaves.

    Attributes:
        rows: of its batch.
        drain: see `EngineFront.serve`.
        load: a file that must be there before the engine is; "" needs none.
        fail: a file that makes the next step fail once it is there.
        url: of the server.
        name: of the model.
        broken: it ends before it serves.
    """

    rows: int = 8
    drain: float = 30.0
    load: str = ""
    fail: str = ""
    url: str = ""
    name: str = "fake"
    broken: bool = False


def supervise(options: dict[str, Any]) -> None:
    """The supervisor's process: writes its address to `options["address"]` and serves."""
    configure_logging(verbose=True)
    listener = listen("127.0.0.1", 0)
    job = FakeJob(**options.get("engine", {}), url=url_of(listener))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(options["address"])
    beside = options.get("beside")
    supervisor = Supervisor(
        listener,
        engine=Program("fake_service_engine", job),
        worker=Program("llmjax.server.worker", WorkerJob({"keep_alive": 60.0})),
        workers=options.get("workers", 1),
        restart=options.get("restart", 0),
        beside=None if beside is None else Program("fake_beside", (beside, job)),
    )
    Path(options["address"]).write_text(job.url)
    try:
        code = supervisor.run()
    except LlmjaxError as error:
        print(f"llmjax: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
