"""Samples from files: which are chosen, what is made of each kind of line, and what is told of bad ones."""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmjax.errors import ConfigError, RequestError, StoreError
from llmjax.quantization.samples import PIECE_CHARS, choose, read_samples


class Bytes:
    """A token a byte; of messages, role and content between marks."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert add_special_tokens
        return list(text.encode())

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        if any("content" not in message for message in messages):
            raise RequestError("messages[0] has no content")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return list(f"{template}{sorted(variables)}{text}{'<assistant>' if add_generation_prompt else ''}".encode())


def texts(path: Path, **options: Any) -> list[str]:
    return [bytes(ids).decode() for ids in read_samples(path, Bytes(), **options).ids]


def written(tmp_path: Path, *records: Any, name: str = "samples.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


def test_a_choice_is_the_same_for_a_seed_and_fair() -> None:
    assert choose(range(1000), 5, seed=7) == choose(iter(range(1000)), 5, seed=7) == sorted(choose(range(1000), 5, seed=7))
    assert choose(range(1000), 5, seed=7) != choose(range(1000), 5, seed=8)
    assert choose(range(3), 5, seed=0) == [0, 1, 2]
    counts = collections.Counter(item for seed in range(4000) for item in choose(range(10), 3, seed=seed))
    assert all(abs(counts[item] - 1200) < 5 * (4000 * 0.3 * 0.7) ** 0.5 for item in range(10))


def test_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    lines = ["\ufeffgrüße\n", *(f"line {n} é\n" for n in range(2000)), "x" * (2 * PIECE_CHARS) + "é\n", "\n", "last"]
    path = tmp_path / "prose.txt"
    path.write_text("".join(lines), encoding="utf-8")
    got = texts(path)
    assert "".join(got) == "".join(lines).removeprefix("\ufeff")
    assert all(len(piece) <= 2 * PIECE_CHARS for piece in got)
    assert all(piece.endswith("\n") for piece in got[:3])


def test_lines_of_every_kind(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    path = written(tmp_path, {"text": "plain"}, "", {"prompt": "asked"}, {"prompt_ids": [65, 66]}, {"messages": chat})
    assert texts(path, template="T") == ["plain", "asked", "AB", "T[]<user>hi<assistant>"]
    assert texts(written(tmp_path, {"text": "no", "body": "this"}), column="body") == ["this"]


def test_a_traffic_log_has_the_answers(tmp_path: Path) -> None:
    chat = {"endpoint": "chat", "messages": [{"role": "user", "content": "hi"}], "output": "yo", "output_ids": [1]}
    options = {"template_options": {"thinking": True, "template": "evil"}}
    path = written(
        tmp_path,
        chat,
        chat | options,
        chat | {"output": ""},
        {"endpoint": "completions", "prompt_ids": [65], "output": "B", "output_ids": [66]},
        {"endpoint": "completions", "prompt": "redac", "output": "ted"},
    )
    assert texts(path) == [
        "None[]<user>hi<assistant>yo",
        "None['thinking']<user>hi<assistant>yo",
        "None[]<user>hi<assistant>",
        "AB",
        "redacted",
    ]


def test_what_cannot_be_used_is_left_out_and_told(tmp_path: Path) -> None:
    bad = ["{", "[1]", {"other": 1}, {"prompt": 3}, {"messages": [{"role": "user"}]}, {"prompt_ids": [1, True]}, {"text": "ok"}]
    got = read_samples(written(tmp_path, {"text": "first"}, *bad), Bytes())
    assert [bytes(ids) for ids in got.ids] == [b"first", b"ok"]
    assert got.left_out == 6
    assert got.problem.startswith("line 2: not valid JSON")


def test_a_sample_of_a_large_file_by_seed(tmp_path: Path) -> None:
    path = written(tmp_path, *({"text": str(n)} for n in range(300)))
    got = read_samples(path, Bytes(), count=20, seed=3)
    assert (len(got.ids), got.seen) == (20, 300)
    assert got == read_samples(path, Bytes(), count=20, seed=3) != read_samples(path, Bytes(), count=20, seed=4)


@pytest.mark.parametrize("content", ["", "\n \n", '{"other": 1}\n', "{}\n"])
def test_no_sample_is_an_error_of_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "empty.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"holds no sample that can be used") as error:
        read_samples(tmp_path / "empty.jsonl", Bytes())
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read: No such file"):
        read_samples(tmp_path / "none.txt", Bytes())
    (tmp_path / "latin.txt").write_bytes("grüße".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_samples(tmp_path / "latin.txt", Bytes())
