"""`run_batch`: a file of requests through an engine into a file of results, as `/v1/batches` would do it.

Owns the loop and the shape of a record. Reading lines is `batch_input`, keeping results `batch_output`. It sees the engine only
through the few methods of `BatchEngine`, keeps a bounded number of requests in it, and writes results in the order they finish.

A line that cannot be answered becomes a record with an `error`; the others go on and the run is a success.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from llmjax.engine.outputs import RequestOutput
from llmjax.errors import ConfigError, LlmjaxError, QueueFullError, QueueTimeoutError, RequestError, StoreError
from llmjax.pipeline.batch_input import BatchFormat, BatchInput, BatchLine
from llmjax.pipeline.batch_output import BatchOutput, Resume
from llmjax.sampling_params import SamplingParams
from llmjax.server.responses import error_body, error_status, response_body, usage
from llmjax.server.tool_parsers import ToolParserName
from llmjax.server.tool_support import with_tools

LINES_AHEAD = 2  # requests kept in the engine, as a multiple of its rows: enough that a row never waits for the file


class BatchEngine(Protocol):
    """What `run_batch` needs of `Engine`."""

    @property
    def config(self) -> Any: ...  # its `max_sequences`

    @property
    def tokenizer(self) -> Any: ...  # `decode(ids)`, or None

    @property
    def stats(self) -> Any: ...  # `num_pages`, `peak_pages_used`

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
    ) -> str: ...

    def add_chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        **template_options: Any,
    ) -> str: ...

    def abort(self, request_id: str) -> None: ...

    def step(self, *, closed: bool = False) -> list[RequestOutput]: ...

    @property
    def has_unfinished(self) -> bool: ...


class BatchLLM(Protocol):
    """An object with an engine, such as `LLM`. Its `name`, if it has one, is the model's name in the answers."""

    @property
    def engine(self) -> Any: ...


