"""Stage kinds for tests of planning and running: an artifact, an object in memory, a gate, a server, one that fails."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from llmjax.errors import GateRejectedError, LlmjaxError, ServiceLevelError
from llmjax.pipeline.schema import Duration, InputPath, SecretStr, StageSection
from llmjax.pipeline.stages import Rejection, StageContext, StageInput, StageKind


@dataclasses.dataclass
class Log:
    """What happened, in order: ``run x``, ``load x``, ``close x``, ``wait x``."""

    events: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Thing:
    """An object in memory, known by the stage that made it."""

    name: str


class MakeSection(StageSection):
    """Makes a file of numbers."""

    samples: int = Field(1, description="How many.")
    data: InputPath | None = Field(None, description="What from.")
    port: int = Field(1, description="Changes nothing.", json_schema_extra={"keyed": False})
    api_key: SecretStr | None = Field(None, description="Secret.")
    pause: Duration = Field(0.0, description="How long.")
    full: bool = Field(False, description="Act as if the disk were full.")


class MakeKind(StageKind[MakeSection]):
    """Skippable."""

    name = "make"
    section = MakeSection
    gives = "numbers"
    skippable = True

    def __init__(self, log: Log) -> None:
        self.log = log

    def run(self, context: StageContext[MakeSection]) -> Any:
        self.log.events.append(f"run {context.name}")
        assert context.folder is not None
        (context.folder / "numbers.json").write_text(json.dumps(list(range(context.config.samples))))
        if context.config.full:
            raise OSError(28, "No space left on device", str(context.folder / "numbers.json"))
        return context.config.samples

    def load(self, context: StageContext[MakeSection]) -> Any:
        self.log.events.append(f"load {context.name}")
        assert context.folder is not None
        return json.loads((context.folder / "numbers.json").read_text())

    def summary(self, value: Any) -> Mapping[str, Any]:
        return {"numbers": value}


class RefineSection(StageSection):
    """Builds on numbers."""

    source: str | None = Field(None, description="Stage with numbers.")
    factor: int = Field(2, description="Times.")


class RefineKind(StageKind[RefineSection]):
    """Skippable, with an input."""

    name = "refine"
    section = RefineSection
    gives = "numbers"
    skippable = True
    inputs = (StageInput("source", "numbers"),)

    def __init__(self, log: Log) -> None:
        self.log = log

    def run(self, context: StageContext[RefineSection]) -> Any:
        self.log.events.append(f"run {context.name}")
        assert context.folder is not None
        numbers = [context.config.factor * n for n in context.inputs["source"]]
        (context.folder / "numbers.json").write_text(json.dumps(numbers))
        return numbers

    def load(self, context: StageContext[RefineSection]) -> Any:
        self.log.events.append(f"load {context.name}")
        assert context.folder is not None
        return json.loads((context.folder / "numbers.json").read_text())


class ThingSection(StageSection):
    """An object in memory."""

    fail: Literal["no", "error", "bug", "level", "interrupt"] = Field("no", description="How it ends.")
    memory: str = Field("", description="Anything.")
    api_key: SecretStr | None = Field(None, description="Secret.")


class ThingKind(StageKind[ThingSection]):
    """Live."""

    name = "thing"
    section = ThingSection
    gives = "thing"
    live = True

    def __init__(self, log: Log) -> None:
        self.log = log

    def run(self, context: StageContext[ThingSection]) -> Thing:
        self.log.events.append(f"run {context.name}")
        secret = context.config.api_key
        if context.config.fail == "error":
            raise LlmjaxError(f"the thing is broken {secret.get_secret_value() if secret else ''}".strip())
        if context.config.fail == "bug":
            raise RuntimeError("not planned")
        if context.config.fail == "level":
            raise ServiceLevelError("too slow")
        if context.config.fail == "interrupt":
            raise KeyboardInterrupt
        if secret is not None:
            context.reporter.message("info", f"using {secret.get_secret_value()}")
        return Thing(context.name)

    def close(self, value: Any) -> None:
        self.log.events.append(f"close {value.name}")


class UseSection(StageSection):
    """Uses a thing."""

    thing: str | None = Field(None, description="Stage with a thing.")
    fail: bool = Field(False, description="Fail.")


class UseKind(StageKind[UseSection]):
    """Runs every time."""

    name = "use"
    section = UseSection
    gives = "nothing"
    inputs: ClassVar = (StageInput("thing", "thing"),)

    def __init__(self, log: Log) -> None:
        self.log = log

    def run(self, context: StageContext[UseSection]) -> Any:
        self.log.events.append(f"run {context.name} with {context.inputs['thing'].name}")
        if context.config.fail:
            raise LlmjaxError("cannot use it")
        return None


class GateSection(StageSection):
    """Compares two things."""

    baseline: str | None = Field(None, description="Stage.")
    candidate: str | None = Field(None, description="Stage.")
    good: bool = Field(True, description="Accept.")
    on_fail: Literal["stop", "fallback"] = Field("stop", description="What then.")


class GateKind(StageKind[GateSection]):
    """Guards its candidate."""

    name = "gate"
    section = GateSection
    gives = "thing"
    inputs = (StageInput("baseline", "thing"), StageInput("candidate", "thing"))
    guards = ("candidate",)
    live = True

    def run(self, context: StageContext[GateSection]) -> Any:
        if context.config.good:
            return context.inputs["candidate"]
        if context.config.on_fail == "stop":
            raise GateRejectedError("perplexity_ratio 1.4 is above 1.02")
        return Rejection(context.inputs["baseline"], "perplexity_ratio 1.4 is above 1.02")

    def close(self, value: Any) -> None:
        raise AssertionError("the thing belongs to the stage that made it")


class HoldKind(StageKind[UseSection]):
    """A server: stays when it is the last."""

    name = "hold"
    section = UseSection
    gives = "server"
    inputs = (StageInput("thing", "thing"),)

    def __init__(self, log: Log) -> None:
        self.log = log

    def run(self, context: StageContext[UseSection]) -> Any:
        self.log.events.append(f"run {context.name}")
        return Thing(context.name)

    def wait(self, value: Any) -> None:
        self.log.events.append(f"wait {value.name}")

    def close(self, value: Any) -> None:
        self.log.events.append(f"close {value.name}")


class CallSection(StageSection):
    """Calls a server."""

    server: str | None = Field(None, description="Stage.")


class CallKind(StageKind[CallSection]):
    """Runs against a server."""

    name = "call"
    section = CallSection
    gives = "nothing"
    inputs = (StageInput("server", "server"),)

    def __init__(self, log: Log) -> None:
        self.log = log

    def run(self, context: StageContext[CallSection]) -> Any:
        self.log.events.append(f"run {context.name}")
        return None


def make(log: Log) -> list[StageKind[Any]]:
    """One of each kind, writing to `log`."""
    return [MakeKind(log), RefineKind(log), ThingKind(log), UseKind(log), GateKind(), HoldKind(log), CallKind(log)]
