"""What a suite loads: `Subject`, the systems to compare and a target for each; an engine of this process, or a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from llmjax.loadtest import baselines
from llmjax.loadtest.http_target import HttpTarget, ServerAddress, find_model
from llmjax.loadtest.suite import System
from llmjax.loadtest.target import EngineTarget, Target


class Subject(Protocol):
    """What is loaded. Closed by whoever made it.

    Attributes:
        systems: the first is the one under test.
        facts: for people.
        num_tokens: random prompts are ids below this.
        max_context: tokens of prompt and output together; None where that is not known.
    """

    systems: Sequence[System]
    facts: Mapping[str, str]
    num_tokens: int
    max_context: int | None

    def target(self, system: System) -> Target:
        """For one run of one of the systems."""

    def close(self) -> None:
        """Leave everything as it was."""


class EngineSubject:
    """An engine of this process that nobody else uses, and the baselines that differ from it by their policy."""

    def __init__(self, engine: Any, names: Sequence[str], *, static_batch: int = 8, name: str = "model") -> None:
        self._engine = engine
        self.systems: Sequence[System] = baselines.systems(names, engine.config, static_batch=static_batch)
        self.facts: Mapping[str, str] = {"model": name}
        self.num_tokens = int(engine.model_config.num_tokens)
        self.max_context: int | None = int(engine.config.max_context)
        self._base = {name: getattr(engine.config, name) for system in self.systems for name in system.policy}

    def target(self, system: System) -> Target:
        """See `Subject`."""
        self._engine.set_policy(**{**self._base, **system.policy})
        return EngineTarget(self._engine)

    def close(self) -> None:
        """The engine's policy is its own again."""
        if not self._engine.has_unfinished:  # else its loop has failed, which is the error to tell
            self._engine.set_policy(**self._base)


class ServerSubject:
    """A server. Its policy is its own, so that static batches are the only baseline.

    Raises `ConfigError` for other baselines, and as `find_model` does.
    """

    def __init__(self, address: ServerAddress, names: Sequence[str], *, num_tokens: int, static_batch: int = 8) -> None:
        self.systems: Sequence[System] = baselines.client_systems(names, static_batch=static_batch)
        model = find_model(address)
        self._target = HttpTarget(address, model)
        self.facts: Mapping[str, str] = {"server": address.url, "model": model.name}
        self.num_tokens = num_tokens
        self.max_context = model.max_context

    def target(self, system: System) -> Target:
        """See `Subject`."""
        return self._target

    def close(self) -> None:
        """The connections are closed."""
        self._target.close()
