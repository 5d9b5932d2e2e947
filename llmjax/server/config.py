"""`ServerConfig`: what a server lets in and how it answers; and how a process of its HTTP side is told. Plain data; knows neither
sockets nor engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from llmjax.errors import ConfigError
from llmjax.server.tool_parsers import TOOL_PARSERS, ToolParserName
from llmjax.server.traffic_log import TrafficConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP side.

    Attributes:
        served_names: names of the model; the first one is used when a request names none.
        api_keys: any of these opens every route but the probes; none leaves all of them open.
        strict: refuse unknown fields; otherwise they are ignored, and listed in the header `x-llmjax-warning`.
        max_body_bytes: of a request; more is answered with 413.
        keep_alive: seconds of silence after which a stream gets a comment, and after which its headers are sent.
        send_timeout: seconds that a client may take to accept what was sent; then it is dropped and its request aborted. Also
            those that it may take to send a body; then it is answered with 408.
        log_prompts: have texts of prompts and outputs in the log, where it is one of JSON objects.
        cors_origins: web pages that may call the server; "*" is all, empty none.
        tool_parser: how the model writes calls of functions: "hermes", "llama", "auto" for what its chat template teaches, or
            "none" to hand its text on as it is.
        traffic: which requests and outputs are kept in a file; None: none.
    """

    served_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    strict: bool = False
    max_body_bytes: int = 4 * 2**20
    keep_alive: float = 5.0
    send_timeout: float = 60.0
    log_prompts: bool = False
    cors_origins: tuple[str, ...] = ()
    tool_parser: ToolParserName = "auto"
    traffic: TrafficConfig | None = None

    def __post_init__(self) -> None:
        if not self.served_names or not all(self.served_names):
            raise ConfigError("served_names must hold at least one name, and none of them empty")
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in self.api_keys):
            raise ConfigError("an API key must be printable ASCII without spaces, and not empty")
        if self.tool_parser not in TOOL_PARSERS:
            raise ConfigError(f"tool_parser must be one of {', '.join(TOOL_PARSERS)}, got {self.tool_parser!r:.40}")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be at least 1, got {self.max_body_bytes}")
        for name in ("keep_alive", "send_timeout"):
            if not 0.0 < getattr(self, name) <= 86400.0:
                raise ConfigError(f"{name} must be above 0 and at most a day, got {getattr(self, name)} s")


@dataclasses.dataclass(frozen=True)
class WorkerJob:
    """What a worker is started with, beside the listening socket.

    Attributes:
        options: fields of `ServerConfig`; without `served_names` the model's own name is taken.
        log: form of the log.
        alone: whether there is no other worker.
        recalibration: file with what is known of recalibrations, for `/metrics`; None where there are none.
    """

    options: Mapping[str, Any]
    log: Literal["text", "json"] = "text"
    alone: bool = True
    recalibration: str | None = None
