"""`/v1/completions` and `/v1/chat/completions`: a body in; an answer, a stream of events or an error out.

What goes wrong before the first byte is an HTTP error: a stream's headers wait for its first output, or for one keep-alive
interval of silence. Afterwards it is an event. However an exchange ends, its requests have left the engine: they finished, or
they are aborted at once, be they queued, in their prefill or decoding.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from llmjax.engine.outputs import RequestOutput
from llmjax.engine.request_stream import RequestStream
from llmjax.errors import LlmjaxError, QueueTimeoutError
from llmjax.server.exchange import EventSender, SlowReaderError, read_body, while_connected
from llmjax.server.http_errors import HttpError, error_object, error_response
from llmjax.server.protocol import ApiRequest, Endpoint
from llmjax.server.responses import response_body
from llmjax.server.service import Service
from llmjax.server.streaming import KEEP_ALIVE, EventWriter, error_event

log = logging.getLogger(__name__)


class Generation:
    """The ASGI app of one endpoint."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self._service = service
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            config = self._service.config
            data = await read_body(scope, receive, config.max_body_bytes, config.send_timeout)
        except HttpError as error:
            await error_response(error, 0)(scope, receive, send)
            return
        await while_connected(receive, self._answer(data, scope, receive, send))

    async def _answer(self, data: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        events: EventSender | None = None
        try:
            request, ignored = service.read_request(self._endpoint, data)
            model = service.model(request.model)
            headers = {"x-llmjax-warning": f"unknown fields ignored: {', '.join(ignored)}"} if ignored else {}
            if request.stream:
                events = EventSender(send, service.config.send_timeout, headers)
            response_id = scope["state"]["request_id"]
            wake = asyncio.Event()
            with service.answering(response_id, max(1, len(request.prompts))) as ids:
                streams = await self._submit(request, ids, wake)
                outputs: dict[int, RequestOutput] = {}
                try:
                    if events is not None:
                        await self._stream(request, streams, wake, events, response_id, model, outputs)
                        self._keep(request, outputs, response_id, model)
                        return
                    async for news in _read_together(streams, wake, None):
                        outputs.update(news)
                finally:
                    for stream in streams:
                        stream.close()
            self._keep(request, outputs, response_id, model)
            body = response_body(
                request,
                [outputs[index] for index in range(len(streams))],
                response_id=response_id,
                model=model,
                created=int(time.time()),
                decode=service.decode,
            )
            response = JSONResponse(body, headers=headers)
        except SlowReaderError:
            service.metrics.slow_readers.inc()
            log.warning("a client took nothing for %g s: its stream was dropped", service.config.send_timeout)
            return
        except Exception as error:
            if events is not None and events.started:
                if not isinstance(error, LlmjaxError):
                    log.error("a stream failed", exc_info=error)
                await events.send(error_event(error_object(error)), last=True)
                return
            response = error_response(error, service.engine.retry_after())
        await response(scope, receive, send)

    def _keep(self, request: ApiRequest, outputs: Mapping[int, RequestOutput], response_id: str, model: str) -> None:
        if self._service.traffic is not None:
            ended = [outputs[index] for index in sorted(outputs)]
            self._service.traffic.record(request, ended, response_id=response_id, model=model)

    async def _submit(self, request: ApiRequest, ids: Sequence[str], wake: asyncio.Event) -> list[RequestStream]:
        """A stream for each prompt; either all of them are taken or none is."""
        engine = self._service.engine
        if request.endpoint == "chat":
            options = request.template_options
            return [await engine.submit_chat(request.messages, request.params, request_id=ids[0], wake=wake, **options)]
        special = request.add_special_tokens
        tasks = [
            asyncio.ensure_future(
                engine.submit(prompt, request.params, request_id=request_id, add_special_tokens=special, wake=wake)
            )
            for prompt, request_id in zip(request.prompts, ids, strict=True)
        ]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            for taken in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(taken, RequestStream):
                    taken.close()
            raise

    async def _stream(
        self,
        request: ApiRequest,
        streams: Sequence[RequestStream],
        wake: asyncio.Event,
        events: EventSender,
        response_id: str,
        model: str,
        outputs: dict[int, RequestOutput],
    ) -> None:
        """Send the events; `outputs` gets the last output of each stream."""
        writer = EventWriter(request, response_id=response_id, model=model, created=int(time.time()), decode=self._service.decode)
        async for news in _read_together(streams, wake, self._service.config.keep_alive):
            outputs.update(news)
            data = b"".join(writer.events(index, output) for index, output in news)
            if data or not news:
                await events.send(data or KEEP_ALIVE)
        await events.send(writer.end(), last=True)


async def _read_together(
    streams: Sequence[RequestStream], wake: asyncio.Event, silence: float | None
) -> AsyncIterator[list[tuple[int, RequestOutput]]]:
    """What is new in any of the streams, as pairs of its number and the output, until all have finished.

    An empty list after `silence` seconds without news. Raises when a stream or one of its choices failed.
    """
    running = dict(enumerate(streams))
    while running:
        wake.clear()
        news: list[tuple[int, RequestOutput]] = []
        for index, stream in list(running.items()):
            output = stream.take()
            if output is None:
                continue
            _check(output)
            if output.finished:
                del running[index]
            news.append((index, output))
        if news:
            yield news
            continue
        try:
            async with asyncio.timeout(silence):
                await wake.wait()
        except TimeoutError:
            yield []


def _check(output: RequestOutput) -> None:
    for choice in output.outputs:
        if choice.error is not None:
            raise (QueueTimeoutError if str(choice.finish_reason) == "timeout" else LlmjaxError)(choice.error)
