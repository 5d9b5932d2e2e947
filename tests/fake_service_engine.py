"""The engine's process of `fake_service`."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fake_service import FakeJob
from fakes_engine import FakeEngine

from llmjax.engine.async_engine import AsyncEngine
from llmjax.engine.config import EngineConfig
from llmjax.engine.outputs import RequestOutput
from llmjax.errors import LlmjaxError
from llmjax.server.control import Control
from llmjax.server.engine_front import EngineFront
from llmjax.telemetry.logs import configure_logging


class PacedEngine(FakeEngine):
    """A step takes two milliseconds."""

    def __init__(self, job: FakeJob) -> None:
        super().__init__(EngineConfig(max_context=100_000, max_sequences=job.rows))
        self._fail = job.fail
        self.stats: Any = SimpleNamespace(num_pages=64, peak_pages_used=0, launches=0, output_tokens=0)
        self.scheduler = self
        self.pool = SimpleNamespace(num_used=0)

    def step(self, *, closed: bool = False) -> list[RequestOutput]:
        time.sleep(0.002)
        assert gc.get_freeze_count(), "garbage would be looked for in all that was made before the service was ready"
        if self._fail and os.path.exists(self._fail):
            raise ValueError("the device is lost")
        return super().step()


def main(handle: int) -> None:
    """The engine's process."""
    configure_logging(verbose=True)
    control = Control.inherited(handle)
    received = control.receive()
    assert received is not None
    (_, job), _ = received
    if isinstance(job, dict):  # that of a pipeline's service
        data = job["run"]["values"].get("stages.calibrate.data.path")
        job = FakeJob(url=job["url"], name="first" if data is None else "from-traffic")
        Path("url").write_text(job.url)
    code = 130
    try:
        front = EngineFront(control, job.url)
        while job.load and not os.path.exists(job.load):
            time.sleep(0.01)
        if job.broken:
            os._exit(4)
        try:
            front.serve(AsyncEngine(PacedEngine(job), max_waiting=64), name=job.name, drain=job.drain).wait()
            code = 0
        except LlmjaxError as error:
            print(f"llmjax: {error}", file=sys.stderr)
            code = error.exit_code
        finally:
            front.close()
    except KeyboardInterrupt:
        pass
    finally:
        os._exit(code)
