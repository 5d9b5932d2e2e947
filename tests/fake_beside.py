"""The process beside of `fake_service`: replaces the engine when a file tells it what by, and writes down how that went."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

from llmjax.server.control import Control


def main(handle: int) -> None:
    """`<beside>.ask` holds fields of a `FakeJob`; `<beside>.told` then says whether that one serves."""
    control = Control.inherited(handle)
    received = control.receive()
    assert received is not None
    (_, (beside, job)), _ = received
    ask = Path(f"{beside}.ask")
    while not ask.exists():
        if os.getppid() == 1:
            return
        time.sleep(0.01)
    control.send("replace", dataclasses.replace(job, **json.loads(ask.read_text())))
    answer = control.receive()
    assert answer is not None
    Path(f"{beside}.told").write_text(json.dumps(answer[0]))
    control.receive()
