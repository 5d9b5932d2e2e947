"""Texts for the bench of int8's quality: what a model is calibrated with, and what is held out of that.

Code is Python's own standard library: of its modules in order of their names every other one is calibrated with, the rest is held
out, so that no file is in both. Each gives one text from its middle, as files begin with prose and imports.
"""

from __future__ import annotations

import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmjax.quantization.samples import read_samples

TEXTS = Path(__file__).resolve().parent.parent / "pipelines" / "texts"
CALIBRATION = ("conversations", "prose", "code")
HELD_OUT = ("prose", "help", "code")

_CHARACTERS = 8  # of a token at most, on the average


class Conversations:
    """A tokenizer for which a text is what a user says."""

    def __init__(self, inner: Any) -> None:
        self.apply_chat_template = inner.apply_chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.apply_chat_template([{"role": "user", "content": text}])
        return ids


def calibration(name: str, tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Up to `count` samples: the shipped conversations as they are, else texts of `length` tokens."""
    if name == "conversations":
        return read_samples(TEXTS / "conversations.jsonl", Conversations(tokenizer), count=count).ids
    if name == "prose":
        ids = [token for text in read_samples(TEXTS / "held_out.jsonl", tokenizer).ids for token in text]
        return [ids[start : start + length] for start in range(0, len(ids), length)][:count]
    return [text for text, _ in zip(modules(tokenizer, length, first=0), range(count), strict=False)]


def held_out(name: str, tokenizer: Any, tokens: int, length: int) -> list[list[int]]:
    """Texts of at most `length` tokens, about `tokens` in all: prose and then help topics, or help topics or code alone."""
    found: list[list[int]] = []
    begin = read_samples(TEXTS / "held_out.jsonl", tokenizer).ids if name == "prose" else []
    topics = (tokenizer.encode(text) for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 4 * length)
    for text in (*begin, *(modules(tokenizer, length, first=1) if name == "code" else topics)):
        if sum(map(len, found)) >= tokens:
            break
        found.append(text[:length])
    return found


def modules(tokenizer: Any, length: int, *, first: int) -> Iterator[list[int]]:
    """`length` tokens from the middle of every other module of the standard library that is long enough, from `first` on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for path in files[first::2]:
        text = path.read_text(encoding="utf-8")
        middle = text.find("\n", len(text) // 2) + 1
        ids = tokenizer.encode(text[middle : middle + _CHARACTERS * length])[:length]
        if middle and len(ids) == length:
            yield ids
