"""A process that traces and lowers programs for another one's device. It holds no device itself.

Tracing and lowering hold the interpreter lock, so an engine's programs are lowered in several processes (`compile_pool`). The
device is described by an abstract mesh; what goes back is StableHLO. Trusts whoever started it.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

    First a `Target`, then (key, shapes) pairs; each is answered by a `jax.export.Exported`, or by a text that says what is wrong.
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
                answer: Any = _export(key, shapes, target)
            except Exception as error:  # told to the other side, which lowers by itself
                answer = f"{type(error).__name__}: {error}"
            pipe.send(answer)


def _export(key: Any, shapes: Any, target: Target) -> Any:
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    from llmjax.engine.compile_programs import export
    from llmjax.model.registry import get_model

    model = get_model(shapes.config.family)
    if target.platform == "cpu":
        return export(key, model, shapes, target.platform)
    device = AbstractDevice(device_kind=target.device_kind, platform="gpu", num_cores=target.num_cores)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):  # no axes: what is lowered says nothing of shardings
        return export(key, model, shapes, target.platform)
