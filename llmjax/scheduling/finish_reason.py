"""Why an output ended. Imports nothing, because the HTTP side needs it and has no use for NumPy."""

from __future__ import annotations

from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error", "timeout"]
"""`timeout`: the request waited for its first row longer than its lane lets it."""
