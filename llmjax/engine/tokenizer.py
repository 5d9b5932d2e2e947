"""`Tokenizer`: text to token ids and back, one class for every model. Host only; knows nothing of requests or streams.

Encoding is the `tokenizers` library's. Decoding goes over bytes: for byte-level BPE and sentencepiece vocabularies (every
family served here) a text is exactly the bytes of its tokens, so that it can be streamed and told apart token by token.
`load_tokenizer` opens a Hugging Face directory or a GGUF file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from llmjax.engine.chat_template import DEFAULT, TEMPLATE_FILE, check_messages, render_template
from llmjax.engine.token_pieces import piece_decoder
from llmjax.errors import ModelError, RequestError
from llmjax.model.checkpoint.eos import collect_eos_ids

log = logging.getLogger(__name__)

_TOOL_TEMPLATE = "tool_use"


def needed[T](tokenizer: T | None, what: str) -> T:
    """An engine's tokenizer. Raises `RequestError` where it has none, and so cannot take `what`."""
    if tokenizer is None:
        raise RequestError(f"{what} needs a tokenizer, and this engine has none: give token ids, or a tokenizer", "prompt")
    return tokenizer


class Tokenizer:
    """A `tokenizers.Tokenizer` with what serving needs around it.

    Special tokens written out in a text ("<|im_end|>") become their ids, as everywhere in this ecosystem: whoever builds
    prompts from untrusted text has to look for them.

    Args:
        backend: owned by this object from here on.
        special_tokens: the model's names for its tokens ("bos_token", "eos_token", "pad_token", …); templates see them.
        eos_ids: ids that end an output, besides the one of "eos_token".
        chat_templates: by name; "default" is the usual one.
        name: the model's, for messages.

    Attributes:
        bos_id: id of "bos_token", None without one.
        eos_ids: each id that ends an output according to the tokenizer's files.
        special_ids: ids that `skip_special_tokens` leaves out of a text.
        vocab_size: one more than the highest id with a string; rows of the model's vocabulary from there on are padding.
        adds_bos: `encode` puts the BOS in front of a text unless told not to.
        strips_leading_space: a text as a whole loses one space at its start (sentencepiece).
        is_byte_exact: texts are the bytes of their tokens. False only for rare kinds such as WordPiece.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        name: str = "this tokenizer",
    ) -> None:
        # A tokenizer.json may ask for both, for training batches; a prompt is neither cut nor filled up.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._templates = dict(chat_templates or {})
        self._name = name
        self._added: dict[int, Any] = backend.get_added_tokens_decoder()
        decoder = backend.decoder
        self._pieces = piece_decoder(None if decoder is None else json.loads(decoder.__getstate__()))
        self._bytes: dict[int, bytes] = {}
        self._warned_of_bos = False
        self.is_byte_exact = self._pieces is not None
        self.strips_leading_space = self._pieces is not None and self._pieces.strips_leading_space
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids = frozenset(token for token, added in self._added.items() if added.special)
        self.bos_id = self.token_id("bos_token")
        eos_id = self.token_id("eos_token")
        self.eos_ids = tuple(dict.fromkeys((*(() if eos_id is None else (eos_id,)), *eos_ids)))
        self.adds_bos = self.bos_id is not None and backend.encode("").ids[:1] == [self.bos_id]

    def token_id(self, special_token: str) -> int | None:
        """Id of a special token by the model's name for it ("eos_token"), None when there is none."""
        text = self._special_tokens.get(special_token)
        token: int | None = None if text is None else self._backend.token_to_id(text)
        return token

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        With `add_special_tokens` (the default, as in transformers) the tokenizer's own special tokens go around it, such
        as a BOS. They do so even when the text already starts with the BOS; a warning then says so, once.

        Raises `RequestError` for a text with lone surrogates (half of a UTF-16 pair: no Unicode text). NUL is a character
        like any other.
        """
        if not isinstance(text, str):
            raise RequestError(f"a prompt must be text, got {type(text).__name__}", "prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has a lone surrogate (\\u{ord(text[error.start]):04x}) at character {error.start}: "
                f"it is half of a character, send the whole one",
                "prompt",
            ) from None
        if add_special_tokens and self.adds_bos and not self._warned_of_bos:
            bos = self._special_tokens["bos_token"]
            if text.startswith(bos):
                self._warned_of_bos = True
                log.warning("a prompt already starts with %s and gets a second one: pass add_special_tokens=False", bos)
        # Not `encode`: that one holds the interpreter's lock, so that a long text on a thread would stop all the others.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD, one for each maximal part of a character.

        Spaces are never "cleaned up", so that the text of a prompt comes back as it was. Ids without a string are empty.
        """
        kept = [token for token in ids if not (skip_special_tokens and token in self.special_ids)]
        if not self.is_byte_exact:
            known = [token for token in kept if 0 <= token < self.vocab_size]
            text: str = self._backend.decode(known, skip_special_tokens=False)
            return text
        data = b"".join(map(self.token_bytes, kept))
        return (data.removeprefix(b" ") if self.strips_leading_space else data).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text, often less or more than a character. b"" for ids without a string.

        Where the tokenizer is not byte-exact: what the token adds behind another one.
        """
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._token_bytes(token_id)
        return data

    def _token_bytes(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if piece is None:
            return b""
        if self._pieces is None:
            first: str = self._backend.decode([0], skip_special_tokens=False)
            both: str = self._backend.decode([0, token_id], skip_special_tokens=False)
            return (both.removeprefix(first) if both.startswith(first) else piece).encode()
        if self._pieces.added_are_plain and token_id in self._added:
            return str(piece).encode()
        return self._pieces.to_bytes(piece)

    def token_strings(self) -> dict[int, str]:
        """Every id that has a string, and the string as the vocabulary spells it: two tokenizers are one if these are."""
        return {token: text for text, token in self._backend.get_vocab(with_added_tokens=True).items()}

    @property
    def chat_template(self) -> str | None:
        """The model's usual chat template, None for a model without one."""
        return self._templates.get(DEFAULT)

    @property
    def tool_template(self) -> str | None:
        """The template that a conversation with tools is rendered with, None without a usual one."""
        return self._templates.get(_TOOL_TEMPLATE, self.chat_template)

    def added_id(self, text: str) -> int | None:
        """Id of the token that was added to the vocabulary as this text, such as a mark of a chat template. None without one."""
        token: int | None = self._backend.token_to_id(text)
        return token if token in self._added else None

    def use_chat_template(self, template: str) -> None:
        """Use a Jinja text in place of all of the model's own chat templates."""
        self._templates = {DEFAULT: template}

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """A conversation as the text of a prompt, to be encoded with `add_special_tokens=False`: templates write the BOS.

        Args:
            messages: objects with role and content (a text, or text parts, which are joined).
            add_generation_prompt: end with the beginning of the assistant's answer.
            template: the name of one of the model's templates, or a Jinja text; default: the model's own.
            tools: JSON descriptions of functions, for templates that know them.
            variables: whatever else the template reads, such as `enable_thinking`.

        Raises `RequestError`: the messages are malformed, there is no template, or it refuses or fails.
        """
        text = self._template(template, tools)
        checked = check_messages(messages)
        names = {**self._special_tokens, **variables, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return render_template(text, checked, names)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation: `render_chat`, encoded with exactly the special tokens that the template writes."""
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, template=template, tools=tools, **variables
        )
        return self.encode(text, add_special_tokens=False)

    def _template(self, wanted: str | None, tools: Sequence[Mapping[str, Any]] | None) -> str:
        if wanted is not None:
            return self._templates.get(wanted, wanted)
        if tools is not None and _TOOL_TEMPLATE in self._templates:
            return self._templates[_TOOL_TEMPLATE]
        if DEFAULT in self._templates:
            return self._templates[DEFAULT]
        if self._templates:
            names = ", ".join(sorted(self._templates))
            raise RequestError(
                f"{self._name} has several chat templates and no default: pass template= one of {names}", "messages"
            )
        raise RequestError(
            f"{self._name} has no chat template (base models have none): put a {TEMPLATE_FILE} beside its tokenizer files, "
            f"pass template=…, or send a plain prompt",
            "messages",
        )


def resolve_eos(
    eos_id: int | None, generation_eos: Any, vocab_size: int, where: str = "generation_config.json"
) -> tuple[int, ...]:
    """Every id that ends an output: the tokenizer's own, then those of a generation config (an id, a list, or None).

    Both count, since either may know only one of several (the end of a turn, the end of a text). Raises `ModelError`,
    naming `where`, for anything that is not a whole number; ids outside the vocabulary are left out.
    """
    return collect_eos_ids([("the tokenizer", eos_id), (where, generation_eos)], vocab_size)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or of a GGUF file.

    Raises `ModelError` naming the file that is missing or malformed, and `UnsupportedModelError` for a GGUF whose
    tokenizer or pre-tokenizer is of a kind we cannot build exactly.
    """
    from llmjax.model.checkpoint.gguf_file import is_gguf, read_metadata

    path = Path(path)
    if path.is_dir():
        from llmjax.engine.hf_tokenizer import load_directory

        return load_directory(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory, so no tokenizer")
    if not is_gguf(path):
        raise ModelError(f"{path}: neither a GGUF file nor a directory with a tokenizer.json")
    from llmjax.engine.gguf_tokenizer import tokenizer_from_metadata

    return tokenizer_from_metadata(read_metadata(path), path)
