"""`HttpTarget`: an OpenAI-compatible server as the target of a load test, whoever made it. Measures as a client can.

A request has a connection of its own, so that connecting is part of the time to the first token, and no answer waits behind
another one. The event loop runs inside `poll` only; no thread is needed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
import ssl
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import h11

from llmjax.errors import ConfigError
from llmjax.loadtest.event_stream import StreamedAnswer, error_message
from llmjax.loadtest.http_exchange import Exchange
from llmjax.loadtest.http_get import get
from llmjax.loadtest.target import Gauge, TokenEvent, TrafficRequest

_LOOK = 1.0  # seconds after which silent servers are looked for
_LEAVING = 10.0  # seconds for connections to close at the end
_MOST_RETRY_AFTER = 60.0
_ASK_AGAIN = (429, 503)


@dataclasses.dataclass(frozen=True)
class ServerAddress:
    """Where a server is and how it is asked.

    Attributes:
        url: with or without `/v1`.
        model: its name there; None asks the server for its first.
        api_key: sent as a bearer token.
        endpoint: of prompts that are texts. Token ids always go to "completions", conversations to "chat".
        usage_per_event: ask for `continuous_usage_stats`, which tells the tokens of each event; a server that refuses unknown
            fields needs it off.
        retries: how often a request that was answered with 429 or 503 is sent again, after the `Retry-After` of the answer.
        silence: seconds without a byte after which a request has failed.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    endpoint: Literal["completions", "chat"] = "completions"
    usage_per_event: bool = True
    retries: int = 0
    silence: float = 300.0


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """What a server tells of the model it serves; `max_context` is None where it does not tell."""

    name: str
    max_context: int | None


