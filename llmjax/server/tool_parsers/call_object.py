"""`CallObject`: the JSON object with which a model calls a function, read a character at a time.

`{"name": "f", "arguments": {...}}`, members in any order, "parameters" meaning the same as "arguments", further members
skipped. The arguments are handed on while they are being written. Knows nothing of markers or of the text around.

Strict until the arguments begin, because until then the text can still be given back as it was. From there on only strings
and nesting are followed: what is not JSON then is for whoever reads the arguments, as in OpenAI's API. One thing is mended:
line breaks and other control characters within strings, which models write as they are, become escapes.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

SPACES = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_FIRST_KEYS = ("name", "type")
_ESCAPES = {chr(code): json.dumps(chr(code))[1:-1] for code in range(0x20)}

_Scan = Generator[None, str, str]  # takes characters, returns the one behind what it has read


class _MalformedError(Exception):
    pass


class CallObject:
    """One call.

    Args:
        bare: no mark stood before it, so it must begin as models begin calls: its first key tells an answer in JSON from one.

    Attributes:
        name: of the function, None until it is known.
        begun: the first character of the arguments is known to be an object's.
        closed: all arguments are known.
        quoted: the last character is within a string.
        literal: it is within a string of the arguments, where what is no quote, backslash or control character is itself.
        done: the object is complete.
        broken: it is none; the last character is the one that does not fit.
    """

    def __init__(self, *, bare: bool = False) -> None:
        self._bare = bare
        self.name: str | None = None
        self.begun = self.closed = self.quoted = self.literal = self.done = self.broken = False
        self._new: list[str] = []
        self._scan = self._object()
        next(self._scan)

    @property
    def ready(self) -> bool:
        """Whether it is certain to be a call: the name is known, and the arguments at least begin."""
        return self.name is not None and self.begun

    def add(self, char: str) -> None:
        """The next character. Not to be called once `done` or `broken`."""
        try:
            self._scan.send(char)
        except StopIteration:
            self.done = True
        except _MalformedError:
            self.broken = True

    def add_literal(self, text: str) -> None:
        """The next characters, while `literal`, as far as they stand for themselves."""
        self._new.append(text)

    def take(self) -> str:
        """The arguments' text that came since the last call of this."""
        text = "".join(self._new)
        self._new.clear()
        return text

    def _object(self) -> _Scan:
        if (yield from _next()) != "{":
            raise _MalformedError
        char = yield from _next()
        first = self._bare
        while char != "}":
            key = yield from self._string(char)
            if first and key not in _FIRST_KEYS:
                raise _MalformedError
            first = False
            if (yield from _next()) != ":":
                raise _MalformedError
            char = yield from self._member(key, (yield from _next()))
            if char == ",":
                char = yield from _next()
                if char == "}":
                    raise _MalformedError
            elif char != "}":
                raise _MalformedError
        if self.name is None:
            raise _MalformedError
        if not self.begun:
            self._give("{}")
        return char

    def _member(self, key: str, char: str) -> _Scan:
        if key == "name":
            name = yield from self._string(char)
            if not name or self.name is not None:
                raise _MalformedError
            self.name = name
            return (yield from _next())
        if key not in _ARGUMENTS:
            return (yield from self._value(char))[1]
        if self.begun:
            raise _MalformedError
        if char == "{":
            yield from self._arguments()
            return (yield from _next())
        value, char = yield from self._value(char)
        self._give(_object_text(value))
        return char

    def _arguments(self) -> Generator[None, str, None]:
        """An object whose brace was read. It begins when a key, or the end, is seen to follow."""
        text = "{"
        while (char := (yield)) in SPACES:
            text += char
        if char not in '"}':
            raise _MalformedError
        self._new.append(text)
        self.begun = True
        depth, escaped = 1, False
        while True:
            if self.quoted:
                plain = _ESCAPES.get(char, char)
                self._new.append(plain[1:] if escaped and len(plain) > 1 else plain)
                self.quoted = escaped or char != '"'
                escaped = char == "\\" and not escaped
                self.literal = self.quoted and not escaped
            else:
                self._new.append(char)
                self.quoted = self.literal = char == '"'
                depth += (char in "{[") - (char in "}]")
                if not depth:
                    self.closed = True
                    return
            char = yield

    def _give(self, arguments: str) -> None:
        self._new.append(arguments)
        self.begun = self.closed = True

    def _value(self, char: str) -> Generator[None, str, tuple[Any, str]]:
        """Any JSON value, and the character behind it."""
        text, depth = "", 0
        while True:
            if char == '"':
                text += json.dumps((yield from self._string(char)))
            elif not depth and (char in ",}]" or (text and char in SPACES)):
                break  # behind a number or a word
            else:
                text += char
                depth += (char in "{[") - (char in "}]")
            if not depth and text[-1] in '"}]':
                char = yield
                break
            char = yield
        while char in SPACES:
            char = yield
        return _loaded(text), char

    def _string(self, char: str) -> Generator[None, str, str]:
        """A JSON string whose first character is given."""
        if char != '"':
            raise _MalformedError
        text, escaped = char, False
        self.quoted = True
        while True:
            char = yield
            text += char
            if char == '"' and not escaped:
                break
            escaped = char == "\\" and not escaped
        self.quoted = False
        value = _loaded(text)
        assert isinstance(value, str)
        return _encodable(value)


def _next() -> _Scan:
    """The next character that is no white space."""
    while (char := (yield)) in SPACES:
        pass
    return char


def _object_text(value: Any) -> str:
    """Arguments that are not an object: a text of one, or null for none."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return "{}"
    if isinstance(value, str) and isinstance(_loaded(value), dict):
        return value
    raise _MalformedError


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, written as an escape
        raise _MalformedError from None
    return text


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise _MalformedError from None
