"""`EngineClient`: what a server needs of an engine, wherever that runs.

Two fulfil it: `AsyncEngine`, with the engine in this process, and `RemoteEngine`, with the engine in another one. Owns what is
the same for both: how prompts become token ids, and in which form requests are asked. Knows no HTTP, and imports no JAX.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from llmjax.engine.health import Health
from llmjax.engine.outputs import RequestOutput
from llmjax.engine.request_stream import Ask, RequestStream
from llmjax.engine.tokenizer import needed
from llmjax.errors import EngineError, UnavailableError
from llmjax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from llmjax.engine.tokenizer import Tokenizer

_SHORT_TEXT = 4096  # characters; a longer text is tokenised on a thread, so that it does not hold up the event loop
_SHORT_CHAT = 64  # messages; likewise


class EngineClient(abc.ABC):
    """Requests to one engine from tasks of event loops."""

    @property
    @abc.abstractmethod
    def health(self) -> Health:
        """The state at this moment."""

    @property
    @abc.abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """The engine's, or one like it; None for an engine without."""

    @property
    @abc.abstractmethod
    def max_context(self) -> int:
        """Tokens of prompt and output together."""

    @property
    @abc.abstractmethod
    def capacity(self) -> int:
        """Choices that may run and wait at the same time."""

    @property
    @abc.abstractmethod
    def num_open(self) -> int:
        """Streams of this client that have not ended."""

    @abc.abstractmethod
    def start(self) -> None:
        """Have the engine run, if that is up to this client."""

    @abc.abstractmethod
    def retry_after(self) -> int:
        """Whole seconds in which a place is likely to become free, from the pace at which requests ended of late."""

    @abc.abstractmethod
    async def abort_group(self, group: str | None) -> int:
        """End the requests of a group, or of every one; each stream gets a last output with finish reason "abort".

        Returns how many groups there were. A request that came before and is still being prepared (its prompt is tokenised, its
        form compiled) is not counted, and ends when the engine has it. Requests without a group are left alone.
        """

    @abc.abstractmethod
    async def metrics(self, own: Sequence[CollectorRegistry]) -> bytes:
        """The engine's series in Prometheus' text format, and those of `own`, summed over all clients of the engine."""

    @abc.abstractmethod
    async def snapshot(self) -> dict[str, Any]:
        """What the engine holds between two steps, fit for `json.dumps`; see `picture_json`. Also while it drains.

        Waits while the engine is stuck. Raises `EngineError` when it is gone, `UnavailableError` while there is none.
        """

    @abc.abstractmethod
    async def memory_map(self) -> dict[str, Any]:
        """Where the engine's memory is between two steps, page by page, as `MemoryMap.to_json` gives it. Waits and raises as
        `snapshot` does; looking at a pool of 60 000 pages takes the engine about 50 ms."""

    @abc.abstractmethod
    async def _submit(self, text: str | None, ids: Sequence[int], params: SamplingParams, ask: Ask) -> RequestStream:
        """Queue a prompt; returns when the engine has taken it."""

    # -- requests

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt. Yields as `RequestStream` does; leaving the loop early aborts the request.

        Raises:
            RequestError: it can never be served.
            QueueFullError: not now; see `retry_after`.
            UnavailableError, EngineError: the engine is draining, stuck or dead.
        """
        stream = await self.submit(prompt, params, request_id=request_id, add_special_tokens=add_special_tokens)
        async with stream:
            async for output in stream:
                yield output

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        **template_options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation; otherwise as `generate`."""
        stream = await self.submit_chat(messages, params, request_id=request_id, **template_options)
        async with stream:
            async for output in stream:
                yield output

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        group: str | None = None,
        arrival_ns: int | None = None,
        add_special_tokens: bool = True,
        at_once: int = 1,
        wake: asyncio.Event | None = None,
    ) -> RequestStream:
        """Queue a prompt and return its stream, once the engine has taken it. The caller closes the stream.

        Args:
            request_id, group, wake: see `Ask`.
            arrival_ns: see `Ask`; None is now.
            at_once: how many prompts like this one the caller submits at the same moment.

        Raises as `generate` does.
        """
        ask = self._ask(request_id, group, arrival_ns, wake)
        if not isinstance(prompt, str):
            return await self._submit(None, prompt, params, ask)
        encode = functools.partial(needed(self.tokenizer, "a text prompt").encode, prompt, add_special_tokens=add_special_tokens)
        ids = encode() if len(prompt) * at_once <= _SHORT_TEXT else await asyncio.to_thread(encode)
        return await self._submit(prompt, ids, params, ask)

    async def submit_chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        group: str | None = None,
        arrival_ns: int | None = None,
        wake: asyncio.Event | None = None,
        **template_options: Any,
    ) -> RequestStream:
        """Queue a conversation, rendered by the model's chat template (`template_options` go to it); otherwise as `submit`."""
        ask = self._ask(request_id, group, arrival_ns, wake)
        text, ids = await self.encode_chat(messages, **template_options)
        return await self._submit(text, ids, params, ask)

    async def encode_chat(self, messages: Sequence[dict[str, Any]], **template_options: Any) -> tuple[str, list[int]]:
        """A conversation as the text and the token ids of a prompt. Raises `RequestError`."""
        tokenizer = needed(self.tokenizer, "chat")

        def encode() -> tuple[str, list[int]]:
            text = tokenizer.render_chat(messages, **template_options)
            return text, tokenizer.encode(text, add_special_tokens=False)

        return encode() if _is_short(messages, template_options) else await asyncio.to_thread(encode)

    def _ask(self, request_id: str | None, group: str | None, arrival_ns: int | None, wake: asyncio.Event | None) -> Ask:
        self._check_open()
        arrival_ns = time.monotonic_ns() if arrival_ns is None else arrival_ns
        return Ask(request_id=request_id, group=group, arrival_ns=arrival_ns, wake=wake)

    def _check_open(self) -> None:
        health = self.health
        if health.state == "dead":
            raise EngineError(health.reason)
        if not health.ready:
            raise UnavailableError(f"{health.reason}: try again later, or elsewhere")


def _is_short(messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> bool:
    """Whether a conversation is rendered and tokenised in no time: few texts, and no tools or calls, which seldom are short."""
    if len(messages) > _SHORT_CHAT or not all(isinstance(value, bool | int | float) for value in options.values()):
        return False
    values = [value for message in messages for value in message.values() if value is not None]
    return all(isinstance(value, str) for value in values) and sum(map(len, values)) <= _SHORT_TEXT
