"""What this machine offers: versions, devices, caches. For `llmjax doctor`; imports JAX only when asked for devices."""

from __future__ import annotations

import dataclasses
import glob
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

_PACKAGES = (
    "llmjax",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "flax",
    "orbax-checkpoint",
    "transformers",
    "tokenizers",
    "gguf",
    "numpy",
)
_OPTIONAL = ("jax-cuda13-plugin", "llmjax")  # run from a source tree, llmjax has no metadata


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the doctor's: what was looked at, what is there, and for a problem what to do."""

    name: str
    value: str
    level: Literal["ok", "warning", "error"] = "ok"
    advice: str = ""


def examine(*, compile_cache: Path) -> list[Finding]:
    """Look at everything. Starts JAX's backend."""
    return [*_host(), *_packages(), *_devices(), _cache(compile_cache)]


def _host() -> list[Finding]:
    version = platform.python_version()
    old = sys.version_info < (3, 12)
    cores = os.process_cpu_count() if hasattr(os, "process_cpu_count") else len(os.sched_getaffinity(0))
    findings = [
        Finding("python", version, "error" if old else "ok", "llmjax needs Python 3.12 or newer" if old else ""),
        Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}, {cores} cores"),
    ]
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return [*findings, Finding("memory", _gib(pages * size))]


def _packages() -> list[Finding]:
    findings = []
    for name in _PACKAGES:
        try:
            findings.append(Finding(name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            if name not in _OPTIONAL:
                findings.append(Finding(name, "not installed", "error", f"python -m pip install {name}"))
    return findings


def _devices() -> list[Finding]:
    try:
        import jax

        devices: list[Any] = jax.devices()
    except (ImportError, RuntimeError) as error:
        return [Finding("devices", str(error).splitlines()[0], "error", "mend the JAX install; on NVIDIA: jax[cuda13]")]
    findings = []
    for device in devices:
        stats = device.memory_stats() or {}
        room = f", {_gib(stats['bytes_limit'])} for this process" if "bytes_limit" in stats else ""
        findings.append(Finding(f"device {device.id}", f"{device.platform} {device.device_kind}{room}"))
    gpu_is_here = bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/proc/driver/nvidia/gpus/*"))
    if gpu_is_here and all(device.platform == "cpu" for device in devices):
        advice = "install CUDA support: python -m pip install 'jax[cuda13]'"
        findings.append(Finding("gpu", "an NVIDIA GPU is here, but JAX does not use it", "warning", advice))
    return findings


def _cache(folder: Path) -> Finding:
    where = folder.absolute()
    existing = where if where.is_dir() else next(parent for parent in where.parents if parent.is_dir())
    if not os.access(existing, os.W_OK):
        return Finding("compile cache", f"{where} cannot be written", "warning", "each start compiles anew")
    files = [path for path in where.glob("*") if path.is_file()] if where.is_dir() else []
    size = sum(path.stat().st_size for path in files)
    free = shutil.disk_usage(existing).free
    return Finding("compile cache", f"{where}: {len(files)} files, {_gib(size)}; {_gib(free)} free")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