class HttpTarget:
    """See `Target`. The server's state (rows, pages, queue times) is not known: there are no gauges."""

    def __init__(self, server: ServerAddress, model: ServedModel) -> None:
        self._server = server
        self._model = model
        self._place = _split(server.url)
        self._ssl = ssl.create_default_context() if self._place.secure else None
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count()
        self._calls: dict[str, _Call] = {}
        self._came: dict[Exchange, None] = {}
        self._leaving: set[Exchange] = set()
        self._owners: dict[Exchange, _Call] = {}
        self._failures: list[tuple[_Call, float, str]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_look = 0.0

    def now(self) -> float:
        """See `Target`."""
        return time.monotonic()

    def submit(self, request: TrafficRequest) -> str:
        """See `Target`. What the server thinks of it comes with `poll`."""
        name = f"http-{next(self._numbers)}"
        call = self._calls[name] = _Call(name, self._request(request), self._server.retries)
        self._send(call)
        return name

    def abort(self, request_id: str) -> None:
        """See `Target`: the client leaves, and nothing more comes."""
        call = self._calls.pop(request_id, None)
        if call is not None and call.exchange is not None:
            self._part(call.exchange)
            call.exchange.close()

    def poll(self, until: float | None) -> Sequence[TokenEvent]:
        """See `Target`."""
        if not self._came and not self._failures:
            latest = self.now() + _LOOK
            self._run(latest if until is None else min(until, latest))
        events: list[TokenEvent] = []
        came, self._came = self._came, {}
        for exchange in came:
            call = self._owners.get(exchange)
            if call is not None:
                self._read(call, exchange, events)
            elif not exchange.open:
                self._leaving.discard(exchange)
        failures, self._failures = self._failures, []
        for call, when, why in failures:
            self._fail(call, when, "connection", why, events)
        self._look_for_silence(events)
        return events

    def settle(self) -> None:
        """See `Target`: the connections are closed; what the server still does for them is its own."""
        deadline = self.now() + _LEAVING
        for request_id in list(self._calls):
            self.abort(request_id)
        for task in self._tasks:
            task.cancel()
        while (self._leaving or self._tasks) and self.now() < deadline:
            self._came.clear()
            self._run(min(deadline, self.now() + 0.1))
            self._leaving = {exchange for exchange in self._leaving if exchange.open}
        for exchange in self._leaving:
            exchange.close()

    def gauge(self) -> Gauge | None:
        """See `Target`: None."""
        return None

    def close(self) -> None:
        """Give up the event loop. The target is of no use afterwards."""
        self.settle()
        self._loop.close()

    # -- sending

    def _request(self, request: TrafficRequest) -> tuple[h11.Request, bytes]:
        prompt, server = request.prompt, self._server
        body: dict[str, Any] = {"model": self._model.name, "max_tokens": request.max_tokens, "temperature": 0.0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if server.usage_per_event:
            body["stream_options"]["continuous_usage_stats"] = True
        if request.ignore_eos:
            body["ignore_eos"] = True
        chat = server.endpoint == "chat" if isinstance(prompt, str) else bool(prompt) and isinstance(prompt[0], Mapping)
        if not chat:
            body["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
        else:
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        data = json.dumps(body).encode()
        headers = [("host", self._place.netloc), *_headers(server), ("content-length", str(len(data)))]
        headers += [("content-type", "application/json"), ("accept", "text/event-stream"), ("connection", "close")]
        path = f"{self._place.path}/{'chat/completions' if chat else 'completions'}"
        return h11.Request(method="POST", target=path, headers=headers), data

    def _send(self, call: _Call) -> None:
        if self._calls.get(call.name) is not call:
            return  # aborted before it was sent again
        exchange = Exchange(call.request, self._on_news)
        call.begin(exchange)
        self._owners[exchange] = call
        task = self._loop.create_task(self._connect(call, exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, call: _Call, exchange: Exchange) -> None:
        try:
            await self._loop.create_connection(lambda: exchange, self._place.host, self._place.port, ssl=self._ssl)
        except OSError as error:
            self._failures.append((call, self.now(), error.strerror or str(error)))
            self._loop.stop()

    # -- receiving

    def _on_news(self, exchange: Exchange) -> None:
        self._came[exchange] = None
        self._loop.stop()  # when all that is ready has been read

    def _run(self, until: float) -> None:
        timer = self._loop.call_at(until, self._loop.stop)
        try:
            self._loop.run_forever()
        finally:
            timer.cancel()

    def _read(self, call: _Call, exchange: Exchange, events: list[TokenEvent]) -> None:
        try:
            for when, event in exchange.read():
                self._take(call, when, event, events)
        except h11.RemoteProtocolError as error:
            why = "the connection was lost" if not exchange.open else f"this is no HTTP: {error}"
            self._fail(call, exchange.last_news, "connection", why, events)
        if not exchange.open and call.exchange is exchange:
            self._fail(call, exchange.last_news, "connection", "the connection was lost", events)

    def _take(self, call: _Call, when: float, event: Any, events: list[TokenEvent]) -> None:
        if isinstance(event, h11.Response):
            call.status, call.headers = event.status_code, dict(event.headers)
        elif isinstance(event, h11.Data):
            if call.streams:
                events += call.answer.feed(bytes(event.data), when)
                if call.answer.ended:
                    self._done(call)
            else:
                call.body += event.data
        elif isinstance(event, h11.EndOfMessage) and call.exchange is not None:
            if call.streams:
                events += call.answer.close(when)
                self._done(call)
            else:
                self._refused(call, when, events)

    def _refused(self, call: _Call, when: float, events: list[TokenEvent]) -> None:
        """An answer that is no stream."""
        if call.status in _ASK_AGAIN and call.retries > 0:
            call.retries -= 1
            if call.exchange is not None:
                self._part(call.exchange)
                call.exchange = None
            self._loop.call_later(call.retry_after, functools.partial(self._send, call))
            return
        try:
            said = error_message(json.loads(call.body))
        except ValueError:
            said = call.body[:200].decode(errors="replace")
        if call.status == 200:
            self._fail(call, when, "invalid", f"the answer is no event stream: {said}", events)
        else:
            self._fail(call, when, f"HTTP {call.status}", said, events)

    def _fail(self, call: _Call, when: float, reason: str, why: str, events: list[TokenEvent]) -> None:
        if self._calls.get(call.name) is call and call.exchange is not None:
            exchange = call.exchange
            self._done(call)
            exchange.close()
            events.append(TokenEvent(call.name, when, 0, finish_reason=reason, error=why))

    def _done(self, call: _Call) -> None:
        """Its last event is out; the server closes the connection."""
        if self._calls.pop(call.name, None) is not None and call.exchange is not None:
            self._part(call.exchange)
            call.exchange = None

    def _part(self, exchange: Exchange) -> None:
        """Nobody waits for it any more."""
        self._owners.pop(exchange, None)
        if exchange.open:
            self._leaving.add(exchange)

    def _look_for_silence(self, events: list[TokenEvent]) -> None:
        now = self.now()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK
        for exchange, call in list(self._owners.items()):
            if now - exchange.last_news > self._server.silence:
                self._fail(call, now, "timeout", f"the server sent nothing for {self._server.silence:g} s", events)


class _Call:
    """A request, and the answer of its present exchange; None between two, and when it is over."""

    def __init__(self, name: str, request: tuple[h11.Request, bytes], retries: int) -> None:
        self.name = name
        self.request = request
        self.retries = retries
        self.exchange: Exchange | None = None

    def begin(self, exchange: Exchange) -> None:
        """Sent, perhaps again."""
        self.exchange = exchange
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.answer = StreamedAnswer(self.name)

    @property
    def streams(self) -> bool:
        return self.status == 200 and self.headers.get(b"content-type", b"").startswith(b"text/event-stream")

    @property
    def retry_after(self) -> float:
        """Seconds; what is no number counts as one."""
        told = self.headers.get(b"retry-after", b"")
        return min(float(told), _MOST_RETRY_AFTER) if told.isdigit() else 1.0


def find_model(server: ServerAddress) -> ServedModel:
    """Ask a server what it serves. Raises `ConfigError` when it cannot be reached, is no such server or lacks the model."""
    place = _split(server.url)
    path = f"{place.path}/models"
    headers = dict(_headers(server))
    status, body = get(server.url, secure=place.secure, host=place.host, port=place.port, path=path, headers=headers)
    try:
        found = json.loads(body)
        if status != 200:
            raise ConfigError(f"{server.url} answers {status} to {path}: {error_message(found)}")
        cards = {str(card["id"]): card for card in found["data"]}
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{server.url} is no OpenAI-compatible server: {path} gives {status} {body[:80]!r}") from None
    name = server.model if server.model is not None else next(iter(cards), None)
    if name not in cards:
        raise ConfigError(f"{server.url} does not serve {name!r}; it serves {', '.join(cards) or 'nothing'}")
    context = cards[name].get("max_model_len")
    return ServedModel(name, context if isinstance(context, int) else None)


@dataclasses.dataclass(frozen=True)
class _Place:
    secure: bool
    host: str
    port: int
    netloc: str
    path: str  # up to and with /v1


def _split(url: str) -> _Place:
    """Raises `ConfigError`."""
    try:
        parts = urllib.parse.urlsplit(url)
        secure, port = parts.scheme == "https", parts.port
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise ConfigError(f"{url} is no URL: {error}") from None
    if "@" in parts.netloc:  # not repeated: it may be a password, and reports name the URL
        raise ConfigError("the server's URL has a user or password in it: leave it out, and give a key as http.api_key")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url} is no URL of a server: write one like http://localhost:8000")
    path = parts.path.rstrip("/")
    path = path if path.endswith("/v1") else f"{path}/v1"
    return _Place(secure, parts.hostname, port or (443 if secure else 80), parts.netloc, path)


def _headers(server: ServerAddress) -> list[tuple[str, str]]:
    if server.api_key is None:
        return []
    if not (server.api_key.isascii() and server.api_key.isprintable()):
        raise ConfigError("the API key has a line break or a character that no header can hold: correct it")
    return [("authorization", f"Bearer {server.api_key}")]
