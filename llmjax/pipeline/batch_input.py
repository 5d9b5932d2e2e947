"""The input of a batch, line by line: what each line asks for, or why it cannot be answered. Never reads the file whole.

A bad line is a `BatchLine` with an `error`, never an exception: it becomes a record in the output and the others go on.
Knows nothing of engines and outputs.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

from llmjax.errors import RequestError, StoreError
from llmjax.server.prompts import encodable
from llmjax.server.protocol import ENDPOINTS, ApiRequest, parse_request
from llmjax.server.strict_json import kind, load_json, printable

BatchFormat = Literal["openai", "prompts"]

MAX_LINE_BYTES = 16 << 20
MAX_ID_CHARS = 512
_OPENAI_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_LOOK_AHEAD_LINES = 1000


@dataclasses.dataclass(frozen=True)
class BatchLine:
    """One line that is not blank.

    Attributes:
        number: its place in the file, from 1, blank lines counted.
        id: the caller's name for it (`custom_id`, or `id` with a default of ``line-<number>``); None when the line gives none
            that can be used, and then `error` is set.
        request: what it asks for; None when `error` is set.
        given: the prompt or messages as written, for the answer to a plain prompt.
        error: why it cannot be answered.
        malformed: the line itself is wrong (no JSON, wrong url, no id), and not only the request in it.
    """

    number: int
    id: str | None = None
    request: ApiRequest | None = None
    given: Any = None
    error: RequestError | None = None
    malformed: bool = False


@dataclasses.dataclass(frozen=True)
class InputFacts:
    """What one pass over the bytes tells: SHA-256 in hexadecimal, and the number of lines that are not blank."""

    sha256: str
    lines: int


class BatchInput:
    """A file of requests, open for reading. Raises `StoreError` when it cannot be read.

    Args:
        format: "openai", "prompts", or None to tell it from the first line that is JSON.
    """

    def __init__(self, path: Path, format: BatchFormat | None = None) -> None:
        self.path = path
        try:
            self._file: BinaryIO = open(path, "rb")  # noqa: SIM115  # closed by close()
            self.facts = _facts(self._file)
        except OSError as error:
            raise StoreError(f"batch input {path} cannot be read: {error.strerror or error}") from None
        self.format: BatchFormat = format or self._told_format()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def lines(self, defaults: Mapping[str, Any]) -> Iterator[BatchLine]:
        """Every line that is not blank, in order. `defaults` are sampling fields for lines that leave them out.

        An id used before makes a line an error, because two results under one id could not be told apart.
        """
        seen: set[bytes] = set()
        for number, data in self._raw_lines():
            line = _read_line(number, data, self.format, defaults)
            if line.id is not None:
                digest = hashlib.blake2b(line.id.encode(), digest_size=16).digest()  # ids may be long and many
                if digest in seen:
                    name = "custom_id" if self.format == "openai" else "id"
                    error = RequestError(
                        f"{name} {printable(line.id)!r} is used by an earlier line: give each line its own", name
                    )
                    line = BatchLine(number, error=error, malformed=True)
                seen.add(digest)
            yield line

    def _told_format(self) -> BatchFormat:
        for number, data in self._raw_lines():
            if number > _LOOK_AHEAD_LINES:
                break
            try:
                value = load_json(data or b"")
            except RequestError:
                continue
            return "openai" if isinstance(value, Mapping) and not _OPENAI_FIELDS.isdisjoint(value) else "prompts"
        return "prompts"

    def _raw_lines(self) -> Iterator[tuple[int, bytes | None]]:
        """Number and bytes of each line that is not blank; None for one that is too long to be held."""
        try:
            self._file.seek(0)
            number = 0
            while data := self._file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
                    while (rest := self._file.readline(1 << 20)) and not rest.endswith(b"\n"):
                        pass
                    yield number, None
                    continue
                if number == 1:
                    data = data.removeprefix(b"\xef\xbb\xbf")
                if data.strip():
                    yield number, data
        except OSError as error:
            raise StoreError(f"batch input {self.path} cannot be read: {error.strerror or error}") from None


def _facts(file: BinaryIO) -> InputFacts:
    digest, lines, blank = hashlib.sha256(), 0, True
    while chunk := file.read(1 << 20):
        digest.update(chunk)
        first, *rest = chunk.split(b"\n")
        blank = blank and not first.strip()
        for part in rest:  # each starts after a line end
            lines += not blank
            blank = not part.strip()
    return InputFacts(digest.hexdigest(), lines + (not blank))


def _read_line(number: int, data: bytes | None, format: BatchFormat, defaults: Mapping[str, Any]) -> BatchLine:
    if data is None:
        error = RequestError(f"the line has more than {MAX_LINE_BYTES >> 20} MiB")
        return BatchLine(number, error=error, malformed=True)
    try:
        value = load_json(data)
        return (_openai_line if format == "openai" else _prompt_line)(number, value, defaults)
    except RequestError as error:
        return BatchLine(number, error=error, malformed=True)


def _openai_line(number: int, value: Any, defaults: Mapping[str, Any]) -> BatchLine:
    if not isinstance(value, Mapping):
        raise RequestError(f"the line must be an object with custom_id, method, url and body, got {kind(value)}")
    if "custom_id" not in value:
        raise RequestError("custom_id is missing", "custom_id")
    name = _checked_id("custom_id", value["custom_id"])
    try:
        for field in value:
            if field not in _OPENAI_FIELDS:
                raise RequestError(
                    f"unknown field {printable(field)!r}: a line has custom_id, method, url and body", printable(field)
                )
        if value.get("method", "POST") != "POST":
            raise RequestError("method must be POST", "method")
        if not isinstance(value.get("url"), str) or value["url"] not in ENDPOINTS:
            raise RequestError(f"url must be one of {', '.join(ENDPOINTS)}", "url")
        if "body" not in value:
            raise RequestError("body is missing", "body")
    except RequestError as error:
        return BatchLine(number, name, error=error, malformed=True)
    try:
        return BatchLine(number, name, _not_streaming(parse_request(ENDPOINTS[value["url"]], value["body"], defaults)))
    except RequestError as error:
        return BatchLine(number, name, error=error)


def _prompt_line(number: int, value: Any, defaults: Mapping[str, Any]) -> BatchLine:
    fields = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping):
        raise RequestError(f"the line must be a string, or an object with prompt or messages, got {kind(value)}")
    given_id = fields.get("id")
    name = f"line-{number}" if given_id is None else _checked_id("id", str(given_id) if type(given_id) is int else given_id)
    body = {field: item for field, item in fields.items() if field != "id"}
    try:
        if ("prompt" in body) == ("messages" in body):
            raise RequestError("give either prompt or messages", "prompt")
        request = _not_streaming(parse_request("chat" if "messages" in body else "completions", body, defaults))
        if len(request.prompts) > 1:
            raise RequestError("prompt holds several prompts: give each a line of its own", "prompt")
        return BatchLine(number, name, request, given=body.get("prompt", body.get("messages")))
    except RequestError as error:
        return BatchLine(number, name, error=error)


def _checked_id(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{field} must be a string, got {kind(value)}", field)
    if not 1 <= len(value) <= MAX_ID_CHARS:
        raise RequestError(f"{field} must have 1 to {MAX_ID_CHARS} characters, got {len(value)}", field)
    return encodable(value, field)


def _not_streaming(request: ApiRequest) -> ApiRequest:
    if request.stream:
        raise RequestError("stream must be false: a batch answers each line once", "stream")
    return request
