"""What is asked of llguidance (https://github.com/guidance-ai/llguidance): its tokenizer, its limits, a form compiled or refused.

Used by the process that has the engine and by the one where forms are tried out, so it imports neither numpy nor JAX; the library
is imported when the first form is compiled.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import llguidance

COMPILE_STACK = 256 * 2**20  # bytes of address space; a chain of rules as long as the size limits allow takes a tenth of it
_REASON_CHARS = 200
NO_TEXT = "it allows no text but the empty one, or none that this model's tokens can write"


class RefusedError(Exception):
    """A form that is not compiled. The message says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class TokenBytes:
    """A vocabulary: the bytes of every token, which of them are special, and which end an output (the first is the main one)."""

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]

    def library_tokenizer(self, encode: Callable[[str], list[int]] | None) -> llguidance.LLTokenizer:
        """As llguidance wants it. `encode` gives the tokens that the model has learnt to write a text with."""
        import llguidance

        wrapper = llguidance.TokenizerWrapper(_Encoder(self, encode))
        return llguidance.LLTokenizer(wrapper, n_vocab=len(self.tokens), eos_token=self.eos_ids)


class _Encoder:
    bos_token_id = None

    def __init__(self, vocabulary: TokenBytes, encode: Callable[[str], list[int]] | None) -> None:
        self.tokens, self.special_token_ids = vocabulary.tokens, vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_ids[0]
        self._encode = encode
        ordinary = set(range(len(self.tokens))) - set(self.special_token_ids)
        self._ids = {self.tokens[token]: token for token in sorted(ordinary, reverse=True)}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes | str) -> list[int]:
        """Token ids of a text. Where only one text can follow, llguidance allows of all ways to write it the one told here.

        That is the tokenizer's, as the model has learnt it, unless it adds or changes something (a space at the beginning, a
        special token); then the longest tokens from left to right.
        """
        data = text.encode() if isinstance(text, str) else text
        if self._encode is not None:
            ids = self._encode(data.decode("utf-8", "replace"))
            exact = all(token < len(self.tokens) and self._ids.get(self.tokens[token]) == token for token in ids)
            if exact and b"".join(self.tokens[token] for token in ids) == data:
                return ids
        ids = []
        while data:
            sizes = range(min(self._longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), None)
            if size is None:
                break
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids


def limits() -> llguidance.LLParserLimits:
    """Ten milliseconds a token, at most. They bound what is found out token by token, but not what comes before the first."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000, step_lexer_fuel=100_000, step_max_items=20_000, max_lexer_states=50_000, verbose_errors=False
    )


def build(tokenizer: llguidance.LLTokenizer, text: str, bounds: llguidance.LLParserLimits) -> llguidance.LLMatcher:
    """The form of a grammar in the library's own syntax, at its beginning. Raises `RefusedError`."""
    import llguidance

    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=bounds)
    if matcher.is_error():
        raise RefusedError(f"it cannot be compiled: {one_line(matcher.get_error())}")
    probe = matcher.deep_copy()
    probe.compute_bitmask()  # what is too complex often shows here
    if probe.is_error():
        reason = probe.get_error()
        raise RefusedError(NO_TEXT if "NoExtension" in reason else f"it is too complex: {one_line(reason)}; make it simpler")
    if matcher.is_error():
        raise RefusedError(f"it cannot be compiled: {one_line(matcher.get_error())}")
    return matcher


def one_line(message: str) -> str:
    """The part of a message of llguidance that says what is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    chosen = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return re.sub(r"\s+", " ", chosen)[:_REASON_CHARS]
