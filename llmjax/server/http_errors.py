"""Errors as HTTP answers: status, OpenAI's error object, headers. Knows no routes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from llmjax.errors import EngineError, LlmjaxError, QueueFullError, QueueTimeoutError, UnavailableError
from llmjax.server.responses import error_body, error_status

log = logging.getLogger(__name__)

UNAVAILABLE_RETRY_AFTER = 5  # seconds; how long a restart takes is not known here


class HttpError(LlmjaxError):
    """An answer that only HTTP has, such as 401 or 413."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


def error_object(error: Exception) -> dict[str, Any]:
    """OpenAI's error object, ``{"error": {"message", "type", "param", "code"}}``. A bug of ours tells nothing of its inside."""
    if isinstance(error, HttpError):
        kind = "authentication_error" if error.status == 401 else "invalid_request_error"
        return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
    if isinstance(error, UnavailableError | EngineError):
        return {"error": {"message": str(error), "type": "server_error", "param": None, "code": "unavailable"}}
    return error_body(error if isinstance(error, LlmjaxError) else LlmjaxError("internal error; the server's log says more"))


def status_of(error: Exception) -> int:
    """The HTTP status of an error."""
    if isinstance(error, HttpError):
        return error.status
    if isinstance(error, UnavailableError | EngineError):
        return 503
    return error_status(error) if isinstance(error, LlmjaxError) else 500


def error_response(error: Exception, retry_after: int) -> JSONResponse:
    """The whole answer. `retry_after` is for a full queue: whole seconds."""
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    status = status_of(error)
    if isinstance(error, QueueFullError | QueueTimeoutError):
        headers["retry-after"] = str(retry_after)
    elif status == 503:
        headers["retry-after"] = str(UNAVAILABLE_RETRY_AFTER)
    if not isinstance(error, LlmjaxError):
        log.error("a request failed", exc_info=error)
    return JSONResponse(error_object(error), status, headers)
