"""`TrafficLog`: sampled requests and their outputs as JSON lines, for calibration and replay. Off unless a server is told so.

One object a line, one line a choice that ended with an answer:

    {"time", "id", "endpoint", "model", "choice", "messages" | "prompt_ids" | "prompt", "output", "output_ids", "output_tokens",
     "finish_reason", "sampling", "timings"}

`time` is the Unix time of arrival, `sampling` what differs from the defaults, `timings` seconds. Conversations are kept as they
came; other prompts as token ids. With redaction every text of a line is searched, and ids, which would tell what was taken out,
are left out: prompts are texts then. A secret that begins in the prompt and ends in the output is not found. Salts are never
written.

A thread of its own writes, and patterns run in a process of their own. Nothing waits for them: what they cannot keep up with, or
cannot write, is dropped and counted. A line is in the file whole or not at all, also after the disk was full or the process was
killed. Knows no HTTP.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from llmjax.engine.outputs import CompletionOutput, RequestOutput
from llmjax.errors import ConfigError
from llmjax.sampling_params import SamplingParams
from llmjax.server.protocol import ApiRequest
from llmjax.server.redaction import Redactor
from llmjax.telemetry.timings import SEGMENTS, Timings

log = logging.getLogger(__name__)

_WAITING_TOKENS = 2**20  # of prompts and outputs not yet written
_MOST_PROCESSES = 256
_NEVER_WRITTEN = ("cache_salt",)  # who knows it can find by timing what others have asked


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrafficConfig:
    """What is kept, and where.

    Attributes:
        path: of the file. A process that finds it in use by another takes a file of its own, the first free one of
            traffic.1.jsonl, traffic.2.jsonl, ...; of a path without a suffix traffic-1, traffic-2, ...
        sample: share of the requests, above 0 and at most 1. Which ones depends on their ids alone.
        max_bytes: of one file; then it is renamed to path.1, path.1 to path.2, and so on.
        keep: renamed files that stay.
        redact: regular expressions; what they match in any text becomes "[redacted]".
    """

    path: str
    sample: float = 1.0
    max_bytes: int = 256 * 2**20
    keep: int = 4
    redact: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 < self.sample <= 1.0:
            raise ConfigError(f"the traffic log's sample must be above 0 and at most 1, got {self.sample}")
        if self.max_bytes < 1 or self.keep < 0:
            raise ConfigError("the traffic log's max_bytes must be at least 1, and keep at least 0")
        for pattern in self.redact:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"the traffic log's redact holds {pattern!r}, which is no regular expression: {error}"
                ) from None


class TrafficLog(Collector):
    """The log of one server.

    Args:
        config: what is kept, and where.
        decode: token ids to text, for prompts that came as ids when there is something to redact.

    Raises `ConfigError` when the file cannot be written.

    Attributes:
        written, dropped: lines. Dropped are those that came faster than they could be written, or could not be.
    """

    def __init__(self, config: TrafficConfig, decode: Callable[[list[int]], str]) -> None:
        self.written = 0
        self.dropped = 0
        self._config = config
        self._decode = decode
        self._redact = Redactor(config.redact) if config.redact else None
        self._file = _File(Path(config.path), config.max_bytes, config.keep)
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[int, list[Callable[[], dict[str, Any]]]]] = collections.deque()
        self._waiting_tokens = 0
        self._closing = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="llmjax-traffic", daemon=True)
        self._thread.start()

    def record(self, request: ApiRequest, outputs: Sequence[RequestOutput], *, response_id: str, model: str) -> None:
        """Keep an answer, if its id is among the sampled ones. Returns at once.

        `outputs`: finished, one a prompt; they must not change any more.
        """
        if not self._samples(response_id):
            return
        zero = time.time() - time.monotonic_ns() * 1e-9  # of the monotonic clock's zero
        size = sum(
            len(output.prompt_token_ids) * len(output.outputs) + sum(len(choice.token_ids) for choice in output.outputs)
            for output in outputs
        )
        lines: list[Callable[[], dict[str, Any]]] = [
            functools.partial(self._line, request, output, choice, response_id=response_id, model=model, zero=zero)
            for output in outputs
            for choice in output.outputs
        ]
        with self._changed:
            if self._closing or (self._waiting and self._waiting_tokens + size > _WAITING_TOKENS):
                self.dropped += len(lines)
                return
            self._waiting.append((size, lines))
            self._waiting_tokens += size
            self._changed.notify()

    def close(self, timeout: float = 10.0) -> None:
        """Write what waits, then no more. May be called again; returns after `timeout` seconds in any case."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def collect(self) -> Iterable[Metric]:
        """For a metrics registry."""
        lines = CounterMetricFamily("llmjax:traffic_lines", "Lines of the traffic log.", labels=["result"])
        lines.add_metric(["written"], self.written)
        lines.add_metric(["dropped"], self.dropped)
        yield lines

    def _samples(self, response_id: str) -> bool:
        digest = hashlib.sha256(response_id.encode()).digest()
        return int.from_bytes(digest[:8]) < self._config.sample * 2**64

    # -- a line

    def _line(
        self, request: ApiRequest, output: RequestOutput, choice: CompletionOutput, *, response_id: str, model: str, zero: float
    ) -> dict[str, Any]:
        timings = output.timings
        line: dict[str, Any] = {
            "time": round(time.time() if timings is None else zero + timings.arrival_ns * 1e-9, 6),
            "id": response_id,
            "endpoint": request.endpoint,
            "model": model,
            "choice": choice.index,
        }
        if request.endpoint == "chat":
            line["messages"] = request.messages
            if request.template_options:
                line["template_options"] = dict(request.template_options)
        elif self._redact is not None:
            line["prompt"] = self._decode(output.prompt_token_ids) if output.prompt is None else output.prompt
        else:
            line["prompt_ids"] = output.prompt_token_ids
        line["output"] = choice.text
        if self._redact is None:
            line["output_ids"] = choice.token_ids
        line |= {
            "output_tokens": len(choice.token_ids),
            "finish_reason": choice.finish_reason,
            "sampling": _sampling(request.params),
            "timings": None if timings is None else _timings(timings),
        }
        return line

    # -- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    break
                size, lines = self._waiting.popleft()
                self._waiting_tokens -= size
            for line in lines:
                self._write(line)
        self._file.close()
        if self._redact is not None:
            self._redact.close()

    def _write(self, line: Callable[[], dict[str, Any]]) -> None:
        try:
            data = json.dumps(line(), separators=(",", ":")).encode()
            self._file.write((data if self._redact is None else self._redact(data)) + b"\n")
        except Exception as error:  # whatever it is, the server goes on, and so does the log
            self.dropped += 1
            if not self._failing:
                log.error("the traffic log %s cannot be written (%s): lines are dropped until it can", self._file.path, error)
            self._failing = True
        else:
            self.written += 1
            self._failing = False


