"""`Health`: what an engine says of its state. Imports nothing, because the smallest processes need it too."""

from __future__ import annotations

import dataclasses
from typing import Literal

State = Literal["new", "starting", "ready", "draining", "stuck", "dead", "stopped"]


@dataclasses.dataclass(frozen=True)
class Health:
    """What can be expected of the engine. `reason` says why when it is not "ready".

    "stuck" may pass (one step takes longer than the watchdog allows), and "starting" does (it is being loaded, perhaps again);
    "dead" and "stopped" do not.
    """

    state: State
    reason: str = ""

    @property
    def ready(self) -> bool:
        """Whether a request would be taken; a new engine starts with its first one."""
        return self.state in ("new", "ready")

    @property
    def gone(self) -> bool:
        """Whether it will never be ready again."""
        return self.state in ("dead", "stopped")
