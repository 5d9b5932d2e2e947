"""The store: one folder a result, `<artifacts>/store/<kind>/<key>/`. A folder counts when it has its `manifest.json`.

Results are written aside and renamed into place, so that a crash, a full disk or a second process never leaves half of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmjax.errors import StoreError
from llmjax.pipeline.digest import write_whole

MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Store:
    """Results of stages below `root`. Reading never creates anything."""

    root: Path

    def folder(self, kind: str, key: str) -> Path:
        """Where a result is, or would be."""
        return self.root / kind / key

    def has(self, kind: str, key: str) -> bool:
        """Whether a complete result is there."""
        return (self.folder(kind, key) / MANIFEST).is_file()

    def manifest(self, kind: str, key: str) -> dict[str, Any]:
        """The manifest of a complete result. Raises `StoreError` when it cannot be read."""
        path = self.folder(kind, key) / MANIFEST
        try:
            data = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} cannot be read: {error}; delete the folder to compute it again") from None
        if not isinstance(data, dict):
            raise StoreError(f"{path} is damaged; delete the folder to compute it again")
        return data

    def remove(self, kind: str, key: str) -> None:
        """Remove a result, and what a process that was killed left half written of it. What cannot be removed stays."""
        folder = self.folder(kind, key)
        with contextlib.suppress(OSError):
            (folder / MANIFEST).unlink()  # first: what is left of it does not count
        for path in (folder, *folder.parent.glob(f".{key[:12]}.*")):
            shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def writing(self, kind: str, key: str, identity: Mapping[str, Any]) -> Iterator[Path]:
        """A new empty folder to write a result to; on leaving it becomes the result of `key`, in place of an older one.

        When the block raises, everything is removed again. `OSError` (a full disk, a read-only folder) becomes a `StoreError`.
        """
        target = self.folder(kind, key)
        aside = target.with_name(f".{key[:12]}.{secrets.token_hex(4)}")
        try:
            try:
                aside.mkdir(parents=True)
            except OSError as error:
                raise _store_error(error, self.root) from None
            try:
                yield aside
            except OSError as error:
                if not _is_about(error, aside):
                    raise
                raise _store_error(error, self.root) from error
            try:
                files = {p.relative_to(aside).as_posix(): p.stat().st_size for p in sorted(aside.rglob("*")) if p.is_file()}
                manifest = {"kind": kind, "key": key, "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
                body = {**manifest, "identity": dict(identity), "files": files}
                write_whole(aside / MANIFEST, json.dumps(body, indent=1, ensure_ascii=False) + "\n")
                _put_in_place(aside, target)
            except OSError as error:
                raise _store_error(error, self.root) from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _put_in_place(aside: Path, target: Path) -> None:
    """Renames `aside` to `target`. An older result steps aside first and comes back when the rename fails."""
    old: Path | None = None
    if target.exists():
        old = target.parent / f"{aside.name}.old"
        os.rename(target, old)
    try:
        os.replace(aside, target)
    except OSError:
        if old is not None:
            os.rename(old, target)
        raise
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _is_about(error: OSError, folder: Path) -> bool:
    """Whether `error` comes from writing to `folder`; a stage's other files and connections raise `OSError` as well."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) and error.filename is None:
        return True
    return isinstance(error.filename, str) and Path(error.filename).is_relative_to(folder)


def _store_error(error: OSError, root: Path) -> StoreError:
    return StoreError(f"the store {root} cannot be written: {error.strerror or error}; free space there or set 'artifacts'")
