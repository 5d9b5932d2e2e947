"""`ServerConfig`: what a server lets in and how it answers. Plain data; knows neither sockets nor engines."""

from __future__ import annotations

import dataclasses

from llmjax.errors import ConfigError
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
        cors_origins: web pages that may call the server; "*" is all, empty none.
        traffic: which requests and outputs are kept in a file; None: none.
    """

    served_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    strict: bool = False
    max_body_bytes: int = 4 * 2**20
    keep_alive: float = 5.0
    send_timeout: float = 60.0
    cors_origins: tuple[str, ...] = ()
    traffic: TrafficConfig | None = None

    def __post_init__(self) -> None:
        if not self.served_names or not all(self.served_names):
            raise ConfigError("served_names must hold at least one name, and none of them empty")
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in self.api_keys):
            raise ConfigError("an API key must be printable ASCII without spaces, and not empty")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be at least 1, got {self.max_body_bytes}")
        for name in ("keep_alive", "send_timeout"):
            if not 0.0 < getattr(self, name) <= 86400.0:
                raise ConfigError(f"{name} must be above 0 and at most a day, got {getattr(self, name)} s")
