"""Samples from files: plain text, JSON lines, a server's traffic log; chosen by a seed, as token ids. Host only.

A traffic log is JSON lines with the fields of `llmjax.server.traffic_log`: there the answer belongs to the sample, because the
model will meet its own answers as input. Lines that cannot be used are left out, counted, and the first is told.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from llmjax.errors import ConfigError, RequestError, StoreError

SampleFormat = Literal["text", "jsonl"]
COLUMNS = ("messages", "prompt_ids", "prompt", "text")
"""Where a line's sample is looked for, in this order, when no column is named."""

PIECE_CHARS = 4096
"""A text file is cut into pieces of whole lines of about so many characters."""

MAX_LINE_BYTES = 16 << 20

_OWN_OPTIONS = frozenset({"messages", "add_generation_prompt", "template", "tools"})  # what a log says of these is not used


class SampleTokenizer(Protocol):
    """What is needed of a tokenizer (`llmjax.engine.tokenizer.Tokenizer` has it)."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sample as its file has it.

    Attributes:
        line: its number in the file, from 1.
        content: a text, token ids, or messages.
        template_options: what the chat template reads beside the messages.
    """

    line: int
    content: str | list[int] | list[dict[str, Any]]
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ReadSamples:
    """Attributes:
    ids: token ids of each sample, in the order of the file.
    seen: samples the file holds, of which these were chosen.
    left_out: lines that could not be used. problem: what is wrong with the first of them, "" for none.
    """

    ids: list[list[int]]
    seen: int
    left_out: int = 0
    problem: str = ""


def choose[T](items: Iterable[T], count: int, *, seed: int) -> list[T]:
    """`count` of the items, or all when there are fewer, each with the same probability, in their own order.

    One pass, and memory for `count`. The same items and seed give the same choice on every machine.
    Source: Vitter, Random Sampling with a Reservoir, 1985, algorithm R.
    """
    draw = random.Random(seed).random  # the one method whose numbers Python promises to keep
    kept: list[tuple[int, T]] = []
    for number, item in enumerate(items):
        if len(kept) < count:
            kept.append((number, item))
        elif (place := int(draw() * (number + 1))) < count:
            kept[place] = (number, item)
    return [item for _, item in sorted(kept, key=lambda pair: pair[0])]


def read_samples(
    path: Path,
    tokenizer: SampleTokenizer,
    *,
    count: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    column: str | None = None,
    template: str | None = None,
    format: SampleFormat | None = None,
) -> ReadSamples:
    """Token ids of samples from a file, which is read once and never held whole.

    Args:
        count: samples wanted, chosen by `seed`; None for all.
        limit: samples of the file's beginning that they are chosen from; None for the whole file.
        column: of JSON lines, where the sample is: a text, token ids, or messages. None looks for one of
            `COLUMNS`, and puts the answer of a traffic log behind what was asked.
        template: name or text of the chat template for messages; None for the tokenizer's own.
        format: None to tell it from the first line.

    Raises:
        StoreError: the file cannot be read.
        ConfigError: it holds no sample that can be used, or is text and not UTF-8.
    """
    counter = _Counter()
    try:
        told = format or _told_format(path)
        held = _texts(path) if told == "text" else _records(path, column, counter)
        found = counter.count(itertools.islice(held, limit))
        chosen = list(found) if count is None else choose(found, count, seed=seed)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from None
    ids = []
    for sample in chosen:
        try:
            ids.append(_tokenised(sample, tokenizer, template))
        except RequestError as error:
            counter.leave_out(sample.line, str(error))
    if not ids:
        why = f": of line {counter.first_line}, {counter.problem}" if counter.problem else ""
        raise ConfigError(f"{path} holds no sample that can be used{why}")
    problem = f"line {counter.first_line}: {counter.problem}" if counter.problem else ""
    return ReadSamples(ids, counter.seen, counter.left_out, problem)


