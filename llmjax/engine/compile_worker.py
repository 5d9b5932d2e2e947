"""A process that traces and lowers programs for another one's device. It holds no device itself.

Tracing and lowering hold the interpreter lock, so an engine's programs are lowered in several processes (`compile_pool`). The
device is described by an abstract mesh; what comes back is StableHLO. Trusts whoever started it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from multiprocessing.connection import Connection
from typing import Any

# Of JAX's settings, those that change what is traced.
TRACING_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)


@dataclasses.dataclass(frozen=True)
class Target:
    """The device to lower for, and JAX's settings there.

    Attributes:
        platform: "cuda" or "cpu".
        device_kind, num_cores: of a GPU, as its process finds them.
        settings: values of `TRACING_SETTINGS`.
    """

    platform: str
    device_kind: str
    num_cores: int | None
    settings: dict[str, Any]


def serve(handle: int) -> None:
    """Answer the tasks that come through the pipe with this file descriptor, until it is closed.

    First a `Target`, then (key, shapes) pairs; each is answered by (`jax.export.Exported`, seconds), or by a text that says
    what went wrong.
    """
    with Connection(handle) as pipe, contextlib.suppress(EOFError, KeyboardInterrupt, OSError):
        target: Target = pipe.recv()
        import jax

        jax.config.update("jax_platforms", "cpu")  # the device belongs to the process that asks
        for name, value in target.settings.items():
            jax.config.update(name, value)
        from llmjax.engine import compile_programs  # imported before the first task comes  # noqa: F401

        while True:
            key, shapes = pipe.recv()
            try:
                started = time.perf_counter()
                answer: Any = export(key, shapes, target), time.perf_counter() - started
            except Exception as error:  # told to the other side, which lowers by itself
                answer = f"{type(error).__name__}: {error}"
            pipe.send(answer)


def export(key: Any, shapes: Any, target: Target) -> Any:
    """The program of `compile_programs.step_function`, lowered for `target`: a `jax.export.Exported` that can be pickled."""
    import jax.export
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    from llmjax.engine.compile_programs import step_function
    from llmjax.model.registry import get_model

    step, arguments, donated = step_function(key, get_model(shapes.config.family), shapes)
    mesh: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if target.platform != "cpu":  # without axes: what is lowered says nothing of shardings
        device = AbstractDevice(device_kind=target.device_kind, platform="gpu", num_cores=target.num_cores)
        mesh = use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    kernels = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")  # compiled by the same JAX, so it need not be stable
    with mesh:
        jitted = jax.jit(step, donate_argnums=donated)
        exported = jax.export.export(jitted, platforms=(target.platform,), disabled_checks=(kernels,))(*arguments)
    return dataclasses.replace(exported, _get_vjp=None)  # a closure, which cannot be pickled
