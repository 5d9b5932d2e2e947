"""Build a tokenizer from a GGUF's own metadata, exactly or not at all.

A GGUF holds the vocabulary and the merges, and only *names* how a text is cut before merging (`tokenizer.ggml.pre`).
Cut another way, most texts still decode to themselves, but to other tokens than the model was trained on: so a name that
is not in the table is refused. Names: https://github.com/ggml-org/llama.cpp, `src/llama-vocab.cpp`; patterns: the
tokenizer.json files of the models the names come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from llmjax.engine.chat_template import DEFAULT
from llmjax.engine.hf_tokenizer import put_ends
from llmjax.engine.tokenizer import Tokenizer
from llmjax.errors import ModelError, UnsupportedModelError
from llmjax.model.checkpoint.eos import collect_eos_ids

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
_KEYS = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_SPACE = "▁"
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"


@dataclasses.dataclass(frozen=True)
class _Pre:
    """How a text is cut before its pieces are merged.

    Attributes:
        patterns: applied one after the other to what the ones before left; each match becomes a piece of its own.
        nfc: normalise to NFC first.
        ignore_merges: a piece that is a token as a whole is that token, whatever the merges say.
        adds_bos: when the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_DIGITS_APART = _Pre((r"\p{N}", _GPT2))
_QWEN2 = _Pre((_WORDS + r"|\p{N}" + _REST,), nfc=True)
_LLAMA3 = _Pre((_WORDS + r"|\p{N}{1,3}" + _REST,), ignore_merges=True, adds_bos=True)
_PRE_TOKENIZERS = {
    "gpt-2": _Pre((_GPT2,)),
    "phi-2": _Pre((_GPT2,)),
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": _Pre((_CASED + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",), ignore_merges=True, adds_bos=True),
    "deepseek-coder": _Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")),
}


