"""`Supervisor`: the parent of a service's processes: one with the engine, and workers that speak HTTP.

Holds the listening socket, passes signals on, and decides what becomes of the service when a process ends:

- a worker: another one is started; the engine has seen its socket close and aborted its requests;
- the engine: its streams have ended with errors; it is started again as often as it may be, or the service ends;
- the process beside, where there is one: the service goes on without it. It may have the engine's process replaced by one with
  another job: that one drains, the next one starts, and if it never comes to serve, one with the job before does;
- the supervisor: the others see their control socket close, and end.

Processes are plain interpreters. They are joined by socket pairs, so that no file is left behind, whatever ends. Knows neither
engines nor HTTP, and must stay small: it is what has to survive.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from llmjax.engine.health import Health
from llmjax.errors import LlmjaxError
from llmjax.server.control import Control

log = logging.getLogger(__name__)

INTERRUPTED = 130
GRACE = 5  # seconds for answers that have ended to reach their clients
REPLACEMENT_STARTS = 1800.0  # seconds in which an engine must come to serve in another one's place
_MOST_FAILED_STARTS = 5  # workers in a row that ended before they came up
_CODE = "import sys; sys.path[:] = {path!r}; from {module} import main; main({handle})"


@dataclasses.dataclass(frozen=True)
class Program:
    """What a process runs: `main(handle)` of a module, with a file descriptor for a `Control`. Its first message is `job`."""

    module: str
    job: Any


class Supervisor:
    """Runs a service on the main thread.

    Args:
        listener: the workers' socket; closed at the end.
        engine, worker: what the processes run; a worker gets the listener with its job.
        workers: how many.
        restart: how often the engine's process is started again when it crashes.
        beside: runs beside the service. It says "replace" with a job for the engine, and is told "replaced" and whether that one
            serves.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        engine: Program,
        worker: Program,
        workers: int = 1,
        restart: int = 0,
        beside: Program | None = None,
    ) -> None:
        self._listener = listener
        self._engine_program = engine
        self._worker_program = worker
        self._num_workers = workers
        self._restart = restart
        self._beside_program = beside
        self._beside: _Child | None = None
        self._before: Program | None = None  # what a replacement that does not serve yet took the place of
        self._engine: _Child | None = None
        self._workers: set[_Child] = set()
        self._stops = 0
        self._stopping = asyncio.Event()
        self._closing = asyncio.Event()
        self._expected = Health("starting", "the engine is starting")

    def run(self) -> int:
        """Until a signal, or the engine's process ends for good. Its exit code.

        Raises `LlmjaxError` when the engine's process was killed, or processes cannot be started.
        """
        try:
            return asyncio.run(self._run())
        except OSError as error:
            raise LlmjaxError(f"the service's processes cannot be run: {error.strerror or error}") from error

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        engine = asyncio.create_task(self._keep_engine())
        failure: asyncio.Future[int] = loop.create_future()
        workers = [asyncio.create_task(self._keep_worker(failure)) for _ in range(self._num_workers)]
        beside = asyncio.create_task(self._run_beside())
        try:
            done, _ = await asyncio.wait((engine, failure), return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            failure.cancel()
            self._listener.close()
            await self._end((engine, beside), workers)

    async def _end(self, others: tuple[asyncio.Task[Any], ...], workers: list[asyncio.Task[None]]) -> None:
        """Whatever still runs. Workers have time for their last answers."""
        tasks: list[asyncio.Task[Any]] = [*others, *workers]
        self._closing.set()
        for task in others:
            task.cancel()
        for worker in list(self._workers):
            worker.control.send("stop", GRACE if self._stops < 2 else 1)
        await asyncio.wait(tasks, timeout=GRACE + 3.0)
        for task in tasks:
            task.cancel()
        for child in list(self._workers):
            child.kill()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_signal(self) -> None:
        self._stops += 1
        self._stopping.set()
        if self._engine is None:
            return
        if self._stops == 1 and self._engine.leaves:
            return  # it drains already, to be replaced: another word would end its requests at once
        self._engine.control.send("stop")
        if self._stops == 2:
            asyncio.get_running_loop().call_later(GRACE + 3.0, self._engine.kill)
        elif self._stops > 2:
            self._engine.kill()

    # -- the engine

    async def _keep_engine(self) -> int:
        failures = 0
        while True:
            program = self._engine_program
            code, was_ready = await self._run_engine()
            if self._stopping.is_set():
                if code < 0:
                    log.error("the engine's process %s before it had stopped", _ending(code))
                return code if code >= 0 else INTERRUPTED
            if self._engine_program is not program:
                self._expect(Health("starting", "the engine is being replaced"))
                continue
            why = f"the engine's process {_ending(code)}"
            if self._before is not None:  # it never served
                log.error("%s before it served; the one before is started again", why)
                self._engine_program = self._before
                self._replaced(False)
                continue
            if code == 0 or (code > 0 and failures == 0 and not was_ready):
                return code  # it is done, or could not begin and has said why
            if failures == self._restart:
                break
            failures += 1
            delay = min(30.0, 0.5 * 2 ** (failures - 1))
            log.warning("%s; it is started again in %g s (%d of %d)", why, delay, failures, self._restart)
            self._expect(Health("starting", f"{why} and is being started again"))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            if self._stopping.is_set():
                return 0
        self._expect(Health("dead", why))
        hint = "it was started again as often as serve.restart allows" if self._restart else "serve.restart would start it again"
        if code > 0:
            log.error("%s; %s", why, hint)
            return code
        raise LlmjaxError(f"{why}; {hint}")

    async def _run_engine(self) -> tuple[int, bool]:
        """One life of the engine's process: how it ended, and whether it ever served."""
        program = self._engine_program
        async with _child(program, heard=self._engine_said) as child:
            self._engine = child
            child.leaves = self._engine_program is not program  # replaced while it was being started
            if child.leaves or self._stopping.is_set():
                child.control.send("stop")
            for worker in self._workers:
                self._join(worker)
            patience = asyncio.get_running_loop().call_later(REPLACEMENT_STARTS, self._wait_no_longer, child)
            try:
                return await child.ended(), child.up
            finally:
                patience.cancel()
                self._engine = None

    def _wait_no_longer(self, child: _Child) -> None:
        """A replacement that hangs is no reason to serve nothing: the one before is started again when it has ended."""
        if self._before is not None and not child.leaves:
            log.error("the engine that replaces another one does not serve after %g s and is ended", REPLACEMENT_STARTS)
            child.kill()

    def _engine_said(self, what: str, *rest: Any) -> None:
        if what == "ready" and self._before is not None and self._engine is not None and not self._engine.leaves:
            self._replaced(True)  # one that leaves has only come so far before it was told

    # -- the process beside

    async def _run_beside(self) -> None:
        if self._beside_program is None:
            return
        try:
            async with _child(self._beside_program, heard=self._beside_said) as child:
                self._beside = child
                why = _ending(await child.ended())
        except OSError as error:
            why = f"could not be started ({error.strerror or error})"
        finally:
            self._beside = None
        log.error("the process beside the service %s; the service goes on without it", why)

    def _beside_said(self, what: str, *rest: Any) -> None:
        if what != "replace" or self._stopping.is_set():
            return
        if self._before is None:
            self._before = self._engine_program
        self._engine_program = Program(self._engine_program.module, rest[0])
        if self._engine is not None:
            self._engine.leaves = True
            self._engine.control.send("stop")

    def _replaced(self, serves: bool) -> None:
        self._before = None
        if self._beside is not None:
            self._beside.control.send("replaced", serves)

    def _join(self, worker: _Child) -> None:
        if self._engine is None:
            worker.control.send("expect", self._expected)
            return
        one, other = socket.socketpair()
        with one, other:
            worker.control.send("engine", self._engine.up, sockets=[one])
            self._engine.control.send("worker", sockets=[other])

    def _expect(self, health: Health) -> None:
        self._expected = health
        for worker in self._workers:
            worker.control.send("expect", health)

    # -- workers

    async def _keep_worker(self, failure: asyncio.Future[int]) -> None:
        """One worker after the other. Why that does not go on is the `failure`."""
        try:
            await self._run_workers()
        except Exception as error:
            if not isinstance(error, LlmjaxError):
                log.error("the HTTP workers cannot be looked after", exc_info=error)
                error = LlmjaxError(f"the HTTP workers cannot be looked after: {type(error).__name__}: {error}")
            if not failure.done():
                failure.set_exception(error)

    async def _run_workers(self) -> None:
        failed = 0
        while not self._closing.is_set():
            up = False
            try:
                code, up = await self._run_worker()
                why = f"an HTTP worker {_ending(code)}" + ("" if up else " before it served anything")
            except OSError as error:
                why = f"an HTTP worker could not be started ({error.strerror or error})"
            if self._closing.is_set():
                return
            failed = 0 if up else failed + 1
            if failed == _MOST_FAILED_STARTS:
                raise LlmjaxError(f"{why}, {failed} times in a row: see the log")
            log.warning("%s; another one is started", why)
            await asyncio.sleep(0.05 * 2**failed)

    async def _run_worker(self) -> tuple[int, bool]:
        """One life of a worker: how it ended, and whether it ever served."""
        async with _child(self._worker_program, [self._listener]) as child:
            self._workers.add(child)
            try:
                self._join(child)
                return await child.ended(), child.up
            finally:
                self._workers.remove(child)


class _Child:
    """A process and the socket to it. `up` once it has said something, which is "ready" or "up"; `heard` gets what it says.
    `leaves` once it was told to make room for another one."""

    def __init__(self, process: asyncio.subprocess.Process, control: Control, heard: Callable[..., None] | None) -> None:
        self.control = control
        self.up = False
        self.leaves = False
        self._process = process
        self._heard = heard

    async def ended(self) -> int:
        """Its exit code; negative is the signal that killed it."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.control.fileno(), self._hear)
        try:
            return await self._process.wait()
        finally:
            loop.remove_reader(self.control.fileno())

    def kill(self) -> None:
        """End it at once, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def gone(self) -> None:
        """`kill`, and wait."""
        self.kill()
        await self._process.wait()

    def _hear(self) -> None:
        received = self.control.receive()
        if received is None:
            asyncio.get_running_loop().remove_reader(self.control.fileno())
            return
        self.up = True
        if self._heard is not None:
            self._heard(*received[0])


def python_command(module: str, handle: int) -> list[str]:
    """The command of a plain interpreter that calls `main(handle)` of a module, with this one's search path."""
    code = _CODE.format(path=[entry or "." for entry in sys.path], module=module, handle=handle)
    return [sys.executable, "-c", code]


@contextlib.asynccontextmanager
async def _child(program: Program, sockets: Any = (), heard: Callable[..., None] | None = None) -> Any:
    """A process that is gone when the block is left."""
    control, theirs = Control.pair()
    with contextlib.closing(control):
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *python_command(program.module, theirs.fileno()), pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
            )
        child = _Child(process, control, heard)
        try:
            control.send("job", program.job, sockets=sockets)
            yield child
        finally:
            await asyncio.shield(child.gone())


def _ending(code: int) -> str:
    """How a process ended, as the end of a sentence."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # most of the real-time ones have none
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (the system does that when memory runs out)" if code == -signal.SIGKILL else "")
