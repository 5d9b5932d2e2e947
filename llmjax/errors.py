"""The one tree of errors a user can cause or must act on.

Every message is one line that says what is wrong and what to do. Anything that is *not* an `LlmjaxError` is a bug of
ours. This module imports nothing of llmjax, so that every layer can raise from it.
"""

from __future__ import annotations


class LlmjaxError(Exception):
    """Base of everything llmjax raises on purpose."""

    exit_code = 5


class ConfigError(LlmjaxError):
    """A pipeline file, a command line or an engine option is wrong. Nothing was started."""

    exit_code = 2


class RequestError(LlmjaxError, ValueError):
    """One request is wrong; the engine and all other requests go on.

    `param` is the name of the field at fault, so that an HTTP layer can put it into its error object.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt does not fit the context (or the page pool) together with one new token."""


class QueueFullError(LlmjaxError):
    """As many requests wait as may; the same request may be sent again later (HTTP 429). `lane` is the one that is full."""

    def __init__(self, message: str, lane: str) -> None:
        super().__init__(message)
        self.lane = lane


class QueueTimeoutError(LlmjaxError):
    """A request waited for its turn longer than its lane lets it (HTTP 503). Nothing was computed for it."""


class ModelError(LlmjaxError):
    """A model cannot be loaded: files missing, truncated, or of a kind we do not support."""


class UnsupportedModelError(ModelError):
    """The configuration names something llmjax does not implement; raised before any weight is read."""


class NonFiniteError(LlmjaxError):
    """Logits were NaN or infinite: overflow in a narrow dtype, or broken weights."""


class EngineError(LlmjaxError):
    """The engine has lost its device state and cannot go on; the message says what happened to it."""


class OutOfMemoryError(LlmjaxError):
    """The memory plan does not fit the device; the message names the number to lower."""


class BackendError(LlmjaxError):
    """The JAX backend cannot be set up as asked (platform absent, or already started with other settings)."""


class StoreError(LlmjaxError):
    """The artifacts folder or an output file cannot be read or written."""


class GateRejectedError(LlmjaxError):
    """A quality gate refused its candidate."""

    exit_code = 3


class ServiceLevelError(LlmjaxError):
    """A load test or a shadow run missed what it was asked to reach."""

    exit_code = 4


class UnavailableError(LlmjaxError):
    """The engine takes no requests at the moment (it drains, was stopped, or is stuck): try later, or elsewhere (HTTP 503)."""
