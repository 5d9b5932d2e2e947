"""One GET of a server, for whoever needs an answer and no connection that stays."""

from __future__ import annotations

import http.client
from collections.abc import Mapping

from llmjax.errors import LlmjaxError

_PATIENCE = 30.0  # seconds


def get(url: str, *, secure: bool, host: str, port: int | None, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    """Status and body of `path`; port None is the scheme's. Raises `LlmjaxError`, which names `url`, when there is no answer."""
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(host, port, timeout=_PATIENCE)
    try:
        connection.request("GET", path, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException, ValueError) as error:  # the last: of a path that no request may have
        raise LlmjaxError(f"{url} does not answer ({error}): start the server, or correct the URL") from None
    finally:
        connection.close()
