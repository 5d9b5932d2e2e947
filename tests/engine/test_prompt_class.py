"""What sort of text a prompt looks like."""

from __future__ import annotations

import pytest

from llmjax.engine.prompt_class import UNKNOWN, class_of, class_of_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write a Python function that merges two sorted lists.", "code"),
        ("Write a C function to compute the nth Fibonacci number iteratively.", "code"),
        ("Implement a stack class in JavaScript with push, pop and peek.", "code"),
        ("Write a SQL query that returns the top 5 customers by total order value, and explain it.", "code"),
        ("def merge(a, b):\n    result = []\n    while a and b:\n", "code"),
        ("#include <stdio.h>\nint main(void) {\n", "code"),
        ("What does this do?\n```\nls | wc\n```", "code"),
        ("Explain in two paragraphs why the sky is blue.", "prose"),
        ("Give me tips for learning to play the guitar.", "prose"),
        ("The class of 1999 met again; nobody had changed.", "prose"),
        ("请用中文介绍一下长城的历史。", "cjk"),
        ("長い歴史について教えてください", "cjk"),
        ("한국의 역사를 설명해 주세요", "cjk"),
        ("Return a JSON object describing three planets with name, radius_km and moons fields.", "json"),
        ('{"name": "Earth", "moons": 1, "radius_km": 6371}\nAnd for Mars?', "json"),
        ("", "prose"),
        ("12345 + 67890 =", "prose"),
    ],
)
def test_the_class_of_a_text(text: str, expected: str) -> None:
    assert class_of_text(text) == expected


def test_a_word_of_code_in_a_long_text_is_no_code() -> None:
    story = "She walked along the river and thought of the summer. " * 12
    assert class_of_text(story + "He was a python keeper.") == "prose"


def test_only_the_end_counts() -> None:
    assert class_of_text("def f(x):\n    return x;\n" * 200 + "Tell me about the sea. " * 60) == "prose"


def test_ids_without_a_tokenizer_are_of_no_class() -> None:
    assert class_of(None, [1, 2, 3], None) == UNKNOWN == "tokens"
