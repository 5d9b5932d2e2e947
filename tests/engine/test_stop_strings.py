"""Stop strings against brute force, for any way a text is cut into deltas (B04, B05, B07)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmjax.engine.stop_strings import StopStrings

SMALL = st.text(alphabet="ab<", max_size=24)
STOPS = st.lists(st.text(alphabet="ab<", min_size=1, max_size=5), min_size=1, max_size=4)
CUTS = st.lists(st.integers(0, 24), max_size=8)


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def run(stops: list[str], deltas: list[str], *, include: bool = False, first_active: int = 0) -> tuple[list[str], str | None]:
    """What was shown, delta by delta, and the match; deltas before `first_active` are fed while not active."""
    state = StopStrings(stops, include)
    shown: list[str] = []
    for index, delta in enumerate(deltas):
        text, matched = state.feed(delta, active=index >= first_active)
        shown.append(text)
        if matched is not None:
            assert state.flush() == ""
            return shown, matched
    shown.append(state.flush())
    return shown, None


def oracle(stops: list[str], text: str, first_end: int = 0) -> tuple[int, str] | None:
    """(start, stop string) of the first end in the text at which any stop string is complete; the longest there."""
    for end in range(first_end + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


@given(SMALL, st.text(alphabet="ab<", min_size=1, max_size=5), CUTS)
@example("aabaabb", "aabb", [3, 4, 5])
def test_one_stop_string_cuts_like_split(text: str, stop: str, places: list[int]) -> None:
    shown, matched = run([stop], cut(text, places))
    assert "".join(shown) == text.split(stop)[0]
    assert (matched is not None) == (stop in text)


@given(SMALL, STOPS, CUTS, st.booleans())
def test_the_first_complete_one_wins_whatever_the_deltas(text: str, stops: list[str], places: list[int], include: bool) -> None:
    shown, matched = run(stops, cut(text, places), include=include)
    expected = oracle(stops, text)
    if expected is None:
        assert (matched, "".join(shown)) == (None, text)
    else:
        start, stop = expected
        assert matched == stop
        assert "".join(shown) == text[:start] + (stop if include else "")


@given(SMALL, STOPS, CUTS)
def test_nothing_more_is_held_back_than_a_possible_beginning(text: str, stops: list[str], places: list[int]) -> None:
    state, fed, shown = StopStrings(stops, False), "", ""
    for delta in cut(text, places):
        released, matched = state.feed(delta, active=True)
        fed, shown = fed + delta, shown + released
        if matched is not None:
            return
        beginnings = [n for stop in stops for n in range(len(stop)) if fed.endswith(stop[:n])]
        assert shown == fed[: len(fed) - max(beginnings)]


@given(SMALL, STOPS, CUTS, st.integers(0, 9))
def test_before_min_tokens_a_complete_stop_string_is_text(text: str, stops: list[str], places: list[int], first: int) -> None:
    deltas = cut(text, places)
    shown, matched = run(stops, deltas, first_active=first)
    expected = oracle(stops, text, first_end=len("".join(deltas[:first])))
    if expected is None:
        assert (matched, "".join(shown)) == (None, text)
    else:
        assert (matched, "".join(shown)) == (expected[1], text[: expected[0]])


@pytest.mark.parametrize("place", range(len("lazy<|im_end|>")))
@pytest.mark.parametrize("stop", ["<|im_end|>", "y<|im_e"])
def test_no_character_of_a_stop_string_is_shown_at_any_split(place: int, stop: str) -> None:
    text = "lazy<|im_end|>"
    shown, matched = run([stop], [text[:place], text[place:]])
    assert ("".join(shown), matched) == (text.split(stop)[0], stop)


@pytest.mark.parametrize(("include", "text"), [(True, "abcSTOP"), (False, "abc")])
@pytest.mark.parametrize("deltas", [["abcSTOPdef"], ["ab", "cST", "OPd"], ["abcS", "T", "O", "P"]])
def test_included_or_not_nothing_follows_the_stop_string(deltas: list[str], include: bool, text: str) -> None:
    shown, matched = run(["STOP"], deltas, include=include)
    assert ("".join(shown), matched) == (text, "STOP")


def test_of_two_that_end_together_the_longer_counts() -> None:
    assert run(["c", "abc", "bc"], ["x", "abcd"]) == (["x", ""], "abc")


def test_the_one_complete_first_wins_over_the_one_that_starts_first() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == (["a"], "bc")


def test_a_stop_string_may_begin_before_min_tokens_and_end_after() -> None:
    assert run(["</s>"], ["a</", "s>b"], first_active=1) == (["a", ""], "</s>")
    assert run(["</s>"], ["a</s>", "b"], first_active=1) == (["a</s>", "b", ""], None)


def test_without_stop_strings_everything_passes() -> None:
    assert run([], ["a", "", "b"]) == (["a", "", "b", ""], None)


def test_long_repetitive_stop_strings_do_not_go_quadratic() -> None:
    stops = ["a" * 1000 + end for end in "bcde"]  # each step back in the text would cost a thousand characters
    shown, matched = run(stops, ["a"] * 30_000 + ["c"])
    assert matched == stops[1]
    assert "".join(shown) == "a" * 29_000
