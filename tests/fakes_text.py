"""Tokenizers made in memory through the `tokenizers` library, so that the real `Tokenizer` runs around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from llmjax.engine.token_pieces import BYTE_LEVEL_CHARS
from llmjax.engine.tokenizer import Tokenizer, load_tokenizer

BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = 256, 257, 258, 259
SPECIALS = {"<bos>": BOS_ID, "<eos>": EOS_ID, "<|im_start|>": IM_START_ID, "<|im_end|>": IM_END_ID}
VOCAB_SIZE = 260


def byte_backend(more_tokens: dict[str, int] | None = None) -> tokenizers.Tokenizer:
    """A token is a byte (id = value), then four special tokens; `more_tokens` have ids from 260 on and are never encoded to."""
    vocabulary = dict(BYTE_LEVEL_CHARS) | SPECIALS | (more_tokens or {})
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in SPECIALS])
    return backend


def write_byte_tokenizer(
    directory: Path,
    *,
    adds_bos: bool = False,
    chat_template: Any = None,
    config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
    more_tokens: dict[str, int] | None = None,
) -> Path:
    """The files of a byte tokenizer as in a Hugging Face directory. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    byte_backend(more_tokens).save(str(directory / "tokenizer.json"))
    fields = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": adds_bos, **(config or {})}
    if chat_template is not None:
        fields["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))
    return directory


def byte_tokenizer(directory: Path, **options: Any) -> Tokenizer:
    """The same, loaded. For one without files, `Tokenizer(byte_backend())` has no BOS and no template."""
    return load_tokenizer(write_byte_tokenizer(directory, **options))


def plain_byte_tokenizer(**options: Any) -> Tokenizer:
    """A byte tokenizer without files; `options` go to `Tokenizer`."""
    return Tokenizer(byte_backend(), special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"}, **options)


def sentencepiece_metadata(pieces: list[str], scores: list[float] | None = None, **fields: Any) -> dict[str, Any]:
    """Key-values of a GGUF with a sentencepiece tokenizer: <unk>, <s>, </s>, the 256 bytes (ids 3..258), then `pieces`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    piece_scores = [-float(rank) for rank in range(len(pieces))] if scores is None else scores
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + piece_scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    }
