"""Move a checked checkpoint onto the device, leaf by leaf. Imports JAX.

A few threads read, dequantise and cast into one host buffer a leaf; the calling thread puts each finished buffer on the
default device and drops it. Only a bounded number of leaves is on the host at any time, never the model.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.errors import ModelError
from llmjax.model.checkpoint.int8 import in_kernel_order
from llmjax.model.checkpoint.leaves import Checkpoint, Leaf, TensorReader, undo_interleaving
from llmjax.model.param_spec import Path as ParamPath
from pallas_kernels.quantized import QuantizedTensor

Progress = Callable[[int, int], None]

_MAX_THREADS = 8


def load_leaves(checkpoint: Checkpoint, progress: Progress | None = None) -> dict[str, Any]:
    """The parameter tree of a checkpoint as arrays on JAX's default device.

    Args:
        checkpoint: opened; its reader stays open.
        progress: called from this thread after each leaf with (bytes of the files done, bytes in total).

    Raises whatever reading raises; what was already loaded is dropped.
    """
    reader = checkpoint.reader
    params: dict[str, Any] = {}
    sizes = [sum(reader.tensors[piece.name].num_bytes for piece in (*leaf.pieces, *leaf.scales)) for leaf in checkpoint.leaves]
    total, done = sum(sizes), 0
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    waiting = deque(zip(checkpoint.leaves, sizes, strict=True))
    running: deque[tuple[Leaf, int, Future[Any]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
        try:
            while waiting or running:
                while waiting and len(running) <= threads:
                    leaf, size = waiting.popleft()
                    running.append((leaf, size, pool.submit(_assemble, leaf, reader)))
                leaf, size, future = running.popleft()
                # Waiting for the copy bounds the host buffers; meanwhile the threads read on.
                value = jax.block_until_ready(jax.device_put(future.result()))
                _insert(params, leaf.path, in_kernel_order(value) if isinstance(value, QuantizedTensor) else value)
                del value
                del future
                done += size
                if progress is not None:
                    progress(done, total)
        finally:
            pool.shutdown(cancel_futures=True)
    return params


def _assemble(leaf: Leaf, reader: TensorReader) -> np.ndarray[Any, Any] | QuantizedTensor:
    """A leaf in a buffer of the host; an int8 weight as two."""
    out = np.empty(leaf.shape, jnp.dtype(leaf.dtype))
    first = 0
    for piece in leaf.pieces:
        rows = out[first : first + piece.shape[0]]
        reader.read_into(piece.name, rows)
        if piece.interleaved_heads:
            rows[:] = undo_interleaving(rows, piece.interleaved_heads)
        first += piece.shape[0]
    return QuantizedTensor(out, _scales(leaf, reader)) if leaf.scales else out  # type: ignore[arg-type]  # of the host yet


def _scales(leaf: Leaf, reader: TensorReader) -> np.ndarray[Any, Any]:
    """float32, one for each row; one for all rows of a piece is theirs each."""
    parts = []
    for piece in leaf.scales:
        read = np.empty(math.prod(reader.tensors[piece.name].shape), np.float32)
        reader.read_into(piece.name, read)
        if not (np.isfinite(read) & (read >= 0)).all():
            raise ModelError(f"{reader.path}: {piece.name} has a scale that is NaN, infinite or negative; download it again")
        parts.append(np.broadcast_to(read, piece.shape))
    return np.concatenate(parts)


def _insert(tree: dict[Any, Any], path: ParamPath, value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
