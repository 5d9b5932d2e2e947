"""A choice's text from its tokens: stop strings across tokens, stop tokens, min_tokens, logprob texts (B01-B09, B25)."""

from __future__ import annotations

import pytest
from fakes_text import EOS_ID, IM_END_ID, byte_backend, plain_byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from llmjax.engine.text_output import ChoiceText, token_text
from llmjax.engine.tokenizer import Tokenizer
from llmjax.errors import RequestError
from llmjax.sampling_params import SamplingParams

BYTES = plain_byte_tokenizer()


def run(
    tokenizer: Tokenizer, ids: list[int], *, ended_by: int | None = None, **params: object
) -> tuple[list[str], str | None, int]:
    """What was shown token by token (and last, on finishing), the stop string, and how many tokens were taken."""
    choice = ChoiceText(tokenizer, [ord("p")], SamplingParams(max_tokens=None, **params))  # type: ignore[arg-type]
    shown: list[str] = []
    for count, token in enumerate(ids, 1):
        text, matched = choice.add(token, count, ended=token == ended_by)
        shown.append(text)
        if matched is not None:
            assert choice.finish() == ""
            assert choice.text == "".join(shown)
            return shown, matched, count
    shown.append(choice.finish())
    assert choice.text == "".join(shown)
    return shown, None, len(ids)


def with_tokens(*texts: str) -> tuple[Tokenizer, list[int]]:
    """A byte tokenizer that also has these (ASCII) texts as tokens, and their ids."""
    more = {text: 260 + index for index, text in enumerate(dict.fromkeys(texts))}
    return Tokenizer(byte_backend(more)), [more[text] for text in texts]


@pytest.mark.parametrize(
    ("tokens", "stop", "text"),
    [
        (("the lazy<|", "im_", "end|>"), "<|im_end|>", "the lazy"),
        (("a br", "own f", "ox jumps"), "own fox", "a br"),
        (("aS", "STO", "PSTOP"), "STOP", "aS"),
    ],
)
def test_a_stop_string_over_several_tokens_never_shows_its_head(tokens: tuple[str, ...], stop: str, text: str) -> None:
    tokenizer, ids = with_tokens(*tokens)
    shown, matched, _ = run(tokenizer, ids, stop=stop)
    assert ("".join(shown), matched) == (text, stop)


@pytest.mark.parametrize(("include", "text"), [(False, "abc"), (True, "abcSTOP")])
def test_text_is_cut_within_the_token_that_completes_the_stop_string(include: bool, text: str) -> None:
    tokenizer, ids = with_tokens("abc", "STOPd", "ef")
    shown, matched, taken = run(tokenizer, ids, stop=["STOP"], include_stop_str_in_output=include)
    assert ("".join(shown), matched, taken) == (text, "STOP", 2)


@given(st.text(alphabet="ab🔥漢", max_size=12), st.text(alphabet="ab🔥漢", min_size=1, max_size=4))
def test_stop_strings_of_many_bytes_cut_like_split(text: str, stop: str) -> None:
    shown, matched, _ = run(BYTES, list(text.encode()), stop=stop)
    assert "".join(shown) == text.split(stop)[0]
    assert matched == (stop if stop in text else None)


def test_a_beginning_of_a_stop_string_is_shown_when_the_output_ends_without_it() -> None:
    assert run(BYTES, list(b"abST"), stop="STOP") == (["a", "b", "", "", "ST"], None, 4)
    assert run(BYTES, [*b"aST", EOS_ID], ended_by=EOS_ID, stop="STOP")[0] == ["a", "", "", "", "ST"]


@pytest.mark.parametrize("stop", ["", [""], [1, 2], ["x"] * 17, "x" * 100_000, 5])
def test_absurd_stop_values_are_refused(stop: object) -> None:
    with pytest.raises(RequestError, match="stop"):
        SamplingParams(stop=stop)  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop_strings_never_stop(stop: object) -> None:
    assert run(BYTES, list(b"ab"), stop=stop) == (["a", "b", ""], None, 2)


def test_min_tokens_keeps_an_early_stop_string_in_the_text() -> None:
    ids = list(b"a\nbcdefgh\nij\nk")
    shown, matched, taken = run(BYTES, ids, stop="\n", min_tokens=10)
    assert (taken, matched) == (10, "\n")  # the newline that comes as the tenth token
    assert "".join(shown) == "a\nbcdefgh"
    shown, _, taken = run(BYTES, ids, stop="\n", min_tokens=11)
    assert (taken, "".join(shown)) == (13, "a\nbcdefgh\nij")


def test_the_token_that_ended_the_output_has_no_text() -> None:
    assert run(BYTES, [*b"ab", EOS_ID], ended_by=EOS_ID, skip_special_tokens=False)[0] == ["a", "b", "", ""]
    assert run(BYTES, list(b"ab!"), ended_by=ord("!"))[0] == ["a", "b", "", ""]


def test_an_ignored_end_of_sequence_is_hidden_like_any_special_token() -> None:
    ids = [ord("a"), EOS_ID, ord("b"), IM_END_ID, ord("c")]
    assert "".join(run(BYTES, ids, ignore_eos=True)[0]) == "abc"
    assert "".join(run(BYTES, ids, ignore_eos=True, skip_special_tokens=False)[0]) == "a<eos>b<|im_end|>c"


def test_half_a_character_waits_and_the_stream_equals_the_whole() -> None:
    text = "🔥漢ď"
    shown, _, _ = run(BYTES, list(text.encode()))
    assert "\ufffd" not in "".join(shown)
    assert "".join(shown) == text


def test_an_incomplete_character_is_replaced_when_the_output_ends() -> None:
    assert "".join(run(BYTES, list("a🔥".encode())[:3])[0]) == "a\ufffd"
    assert "".join(run(BYTES, list("a🔥".encode())[:3], stop="\ufffd")[0]) == "a"


@given(st.text())
def test_bytes_of_tokens_concatenate_to_the_text(text: str) -> None:
    tokens = [token_text(BYTES, token) for token in BYTES.encode(text, add_special_tokens=False) if token < 256]
    assert all(display == data.decode("utf-8", "replace") for display, data in tokens)
    if not any(special in text for special in ("<bos>", "<eos>", "<|im_")):
        assert b"".join(data for _, data in tokens) == text.encode()


def test_token_text_of_special_and_unknown_ids() -> None:
    assert token_text(BYTES, IM_END_ID) == ("<|im_end|>", b"<|im_end|>")
    assert token_text(BYTES, 0xF0) == ("\ufffd", b"\xf0")
    assert token_text(BYTES, 5000) == ("", b"")
