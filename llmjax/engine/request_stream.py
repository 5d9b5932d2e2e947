"""`RequestStream`: what one request's reader sees of it, on an event loop. Is given parts and hands out outputs; knows no engine.

A part is made on the engine's thread (`cut`), because the engine's own objects go on growing there; everything else happens on
the stream's loop. Parts that the reader has not taken are merged.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from llmjax.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from llmjax.sampling_params import SamplingParams


@dataclasses.dataclass(slots=True)
class Part:
    """What one or more steps brought: `choices` hold only new text, ids and logprobs; everything else is as of the last step."""

    last: RequestOutput
    choices: list[CompletionOutput]

    def merge(self, later: Part) -> None:
        """Take in the part that follows."""
        for index, new in enumerate(later.choices):
            self.choices[index] = _joined(self.choices[index], new)
        later.last.prompt_logprobs = later.last.prompt_logprobs or self.last.prompt_logprobs
        self.last = later.last


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
        prompt_ids, params: what was asked for.
        loop: the event loop of its reader.
        accepted: done once the engine has taken the request, or refused it with an error.
        closed: nobody reads on.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        wake: asyncio.Event | None,
        on_close: OnClose,
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.params = params
        self.loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = self.loop.create_future()
        self.closed = False
        self._prompt = prompt
        self._wake = wake or asyncio.Event()
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
        choices = []
        for choice, text, ids in zip(output.outputs, output.new_text, output.new_token_ids, strict=True):
            logprobs = choice.logprobs
            if logprobs is not None:
                logprobs = logprobs[len(logprobs) - len(ids) :]
            choices.append(dataclasses.replace(choice, text=text, token_ids=ids, logprobs=logprobs))
        scores = None
        scored = output.prompt_logprobs
        if scored is not None and not self._scored and (output.finished or scored[-1] is not None):
            self._scored = True
            scores = list(scored)
        elif not output.finished and not any(choice.token_ids or choice.finish_reason for choice in choices):
            return None
        return Part(dataclasses.replace(output, prompt=self._prompt, outputs=[], prompt_logprobs=scores), choices)

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
        if self._error is None and not (self._waiting is not None and self._waiting.last.finished):
            self._error = error
        self._wake.set()

    def take(self) -> RequestOutput | None:
        """What is new, without waiting; None when nothing is. Raises the error that ended the request, after its last output."""
        part, self._waiting = self._waiting, None
        if part is None:
            if self._error is not None and not self.closed:
                self._close(ended=True)
                raise self._error
            return None
        old = self._choices or [_empty(choice) for choice in part.choices]
        self._choices = [_joined(before, new) for before, new in zip(old, part.choices, strict=True)]
        self._prompt_logprobs = self._prompt_logprobs or part.last.prompt_logprobs
        if part.last.finished:
            self._finished = True
            self._close(ended=True)
        return dataclasses.replace(
            part.last,
            outputs=self._choices,
            prompt_logprobs=self._prompt_logprobs,
            new_text=[choice.text for choice in part.choices],
            new_token_ids=[choice.token_ids for choice in part.choices],
        )

    def close(self) -> None:
        """Nobody reads on: if the request has not ended, it is aborted. May be called any number of times."""
        if not self.closed:
            self._close(ended=self._error is not None)

    @property
    def ends(self) -> bool:
        """Whether what can be taken now is the last: the end of the request, or its error."""
        return self._error is not None or (self._waiting is not None and self._waiting.last.finished)

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


def _empty(choice: CompletionOutput) -> CompletionOutput:
    return dataclasses.replace(choice, text="", token_ids=[], logprobs=None if choice.logprobs is None else [])


def _joined(before: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    """Both, one after the other; the lists of `before` are extended in place."""
    ids, logprobs = before.token_ids, before.logprobs
    ids += new.token_ids
    if logprobs is not None:
        logprobs += new.logprobs or ()
    return dataclasses.replace(new, text=before.text + new.text, token_ids=ids, logprobs=logprobs)
