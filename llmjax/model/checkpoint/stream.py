"""Move a checked checkpoint onto the device, leaf by leaf. Imports JAX.

A few threads read, dequantise and cast into one host buffer a leaf; the calling thread puts each finished buffer on the
default device and drops it. Only a bounded number of leaves is on the host at any time, never the model.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.model.checkpoint.leaves import Checkpoint, Leaf, TensorReader, undo_interleaving
from llmjax.model.param_spec import Path as ParamPath

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
    sizes = [sum(reader.tensors[piece.name].num_bytes for piece in leaf.pieces) for leaf in checkpoint.leaves]
    total, done = sum(sizes), 0
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    waiting = deque(zip(checkpoint.leaves, sizes, strict=True))
    running: deque[tuple[Leaf, int, Future[np.ndarray[Any, Any]]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
        try:
            while waiting or running:
                while waiting and len(running) <= threads:
                    leaf, size = waiting.popleft()
                    running.append((leaf, size, pool.submit(_assemble, leaf, reader)))
                leaf, size, future = running.popleft()
                # Waiting for the copy bounds the host buffers; meanwhile the threads read on.
                _insert(params, leaf.path, jax.device_put(future.result()).block_until_ready())
                del future
                done += size
                if progress is not None:
                    progress(done, total)
        finally:
            pool.shutdown(cancel_futures=True)
    return params


def _assemble(leaf: Leaf, reader: TensorReader) -> np.ndarray[Any, Any]:
    out = np.empty(leaf.shape, jnp.dtype(leaf.dtype))
    first = 0
    for piece in leaf.pieces:
        rows = out[first : first + piece.shape[0]]
        reader.read_into(piece.name, rows)
        if piece.interleaved_heads:
            rows[:] = undo_interleaving(rows, piece.interleaved_heads)
        first += piece.shape[0]
    return out


def _insert(tree: dict[Any, Any], path: ParamPath, value: jax.Array) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
