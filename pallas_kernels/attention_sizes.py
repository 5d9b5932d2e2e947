"""Sizes that the attention kernels share. Imports nothing, Mosaic least of all, which takes seconds."""

from __future__ import annotations

import math

TILE = 64
"""Rows of a wgmma, and so of a warpgroup's queries."""

LOG2E = math.log2(math.e)
"""The softmax is computed in base 2."""

FAR = 1 << 29
"""Beyond any position, and safe to add to one or to subtract from one."""

PAGES = (16, 32, 64)
"""Tokens of a page."""

SHARED_BYTES = 232448 - 1024
"""Shared memory that a CTA may use, its barriers left out."""
