"""From a token's string to its bytes: the two ways byte-exact tokenizers write bytes into a vocabulary.

Owns the reading of a tokenizer's decoder. A decoder is byte-exact when the bytes of a text are the bytes of its tokens,
one after the other; then a text can be decoded token by token. Knows nothing of files, prompts or streams.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True)
class PieceDecoder:
    """How one vocabulary writes bytes.

    Attributes:
        to_bytes: a token's string in the vocabulary -> its bytes.
        added_are_plain: strings of added tokens are the text itself and do not go through `to_bytes`.
        strips_leading_space: the text as a whole loses one space at its start (sentencepiece puts one there to encode).
    """

    to_bytes: Callable[[str], bytes]
    added_are_plain: bool
    strips_leading_space: bool = False


def piece_decoder(decoder: Mapping[str, Any] | None) -> PieceDecoder | None:
    """The rule behind the decoder of a tokenizer.json (its JSON object), or None when it is not byte-exact."""
    if decoder is None:
        return None
    steps = list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceDecoder(byte_level_bytes, added_are_plain=True)
    return _sentencepiece(steps, kinds)


def _sentencepiece(steps: list[Mapping[str, Any]], kinds: list[str]) -> PieceDecoder | None:
    """Replace (the mark for a space), ByteFallback, Fuse and maybe Strip, in this order; anything else is not byte-exact."""
    strips = kinds[-1:] == ["Strip"]
    if (kinds[:-1] if strips else kinds) != ["Replace", "ByteFallback", "Fuse"]:
        return None
    if strips and (steps[3].get("content"), steps[3].get("start"), steps[3].get("stop")) != (" ", 1, 0):
        return None
    pattern = steps[0].get("pattern")
    mark = pattern.get("String") if isinstance(pattern, Mapping) else None
    if not isinstance(mark, str) or not mark:
        return None
    content = str(steps[0].get("content", ""))

    def to_bytes(piece: str) -> bytes:
        byte = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(mark, content).encode()

    return PieceDecoder(to_bytes, added_are_plain=False, strips_leading_space=strips)


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level BPE piece; a piece with any other character stands for its own UTF-8."""
    try:
        return bytes(map(BYTE_LEVEL_CHARS.__getitem__, piece))
    except KeyError:
        return piece.encode()


def _byte_level_chars() -> dict[str, int]:
    """GPT-2's alphabet (Radford et al. 2019): printable Latin-1 stands for itself, the other bytes, in order, for U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_LEVEL_CHARS = _byte_level_chars()
