"""Streaming against decoding the whole (B01, B02)."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from fakes_text import EOS_ID, IM_END_ID, byte_backend, plain_byte_tokenizer, sentencepiece_metadata
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from llmjax.engine.detokenizer import Detokenizer
from llmjax.engine.gguf_tokenizer import tokenizer_from_metadata
from llmjax.engine.token_pieces import BYTE_LEVEL_CHARS
from llmjax.engine.tokenizer import Tokenizer

BYTES = plain_byte_tokenizer()
PIECES = ["▁", "▁Hello", "Hello", "漢", "▁🔥", "e", "▁▁"]
SPM = tokenizer_from_metadata(sentencepiece_metadata(PIECES), Path("fake.gguf"))
SPM_BYTE, SPM_PIECE = 3, 259  # first ids of both sorts


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [], skip)
    return [*map(detokenizer.add, ids), detokenizer.flush()]


@given(st.text(), st.integers(1, 5))
@example("🔥漢ď", 1)
def test_any_text_comes_back_however_its_bytes_are_cut(text: str, size: int) -> None:
    data = text.encode()
    pieces = {data[i : i + size] for i in range(0, len(data), size)}
    chars = {byte: char for char, byte in BYTE_LEVEL_CHARS.items()}
    # Pieces of one byte are in the vocabulary already.
    more = {"".join(chars[b] for b in piece): 260 + i for i, piece in enumerate(sorted(p for p in pieces if len(p) > 1))}
    tokenizer = Tokenizer(byte_backend(more))
    ids = [
        piece[0] if len(piece) == 1 else more["".join(chars[b] for b in piece)]
        for piece in (data[i : i + size] for i in range(0, len(data), size))
    ]
    shown = stream(tokenizer, ids)
    assert "".join(shown) == text == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(shown)


@given(st.binary())
@example(b"\xc0\x80\x99\xed\xa0\x80abc")
@example(b"\xf0\x9f\x94")
@example(b"\xf0\x9f\x94\xe6\xbc\xa2\xf4\x90\x80\x80")
def test_any_bytes_become_what_python_makes_of_them(data: bytes) -> None:
    detokenizer = Detokenizer(BYTES)
    shown = ""
    for count, byte in enumerate(data, 1):
        shown += detokenizer.add(byte)
        whole = data[:count].decode("utf-8", "replace")
        assert whole.startswith(shown)
        # At most three bytes wait.
        waiting = (data[max(0, count - n) : count].decode("utf-8", "replace") for n in range(4))
        assert whole[len(shown) :] in waiting
    assert shown + detokenizer.flush() == data.decode("utf-8", "replace") == BYTES.decode(list(data))


def test_a_character_over_several_tokens_is_shown_when_complete() -> None:
    assert stream(BYTES, list("🔥".encode())) == ["", "", "", "🔥", ""]
    assert stream(BYTES, list("ď漢".encode())) == ["", "ď", "", "", "漢", ""]


def test_bytes_that_are_never_utf8_are_replaced_and_what_follows_is_intact() -> None:
    shown = stream(BYTES, list(b"\xc0\x80\x99\xed\xa0\x80ok"))
    assert "".join(shown) == "\ufffd" * 6 + "ok"
    assert shown[-3:] == ["o", "k", ""]


def test_an_output_that_ends_within_a_character_shows_its_beginning_as_one_replacement() -> None:
    assert stream(BYTES, list("🔥".encode())[:3]) == ["", "", "", "\ufffd"]


def test_special_tokens_and_ids_without_a_string_have_no_text() -> None:
    ids = [ord("a"), IM_END_ID, 300, 10**6, ord("b"), EOS_ID]
    assert "".join(stream(BYTES, ids)) == "ab" == BYTES.decode(ids)
    assert "".join(stream(BYTES, ids, skip=False)) == "a<|im_end|>b<eos>" == BYTES.decode(ids, skip_special_tokens=False)


def test_a_special_token_within_a_character_does_not_break_it() -> None:
    fire = list("🔥".encode())
    assert "".join(stream(BYTES, [*fire[:2], IM_END_ID, *fire[2:]])) == "🔥"


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_character_that_the_prompt_began_is_shown_whole(place: int) -> None:
    fire = list("🔥".encode())
    assert "".join(stream(BYTES, [*fire[place:], ord("!")], [ord("x"), *fire[:place]])) == "🔥!"
    # What never becomes a character was the prompt's.
    assert "".join(stream(BYTES, [ord("!")], [ord("x"), *fire[:place]])) == "!"
    assert "".join(stream(BYTES, [], fire[:place])) == ""


@given(st.lists(st.integers(0, 265), max_size=12), st.lists(st.integers(0, 265), max_size=12), st.booleans())
@example([], [SPM_PIECE + 1], True)
@example([1], [SPM_PIECE + 1], True)
@example([1], [SPM_PIECE + 1], False)
@example([SPM_PIECE], [SPM_PIECE + 1], True)
def test_sentencepiece_text_is_what_the_output_adds_to_its_prompt(prompt: list[int], ids: list[int], skip: bool) -> None:
    shown = "".join(stream(SPM, ids, prompt, skip))
    before, whole = SPM.decode(prompt, skip), SPM.decode(prompt + ids, skip)
    if not before.endswith("\ufffd"):  # a character cut by the end of the prompt has its own test
        assert whole == before + shown
    if not prompt:
        assert shown == SPM.decode(ids, skip)


def test_sentencepiece_loses_one_space_at_the_start_of_a_text_only() -> None:
    hello, spaces = SPM_PIECE + 1, SPM_PIECE + 6
    assert "".join(stream(SPM, [hello, hello])) == "Hello Hello"
    assert "".join(stream(SPM, [hello], [1])) == "Hello"  # behind the BOS, which has no text
    assert "".join(stream(SPM, [hello], [1], skip=False)) == " Hello"
    assert "".join(stream(SPM, [hello], [hello])) == " Hello"
    assert "".join(stream(SPM, [spaces])) == " "
    assert "".join(stream(SPM, [SPM_BYTE + byte for byte in "🔥".encode()])) == "🔥"


def word_piece() -> Tokenizer:
    vocabulary = {text: i for i, text in enumerate(["[UNK]", "hello", "world", "##ing", "!", "\ufffd", "##\ufffd", "[SEP]"])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return Tokenizer(backend)


def test_other_decoders_stream_through_a_window() -> None:
    tokenizer = word_piece()
    assert not tokenizer.is_byte_exact
    ids = [1, 2, 3, 7, 4, 1]
    assert stream(tokenizer, ids) == ["hello", " world", "ing", "", "!", " hello", ""]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    assert "".join(stream(tokenizer, [3, 2], [1])) == "ing world"
    assert tokenizer.token_bytes(2) == b" world"
    assert tokenizer.token_bytes(99) == b""


@given(st.lists(st.integers(0, 7), max_size=12), st.lists(st.integers(0, 7), max_size=4))
def test_other_decoders_add_up_to_the_whole(ids: list[int], prompt: list[int]) -> None:
    tokenizer = word_piece()
    shown = stream(tokenizer, ids, prompt)
    before = tokenizer.decode(prompt)
    assert before + "".join(shown) == tokenizer.decode(prompt + ids)
    waiting = 0
    for token, text in zip(ids, shown, strict=False):
        waiting = 0 if text or token == 7 else waiting + 1
        assert waiting <= 3
