"""`StreamedAnswer`: the bytes of an OpenAI event stream, in pieces of any size, to counts of output tokens. Pure: no clock.

Server-sent events as in the HTML standard, but for lines that end with a lone carriage return, which no server writes.

Tokens of an event
- where the server tells usage with every event (`continuous_usage_stats`: vLLM, SGLang, llmjax), what it has grown by;
- else one for each event that shows something, as clients that know no tokenizer have to assume. What the usage at the end has
  beyond that is the last event's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from llmjax.loadtest.target import TokenEvent

_SHOWN = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal")
_ENDS = {"tool_calls": "stop", "function_call": "stop", "eos_token": "stop", "stop_sequence": "stop"}
"""Reasons of other servers, and of tools, that are the model's own end."""


class StreamedAnswer:
    """One answer of one choice.

    Args:
        request_id: for the events it makes.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._rest = b""
        self._data: list[bytes] = []
        self._counted = 0
        self._told: int | None = None  # by the last usage
        self._prompt_tokens: int | None = None
        self._reason: str | None = None
        self.ended = False

    def feed(self, data: bytes, time: float) -> Iterator[TokenEvent]:
        """What further bytes bring; `time` is when they came. Nothing after the end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                payload, self._data = b"\n".join(self._data), []
                if not self.ended:
                    yield from self._event(payload, time)

    def close(self, time: float) -> Iterator[TokenEvent]:
        """The answer is complete; not every server sends an end mark."""
        if not self.ended:
            yield self._end(time)

    def _event(self, payload: bytes, time: float) -> Iterator[TokenEvent]:
        if payload == b"[DONE]":
            yield self._end(time)
            return
        try:
            event = json.loads(payload.decode())  # of bytes, json would guess the encoding
        except ValueError:
            event = None
        if not isinstance(event, dict):
            yield self._failure(time, "invalid", f"an event is no JSON object: {payload[:80]!r}")
        elif event.get("error"):
            yield self._failure(time, "error", error_message(event))
        else:
            try:
                tokens = self._tokens(event)
            except (AttributeError, TypeError, ValueError):
                yield self._failure(time, "invalid", f"an event is no completion: {payload[:80]!r}")
                return
            if tokens:
                yield TokenEvent(self._request_id, time, tokens, prompt_tokens=self._prompt_tokens)

    def _tokens(self, event: dict[str, Any]) -> int:
        shows = False
        choices = event.get("choices") or ()
        for choice in choices:
            delta = choice.get("delta") or {}
            shows = shows or bool(choice.get("text")) or any(delta.get(name) for name in _SHOWN)
            if reason := choice.get("finish_reason"):
                self._reason = _ENDS.get(reason, str(reason))
        tokens = int(shows)
        if usage := event.get("usage"):
            self._told, self._prompt_tokens = _count(usage.get("completion_tokens")), _count(usage.get("prompt_tokens"))
            if choices and self._told is not None:
                tokens = max(0, self._told - self._counted)
        self._counted += tokens
        return tokens

    def _end(self, time: float) -> TokenEvent:
        if self._reason is None:
            return self._failure(time, "incomplete", "the stream ended without a finish reason")
        self.ended = True
        event = TokenEvent(self._request_id, time, 0, finish_reason=self._reason, prompt_tokens=self._prompt_tokens)
        return dataclasses.replace(event, total_tokens=self._told)

    def _failure(self, time: float, reason: str, why: str) -> TokenEvent:
        self.ended = True
        return TokenEvent(self._request_id, time, 0, finish_reason=reason, error=why, prompt_tokens=self._prompt_tokens)


def _count(value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError
    return value


def error_message(answer: Any) -> str:
    """What a server says of an error, in one line: OpenAI's object, or what others send instead."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    if message is None and isinstance(answer, dict):
        message = answer.get("message") or answer.get("detail")
    return " ".join(str(message if message is not None else answer).split())[:300]