def tokenizer_from_metadata(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer that a GGUF's key-values describe; `path` is for messages.

    Kinds: "gpt2" (byte-level BPE) with a pre-tokenizer from the table, and "llama" (sentencepiece's BPE, its merges
    recovered from the scores). Raises `UnsupportedModelError` naming any other kind, `ModelError` for a malformed one.
    """
    kind = metadata.get(_KEYS + "model")
    if kind is None:
        raise ModelError(f"{path}: holds no tokenizer (no tokenizer.ggml.model): give one by path")
    defaults: dict[str, int] = {}
    if kind == "gpt2":
        pre = _named_pre_tokenizer(metadata, path)
        vocabulary = _Vocabulary(metadata, path)
        backend, adds_bos = _byte_level(vocabulary, pre), pre.adds_bos
    elif kind == "llama":
        vocabulary = _Vocabulary(metadata, path)
        backend, adds_bos = _sentencepiece(vocabulary), True
        defaults = {"unknown": 0, "bos": 1, "eos": 2}  # sentencepiece's own
    else:
        known = "gpt2 (byte-level BPE) and llama (sentencepiece BPE)"
        raise UnsupportedModelError(f"{path}: tokenizer {kind!r} is not supported; supported are {known}")
    _add_special_tokens(backend, vocabulary)
    special_tokens = {}
    for name, key in _SPECIAL_TOKENS.items():
        text = vocabulary.text(metadata.get(f"{_KEYS}{key}_token_id", defaults.get(key)))
        if text is not None:
            special_tokens[name] = text
    bos = special_tokens.get("bos_token") if metadata.get(_KEYS + "add_bos_token", adds_bos) else None
    eos = special_tokens.get("eos_token") if metadata.get(_KEYS + "add_eos_token", False) else None
    if bos is not None or eos is not None:
        put_ends(backend, bos, eos)
    ends = [(f"{path}: {key}", metadata.get(key)) for key in (f"{_KEYS}{name}_token_id" for name in ("eos", "eot", "eom"))]
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_ids=collect_eos_ids(ends, len(vocabulary.tokens)),
        chat_templates=_templates(metadata, path),
        name=path.name,
    )


class _Vocabulary:
    """The token list of a file, checked; padding rows at its end are cut off."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.path = path
        self.metadata = metadata
        self.tokens: list[str] = self.items("tokens", str)
        self.types: list[int] = self.items("token_type", int, optional=True) or [_NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise ModelError(f"{path}: tokenizer.ggml.token_type has {len(self.types)} entries for {len(self.tokens)} tokens")
        known = len(self.tokens)
        while known and self.types[known - 1] == _UNUSED:
            known -= 1
        del self.tokens[known:], self.types[known:]
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise ModelError(f"{path}: tokenizer.ggml.tokens has {twice!r} twice")

    def items(self, name: str, kind: type, *, optional: bool = False) -> list[Any]:
        """An array of the metadata, checked to hold `kind`s. An absent one is an error, or empty when `optional`."""
        values = self.metadata.get(_KEYS + name)
        if values is None and optional:
            return []
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise ModelError(f"{self.path}: {_KEYS}{name} must be an array of {kind.__name__}")
        return list(values)

    def text(self, token: Any) -> str | None:
        """A token's string; None when the file says nothing, or -1."""
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < len(self.tokens):
            return None
        return self.tokens[token]


def _named_pre_tokenizer(metadata: Mapping[str, Any], path: Path) -> _Pre:
    name = metadata.get(_KEYS + "pre")
    known = ", ".join(_PRE_TOKENIZERS)
    if name is None:
        raise UnsupportedModelError(
            f"{path}: does not name its pre-tokenizer (tokenizer.ggml.pre), and a guess would change the tokens; "
            f"convert the model again with a newer converter, or give a tokenizer by path"
        )
    pre = _PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise UnsupportedModelError(f"{path}: pre-tokenizer {name!r} is not supported; supported are {known}")
    return pre


def _byte_level(vocabulary: _Vocabulary, pre: _Pre) -> tokenizers.Tokenizer:
    merges = []
    for index, merge in enumerate(vocabulary.items("merges", str)):
        left, space, right = merge[1:].partition(" ")  # the first character is never the separator
        if not space or merge[:1] + left not in vocabulary.ids or right not in vocabulary.ids:
            raise ModelError(f"{vocabulary.path}: tokenizer.ggml.merges[{index}] is {merge!r:.60}, not two tokens")
        merges.append((merge[:1] + left, right))
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=pre.ignore_merges))
    except Exception as error:  # a merge whose result is no token
        raise ModelError(f"{vocabulary.path}: the merges do not fit the tokens: {error}") from None
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    for option in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if vocabulary.metadata.get(_KEYS + option):
            raise UnsupportedModelError(f"{vocabulary.path}: a sentencepiece tokenizer with {option} is not supported")
    adds_space = bool(vocabulary.metadata.get(_KEYS + "add_space_prefix", True))
    unknown = vocabulary.text(vocabulary.metadata.get(_KEYS + "unknown_token_id", 0))
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary.ids, _merges_by_score(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    # The space in front comes before each stretch of text between special tokens, as in sentencepiece's callers.
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if adds_space else spaces
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Merges that do what sentencepiece does with scores: of all neighbours, join those with the best joint token.

    Kudo and Richardson 2018. One merge for each way to cut a token into two tokens, the best score first; within a token
    the order is that of the tokenizer.json files converted from sentencepiece models, so that ids agree with theirs.
    """
    scores = vocabulary.items("scores", float)
    if len(scores) < len(vocabulary.tokens):
        raise ModelError(
            f"{vocabulary.path}: tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary.tokens)} tokens"
        )
    texts = {text: index for text, index in vocabulary.ids.items() if vocabulary.types[index] in (_NORMAL, _USER_DEFINED)}
    found: list[tuple[float, int, int, int, int, str, str]] = []
    for text, index in texts.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in texts and right in texts:
                found.append((-scores[index], -cut, cut - len(text), index, texts[left], left, right))
    found.sort(key=lambda merge: merge[:5])
    return [(left, right) for *_, left, right in found]


def _add_special_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens (never text) and user-defined ones (text that is always this token) are found before anything is cut."""
    for kinds, special in (((_CONTROL, _UNKNOWN), True), ((_USER_DEFINED,), False)):
        texts = [text for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in kinds and text]
        backend.add_tokens([tokenizers.AddedToken(text, normalized=False, special=special) for text in texts])


def _templates(metadata: Mapping[str, Any], path: Path) -> dict[str, str]:
    templates = {
        key.removeprefix(_TEMPLATE).removeprefix(".") or DEFAULT: value
        for key, value in metadata.items()
        if key == _TEMPLATE or key.startswith(_TEMPLATE + ".")
    }
    if not all(isinstance(text, str) for text in templates.values()):
        raise ModelError(f"{path}: {_TEMPLATE} must be text")
    return templates
