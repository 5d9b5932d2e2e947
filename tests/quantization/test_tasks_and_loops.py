"""Loops are found and ordinary text is none; tasks are read strictly, and solved by what they ask for."""

from __future__ import annotations

import json
import random

import pytest

from llmjax.errors import ConfigError
from llmjax.quantization.loops import LOOP_TOKENS, distinct_share, is_loop
from llmjax.quantization.scores import Generation
from llmjax.quantization.tasks import Paired, Task, arithmetic_tasks, first_number, read_tasks


@pytest.mark.parametrize("period", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("cut", [0, 1])
def test_a_piece_said_over_and_over_at_the_end_is_a_loop(period, cut):
    piece = random.sample(range(1000), period)
    count = max(5, -(-LOOP_TOKENS // period) + 1)
    assert is_loop(random.sample(range(2000, 3000), 30) + piece * count + piece[: cut * (period // 2)])


def test_what_is_no_loop():
    words = random.sample(range(1000), 128)
    assert not is_loop(words)
    assert not is_loop([])
    assert not is_loop([7] * (LOOP_TOKENS - 1))  # a short run: "----"
    assert is_loop([7] * LOOP_TOKENS)
    assert not is_loop([7] * 20 + words[:40])  # it came out of it
    assert not is_loop(words[:15] * 3)  # said three times, with a fourth it is one
    assert is_loop(words[:15] * 4)


def test_a_loop_that_counts_on_is_found_by_its_ngrams():
    tokens = [token for number in range(20) for token in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 100 + number)]
    assert distinct_share(tokens) < 0.4
    assert is_loop(tokens)
    assert distinct_share([1, 2, 3]) == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [(" 42.", 42), ("= -7 or 8", -7), ("1,234 apples", 1234), ("none", None), ("12,34", 12), ("٤٢", None), ("9" * 40, None)],
)
def test_the_first_number_of_a_text(text, number):
    assert first_number(text) == number


def test_what_solves_a_task():
    assert Task("?", "Paris").solved_by(Generation((), "\n Paris, of course"))
    assert not Task("?", "Paris").solved_by(Generation((), "It is Paris"))
    assert not Task("?", "8").solved_by(Generation((), "80 apples"))
    assert Task("?", "8").solved_by(Generation((), "8. Next"))
    assert Task("?", "巴黎").solved_by(Generation((), "巴黎是法国的首都"))
    assert Task("?", "f(").solved_by(Generation((), "f(x)"))
    assert Task("?", (4, 5)).solved_by(Generation((4, 5, 6)))
    assert not Task("?", (4, 5)).solved_by(Generation((4,)))
    assert Task("?", "8", number=True).solved_by(Generation((), " It is 8\n"))
    assert not Task("?", "8", number=True).solved_by(Generation((), " 88"))
    assert not Task("?", "Paris").solved_by(Generation((), "Paris", error="NaN"))


def test_sums_are_right_and_the_same_for_a_seed():
    tasks = arithmetic_tasks(200, seed=3)
    assert tasks == arithmetic_tasks(200, seed=3)
    assert tasks != arithmetic_tasks(200, seed=4)
    for task in tasks:
        a, sign, b = task.prompt.rpartition("is ")[2].partition("?")[0].split()
        assert int(task.expected) == (int(a) + int(b) if sign == "+" else int(a) - int(b)) >= 0


def test_a_file_of_tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    talk = [{"role": "user", "content": "hi"}]
    lines = [{"prompt": "a", "expected": "b", "id": 7}, {"messages": talk, "expected": "c"}, {"prompt": [1, 2], "expected": [3]}]
    path.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    assert list(read_tasks(path)) == [Task("a", "b"), Task(talk, "c"), Task([1, 2], (3,))]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"), ("[]", "a task is an object"), ('{"prompt": "a"}', "expected"), ('{"expected": "a"}', "one of"),
        ('{"prompt": "a", "messages": [], "expected": "b"}', "one of"), ('{"prompt": 3, "expected": "b"}', "prompt is"),
        ('{"prompt": [true], "expected": "b"}', "prompt is"), ('{"prompt": "a", "expected": " "}', "not empty"),
        ('{"prompt": "a", "expected": null}', "not empty"), ('{"messages": ["x"], "expected": "b"}', "messages"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path, line, why):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "a", "expected": "b"}\n' + line)
    with pytest.raises(ConfigError, match=rf"tasks.jsonl:2: .*{why}"):
        list(read_tasks(path))


def test_a_file_without_tasks_or_none_at_all(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    for name, why in (("empty", "no task"), ("absent", "cannot read"), ("bytes", "cannot read")):
        with pytest.raises(ConfigError, match=why):
            list(read_tasks(tmp_path / f"{name}.jsonl"))


def test_pairs_add_up():
    pairs = Paired.of([True, True, False, False], [True, False, True, False]) + Paired(neither=2)
    assert (pairs.count, pairs.baseline, pairs.candidate) == (6, 2, 2)
    assert pairs == Paired(1, 1, 1, 3)
    assert Paired().as_json()["baseline_rate"] is None
