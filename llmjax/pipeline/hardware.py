"""Is there a GPU that JAX would use? Answered without importing JAX, because `plan` must know it within a second."""

from __future__ import annotations

import glob
import importlib.util
from typing import Literal


def has_gpu() -> bool:
    """Whether an NVIDIA device and JAX's CUDA plugin are both here."""
    device = bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/proc/driver/nvidia/gpus/*") or glob.glob("/dev/dxg"))
    return device and any(importlib.util.find_spec(name) is not None for name in ("jax_cuda13_plugin", "jax_cuda12_plugin"))


def decide_platform(setting: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """`setting` with `auto` replaced by what this machine has."""
    if setting == "auto":
        return "cuda" if has_gpu() else "cpu"
    return setting
