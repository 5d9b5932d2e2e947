"""`Service`: what all routes share: the engine, the settings, the answers that are under way. Knows no HTTP."""

from __future__ import annotations

import collections
import itertools
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from llmjax.engine.engine_client import EngineClient
from llmjax.errors import RequestError
from llmjax.server.config import ServerConfig
from llmjax.server.http_errors import HttpError
from llmjax.server.metrics import ServerMetrics
from llmjax.server.protocol import ApiRequest, Endpoint, parse_request, unknown_fields
from llmjax.server.recent_errors import RecentErrors
from llmjax.server.strict_json import kind, load_json, printable
from llmjax.server.tool_support import with_tools
from llmjax.server.traffic_log import TrafficLog

_OWN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_WARNED_FIELDS = 20


class Service:
    """One engine, served under one or more names."""

    def __init__(self, engine: EngineClient, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.created = int(time.time())
        self.metrics = ServerMetrics(config.served_names[0])
        self.errors = RecentErrors()
        self.traffic: TrafficLog | None = None
        if config.traffic is not None:
            self.traffic = TrafficLog(config.traffic, self.decode)
            self.metrics.registry.register(self.traffic)
        self._active: collections.Counter[str] = collections.Counter()  # ids of answers under way
        self._nonce = uuid.uuid4().hex[:8]  # several apps may share an engine
        self._numbers = itertools.count()

    @property
    def max_context(self) -> int:
        """Tokens of prompt and output together."""
        return self.engine.max_context

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
        request = with_tools(parse_request(endpoint, body), self.engine.tokenizer, self.config.tool_parser)
        if request.stream and request.prompt_logprobs_asked:
            raise RequestError(
                "prompt_logprobs cannot be streamed: leave out stream, or use echo with logprobs", "prompt_logprobs"
            )
        return request, [_for_header(name) for name in ignored[:_WARNED_FIELDS]]

    def decode(self, ids: list[int]) -> str:
        """The text of a prompt that was given as ids."""
        tokenizer = self.engine.tokenizer
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
        """Ids for the `count` engine requests of an answer, which is under way meanwhile.

        They are unique even if two clients chose one id at the same moment, of one app or of two over one engine.
        """
        self._active[response_id] += 1
        try:
            yield [f"{response_id}-{self._nonce}-{next(self._numbers)}" for _ in range(count)]
        finally:
            self._active[response_id] -= 1
            if not self._active[response_id]:
                del self._active[response_id]

    async def abort(self, response_id: str) -> int:
        """End an answer by its id, with or without its prefix; its client gets what there is, with finish reason "abort".

        Returns how many there were of that id, in all workers.
        """
        plain = response_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
        return await self.engine.abort_group(plain) or (await self.engine.abort_group(response_id) if plain != response_id else 0)


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


def _for_header(name: str) -> str:
    """A name as a header may hold it: escaped, as a line break would add another one; quoted, as no value may end in a space."""
    return f'"{name.encode("unicode_escape").decode()[:80]}"'


_TYPES: dict[Any, str] = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}
