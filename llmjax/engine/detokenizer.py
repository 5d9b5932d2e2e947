"""`Detokenizer`: sampled token ids to text, one at a time, without ever showing half a character.

Concatenated, the pieces are the text that `Tokenizer.decode` gives for the output where it stands, behind its prompt.
Knows nothing of stop strings or requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from llmjax.engine.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one output, growing by a token at a time, in constant time a token.

    At most 3 bytes are held back: the beginning of a character whose other bytes may still come (or of an encoded
    surrogate, which Python judges as a whole). Bytes that belong to no character are shown as U+FFFD, one for each maximal
    part of a character (Unicode 17, section 3.9), exactly as `bytes.decode(errors="replace")` does with the whole.

    The prompt matters in two places. A sentencepiece text loses one space at its start, so the first token of an output
    loses it only behind a prompt without text. And should the prompt (given as token ids) end within a character, the
    first token may complete it: then the whole character is the output's, while a beginning left incomplete is the
    prompt's and not shown.

    Args:
        tokenizer: not changed.
        prompt_ids: what the output follows.
        skip_special_tokens: special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        stream = _ByteStream if tokenizer.is_byte_exact else _WindowStream
        self._stream: _Stream = stream(tokenizer, _ends_of_prompt(tokenizer, prompt_ids, self._skipped))

    def add(self, token_id: int) -> str:
        """The text that this token makes ready to be shown; empty while a character is incomplete."""
        return "" if token_id in self._skipped else self._stream.add(token_id)

    def flush(self) -> str:
        """What is held back, when no token follows: U+FFFD for an incomplete character, else nothing."""
        return self._stream.flush()


def _ends_of_prompt(tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]) -> list[int]:
    """The last tokens of a prompt that have text, enough of them to hold a whole character."""
    ends: list[int] = []
    num_bytes = 0
    for token in reversed(prompt_ids):
        size = 0 if token in skipped else len(tokenizer.token_bytes(token))
        if size:
            ends.append(token)
            num_bytes += size
            if num_bytes >= 4:
                break
    return ends[::-1]


class _Stream(Protocol):
    def add(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class _ByteStream:
    """For byte-exact tokenizers: an incremental UTF-8 decoder over the bytes of the tokens."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = _utf8("replace")
        self._strip = tokenizer.strips_leading_space and not before
        prompt = _utf8("replace")
        prompt.decode(b"".join(map(tokenizer.token_bytes, before)))
        self._carried = bytes(prompt.getstate()[0])  # of the prompt's last character, when it is incomplete

    def add(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        if not data:
            return ""
        if self._strip:
            self._strip = False
            data = data.removeprefix(b" ")
        if self._carried:
            if _is_beginning(self._carried + data[:1]):
                data = self._carried + data
            self._carried = b""
        return self._decoder.decode(data)

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _is_beginning(data: bytes) -> bool:
    """Whether `data` is a character or the beginning of one."""
    try:
        _utf8("strict").decode(data)
    except UnicodeDecodeError:
        return False
    return True


class _WindowStream:
    """For the other kinds: what decoding adds when the new tokens stand behind the ones last shown.

    Tokens whose text ends with U+FFFD wait for the rest of a character, at most three of them, since with a fourth there
    would be four bytes or more.
    """

    _MAX_WAITING = 3

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = list(before)
        self._waiting: list[int] = []

    def add(self, token_id: int) -> str:
        self._waiting.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._waiting) <= self._MAX_WAITING:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._new_text())

    def _new_text(self) -> str:
        before = self._decode(self._shown)
        text = self._decode(self._shown + self._waiting)
        return text[len(before) :] if text.startswith(before) else self._decode(self._waiting)

    def _show(self, text: str) -> str:
        if text:  # a token without text must not become the one the next is decoded behind
            self._shown = self._waiting
        self._waiting = []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
