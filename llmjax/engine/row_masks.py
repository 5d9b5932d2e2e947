"""`RowMasks`: what one row of a launch may sample, and the drafts that were made for it. Plain data for the runner; no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class RowMasks:
    """Of a row that samples only some tokens. It holds for one launch: a row that has once had a mask gets another for each.

    Attributes:
        row: its device row.
        allowed: int32 [W] each, as `DeviceState.allowed` has them: of the next token, and of the one behind each draft.
        drafts: token ids; none but in a speculate launch.
        position: that of the first of them.
    """

    row: int
    allowed: Sequence[np.ndarray]
    drafts: Sequence[int] = ()
    position: int = 0
