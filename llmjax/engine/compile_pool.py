"""Processes that lower programs side by side, seen from the engine that asks them. Owns the processes and their pipes.

What they do is `compile_worker`'s. They are started as plain interpreters: a script that makes an engine needs no
`if __name__ == "__main__"`.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import queue
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.export

from llmjax.engine.compile_worker import TRACING_SETTINGS, Target

MAX_WORKERS = 8
_MIN_CORES = 8  # with fewer, processes that import JAX take the time of those that compile

_CODE = "import sys; sys.path[:] = {path!r}; from llmjax.engine.compile_worker import serve; serve({handle})"


class LoweringFailed(Exception):
    """Another process could not lower a program. The message says why."""


class LoweringPool:
    """`workers` processes that lower for the default device. They start at once, and take their first task when JAX is up."""

    def __init__(self, workers: int) -> None:
        device = jax.devices()[0]
        target = Target(
            platform="cuda" if device.platform == "gpu" else "cpu",
            device_kind=device.device_kind,
            num_cores=getattr(device, "core_count", None),
            settings={name: getattr(jax.config, name) for name in TRACING_SETTINGS},
        )
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._threads = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="lower")
        for _ in range(workers):
            ours, theirs = multiprocessing.Pipe()
            code = _CODE.format(path=[entry or "." for entry in sys.path], handle=theirs.fileno())
            self._processes.append(
                subprocess.Popen([sys.executable, "-c", code], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
            )
            theirs.close()
            ours.send(target)
            self._pipes.append(ours)
            self._idle.put(ours)

    def submit(self, key: Any, shapes: Any) -> concurrent.futures.Future[jax.export.Exported]:
        """Lower the program `key` of `shapes`. The future raises `LoweringFailed`."""
        return self._threads.submit(self._ask, key, shapes)

    def _ask(self, key: Any, shapes: Any) -> jax.export.Exported:
        pipe = self._idle.get()
        try:
            pipe.send((key, shapes))
            answer = pipe.recv()
        except (EOFError, OSError) as error:
            raise LoweringFailed(f"the process that lowers ended ({type(error).__name__})") from error
        finally:
            self._idle.put(pipe)
        if isinstance(answer, str):
            raise LoweringFailed(answer.splitlines()[0])
        exported: jax.export.Exported = answer
        return exported

    def close(self) -> None:
        """End the processes; whatever they are at is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.wait()
            pipe.close()


def useful_workers(programs: int, cores: int) -> int:
    """How many processes are worth starting on this machine to lower so many programs; 0 when this process is as quick.

    Only for GPUs of compute capability 9.0: a process without the device cannot tell Mosaic of another, and without kernels
    lowering is quick.
    """
    device = jax.devices()[0]
    if device.platform != "gpu" or getattr(device, "compute_capability", "") != "9.0" or cores < _MIN_CORES:
        return 0
    return min(programs, cores // 2, MAX_WORKERS)