@dataclasses.dataclass
class BatchReport:
    """What a run did.

    Attributes:
        output: where the results are.
        lines: lines of the input that are not blank.
        answered, failed: lines settled by this run, with an answer or with an error record.
        skipped: lines an earlier run had settled.
        prompt_tokens, output_tokens: of this run's answers.
        seconds: from the first line to the last result on disk.
        num_pages, peak_pages_used: of the engine's page pool.
    """

    output: str
    lines: int = 0
    answered: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    num_pages: int = 0
    peak_pages_used: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second, 0 for a run that answered nothing."""
        return self.output_tokens / self.seconds if self.seconds > 0 and self.output_tokens else 0.0

    def summary(self) -> dict[str, Any]:
        """The report as a row for people: counts, seconds, speed, pages."""
        return {
            "answered": self.answered,
            "failed": self.failed,
            "skipped": self.skipped,
            "prompt tokens": self.prompt_tokens,
            "output tokens": self.output_tokens,
            "seconds": round(self.seconds, 2),
            "tokens/s": round(self.tokens_per_second, 1),
            "pages used": f"{self.peak_pages_used} of {self.num_pages}",
            "output": self.output,
        }


@dataclasses.dataclass
class _Live:
    """A line in the engine: `requests` engine requests, one a prompt, and those of their outputs that are finished."""

    line: BatchLine
    requests: int
    request_ids: list[str] = dataclasses.field(default_factory=list)
    outputs: dict[str, RequestOutput] = dataclasses.field(default_factory=dict)

    @property
    def choices(self) -> int:
        assert self.line.request is not None
        return self.requests * self.line.request.params.n


def run_batch(
    llm: BatchLLM,
    *,
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    errors: str | os.PathLike[str] | None = None,
    format: BatchFormat | None = None,
    resume: Resume = False,
    checkpoint_every: int = 16,
    defaults: Mapping[str, Any] | None = None,
    tool_parser: ToolParserName = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> BatchReport:
    """Answer a file of requests.

    Args:
        input: JSON lines. "openai": ``{"custom_id", "method", "url", "body"}``. "prompts": a JSON string, or an object with
            `prompt` or `messages`, optional sampling fields and an optional `id`.
        output: JSON lines. "openai": ``{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}``.
            "prompts": ``{"id", "prompt" or "messages", "text", "finish_reason", "usage", "error"}`` (with n > 1, `choices` in
            place of text and finish reason). A record of a failed line has an `error` and the number of its `line`; its id is
            null when the line has none of its own.
        errors: file for the records of failed lines; default: the output.
        format: default: told from the first line.
        resume: what to do when `output` holds results: True answers what is missing (failed lines count as settled), "replace"
            starts over, False is an error.
        checkpoint_every: results between two waits for the disk.
        defaults: `SamplingParams` fields for lines that leave them out.
        tool_parser: how the model writes calls of tools, as in `ServerConfig`.
        progress: called with lines settled and lines in all.

    Raises `ConfigError` for wrong defaults, `StoreError` for files that cannot be read or written or that do not belong
    together, and whatever the engine raises; results that were finished before are on disk then.
    """
    defaults = dict(defaults or {})
    try:
        SamplingParams(**defaults)
    except (RequestError, TypeError) as error:
        raise ConfigError(f"batch defaults: {error}") from None
    if checkpoint_every < 1:
        raise ConfigError(f"checkpoint_every must be at least 1, got {checkpoint_every}")
    source_path, output_path = Path(input), Path(output)
    errors_path = None if errors is None else Path(errors)
    source = BatchInput(source_path, format)
    try:
        _check_apart(source_path, output_path, errors_path)
        state = {
            "input": source.facts.sha256,
            "format": source.format,
            "defaults": defaults,
            "errors": None if errors_path is None else str(errors_path),
            "model": _model_name(llm),
        }
        id_field = "custom_id" if source.format == "openai" else "id"
        results = BatchOutput(output_path, errors_path, resume=resume, state=state, id_field=id_field)
        try:
            report = BatchReport(str(output))
            return _BatchRun(llm, source, results, checkpoint_every, tool_parser, progress, report).run(defaults)
        finally:
            results.close()
    finally:
        source.close()


class _BatchRun:
    """The state of one run."""

    def __init__(
        self,
        llm: BatchLLM,
        source: BatchInput,
        results: BatchOutput,
        checkpoint_every: int,
        tool_parser: ToolParserName,
        progress: Callable[[int, int], None] | None,
        report: BatchReport,
    ) -> None:
        self._engine: BatchEngine = llm.engine
        self._model = _model_name(llm)
        self._source = source
        self._results = results
        self._checkpoint_every = checkpoint_every
        self._tool_parser = tool_parser
        self._progress = progress
        self._report = report
        self._run_id = source.facts.sha256[:12]
        self._window = max(1, LINES_AHEAD * int(self._engine.config.max_sequences))
        self._live: dict[str, _Live] = {}  # by engine request id
        self._choices = 0  # of the live lines
        self._unsynced = 0

    def run(self, defaults: Mapping[str, Any]) -> BatchReport:
        report, done = self._report, self._results.done
        report.lines = self._source.facts.lines
        started = time.perf_counter()
        try:
            for line in self._source.lines(defaults):
                if line.id in done.ids if line.id is not None else line.number in done.lines:
                    report.skipped += 1
                    continue
                while self._choices >= self._window:
                    self._step()
                self._start(line)
            while self._live:
                self._step()
        finally:
            for request_id in list(self._live):
                self._engine.abort(request_id)
            self._results.sync()
        report.seconds = time.perf_counter() - started
        stats = self._engine.stats
        report.num_pages, report.peak_pages_used = stats.num_pages, stats.peak_pages_used
        self._tell()
        return report

    def _start(self, line: BatchLine) -> None:
        if line.error is not None:
            self._fail(line, line.error)
            return
        assert line.request is not None
        try:
            request = with_tools(line.request, self._engine.tokenizer, self._tool_parser)
        except RequestError as error:
            self._fail(line, error)
            return
        line = dataclasses.replace(line, request=request)
        adders: list[Callable[[], str]] = []
        if request.endpoint == "chat":
            options = request.template_options
            adders.append(functools.partial(self._engine.add_chat, list(request.messages), request.params, **options))
        for prompt in request.prompts:
            special = request.add_special_tokens
            adders.append(functools.partial(self._engine.add_request, prompt, request.params, add_special_tokens=special))
        live = _Live(line, len(adders))
        try:
            for add in adders:
                live.request_ids.append(self._once_there_is_room(add))
                self._live[live.request_ids[-1]] = live
        except RequestError as error:
            for request_id in live.request_ids:
                self._live.pop(request_id, None)
                self._engine.abort(request_id)
            self._fail(line, error)
            return
        self._choices += live.choices

    def _once_there_is_room(self, add: Callable[[], str]) -> str:
        """A full lane is no reason to fail a line: it waits here."""
        while True:
            try:
                return add()
            except QueueFullError:
                self._step()

    def _step(self) -> None:
        assert self._engine.has_unfinished, "the engine lost a request"
        for output in self._engine.step(closed=True):
            live = self._live.get(output.request_id)
            if live is None or not output.finished:
                continue
            del self._live[output.request_id]
            live.outputs[output.request_id] = output
            if len(live.outputs) == live.requests:
                self._choices -= live.choices
                self._finish(live)

    def _finish(self, live: _Live) -> None:
        outputs = [live.outputs[request_id] for request_id in live.request_ids]
        for output in outputs:
            for choice in output.outputs:
                if choice.finish_reason == "timeout":
                    self._fail(live.line, QueueTimeoutError(choice.error))
                    return
                if choice.finish_reason in ("error", "abort"):
                    self._fail(live.line, LlmjaxError(choice.error or "the request was aborted"))
                    return
        counts = usage(outputs)
        self._report.answered += 1
        self._report.prompt_tokens += counts["prompt_tokens"]
        self._report.output_tokens += counts["completion_tokens"]
        self._write(self._answer(live.line, outputs), failed=False)

    def _answer(self, line: BatchLine, outputs: list[RequestOutput]) -> dict[str, Any]:
        assert line.request is not None
        body = response_body(
            line.request,
            outputs,
            response_id=f"{self._run_id}-{line.number}",
            model=self._model,
            created=int(time.time()),
            decode=self._decode,
        )
        if self._source.format == "openai":
            return {**self._head(line), "response": self._response(line, 200, body), "error": None}
        record = {"id": line.id, "messages" if line.request.endpoint == "chat" else "prompt": line.given}
        choices = [_plain_choice(choice) for choice in body["choices"]]
        record |= choices[0] if len(choices) == 1 else {"choices": choices}
        return {**record, "usage": body["usage"], "error": None}

    def _fail(self, line: BatchLine, error: LlmjaxError) -> None:
        self._report.failed += 1
        body = error_body(error)
        told = {name: body["error"][name] for name in ("code", "message", "param")}
        if line.malformed:
            told["code"] = "invalid_line"
        told["message"] = f"line {line.number}: {told['message']}"
        if self._source.format == "openai":
            response = None if line.malformed else self._response(line, error_status(error), body)
            record = {**self._head(line), "response": response, "error": told, "line": line.number}
        else:
            record = {"id": line.id, "error": told, "line": line.number}
        self._write(record, failed=True)

    def _write(self, record: Mapping[str, Any], *, failed: bool) -> None:
        self._results.add(record, failed=failed)
        self._unsynced += 1
        if self._unsynced >= self._checkpoint_every:
            self._results.sync()
            self._unsynced = 0
        self._tell()

    def _head(self, line: BatchLine) -> dict[str, Any]:
        return {"id": f"batch_req_{self._run_id}_{line.number}", "custom_id": line.id}

    def _response(self, line: BatchLine, status: int, body: dict[str, Any]) -> dict[str, Any]:
        return {"status_code": status, "request_id": f"req_{self._run_id}_{line.number}", "body": body}

    def _decode(self, ids: list[int]) -> str:
        tokenizer = self._engine.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(ids, skip_special_tokens=False))

    def _tell(self) -> None:
        if self._progress is not None:
            report = self._report
            self._progress(report.answered + report.failed + report.skipped, report.lines)


def _plain_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    """A choice of either endpoint as `text`, `finish_reason`, and calls and logprobs where there are any."""
    message = choice.get("message", {"content": choice.get("text")})
    out = {"text": message["content"], "finish_reason": choice["finish_reason"]}
    if "tool_calls" in message:
        out["tool_calls"] = message["tool_calls"]
    return out | {name: choice[name] for name in ("logprobs", "prompt_logprobs") if choice.get(name) is not None}


def _model_name(llm: BatchLLM) -> str:
    return str(getattr(llm, "name", None) or "llmjax")


def _check_apart(source: Path, output: Path, errors: Path | None) -> None:
    for path in (output, errors):
        if path is not None and path.exists() and path.samefile(source):
            raise StoreError(f"{path} is the input itself: choose another output")
