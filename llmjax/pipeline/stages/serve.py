"""The `serve` stage: an engine behind an OpenAI-compatible HTTP server. The server itself is in `llmjax/server`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SecretStr, model_validator

from llmjax.pipeline.schema import Duration, InputPath, OneOrMore, OutputPath, Section, Share, Size, StageSection, located
from llmjax.pipeline.stages import StageContext, StageInput, StageKind
from llmjax.server.key_file import read_key_file

if TYPE_CHECKING:
    from llmjax.server.traffic_log import TrafficConfig


class LimitsSection(Section):
    """What one client, or all of them together, may ask for."""

    body: Size = Field(4 * 2**20, ge=1, description="Bytes of a request's body; more is answered with 413.")
    waiting: int = Field(
        1024, ge=1, description="Choices that may wait beyond the engine's rows; one more is answered with 429 and Retry-After."
    )
    step: Duration = Field(
        60.0,
        gt=0,
        description="Time that one step of the engine may take before it counts as stuck: streams end, /readyz is 503.",
    )
    send: Duration = Field(
        60.0,
        gt=0,
        description="Time that a client may take to accept what was sent before its request is aborted, and to send a body.",
    )


class TrafficSection(Section):
    """Requests and their outputs in a file, one JSON object a line: what people really ask, for calibration and load tests."""

    path: OutputPath = Field(
        description="File that is written, readable by its owner alone; of several processes each has its own, numbered.",
        json_schema_extra={"keyed": False},
    )
    sample: Share = Field(0.01, description="Share of the requests that is kept; which ones depends on their ids alone.")
    max_bytes: Size = Field(
        256 * 2**20, ge=1, description="Bytes of a file; a full one is renamed to path.1, that one to path.2, and so on."
    )
    keep: int = Field(4, ge=0, description="Renamed files that stay; older ones are removed.")
    redact: Annotated[list[str], OneOrMore] = Field(
        default_factory=list,
        description='Regular expressions; what they match in any text becomes "[redacted]", and token ids are left out.',
    )

    @model_validator(mode="after")
    def _compiles(self) -> TrafficSection:
        for index, pattern in enumerate(self.redact):
            try:
                re.compile(pattern)
            except re.error as error:
                raise located(f"this is no regular expression: {error}", "redact", index) from None
        return self


class ServeSection(StageSection):
    """An OpenAI-compatible server over one engine. As the last stage it stays until SIGTERM or Ctrl-C."""

    engine: str | None = Field(None, description="Engine stage that answers; by default the only earlier one.")
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address to listen on; 0.0.0.0 for every one of this machine.",
        json_schema_extra={"keyed": False},
    )
    port: int = Field(
        8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.", json_schema_extra={"keyed": False}
    )
    served_name: Annotated[list[str], OneOrMore] = Field(
        default_factory=list, description="Names of the model for clients; by default its own. Any other is answered with 404."
    )
    api_key: SecretStr | None = Field(
        None, description="Key that clients must send as a bearer token; every route but the probes needs it. Empty: none."
    )
    api_key_file: InputPath | None = Field(
        None, description="File of further keys, one a line; # begins a comment.", json_schema_extra={"keyed": False}
    )
    http_workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that speak HTTP and tokenise, beside the engine's. A server that later stages use has none: it is "
        "in the engine's process.",
        json_schema_extra={"keyed": False},
    )
    restart: int = Field(
        0,
        ge=0,
        description="How often the engine's process is started again when it crashes; once more, and the service ends. Not for a "
        "server that later stages use.",
        json_schema_extra={"keyed": False},
    )
    drain: Duration = Field(30.0, ge=0, description="Time that running requests get at the end, before they end with an error.")
    keep_alive: Duration = Field(
        5.0, gt=0, description="Silence after which a stream gets a comment, so that proxies do not cut it."
    )
    strict: bool = Field(
        False, description="Refuse unknown fields of a request; otherwise they are ignored and listed in x-llmjax-warning."
    )
    log_prompts: bool = Field(
        False, description="Have texts of prompts and outputs in the log, where runtime.log is json. The rest is always there."
    )
    cors_origins: Annotated[list[str], OneOrMore] = Field(
        default_factory=list, description='Origins of web pages that may call the server; "*" is all.'
    )
    tool_parser: Literal["auto", "hermes", "llama", "none"] = Field(
        "auto",
        description="How the model writes calls of tools: hermes (Qwen and others), llama (3.1 to 3.3), auto for what its chat "
        "template teaches, none to hand its text on as it is.",
    )
    limits: LimitsSection = Field(default_factory=lambda: LimitsSection.model_validate({}), description="What may be asked for.")
    traffic: TrafficSection | None = Field(None, description="Keep a sample of requests and outputs in a file. Off by default.")

    @model_validator(mode="after")
    def _check(self) -> ServeSection:
        if any(not name for name in self.served_name):
            raise located("a name cannot be empty", "served_name")
        return self


class ServeKind(StageKind[ServeSection]):
    """Started for the stages that use it and closed after the last one. Without any it is the last and waits for a signal, and
    the HTTP side may be processes of its own (`StageContext.front`)."""

    name = "serve"
    section = ServeSection
    gives = "serve"
    stays = True
    inputs = (StageInput("engine", "engine"),)

    def run(self, context: StageContext[ServeSection]) -> Any:
        """Returns when the server answers."""
        keys = read_keys(context.config)
        if not keys and not _is_loopback(context.config.host):
            context.reporter.message(
                "warning",
                f"anybody who reaches {context.config.host} port {context.config.port} may use this server: set serve.api_key, "
                f"or serve.host: 127.0.0.1",
            )
        return start_server(context.inputs["engine"], context, keys)

    def summary(self, value: Any) -> Mapping[str, Any]:
        """Where it is."""
        return {"url": value.url}

    def wait(self, value: Any) -> None:
        """Until a signal comes and everything has been answered."""
        value.wait()


def start_server(llm: Any, context: StageContext[ServeSection], keys: tuple[str, ...]) -> Any:
    """The one call into the server; imported here because it is needed by no other stage."""
    from llmjax.engine.async_engine import AsyncEngine

    section = context.config
    engine = AsyncEngine(
        llm.engine,
        max_waiting=section.limits.waiting,
        watchdog=section.limits.step,
        model_name=(section.served_name or [llm.name])[0],
    )
    if context.front is not None:
        return context.front.serve(engine, name=llm.name, drain=section.drain)
    from llmjax.server.app import create_app
    from llmjax.server.config import ServerConfig
    from llmjax.server.http_server import HttpServer

    options = server_options(section, keys)
    options["served_names"] = options["served_names"] or (llm.name,)
    server = HttpServer(
        create_app(engine, ServerConfig(**options)),
        engine,
        host=section.host,
        port=section.port,
        drain=section.drain,
    )
    server.start()
    return server


def server_options(section: ServeSection, keys: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a `ServerConfig`; without names of its own the model's is to be filled in."""
    return {
        "served_names": tuple(section.served_name),
        "api_keys": keys,
        "strict": section.strict,
        "max_body_bytes": section.limits.body,
        "keep_alive": section.keep_alive,
        "send_timeout": section.limits.send,
        "log_prompts": section.log_prompts,
        "cors_origins": tuple(section.cors_origins),
        "tool_parser": section.tool_parser,
        "traffic": None if section.traffic is None else traffic_config(section.traffic),
    }


def traffic_config(section: TrafficSection) -> TrafficConfig:
    """The section as the server takes it."""
    from llmjax.server.traffic_log import TrafficConfig

    return TrafficConfig(
        path=str(section.path),
        sample=section.sample,
        max_bytes=section.max_bytes,
        keep=section.keep,
        redact=tuple(section.redact),
    )


def read_keys(section: ServeSection) -> tuple[str, ...]:
    """Every key that opens the server. Raises `ConfigError` for a file that cannot be read, or holds none."""
    keys = [section.api_key.get_secret_value()] if section.api_key is not None and section.api_key.get_secret_value() else []
    if section.api_key_file is not None:
        keys += read_key_file(section.api_key_file)
    return tuple(dict.fromkeys(keys))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


KIND = ServeKind()
