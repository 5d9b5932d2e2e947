"""Open the tokenizer files of a Hugging Face directory. Knows which file says what, nothing of how a text is encoded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.processors

from llmjax.engine.chat_template import read_templates
from llmjax.engine.tokenizer import Tokenizer, resolve_eos
from llmjax.errors import ModelError
from llmjax.model.checkpoint.json_file import read_json_object

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
# Vocabulary files of the time before tokenizer.json; transformers knows how each family reads them.
_OLD_FILES = ("tokenizer.model", "tekken.json", "vocab.json", "spiece.model", "vocab.txt")


def load_directory(path: Path) -> Tokenizer:
    """The tokenizer in `path`: tokenizer.json, and what the configuration files beside it add.

    tokenizer_config.json and special_tokens_map.json name the special tokens, generation_config.json more ends of
    sequence, and the chat template has its own files. Raises `ModelError` naming the file at fault.
    """
    config, names, generation = (
        _optional(path / name) for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
    )
    backend = _backend(path)
    special_tokens = {name: text for name in _NAMES if (text := _text(config.get(name)) or _text(names.get(name)))}
    _add_missing_tokens(backend, config, [*special_tokens.values(), *_extra_tokens(config), *_extra_tokens(names)], path)
    known = {name: text for name, text in special_tokens.items() if backend.token_to_id(text) is not None}
    _set_ends(backend, config, known)
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    eos_id = backend.token_to_id(known["eos_token"]) if "eos_token" in known else None
    where = str(path / "generation_config.json")
    return Tokenizer(
        backend,
        special_tokens=known,
        eos_ids=resolve_eos(eos_id, generation.get("eos_token_id"), vocab_size, where),
        chat_templates=read_templates(path, config),
        name=path.name,
    )


def _backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for everything
            raise ModelError(f"{file}: not a tokenizer that the tokenizers library can read: {error}") from None
    if not any((path / name).is_file() for name in _OLD_FILES):
        raise ModelError(f"{path}: no tokenizer.json (nor {', '.join(_OLD_FILES)}): copy it from the model this one came from")
    import transformers  # seconds to import, so only here

    try:
        # Never code from the directory, never a download.
        slow = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # anything, from a missing sentencepiece to a parse error
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{path}: no tokenizer.json, and transformers cannot convert the older files: {reason}") from None
    backend = getattr(slow, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{path}: no tokenizer.json, and a {type(slow).__name__} cannot be converted to one")
    return backend


def _optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _text(value: Any) -> str | None:
    """A special token is written as its text or as an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _extra_tokens(config: Mapping[str, Any]) -> list[str]:
    values: list[Any] = []
    for name in _LISTS:
        field = config.get(name)
        values += field.values() if isinstance(field, Mapping) else field if isinstance(field, list) else ()
    return [text for value in values if (text := _text(value))]


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], specials: list[str], path: Path) -> None:
    """Tokens that only tokenizer_config.json lists, and named special tokens that tokenizer.json has as ordinary ones.

    A named special token that is in no vocabulary is left out: a new id would have no row in the model.
    """
    present = {added.content for added in backend.get_added_tokens_decoder().values()}
    entries = config.get("added_tokens_decoder") or {}
    try:
        listed = sorted((int(token), dict(entry)) for token, entry in entries.items())
        texts = [str(entry["content"]) for _, entry in listed]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ModelError(
            f"{path / 'tokenizer_config.json'}: added_tokens_decoder must map ids to objects with a content"
        ) from None
    for (token, entry), text in zip(listed, texts, strict=True):
        if text in present:
            continue
        flags = {flag: bool(entry.get(flag, False)) for flag in ("lstrip", "rstrip", "single_word", "special", "normalized")}
        backend.add_tokens([tokenizers.AddedToken(text, **flags)])
        present.add(text)
        if backend.token_to_id(text) != token:
            raise ModelError(
                f"{path}: tokenizer_config.json gives {text!r} the id {token}, which does not follow from tokenizer.json; "
                f"save the tokenizer again with transformers"
            )
    for text in specials:
        if text not in present and backend.token_to_id(text) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True)])


def _set_ends(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Obey `add_bos_token` and `add_eos_token` where tokenizer_config.json has them and tokenizer.json does otherwise."""
    bos, eos = special_tokens.get("bos_token"), special_tokens.get("eos_token")
    around = backend.encode("").ids
    has_bos = bos is not None and around[:1] == [backend.token_to_id(bos)]
    rest = around[has_bos:]  # one token may be both, and a single one is the BOS
    has_eos = eos is not None and rest[-1:] == [backend.token_to_id(eos)]
    wants_bos, wants_eos = config.get("add_bos_token"), config.get("add_eos_token")
    put_bos = bos is not None and (wants_bos if isinstance(wants_bos, bool) else has_bos)
    put_eos = eos is not None and (wants_eos if isinstance(wants_eos, bool) else has_eos)
    if (put_bos, put_eos) != (has_bos, has_eos):
        put_ends(backend, bos if put_bos else None, eos if put_eos else None)


def put_ends(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `backend` put these tokens, which are in its vocabulary, around every text."""
    ends = {"bos": bos, "eos": eos}
    tokens = [
        {"id": name, "ids": [backend.token_to_id(text)], "tokens": [text]} for name, text in ends.items() if text is not None
    ]
    single = [*(["bos"] if bos is not None else []), "$A", *(["eos"] if eos is not None else [])]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=tokens)
