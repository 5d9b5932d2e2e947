"""Sets JAX up before its first use: platform, share of the device's memory, persistent compile cache.

These are settings of the process, so they are made in one place and refused when it is too late for them.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from llmjax.errors import BackendError

log = logging.getLogger(__name__)

PLATFORMS = ("auto", "cpu", "cuda")
_FRACTION = "XLA_CLIENT_MEM_FRACTION"  # read by the GPU client when it starts; there is no other way to hand it over
_FRACTION_DEPRECATED = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def configure_backend(*, platform: str = "auto", memory_fraction: float | None = None) -> None:
    """Choose the platform ("auto", "cpu" or "cuda") and the share of the GPU's memory this process may take.

    Raises `BackendError` when JAX has started already with other settings, or when the platform is not there. Calling
    it again with the same settings is fine. Does not start the backend unless `platform` has to be checked.
    """
    if platform not in PLATFORMS:
        raise BackendError(f"platform {platform!r} is unknown; choose one of {', '.join(PLATFORMS)}")
    import jax

    started = _backend_started()
    if memory_fraction is not None and not _has_fraction(memory_fraction):
        if started and jax.default_backend() != "cpu":
            raise BackendError(
                f"JAX has already started with another memory setting than memory_fraction {memory_fraction:g}: "
                "configure llmjax before anything uses JAX, or drop memory_fraction"
            )
        os.environ.pop(_FRACTION_DEPRECATED, None)  # both set is an error of JAX
        os.environ[_FRACTION] = repr(float(memory_fraction))
    if platform == "auto":
        return
    if started:
        running = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
        if running != platform:
            raise BackendError(f"JAX has already started on {running}, the pipeline asks for {platform}: start a new process")
        return
    before = jax.config.jax_platforms
    # Beside a GPU there is a CPU: kernels are compared with references that are computed there.
    jax.config.update("jax_platforms", "cuda,cpu" if platform == "cuda" else platform)
    try:
        if jax.devices()[0].platform != ("gpu" if platform == "cuda" else platform):
            raise RuntimeError("JAX finds no such device")
    except (RuntimeError, AssertionError) as error:  # JAX asserts where a platform's plug-in is there but no device
        jax.config.update("jax_platforms", before)
        reason = (str(error).splitlines() or ["JAX finds no such device"])[0]
        raise BackendError(f"platform {platform} is not available: {reason}") from error


def is_gpu() -> bool:
    """Whether JAX's default device is a GPU. Starts the backend."""
    import jax

    return bool(jax.default_backend() == "gpu")


def use_compile_cache(folder: str | Path) -> None:
    """Keep compiled programs in `folder`, shared by processes. A folder that cannot be written is still read from."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    path = str(folder)
    try:
        Path(path).mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        log.warning("compile cache %s cannot be made (%s); going on without", path, error.strerror or error)
        return
    if jax.config.jax_compilation_cache_dir == path:
        return
    jax.config.update("jax_compilation_cache_dir", path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # the folder is otherwise read once, at the first compilation


def _backend_started() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bool(bridge is not None and getattr(bridge, "_backends", None))


def _has_fraction(wanted: float) -> bool:
    for name in (_FRACTION, _FRACTION_DEPRECATED):
        if name in os.environ:
            try:
                return abs(float(os.environ[name]) - wanted) < 1e-9
            except ValueError:
                return False
    return False
