"""Lowered programs kept in a folder between starts, so that a start traces and lowers nothing it has done before.

Owns the files and the question whether one may be used: its name is a digest of everything a program depends on, this code and
the versions of what traces it included. What it is compiled to is kept by JAX's own cache, beside it. Replicas that start at once
may share the folder: a file is complete or absent, and a damaged one is as good as absent. Programs are pickled and are run:
whoever can write to the folder can run code as its user.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import pickle
import platform
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.export

log = logging.getLogger(__name__)

MAX_BYTES = 2**30  # about 400 KB a program
_VERSIONS = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "flax", "numpy")
_ENVIRONMENT = ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")  # read by XLA itself, unseen by JAX's settings
_KINDS = (".program", ".fact")
_DIGEST_BYTES = hashlib.sha256().digest_size


class ProgramStore:
    """Programs, and small facts that took as long to find out, in `folder`.

    Nothing here raises: a folder that cannot be read has nothing in it, one that cannot be written keeps nothing.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._surroundings = _surroundings()

    def load(self, identity: str) -> jax.export.Exported | None:
        """The program that was saved under `identity`; None when there is none that can be used here."""
        path = self._path(identity, "program")
        content = self._read(path)
        if content is None:
            return None
        try:
            exported: jax.export.Exported = pickle.loads(content)
        except Exception as error:  # whatever unpickling may raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            log.warning("stored program %s cannot be loaded and is made again: %s", path.name, reason)
            return None
        with contextlib.suppress(OSError):  # a folder that is only read
            os.utime(path)
        return exported

    def save(self, identity: str, exported: jax.export.Exported) -> None:
        """Keep a program, as `compile_programs.export` makes it."""
        self._write(self._path(identity, "program"), pickle.dumps(exported))

    def recall(self, identity: str) -> Any | None:
        """The fact that was noted under `identity`, or None."""
        content = self._read(self._path(identity, "fact"))
        return None if content is None else json.loads(content)

    def note(self, identity: str, fact: Any) -> None:
        """Keep a fact, anything that JSON can hold but null."""
        self._write(self._path(identity, "fact"), json.dumps(fact).encode())

    def _path(self, identity: str, kind: str) -> Path:
        text = "\n".join((self._surroundings, kind, identity))
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()}.{kind}"

    def _read(self, path: Path) -> bytes | None:
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest, rest = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(rest).digest() != digest:
            log.warning("%s in the compile cache is damaged and is made again", path.name)
            return None
        return rest

    def _write(self, path: Path, content: bytes) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".part", delete=False) as file:
                try:
                    file.write(hashlib.sha256(content).digest() + content)
                    file.close()
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
            self._forget_oldest()
        except OSError as error:
            log.info("compile cache %s keeps nothing new: %s", self._folder, error.strerror or error)

    def _forget_oldest(self) -> None:
        """Code and shapes change; what was not used for longest makes room."""
        paths = [path for path in self._folder.iterdir() if path.suffix in _KINDS]  # the folder is JAX's as well
        entries = sorted(((path.stat(), path) for path in paths), key=lambda entry: entry[0].st_mtime)
        size = sum(stat.st_size for stat, _ in entries)
        for stat, path in entries:
            if size <= MAX_BYTES:
                return
            path.unlink(missing_ok=True)
            size -= stat.st_size


@functools.cache
def _code_digest() -> str:
    """Of every source and every table of this code: any change may change a program."""
    import llmjax
    import pallas_kernels

    digest = hashlib.sha256()
    for package in (llmjax, pallas_kernels):
        root = Path(str(package.__path__[0]))
        for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".json")):
            digest.update(f"{root.name}/{path.relative_to(root)}".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _surroundings() -> str:
    """Everything outside a program's own shapes that changes it: code, versions, device, driver, JAX's and XLA's settings."""
    device = jax.devices()[0]
    versions = {}
    for name in _VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    skipped = ("cache", "log", "traceback")  # where things are kept and told; all others count, to be on the safe side
    settings = {
        name: repr(getattr(jax.config, name, None))
        for name in sorted(jax.config.values)
        if not any(word in name for word in skipped)
    }
    facts = {
        "code": _code_digest(),
        "python": platform.python_version(),
        "versions": versions,
        "device": (device.platform, device.device_kind, device.id, device.client.platform_version, jax.device_count()),
        "driver": _first_lines("/proc/driver/nvidia/version"),
        "processor": _first_lines("/proc/cpuinfo", "flags") if device.platform == "cpu" else "",
        "settings": settings,
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
    }
    return json.dumps(facts, sort_keys=True)


def _first_lines(path: str, start: str = "") -> str:
    """The first line of a file that begins so; "" where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return next((line for line in file if line.startswith(start)), "")
    except OSError:
        return ""
