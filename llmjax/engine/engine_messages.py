"""What an engine and the processes of its clients say to each other over a socket: frames, and outputs and errors as plain data.

A frame is a length (four bytes, big-endian) and a pickle. Both ends are processes of one service and the socket is a pair that
nobody else can reach, so that pickle is safe here; and it is the quickest there is for tuples. The objects of a step are taken
apart into tuples first: as they are they would cost ten times as much. Owns no sockets and knows no streams.

Client to engine: ``("submit", number, request_id, group, ids, params, arrival_ns)``, ``("close", number)``,
``("metrics", question, series)``, ``("snapshot", question, None)``, ``("memory", question, None)``,
``("abort", question, group)``, ``("series", series)`` and ``("ready",)``.

Engine to client: first a `Hello`, then `News`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from llmjax import errors
from llmjax.engine.health import Health
from llmjax.engine.outputs import CompletionOutput, PositionLogprobs, TokenLogprob
from llmjax.engine.request_stream import Part
from llmjax.errors import LlmjaxError

_LENGTH = struct.Struct(">I")


@dataclasses.dataclass(frozen=True)
class Hello:
    """What a client has to know of an engine.

    Attributes:
        name: the model's own.
        model_name: label of the engine's metrics.
        max_context, capacity: see `EngineClient`.
        watchdog: seconds that a step may take, and the engine's process may be silent.
        tokenizer: a pickle.
    """

    name: str
    model_name: str
    max_context: int
    capacity: int
    watchdog: float
    tokenizer: bytes


class News(NamedTuple):
    """What is new for one client since the last message.

    Attributes:
        health, retry_after: the engine's.
        accepted: numbers of the streams whose requests the engine has taken.
        parts: (number, packed part) of streams.
        failures: (number, packed error) of streams.
        answers: (question's number, its answer).
        refusals: (question's number, packed error).
    """

    health: tuple[str, str]
    retry_after: int
    accepted: Sequence[int]
    parts: Sequence[tuple[int, Any]]
    failures: Sequence[tuple[int, Any]]
    answers: Sequence[tuple[int, Any]]
    refusals: Sequence[tuple[int, Any]]

    @property
    def state(self) -> Health:
        """`health` as an object."""
        state, reason = self.health
        return Health(state, reason)  # type: ignore[arg-type]


def frame(message: Any) -> bytes:
    """A message as bytes to be written."""
    data = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises `asyncio.IncompleteReadError` or `OSError` when the other side is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


# -- outputs


def pack_part(part: Part) -> Any:
    """A part as nested tuples. What the reader knows by itself (its ids) is left out."""
    scores = part.prompt_logprobs
    return (
        [_pack_choice(choice) for choice in part.choices],
        None if scores is None else [None if one is None else _pack_position(one) for one in scores],
        part.num_preemptions,
        part.num_cached_tokens,
        part.finished,
        part.timings,
        part.speculation,
    )


def unpack_part(packed: Any, prompt_ids: list[int]) -> Part:
    """The part again, of the stream whose prompt this is."""
    choices, packed_scores, preemptions, cached, finished, timings, speculation = packed
    scores = None
    if packed_scores is not None:
        scores = [None if one is None else _unpack_position(one) for one in packed_scores]
    choices = [_unpack_choice(index, choice) for index, choice in enumerate(choices)]
    return Part(choices, prompt_ids, scores, preemptions, cached, finished, timings, speculation)


def _pack_choice(choice: CompletionOutput) -> Any:
    logprobs = choice.logprobs
    return (
        choice.text,
        choice.token_ids,
        choice.cumulative_logprob,
        None if logprobs is None else [_pack_position(one) for one in logprobs],
        choice.finish_reason,
        choice.stop_reason,
        choice.error,
    )


def _unpack_choice(index: int, packed: Any) -> CompletionOutput:
    text, ids, total, logprobs, finish_reason, stop_reason, error = packed
    positions = None if logprobs is None else [_unpack_position(one) for one in logprobs]
    return CompletionOutput(index, text, ids, total, positions, finish_reason, stop_reason, error)


def _pack_position(position: PositionLogprobs) -> Any:
    return [(one.token_id, one.logprob, one.rank, one.text, one.bytes) for one in (position.chosen, *position.top)]


def _unpack_position(packed: Any) -> PositionLogprobs:
    chosen, *top = packed
    return PositionLogprobs(TokenLogprob(*chosen), tuple(TokenLogprob(*one) for one in top))


# -- errors


def pack_error(error: Exception) -> Any:
    """An error as class, message and attributes. Of a bug only that it is one: the engine's log has it."""
    if not isinstance(error, LlmjaxError):
        return LlmjaxError.__name__, "internal error; the server's log says more", {}
    return type(error).__name__, str(error), dict(vars(error))


def unpack_error(packed: Any) -> LlmjaxError:
    """The error again."""
    name, message, attributes = packed
    kind: type[LlmjaxError] = getattr(errors, name)
    error = kind.__new__(kind, message)  # not by its constructor: each has its own
    error.args = (message,)
    vars(error).update(attributes)
    return error
