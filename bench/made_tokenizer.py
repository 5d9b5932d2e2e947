"""A tokenizer for weights that have none: byte-level BPE of any vocabulary size, and texts of exactly so many tokens.

Ids 0 to 255 are bytes; then come words, a space and one to four lower-case letters, shortest first. Each word is merged letter by
letter from its beginning, so that it is encoded as it was drawn, and encoding costs what it costs with a trained vocabulary of
that size: as many merges, as long words.
"""

from __future__ import annotations

import functools
import itertools
import json
import string
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

BYTES = 256


def write_tokenizer(folder: Path, vocab_size: int) -> Path:
    """A model folder with nothing but the tokenizer. Returns it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = _words(vocab_size - BYTES)
    vocabulary = {piece: token for token, piece in enumerate([*alphabet, *words])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [(word[:-1], word[-1]) for word in words]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %} {{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def text_of(ids: Sequence[int], vocab_size: int) -> str:
    """A text of `len(ids)` tokens; ids are taken modulo the number of words."""
    words = _words(vocab_size - BYTES)
    return "".join(words[token % len(words)] for token in ids).replace("Ġ", " ")


@functools.cache
def _words(count: int) -> list[str]:
    letters = itertools.chain.from_iterable(itertools.product(string.ascii_lowercase, repeat=size) for size in (1, 2, 3, 4))
    return ["Ġ" + "".join(word) for word in itertools.islice(letters, count)]
