"""`RequestStream`: what one request's reader sees of it, on an event loop. Is given parts and hands out outputs; knows no engine.

A part is made on the engine's thread (`cut`), because the engine's own objects go on growing there; everything else happens on
the stream's loop. Parts that the reader has not taken are merged.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, Self

from llmjax.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput, SpeculationOutput
from llmjax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmjax.telemetry.timings import Timings


@dataclasses.dataclass(slots=True)
class Part:
    """What one or more steps brought: `choices` hold only new text, ids and logprobs; the rest is as of the last step.

    The fields are those of `RequestOutput`. A step makes one for each of hundreds of streams, so it is no more than that.
    """

    choices: list[CompletionOutput]
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    num_preemptions: int
    num_cached_tokens: int
    finished: bool
    timings: Timings | None
    speculation: SpeculationOutput | None = None

    def merge(self, later: Part) -> None:
        """Take in the part that follows."""
        self.choices = [_joined(before, new) for before, new in zip(self.choices, later.choices, strict=True)]
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.num_preemptions, self.num_cached_tokens = later.num_preemptions, later.num_cached_tokens
        self.finished, self.timings, self.speculation = later.finished, later.timings, later.speculation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """What a request is besides its prompt.

    Attributes:
        request_id: the engine's; None for a fresh one.
        group: requests of one group are aborted together (`EngineClient.abort_group`).
        arrival_ns: when it came, by `time.monotonic_ns`, which the processes of a host share.
        wake: set whenever the stream has something new; None for an event of its own.
    """

    request_id: str | None
    group: str | None
    arrival_ns: int
    wake: asyncio.Event | None


class OnClose(Protocol):
    """What to do when a stream is closed; `ended` says whether its request had ended."""

    def __call__(self, stream: RequestStream, *, ended: bool) -> None: ...


class RequestStream:
    """An asynchronous iterator over a request's outputs, and a context manager that ends the request when it is left early.

    Each output holds everything so far and, in `new_text` and `new_token_ids`, what is new since the one before; the new logprobs
    of a choice are the last ones, as many as there are new ids. Outputs share their lists, which grow only when the next output
    is taken. `prompt_logprobs` are there once they are complete. An output need not have new text: a choice may have ended, or
    its text is held back.

    Attributes:
        request_id: the engine's.
        prompt, prompt_ids, params: what was asked for; `prompt` is the text, where there was one.
        group, arrival_ns: see `Ask`.
        loop: the event loop of its reader.
        accepted: done once the engine has taken the request, or refused it with an error.
        closed: nobody reads on.
        aborted: it is to end as soon as the engine has taken it.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        ask: Ask,
        on_close: OnClose,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.params = params
        self.group = ask.group
        self.arrival_ns = ask.arrival_ns
        self.loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = self.loop.create_future()
        self.closed = False
        self.aborted = False
        self._wake = ask.wake or asyncio.Event()
        self._on_close: Callable[..., None] = on_close
        self._scored = False  # the engine thread's: prompt logprobs have been given out
        self._waiting: Part | None = None
        self._error: Exception | None = None
        self._choices: list[CompletionOutput] | None = None
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._finished = False

    # -- on the engine's thread

    def cut(self, output: RequestOutput) -> Part | None:
        """What is new in the engine's output, copied; None when nothing is that a reader could see."""
        choices, visible = [], output.finished
        for choice, text, ids in zip(output.outputs, output.new_text, output.new_token_ids, strict=True):
            logprobs = choice.logprobs
            if logprobs is not None:
                logprobs = logprobs[len(logprobs) - len(ids) :]
            choices.append(_with(choice, text, ids, logprobs))
            visible = visible or bool(ids) or choice.finish_reason is not None
        scores = None
        scored = output.prompt_logprobs
        complete = output.finished or len(output.prompt_token_ids) == 1  # the first token never has any
        if scored is not None and not self._scored and (complete or scored[-1] is not None):
            self._scored = True
            scores = list(scored)
        elif not visible:
            return None
        return Part(
            choices, output.prompt_token_ids, scores, output.num_preemptions, output.num_cached_tokens, output.finished,
            output.timings, output.speculation,
        )  # fmt: skip

    # -- on the stream's loop

    def accept(self) -> None:
        """The engine has taken the request."""
        if not self.accepted.done():
            self.accepted.set_result(None)

    def put(self, part: Part) -> None:
        """Something new."""
        if self._error is not None or self.closed:
            return
        if self._waiting is None:
            self._waiting = part
        else:
            self._waiting.merge(part)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """The request has ended with an error. What came before it can still be taken."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
        if self._error is None and not (self._waiting is not None and self._waiting.finished):
            self._error = error
        self._wake.set()

    def take_part(self) -> Part | None:
        """What is new, without waiting; None when nothing is. Raises the error that ended the request, after its last part.

        For a reader that passes it on; one stream is read either by `take` or by this.
        """
        part, self._waiting = self._waiting, None
        if part is None:
            if self._error is not None and not self.closed:
                self._close(ended=True)
                raise self._error
        elif part.finished:
            self._finished = True
            self._close(ended=True)
        return part

    def take(self) -> RequestOutput | None:
        """`take_part`, as an output that holds everything so far."""
        part = self.take_part()
        if part is None:
            return None
        old = self._choices or [_with(choice, "", [], None if choice.logprobs is None else []) for choice in part.choices]
        self._choices = [_joined(before, new) for before, new in zip(old, part.choices, strict=True)]
        self._prompt_logprobs = self._prompt_logprobs or part.prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=part.prompt_token_ids,
            outputs=self._choices,
            prompt_logprobs=self._prompt_logprobs,
            new_text=[choice.text for choice in part.choices],
            new_token_ids=[choice.token_ids for choice in part.choices],
            num_preemptions=part.num_preemptions,
            num_cached_tokens=part.num_cached_tokens,
            finished=part.finished,
            timings=part.timings,
            speculation=part.speculation,
        )

    def close(self) -> None:
        """Nobody reads on: if the request has not ended, it is aborted. May be called any number of times."""
        if not self.closed:
            self._close(ended=self._error is not None)

    @property
    def ends(self) -> bool:
        """Whether what can be taken now is the last: the end of the request, or its error."""
        return self._error is not None or (self._waiting is not None and self._waiting.finished)

    def _close(self, *, ended: bool) -> None:
        self.closed = True
        self._on_close(self, ended=ended)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            if self._finished or (self.closed and self._waiting is None):
                raise StopAsyncIteration
            self._wake.clear()
            output = self.take()
            if output is not None:
                return output
            await self._wake.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


def _with(choice: CompletionOutput, text: str, token_ids: list[int], logprobs: list[PositionLogprobs] | None) -> CompletionOutput:
    """A copy with other contents. Field by field: `dataclasses.replace` takes several times as long."""
    return CompletionOutput(
        choice.index, text, token_ids, choice.cumulative_logprob, logprobs, choice.finish_reason, choice.stop_reason, choice.error
    )


def _joined(before: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    """Both, one after the other; the lists of `before` are extended in place."""
    ids, logprobs = before.token_ids, before.logprobs
    ids += new.token_ids
    if logprobs is not None:
        logprobs += new.logprobs or ()
    return _with(new, before.text + new.text, ids, logprobs)
