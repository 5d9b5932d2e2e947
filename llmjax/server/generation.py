"""`/v1/completions` and `/v1/chat/completions`: a body in; an answer, a stream of events or an error out.

What goes wrong before the first byte is an HTTP error: a stream's headers wait for its first output, or for one keep-alive
interval of silence. Afterwards it is an event. However an exchange ends, its requests have left the engine: they finished, or
they are aborted at once, be they queued, in their prefill or decoding.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from llmjax.engine.outputs import RequestOutput
from llmjax.engine.request_stream import RequestStream
from llmjax.errors import LlmjaxError, QueueTimeoutError, RequestError
from llmjax.server.exchange import CLIENT_LEFT, EventSender, SlowReaderError, read_body, while_connected
from llmjax.server.http_errors import HttpError, error_object, error_response
from llmjax.server.pace import Alarm, Pace, Wake
from llmjax.server.protocol import ApiRequest, Endpoint
from llmjax.server.request_log import answer_fields
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
            if error.status != CLIENT_LEFT:
                self._service.errors.add(scope["state"]["request_id"], error)
            await error_response(error, 0)(scope, receive, send)
            return
        # A request is there when its last byte is: how slowly it was sent is not the queue's time.
        await while_connected(receive, self._answer(data, time.monotonic_ns(), scope, receive, send))

    async def _answer(self, data: bytes, arrival_ns: int, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        events: EventSender | None = None
        outputs: dict[int, RequestOutput] = {}
        response_id = scope["state"]["request_id"]
        try:
            request, ignored = service.read_request(self._endpoint, data)
            model = service.model(request.model)
            headers = {"x-llmjax-warning": f"unknown fields ignored: {', '.join(ignored)}"} if ignored else {}
            if request.stream:
                events = EventSender(send, service.config.send_timeout, headers)
            wake = Wake()
            with service.answering(response_id, max(1, len(request.prompts))) as ids:
                streams = await self._submit(request, ids, group=response_id, arrival_ns=arrival_ns, wake=wake)
                try:
                    if events is not None:
                        async with events.watched():
                            await self._stream(request, streams, wake, events, response_id, model, outputs)
                        self._keep(request, outputs, response_id, model)
                        return
                    await _read_to_end(streams, wake, outputs)
                finally:
                    for stream in streams:
                        stream.close()
                    told = answer_fields(request, outputs.values(), prompts=service.config.log_prompts)
                    scope["state"]["answer"] = {"model": model, **told}
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
            service.errors.add(response_id, error)
            if events is not None and events.started:
                if not isinstance(error, LlmjaxError):
                    log.error("a stream failed", exc_info=error)
                with contextlib.suppress(SlowReaderError):  # it has its error, or takes nothing at all
                    async with events.watched():
                        await events.send(error_event(error_object(error)), asyncio.get_running_loop().time(), last=True)
                return
            response = error_response(error, service.engine.retry_after())
        await response(scope, receive, send)

    def _keep(self, request: ApiRequest, outputs: Mapping[int, RequestOutput], response_id: str, model: str) -> None:
        if self._service.traffic is not None:
            ended = [outputs[index] for index in sorted(outputs)]
            self._service.traffic.record(request, ended, response_id=response_id, model=model)

    async def _submit(self, request: ApiRequest, ids: Sequence[str], **common: Any) -> list[RequestStream]:
        """A stream for each prompt; either all of them are taken or none is. `common` are `submit`'s for every one of them."""
        engine, params = self._service.engine, request.params
        if request.endpoint == "chat":
            return [await engine.submit_chat(request.messages, params, request_id=ids[0], **common, **request.template_options)]
        if len(ids) > 1 and len(ids) * params.n > engine.capacity:
            raise RequestError(
                f"{len(ids)} prompts of {params.n} choices each are asked for, and at most {engine.capacity} choices may run and "
                f"wait: send fewer at once",
                "prompt",
            )
        common |= {"add_special_tokens": request.add_special_tokens, "at_once": len(ids)}
        tasks = [
            asyncio.ensure_future(engine.submit(prompt, params, request_id=request_id, **common))
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
        wake: Wake,
        events: EventSender,
        response_id: str,
        model: str,
        outputs: dict[int, RequestOutput],
    ) -> None:
        """One event a step, or fewer when the stream is behind; see `Pace`. This is what costs: it runs for every token."""
        writer = EventWriter(request, response_id=response_id, model=model, created=int(time.time()), decode=self._service.decode)
        clock = asyncio.get_running_loop().time
        silence = Alarm(self._service.config.keep_alive, wake.ring)
        silence.start(clock())
        pace, running = Pace(), dict(enumerate(streams))
        try:
            while running:
                await wake.wait()
                if pace.until is not None:
                    await _rest(streams, wake, pace.until)
                steps = wake.take()
                now, (news, error) = clock(), _take(running, wake)
                outputs.update(news)
                if error is not None and not events.started:
                    raise error  # it can still be a status
                if data := b"".join([writer.events(index, output) for index, output in news]):
                    pace.went(now, steps - len(news) + 1)
                elif silence.off and error is None:  # it rang
                    data = KEEP_ALIVE
                if data:
                    silence.start(now)
                    await events.send(data, now)
                if error is not None:
                    raise error
        finally:
            silence.close()
        await events.send(writer.end(), clock(), last=True)


def _take(running: dict[int, RequestStream], wake: Wake) -> tuple[list[tuple[int, RequestOutput]], Exception | None]:
    """What is new in any of the streams, as pairs of its number and the output; those that have finished leave `running`. And why
    a stream or one of its choices failed: to be raised when the news of the others has been handed on."""
    news: list[tuple[int, RequestOutput]] = []
    failure: Exception | None = None
    for index, stream in list(running.items()):
        try:
            output = stream.take()
            if output is None:
                continue
            _check(output)
        except Exception as error:
            failure = failure or error
            continue
        if output.finished:
            del running[index]
        elif stream.ends:
            wake.ring()  # the error that follows is still to be taken
        news.append((index, output))
    return news, failure


async def _read_to_end(streams: Sequence[RequestStream], wake: Wake, outputs: dict[int, RequestOutput]) -> None:
    running = dict(enumerate(streams))
    while running:
        await wake.wait()
        wake.take()
        news, error = _take(running, wake)
        outputs.update(news)
        if error is not None:
            raise error


async def _rest(streams: Sequence[RequestStream], wake: Wake, until: float) -> None:
    """Let steps gather until then, or until a stream ends."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            while not any(stream.ends for stream in streams):
                wake.clear()
                await wake.wait()


def _check(output: RequestOutput) -> None:
    for choice in output.outputs:
        if choice.error is not None:
            raise (QueueTimeoutError if str(choice.finish_reason) == "timeout" else LlmjaxError)(choice.error)
