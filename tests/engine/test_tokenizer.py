"""`Tokenizer` and Hugging Face directories: special tokens, ends of sequence, odd texts and broken files (B03, B08, B34)."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from fakes_text import (
    BOS_ID,
    EOS_ID,
    IM_END_ID,
    IM_START_ID,
    VOCAB_SIZE,
    byte_backend,
    byte_tokenizer,
    plain_byte_tokenizer,
    write_byte_tokenizer,
)
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from llmjax.engine.tokenizer import Tokenizer, load_tokenizer, resolve_eos
from llmjax.errors import ModelError, RequestError

BYTES = plain_byte_tokenizer()


# -- encoding and decoding


@given(st.text())
def test_texts_come_back(text: str) -> None:
    ids = BYTES.encode(text)
    assert BYTES.decode(ids, skip_special_tokens=False) == text
    if "<" not in text:
        assert ids == list(text.encode())


def test_nul_is_a_character() -> None:
    assert BYTES.encode("a\0b") == [97, 0, 98]
    assert BYTES.decode([97, 0, 98]) == "a\0b"


@pytest.mark.parametrize("text", ["a\ud83d", "\udc00", "x\ud83dy\udd25"])
def test_a_lone_surrogate_is_refused_and_the_next_text_works(text: str) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate \(\\ud") as caught:
        BYTES.encode(text)
    assert caught.value.param == "prompt"
    assert BYTES.encode("a") == [97]


@pytest.mark.parametrize("text", [None, 5, b"a", ["a"]])
def test_only_text_is_encoded(text: Any) -> None:
    with pytest.raises(RequestError, match="must be text"):
        BYTES.encode(text)


def test_special_tokens_in_a_text_are_their_ids() -> None:
    assert BYTES.encode("a<|im_end|>\n") == [97, IM_END_ID, 10]
    assert BYTES.decode([97, IM_END_ID, 10]) == "a\n"
    assert BYTES.special_ids == {BOS_ID, EOS_ID, IM_START_ID, IM_END_ID}


def test_ids_without_a_string_are_empty() -> None:
    for token in (VOCAB_SIZE, 151_665, 2**40, -1):
        assert BYTES.token_bytes(token) == b""
        assert BYTES.decode([97, token, 98]) == "ab"
    assert BYTES.vocab_size == VOCAB_SIZE


def test_the_vocabulary_reaches_up_to_the_last_id_with_a_string() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    assert tokenizer.vocab_size == 8
    assert tokenizer.decode([7, 3, 0]) == "ba"


def test_added_tokens_are_plain_text_even_in_byte_level_letters() -> None:
    backend = byte_backend()
    backend.add_tokens([tokenizers.AddedToken("<né x>", normalized=False)])  # é and space mean other bytes in the alphabet
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("a<né x>")
    assert ids == [97, VOCAB_SIZE]
    assert tokenizer.decode(ids) == "a<né x>"


def test_a_prompt_is_neither_cut_nor_padded() -> None:
    backend = byte_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    assert Tokenizer(backend).encode("abcdef") == list(b"abcdef")


def test_spaces_before_punctuation_stay() -> None:
    assert BYTES.decode(list(b"a . b , c 's")) == "a . b , c 's"


# -- beginning of sequence


def test_without_bos(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    assert (tokenizer.adds_bos, tokenizer.bos_id) == (False, BOS_ID)
    assert tokenizer.encode("") == []


def test_with_bos(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, adds_bos=True)
    assert tokenizer.adds_bos
    assert tokenizer.encode("") == [BOS_ID]
    assert tokenizer.encode("a") == [BOS_ID, 97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_a_text_that_brings_its_bos_gets_another_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer(tmp_path, adds_bos=True)
    with caplog.at_level(logging.WARNING):
        assert tokenizer.encode("<bos>a", add_special_tokens=False) == [BOS_ID, 97]
        assert not caplog.records
        assert tokenizer.encode("<bos>a") == [BOS_ID, BOS_ID, 97]
        assert tokenizer.encode("<bos>b") == [BOS_ID, BOS_ID, 98]
    assert [record.getMessage() for record in caplog.records] == [
        "a prompt already starts with <bos> and gets a second one: pass add_special_tokens=False"
    ]


@pytest.mark.parametrize(
    ("in_file", "config", "ids"),
    [
        (True, {}, [BOS_ID, 97]),
        (True, {"add_bos_token": None}, [BOS_ID, 97]),
        (True, {"add_bos_token": False}, [97]),
        (True, {"add_eos_token": True}, [BOS_ID, 97, EOS_ID]),
        (False, {"add_bos_token": True}, [BOS_ID, 97]),
        (False, {"add_bos_token": True, "add_eos_token": True}, [BOS_ID, 97, EOS_ID]),
        (False, {"add_bos_token": True, "bos_token": None}, [97]),
        (False, {"add_bos_token": True, "eos_token": "<bos>"}, [BOS_ID, 97]),
    ],
)
def test_the_configuration_decides_what_goes_around_a_text(
    tmp_path: Path, in_file: bool, config: dict[str, Any], ids: list[int]
) -> None:
    backend = byte_backend()
    if in_file:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    backend.save(str(tmp_path / "tokenizer.json"))
    fields = {"bos_token": "<bos>", "eos_token": "<eos>", **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    assert load_tokenizer(tmp_path).encode("a") == ids


# -- end of sequence


@pytest.mark.parametrize(
    ("own", "generation", "ids"),
    [(9, [2, 7], (9, 2, 7)), (9, 7, (9, 7)), (9, None, (9,)), (None, [2, 7], (2, 7)), (None, None, ()), (7, [2, 7], (7, 2))],
)
def test_every_end_of_sequence_counts(own: int | None, generation: Any, ids: tuple[int, ...]) -> None:
    assert resolve_eos(own, generation, 300) == ids


def test_an_end_of_sequence_that_is_no_id_is_refused() -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id"):
        resolve_eos(9, ["</s>"], 300)
    assert resolve_eos(9, [-1, 300, 2], 300) == (9, 2)


def test_a_directory_unites_them(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, generation_config={"eos_token_id": [IM_END_ID, EOS_ID]})
    assert tokenizer.eos_ids == (EOS_ID, IM_END_ID)
    assert byte_tokenizer(tmp_path, generation_config={}).eos_ids == (EOS_ID,)
    assert byte_tokenizer(tmp_path, config={"eos_token": None}, generation_config={"eos_token_id": 7}).eos_ids == (7,)


# -- files


def test_special_tokens_are_found_wherever_they_are_written(tmp_path: Path) -> None:
    names = {"bos_token": {"content": "<bos>", "lstrip": False}, "eos_token": None, "pad_token": "<|im_start|>"}
    write_byte_tokenizer(tmp_path, config=names)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "x", "eos_token": {"content": "<|im_end|>"}}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.token_id("pad_token"), tokenizer.eos_ids) == (BOS_ID, IM_START_ID, (IM_END_ID,))
    assert tokenizer.token_id("unk_token") is None


def test_a_directory_with_tokenizer_json_alone(tmp_path: Path) -> None:
    byte_backend().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (None, (), None)
    assert tokenizer.encode("a") == [97]


def test_named_special_tokens_that_are_ordinary_in_tokenizer_json_become_special(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, more_tokens={"</s>": 260, "<extra>": 261}, config={"eos_token": "</s>"})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["<extra>", "<none>"]}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a</s><extra>") == [97, 260, 261]
    assert tokenizer.decode([97, 260, 261]) == "a"
    assert tokenizer.vocab_size == 262  # <none> got no id: the model has no row for it


def test_tokens_that_only_the_configuration_lists(tmp_path: Path) -> None:
    entries = {"261": {"content": "<think>", "special": False}, "260": {"content": "<x>", "special": True}}
    tokenizer = byte_tokenizer(tmp_path, config={"added_tokens_decoder": entries})
    assert tokenizer.encode("<x><think>") == [260, 261]
    assert tokenizer.decode([260, 261]) == "<think>"
    entries = {"300": {"content": "<think>"}}
    with pytest.raises(ModelError, match="gives '<think>' the id 300"):
        byte_tokenizer(tmp_path, config={"added_tokens_decoder": entries})


@pytest.mark.parametrize("entries", [5, {"x": {"content": "a"}}, {"260": {}}, {"260": "<x>"}])
def test_malformed_added_tokens_are_refused(tmp_path: Path, entries: Any) -> None:
    with pytest.raises(ModelError, match="added_tokens_decoder"):
        byte_tokenizer(tmp_path, config={"added_tokens_decoder": entries})


def test_paths_that_hold_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere: no such file or directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x" * 100)
    with pytest.raises(ModelError, match="neither a GGUF file nor a directory"):
        load_tokenizer(tmp_path / "weights.bin")


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_json_is_named(tmp_path: Path, content: bytes) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
def test_a_broken_configuration_is_named(tmp_path: Path, name: str) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / name).write_text("[1")
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load_tokenizer(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # transformers' own warnings are not ours
def test_a_directory_from_before_tokenizer_json_is_converted(tmp_path: Path) -> None:
    backend = byte_backend()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.model.save(str(tmp_path))
    fields = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Hé <eos>") == [*"Hé ".encode(), EOS_ID]
    assert tokenizer.decode(tokenizer.encode("Hé")) == "Hé"
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    (tmp_path / "tokenizer.model").write_bytes(b"no sentencepiece model")
    with pytest.raises(ModelError, match="cannot convert the older files"):
        load_tokenizer(tmp_path)