class _Counter:
    """Samples that went by, and lines that were left out."""

    def __init__(self) -> None:
        self.seen = self.left_out = self.first_line = 0
        self.problem = ""

    def count(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        for sample in samples:
            self.seen += 1
            yield sample

    def leave_out(self, line: int, problem: str) -> None:
        if not self.left_out:
            self.first_line, self.problem = line, problem
        self.left_out += 1


def _told_format(path: Path) -> SampleFormat:
    """JSON lines if the first line that is not blank is a JSON object."""
    with open(path, "rb") as file:
        for data in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
            if line := data.removeprefix(b"\xef\xbb\xbf").strip():
                try:
                    return "jsonl" if isinstance(_parsed(line), dict) else "text"
                except RequestError:
                    return "text"
    return "text"


def _texts(path: Path) -> Iterator[Sample]:
    """Pieces of whole lines; only a line that is longer than a piece is cut."""
    piece, size, line, first = "", 0, 1, 1
    try:
        with open(path, encoding="utf-8-sig") as file:
            while part := file.readline(PIECE_CHARS):
                piece += part
                size += len(part)
                line += part.endswith("\n")
                if size >= PIECE_CHARS:
                    if piece.strip():
                        yield Sample(first, piece)
                    piece, size, first = "", 0, line
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 behind line {line}: give a text file in UTF-8, or JSON lines") from None
    if piece.strip():
        yield Sample(first, piece)


def _records(path: Path, column: str | None, counter: _Counter) -> Iterator[Sample]:
    with open(path, "rb") as file:
        for number, data in enumerate(_lines(file), 1):
            if data is None:
                counter.leave_out(number, f"it has more than {MAX_LINE_BYTES >> 20} MiB")
            elif data.strip():
                try:
                    yield _sample(number, _parsed(data), column)
                except RequestError as error:
                    counter.leave_out(number, str(error))


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Each line, None for one that is too long to be held."""
    while data := file.readline(MAX_LINE_BYTES + 1):
        if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
            while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            yield None
        else:
            yield data


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise RequestError("not valid JSON: nested too deeply") from None
    except ValueError as error:  # no UTF-8, no JSON, or a number of more than 4300 digits
        raise RequestError(f"not valid JSON: {str(error).splitlines()[0][:200]}") from None


def _sample(number: int, record: Any, column: str | None) -> Sample:
    if not isinstance(record, dict):
        raise RequestError("a line must be a JSON object")
    name = column or next((name for name in COLUMNS if record.get(name) is not None), None)
    if name is None:
        raise RequestError(f"it has none of the columns {', '.join(COLUMNS)}: name the one that holds the samples")
    if name not in record:
        raise RequestError(f"it has no column {name!r}")
    content = record[name]
    if column is None and "endpoint" in record and "output" in record:
        content = _with_answer(content, record)
    if isinstance(content, str) or _is_list_of(content, int) or _is_list_of(content, dict):
        options = record.get("template_options")
        return Sample(number, content, options if isinstance(options, dict) else {})
    raise RequestError(f"{name} must be a text, a list of token ids, or a list of messages")


def _with_answer(content: Any, record: Mapping[str, Any]) -> Any:
    """What a line of a traffic log asks, with what was answered."""
    output, output_ids = record["output"], record.get("output_ids")
    if isinstance(content, str) and isinstance(output, str):
        return content + output
    if _is_list_of(content, dict) and isinstance(output, str):
        return [*content, {"role": "assistant", "content": output}] if output else content
    if _is_list_of(content, int) and _is_list_of(output_ids, int):
        return [*content, *(output_ids or [])]
    return content


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)


def _tokenised(sample: Sample, tokenizer: SampleTokenizer, template: str | None) -> list[int]:
    content: Any = sample.content
    if isinstance(content, str):
        return tokenizer.encode(content)
    if isinstance(content[0], int):
        return [int(token) for token in content]
    options = {name: value for name, value in sample.template_options.items() if name not in _OWN_OPTIONS}
    asks = content[-1].get("role") != "assistant"
    return tokenizer.apply_chat_template(content, add_generation_prompt=asks, template=template, **options)