class _File:
    """A file that only grows by whole lines, and is renamed when it is full. Readable by its owner alone.

    Locked, so that each process has one of its own; the lock goes with the process, however that ends.
    """

    def __init__(self, path: Path, max_bytes: int, keep: int) -> None:
        self._wanted = path
        self._max_bytes = max_bytes
        self._keep = keep
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.path, self._descriptor, self._size = _claim(path, path)
        except OSError as error:
            raise ConfigError(f"the traffic log {path} cannot be written: {error.strerror}; choose another path") from None

    def write(self, line: bytes) -> None:
        """Raises `OSError` when it does not fit on the disk, `ValueError` when it is larger than a file may be."""
        if len(line) > self._max_bytes:
            raise ValueError(f"a line has {len(line)} bytes, and a file may have {self._max_bytes}")
        if self._descriptor < 0:
            self.path, self._descriptor, self._size = _claim(self.path, self._wanted)
        if self._size + len(line) > self._max_bytes:
            self._rotate()
        try:
            done = 0
            while done < len(line):
                done += os.write(self._descriptor, line[done:])
        except OSError:
            os.ftruncate(self._descriptor, self._size)  # no half line stays
            raise
        self._size += len(line)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _rotate(self) -> None:
        names = [self.path, *(Path(f"{self.path}.{number}") for number in range(1, self._keep + 1))]
        names[-1].unlink(missing_ok=True)
        for new, old in zip(names[:0:-1], names[-2::-1], strict=True):
            if old.exists():
                old.replace(new)
        full, self._descriptor = self._descriptor, -1
        try:
            self.path, self._descriptor, self._size = _claim(self.path, self._wanted)
        finally:
            os.close(full)  # and with it the lock: not before the name is somebody's again


def _claim(before: Path, wanted: Path) -> tuple[Path, int, int]:
    """The file that one had before, or the first of a name that nobody else writes: path, a descriptor that appends, size."""
    plain = not wanted.suffix or wanted.suffix[1:].isdecimal()  # name.1 would be that of a full file
    before_number, after_number = (f"{wanted.name}-", "") if plain else (f"{wanted.stem}.", wanted.suffix)
    numbered = (wanted.with_name(f"{before_number}{number}{after_number}") for number in range(1, _MOST_PROCESSES))
    for candidate in (before, wanted, *numbered):
        descriptor = os.open(candidate, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is not a plain file")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), os.stat(candidate)):
                raise BlockingIOError  # renamed by its owner between the two
            return candidate, descriptor, _whole_lines(descriptor)
        except (BlockingIOError, FileNotFoundError):
            os.close(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
    raise OSError(errno.EBUSY, f"{_MOST_PROCESSES} processes write files of this name")


def _whole_lines(descriptor: int) -> int:
    """The size up to the last whole line; what follows it was cut off by a crash, and goes."""
    os.fchmod(descriptor, 0o600)
    size = end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - 2**16)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(descriptor, end)
    return end


def _sampling(params: SamplingParams) -> dict[str, Any]:
    found = {name: value for name, value in _not_default(params).items() if value != () and name not in _NEVER_WRITTEN}
    if params.structured is not None:
        found["structured"] = form = _not_default(params.structured)
        if params.structured.json_schema is not None:
            form["json_schema"] = json.loads(params.structured.schema_text)  # its texts as they are, without JSON's escapes
    return found


def _not_default(settings: Any) -> dict[str, Any]:
    fields = [field for field in dataclasses.fields(settings) if field.compare]
    return {field.name: value for field in fields if (value := getattr(settings, field.name)) != field.default}


def _timings(timings: Timings) -> dict[str, Any]:
    points = {"first_token": timings.first_token_ns, "last_token": timings.last_token_ns, "total": timings.total_ns}
    return {
        **{segment: round(timings.seconds(segment), 6) for segment in SEGMENTS},
        **{name: None if value is None else round(value * 1e-9, 6) for name, value in points.items()},
        "prompt_tokens": timings.prompt_tokens,
        "cached_tokens": timings.cached_tokens,
        "preemptions": timings.preemptions,
    }
