"""A directory that is complete or absent: written aside, then renamed. Knows nothing of what is in it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llmjax.errors import StoreError


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write into; it is `target` at the end, and gone if that is not reached.

    Raises:
        StoreError: `target` exists, or an OSError came up inside; the latter names what cannot be written.
    """
    if target.exists():
        raise StoreError(f"{target}: exists already; choose another directory or remove it")
    aside: Path | None = None
    try:
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        yield aside
        aside.chmod(0o755)  # mkdtemp makes it private
        aside.rename(target)
    except OSError as error:
        raise StoreError(f"{target}: cannot write the model: {error.strerror or error}") from error
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
