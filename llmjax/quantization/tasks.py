"""Tasks with known answers: lines of a file, and sums. Who is right, and for how many. Host only."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmjax.errors import ConfigError
from llmjax.quantization.scores import Generation, Prompt

_SHOTS = (
    "Question: What is 5 + 3?\nAnswer: 8\n\nQuestion: What is 14 - 6?\nAnswer: 8\n\nQuestion: What is 12 + 7?\nAnswer: 19\n\n"
)


@dataclasses.dataclass(frozen=True)
class Task:
    """A prompt and what must come. A text is right when the output begins with it and its last word does not go on ("8" is not
    "80"; looked at in ASCII alone, as other scripts need no spaces), ids when they are the output's first ones.

    With `number`, the first whole number of the output must be the expected one.
    """

    prompt: Prompt
    expected: str | tuple[int, ...]
    number: bool = False

    def solved_by(self, output: Generation) -> bool:
        """Whether an output is right. Texts are compared without the white space around them; one that failed is wrong."""
        if output.error is not None:
            return False
        if isinstance(self.expected, tuple):
            return output.token_ids[: len(self.expected)] == self.expected
        if self.number:
            return first_number(output.text) == int(self.expected)
        expected, text = self.expected.strip(), output.text.strip()
        around = (expected[-1:], text[len(expected) : len(expected) + 1])
        return text.startswith(expected) and not all(one.isascii() and one.isalnum() for one in around)


def first_number(text: str) -> int | None:
    """The first whole number of a text, thousands commas left out; None without one."""
    found = re.search(r"(?<![0-9])-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,18})(?![0-9])", text)
    return None if found is None else int(found.group().replace(",", ""))


def read_tasks(path: Path) -> Iterator[Task]:
    """The tasks of a JSONL file, one a line: {"prompt": text or ids, "expected": text or ids}, or "messages" for "prompt".

    Other keys are left alone, empty lines too. The file is read line by line.
    Raises `ConfigError` that names the line: not JSON, a key missing or of another kind, an empty answer. Also when the file
    cannot be read, or holds no task at all.
    """
    count = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    count += 1
                    yield _task(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the tasks: {error}") from None
    if not count:
        raise ConfigError(f'{path}: there is no task in it; a line is {{"prompt": ..., "expected": ...}}')


def _task(line: str, where: str) -> Task:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(found, dict) or ("prompt" in found) == ("messages" in found) or "expected" not in found:
        raise ConfigError(f'{where}: a task is an object with "expected" and one of "prompt" and "messages"')
    prompt: Any = found.get("prompt", found.get("messages"))
    if not (isinstance(prompt, str) or _ids(prompt) or ("messages" in found and _talk(prompt))):
        raise ConfigError(f"{where}: prompt is a text or token ids, messages are objects with role and content")
    expected = found["expected"]
    if not (isinstance(expected, str) and expected.strip()) and not _ids(expected):
        raise ConfigError(f"{where}: expected is a text or token ids, and not empty")
    return Task(prompt, tuple(expected) if isinstance(expected, list) else expected)


def _ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _talk(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) and "role" in one for one in value)


def arithmetic_tasks(count: int, seed: int = 0) -> list[Task]:
    """Sums and differences of numbers up to 49, behind three solved ones. Same seed, same tasks."""
    random = np.random.default_rng(seed)
    tasks = []
    for _ in range(count):
        a, b = sorted((int(one) for one in random.integers(1, 50, 2)), reverse=True)
        sign, answer = ("+", a + b) if random.integers(2) else ("-", a - b)
        tasks.append(Task(f"{_SHOTS}Question: What is {a} {sign} {b}?\nAnswer:", str(answer), number=True))
    return tasks


@dataclasses.dataclass(frozen=True)
class Paired:
    """A yes or no of both models for the same things: solved, looped.

    Attributes:
        both, only_baseline, only_candidate, neither: counts of yes.
    """

    both: int = 0
    only_baseline: int = 0
    only_candidate: int = 0
    neither: int = 0

    @classmethod
    def of(cls, baseline: Sequence[bool], candidate: Sequence[bool]) -> Paired:
        """Of answers in the same order."""
        pairs = list(zip(baseline, candidate, strict=True))
        return cls(*(pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))))

    def __add__(self, other: Paired) -> Paired:
        return Paired(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    @property
    def count(self) -> int:
        """Things asked."""
        return self.both + self.only_baseline + self.only_candidate + self.neither

    @property
    def baseline(self) -> int:
        """Yes of the baseline."""
        return self.both + self.only_baseline

    @property
    def candidate(self) -> int:
        """Yes of the candidate."""
        return self.both + self.only_candidate

    def as_json(self) -> dict[str, Any]:
        """Plain data, rates with it (None when nothing was asked)."""
        rates = {name: getattr(self, name) / self.count if self.count else None for name in ("baseline", "candidate")}
        return dataclasses.asdict(self) | {"count": self.count} | {f"{name}_rate": rate for name, rate in rates.items()}
