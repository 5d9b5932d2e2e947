"""Chooses the implementation of an operation: the one named by the caller, else a tuned one, else the reference.

Owns the registry of implementations and the rule of falling back. Must not know what an operation computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

REFERENCE = "xla"


class UnsupportedShape(NotImplementedError):
    """Raised by an implementation, while tracing, for a call that it cannot serve. The message is the reason."""


class Operation:
    """One operation and its implementations by name; all take the same arguments and give the same result.

    The reference, named "xla", serves every valid call on every platform. Others are registered on top of it and are
    tried first, the latest registered first.
    """

    def __init__(self, name: str, reference: Callable[..., Any]) -> None:
        self.name = name
        self._implementations: dict[str, Callable[..., Any]] = {REFERENCE: reference}
        self._reported: set[tuple[str, str]] = set()

    @property
    def implementations(self) -> tuple[str, ...]:
        """Names in the order in which an automatic choice tries them."""
        return tuple(reversed(self._implementations))

    def register(self, name: str, implementation: Callable[..., Any]) -> None:
        """Adds a tuned implementation. Raises ValueError when the name is taken."""
        if name in self._implementations:
            raise ValueError(f"{self.name} already has an implementation named {name!r}")
        self._implementations[name] = implementation

    def __call__(self, *args: Any, implementation: str | None = None, **kwargs: Any) -> Any:
        """Runs the operation.

        A named `implementation` is used or fails: UnsupportedShape where it cannot serve the call, ValueError where no such
        name exists. Without a name, an implementation that cannot serve the call is passed over, and that is logged once
        for each reason.
        """
        if implementation is not None:
            if implementation not in self._implementations:
                raise ValueError(
                    f"{self.name} has no implementation {implementation!r}; choose one of {', '.join(self.implementations)}"
                )
            return self._implementations[implementation](*args, **kwargs)
        for name in self.implementations[:-1]:
            try:
                return self._implementations[name](*args, **kwargs)
            except UnsupportedShape as reason:
                self._report(name, str(reason))
        return self._implementations[REFERENCE](*args, **kwargs)

    def _report(self, name: str, reason: str) -> None:
        if (name, reason) not in self._reported:
            self._reported.add((name, reason))
            logger.warning("%s: %s cannot serve this call (%s); trying the next, at last %s", self.name, name, reason, REFERENCE)
