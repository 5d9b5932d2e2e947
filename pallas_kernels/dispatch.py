"""Chooses the implementation of an operation: the one named by the caller, else the one measured to be fastest for the shape,
else the reference.

Owns the registry of implementations and the rule of falling back. Must not know what an operation computes.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels import tuning

logger = logging.getLogger(__name__)

REFERENCE = "xla"


class UnsupportedShape(NotImplementedError):
    """Raised by an implementation, while tracing, for a call that it cannot serve. The message is the reason."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
        function: takes the operation's arguments and, unless it is the reference, `config=None` for its own default.
        shape_key: takes the operation's arguments; the key under which `tuning` knows the call, its sizes not rounded.
            UnsupportedShape where the implementation serves nothing of the kind. None: never chosen but by name.
        config_type: makes a `config` from the fields that `tuning` keeps.
        candidates: the configurations worth timing for a key; the first is the one by rule.
        untuned: faster than the reference at every shape timed so far, by its default configuration too. Serves the shapes that
            a device's table knows nothing about, once the table names it for another.
    """

    function: Callable[..., Any]
    shape_key: Callable[..., tuning.Key] | None = None
    config_type: Callable[..., Any] | None = None
    candidates: Callable[[tuning.Key], Sequence[Any]] | None = None
    untuned: bool = False


class Operation:
    """One operation and its implementations by name; all take the same arguments and give the same result.

    The reference, named "xla", serves every valid call on every platform.
    """

    def __init__(self, name: str, reference: Callable[..., Any]) -> None:
        self.name = name
        self._implementations: dict[str, Implementation] = {REFERENCE: Implementation(reference)}
        self._reported: set[tuple[str, str]] = set()

    @property
    def implementations(self) -> dict[str, Implementation]:
        """The implementations by name, the reference first."""
        return dict(self._implementations)

    def register(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        shape_key: Callable[..., tuning.Key] | None = None,
        config_type: Callable[..., Any] | None = None,
        candidates: Callable[[tuning.Key], Sequence[Any]] | None = None,
        untuned: bool = False,
    ) -> None:
        """Adds an implementation; see `Implementation`. Raises ValueError when the name is taken, or when it has a shape key
        but nothing that makes a configuration of what is found under it."""
        if name in self._implementations:
            raise ValueError(f"{self.name} already has an implementation named {name!r}")
        if (shape_key is None) != (config_type is None):
            raise ValueError(f"{self.name}: shape_key and config_type of {name!r} belong together")
        self._implementations[name] = Implementation(function, shape_key, config_type, candidates, untuned)

    def __call__(self, *args: Any, implementation: str | None = None, **kwargs: Any) -> Any:
        """Runs the operation.

        A named `implementation` is used or fails: UnsupportedShape where it cannot serve the call, ValueError where no such
        name exists. Without a name, the tuning table of the device decides. Where it says nothing, an implementation that is
        good untuned serves if it can, else the reference.
        An implementation that the table names but that cannot serve the call is passed over, and that is logged once for
        each reason.
        """
        if implementation is not None:
            if implementation not in self._implementations:
                names = ", ".join(reversed(self._implementations))
                raise ValueError(f"{self.name} has no implementation {implementation!r}; choose one of {names}")
            return self._implementations[implementation].function(*args, **kwargs)
        for name, (function, config) in self._tuned(args, kwargs).items():
            try:
                return function(*args, config=config, **kwargs)
            except UnsupportedShape as reason:
                self._report(name, str(reason))
        return self._implementations[REFERENCE].function(*args, **kwargs)

    def _tuned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, tuple[Callable[..., Any], Any]]:
        """What the table names for this call, with its configuration; None is an implementation's default."""
        found: dict[str, tuple[Callable[..., Any], Any]] = {}
        entries = tuning.entries(self.name)
        if len(self._implementations) == 1 or not entries:  # as on every CPU: no key is made
            return found
        for name, candidate in self._implementations.items():
            if candidate.shape_key is None or candidate.config_type is None:
                continue
            try:
                entry = tuning.lookup(self.name, candidate.shape_key(*args, **kwargs))
            except UnsupportedShape:
                continue
            if entry is not None:
                if entry["implementation"] == name:
                    found[name] = candidate.function, candidate.config_type(**entry["config"])
            elif candidate.untuned and any(other["implementation"] == name for other in entries):
                found[name] = candidate.function, None
        return found

    def _report(self, name: str, reason: str) -> None:
        if (name, reason) not in self._reported:
            self._reported.add((name, reason))
            logger.warning("%s: %s cannot serve this call (%s); %s does", self.name, name, reason, REFERENCE)
