"""One name for one kernel, however often it is lowered.

Mosaic numbers the modules of a process, and the number becomes a part of what it compiles, by which it also finds what it has
compiled already. So a kernel of two programs would be compiled twice, seconds each time, and the text of a program would depend
on what was lowered before it.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

_NAME = "mosaic_gpu.dump_basename"


def keep_stable() -> None:
    """From here on kernels are lowered in this process without their numbers. Imports Mosaic. Files that a dump leaves are still
    numbered. Does nothing where Mosaic has no such numbers."""
    dialect = importlib.import_module("jax.experimental.mosaic.gpu").dialect
    original = getattr(dialect, "get_or_set_dump_options", None)
    if original is None or hasattr(original, "numbered"):
        return

    def get_or_set_dump_options(module: Any) -> Any:
        options, attributes = original(module), module.operation.attributes
        if _NAME in attributes:
            with module.context:
                attributes[_NAME] = type(attributes[_NAME]).get(re.sub(r"_\d+$", "", attributes[_NAME].value))
        return options

    get_or_set_dump_options.numbered = original  # type: ignore[attr-defined]
    dialect.get_or_set_dump_options = get_or_set_dump_options
