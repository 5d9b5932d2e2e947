"""Forms are compiled here first: in a process of their own, which can be stopped.

A schema is other people's input, and llguidance's limits do not bound everything it does before the first token: a few characters
can cost minutes and gigabytes. So a form has `TRIAL_SECONDS` and `TRIAL_MEMORY` in a plain interpreter that imports the library
alone; what passes costs the same again in the engine's process, what does not costs a process. Owns the threads that wait for it
and the processes, one a thread, started when the first form comes. Both are the program's, whatever compiler asks.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import multiprocessing
import queue
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from llmjax.engine.grammar_library import COMPILE_STACK, RefusedError, TokenBytes, build, limits
from llmjax.errors import EngineError

if TYPE_CHECKING:
    import llguidance

TRIAL_SECONDS = 2.0
TRIAL_MEMORY = 2**30  # bytes of address space, beyond that of the stack
THREADS = 2
_START_SECONDS = 60.0  # an interpreter and a vocabulary, on a machine that has much to do
_EXIT_SECONDS = 2 * TRIAL_SECONDS

_CODE = "import sys; sys.path[:] = {path!r}; from llmjax.engine.grammar_trial import serve; serve({handle})"


class TooComplexError(RefusedError):
    """A form that was given up."""


class _Trial:
    """One process, started when it is needed. Not for several threads, but for `close`."""

    def __init__(self) -> None:
        self.in_process = threading.Lock()  # held while the form is compiled in this process
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._vocabulary: TokenBytes | None = None

    def run(self, vocabulary: TokenBytes, text: str) -> None:
        if vocabulary is not self._vocabulary or self._process is None or self._process.poll() is not None:
            self._prepare(vocabulary)
        assert self._pipe is not None
        try:
            self._pipe.send((text, TRIAL_SECONDS))
            if not self._pipe.poll(TRIAL_SECONDS + 1):
                raise EOFError
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self.close()
            raise TooComplexError(
                f"it is too complex: compiling it takes more than {TRIAL_SECONDS:g} seconds, or too much memory; make it smaller"
            ) from None
        if answer is not None:
            raise RefusedError(answer)

    def _prepare(self, vocabulary: TokenBytes) -> None:
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._pipe is not None
            self._pipe.send(vocabulary)
            if not self._pipe.poll(_START_SECONDS):
                raise EOFError
            self._pipe.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise EngineError(f"the process where forms are tried out could not be started ({type(error).__name__})") from None
        self._vocabulary = vocabulary

    def _start(self) -> None:
        self.close()
        ours, theirs = multiprocessing.Pipe()
        code = _CODE.format(path=[entry or "." for entry in sys.path], handle=theirs.fileno())
        quiet = subprocess.DEVNULL  # what a library that runs out of memory says
        with theirs:
            self._pipe = ours
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=(theirs.fileno(),), stdin=quiet, stdout=quiet, stderr=quiet
            )

    def close(self) -> None:
        """End the process, whatever it is at."""
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        self._vocabulary = None
        if process is not None:
            process.kill()
            process.wait()
        if pipe is not None:
            pipe.close()


type _Job = tuple[concurrent.futures.Future[Any], Callable[[], Any]]

_lock = threading.Lock()
_jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
_trials: list[_Trial] = []
_own = threading.local()
_stack_lock = threading.Lock()  # the size is the program's, not a thread's
_ending = False


def submit[T](call: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Run `call` on one of the threads, which have a deep stack (the library recurses over rules that lead to one another)."""
    with _lock:
        if not _trials:
            atexit.register(_end)
            _trials.extend(_Trial() for _ in range(THREADS))
            with _stack_lock:
                before = threading.stack_size(COMPILE_STACK)  # of threads started from now on
                try:
                    for index, trial in enumerate(_trials):
                        # No thread of a pool: the program's end would wait for all that is queued.
                        threading.Thread(target=_work, args=(trial,), name=f"grammar_{index}", daemon=True).start()
                finally:
                    threading.stack_size(before)
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    _jobs.put((future, call))
    return future


def compile_tried[T](vocabulary: TokenBytes, text: str, call: Callable[[], T]) -> T:
    """`call`, which compiles `text` in this process, once it could be compiled elsewhere. Raises `RefusedError`.

    For calls of `submit` only.
    """
    trial: _Trial = _own.trial
    trial.run(vocabulary, text)
    with trial.in_process:
        return call()


def _work(trial: _Trial) -> None:
    _own.trial = trial
    while not _ending:
        future, call = _jobs.get()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        del future, call  # or they would be held until the next comes


def _end() -> None:
    """The program ends. A trial is given up; what has passed one is waited for, because the library is no Python code that an
    interpreter could leave."""
    global _ending
    _ending = True
    for trial in _trials:
        if (process := trial._process) is not None:
            process.kill()
    for trial in _trials:
        trial.in_process.acquire(timeout=_EXIT_SECONDS)


# -- in the other process


def serve(handle: int) -> None:
    """Take vocabularies, and forms for the last of them, until the other end is closed.

    A form that takes too long ends this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the keyboard's, for the process that has the engine
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    memory = TRIAL_MEMORY + COMPILE_STACK
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(COMPILE_STACK)
    thread = threading.Thread(target=_try_out, args=(Connection(handle),))
    thread.start()
    thread.join()


def _try_out(pipe: Connection) -> None:
    tokenizer: llguidance.LLTokenizer | None = None
    try:
        while True:
            asked: TokenBytes | tuple[str, float] = pipe.recv()
            answer = None
            if isinstance(asked, TokenBytes):
                tokenizer = asked.library_tokenizer(None)
            else:
                text, seconds = asked
                assert tokenizer is not None, "a vocabulary comes first"
                signal.setitimer(signal.ITIMER_REAL, seconds)  # by the kernel: the library never looks at a clock
                try:
                    build(tokenizer, text, limits())
                except RefusedError as error:
                    answer = str(error)
                signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send(answer)
    except EOFError:
        pass
