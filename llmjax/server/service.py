"""`Service`: what all routes share: the engine, the settings, the answers that are under way. Knows no HTTP."""

from __future__ import annotations

import itertools
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from llmjax.engine.async_engine import AsyncEngine
from llmjax.errors import RequestError
from llmjax.server.config import ServerConfig
from llmjax.server.http_errors import HttpError
from llmjax.server.metrics import ServerMetrics
from llmjax.server.protocol import ApiRequest, Endpoint, parse_request, unknown_fields
from llmjax.server.strict_json import kind, load_json, printable
from llmjax.server.traffic_log import TrafficLog

_OWN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_WARNED_FIELDS = 20


class Service:
    """One engine, served under one or more names."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.created = int(time.time())
        self.metrics = ServerMetrics(engine)
        self.traffic: TrafficLog | None = None
        if config.traffic is not None:
            self.traffic = TrafficLog(config.traffic, self.decode)
            self.metrics.registry.register(self.traffic)
        self._active: dict[str, list[str]] = {}  # answer's id -> the engine's ids of its requests
        self._numbers = itertools.count()

    @property
    def max_context(self) -> int:
        """Tokens of prompt and output together."""
        return int(self.engine.engine.config.max_context or 0)

    def model(self, asked: str | None) -> str:
        """The name to answer with. Raises `HttpError` (404) for one that is not served."""
        names = self.config.served_names
        if asked is None:
            return names[0]
        if asked not in names:
            raise HttpError(
                404,
                f"the model {printable(asked)!r} does not exist; served here: {', '.join(names)}",
                code="model_not_found",
                param="model",
            )
        return asked

    def read_request(self, endpoint: Endpoint, data: bytes) -> tuple[ApiRequest, list[str]]:
        """A body, checked, and the fields of it that were ignored."""
        body = load_json(data)
        ignored: list[str] = []
        if isinstance(body, Mapping) and not self.config.strict:
            ignored = unknown_fields(endpoint, body)
            left_out = set(ignored)
            body = {name: value for name, value in body.items() if name not in left_out}
        request = parse_request(endpoint, body)
        if request.stream and request.prompt_logprobs_asked:
            raise RequestError(
                "prompt_logprobs cannot be streamed: leave out stream, or use echo with logprobs", "prompt_logprobs"
            )
        # For a header: escaped, so that a name with a line break in it cannot add another one.
        return request, [name.encode("unicode_escape").decode()[:80] for name in ignored[:_WARNED_FIELDS]]

    def decode(self, ids: list[int]) -> str:
        """The text of a prompt that was given as ids."""
        tokenizer = self.engine.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)

    def close(self) -> None:
        """What waits for a file is written. Blocks; the service must not be used any more."""
        if self.traffic is not None:
            self.traffic.close()

    # -- answers under way

    def new_id(self, wanted: str | None) -> str:
        """The unique part of an answer's id: the client's own (`x-request-id`) when it is plain and not in use."""
        if wanted is not None and _OWN_ID.fullmatch(wanted) and wanted not in self._active:
            return wanted
        return uuid.uuid4().hex

    @contextmanager
    def answering(self, response_id: str, count: int) -> Iterator[list[str]]:
        """Ids for the `count` engine requests of an answer, which can be aborted meanwhile.

        They are unique even if two clients chose one id at the same moment.
        """
        ids = [f"{response_id}-{next(self._numbers)}" for _ in range(count)]
        active = self._active.setdefault(response_id, [])
        active += ids
        try:
            yield ids
        finally:
            for one in ids:
                active.remove(one)
            if not active:
                self._active.pop(response_id, None)

    def abort(self, response_id: str) -> bool:
        """End an answer by its id, with or without its prefix; its client gets what there is, with finish reason "abort"."""
        plain = response_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
        ids = self._active.get(plain) or self._active.get(response_id)
        for request_id in ids or ():
            self.engine.abort(request_id)
        return ids is not None

    def abort_all(self) -> int:
        """End every answer under way; how many there were."""
        names = list(self._active)
        for name in names:
            self.abort(name)
        return len(names)


def read_object(data: bytes, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with these fields at most, null ones left out; `fields` maps names to types. Raises `RequestError`."""
    body = load_json(data)
    if not isinstance(body, Mapping):
        raise RequestError(f"the body must be a JSON object, got {kind(body)}")
    found = {name: value for name, value in body.items() if value is not None}
    for name, value in found.items():
        if name not in fields:
            raise RequestError(f"unknown field {printable(name)!r}; known are {', '.join(fields)}", printable(name))
        if not isinstance(value, fields[name]):
            raise RequestError(f"{name} must be {_TYPES[fields[name]]}, got {kind(value)}", name)
    return found


_TYPES: dict[Any, str] = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}
