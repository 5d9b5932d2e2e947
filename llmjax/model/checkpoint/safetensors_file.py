"""Open one .safetensors file safely: its table checked against the file's size, its tensors memory-mapped. Host only.

Format: eight bytes of header length, a JSON header, then the tensors' bytes without gaps
(https://huggingface.co/docs/safetensors). There is no code in it to run.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llmjax.errors import ModelError, UnsupportedModelError
from llmjax.model.checkpoint.json_file import parse_json_object

_MAX_HEADER = 100_000_000  # the format's own limit

_FLOATS: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor: its dtype as the file spells it, shape, first byte (from the start of the file) and bytes."""

    type_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsFile:
    """A mapped file whose table was checked. Raises `ModelError`, naming the file, if it is damaged or truncated.

    Attributes:
        path: where it lies.
        tensors: name -> entry.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                if size < 8:
                    raise ModelError(f"{path}: truncated safetensors file: {size} bytes; download it again")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{path}: cannot read the safetensors file: {error.strerror or error}") from None
        try:
            self.tensors = _read_table(path, self._map)
        except BaseException:
            self._map.close()
            raise

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def read_into(self, name: str, out: np.ndarray[Any, Any]) -> None:
        """Copy tensor `name` into the C-contiguous array `out`: floats, cast to its dtype, or int8 as it is."""
        entry = self.tensors[name]
        kinds = {"I8": np.int8} if out.dtype == np.int8 else _FLOATS
        if entry.type_name not in kinds:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} is {entry.type_name}; weights must be one of {', '.join(kinds)}"
            )
        count = math.prod(entry.shape)
        assert out.size == count, (name, out.shape, entry.shape)
        assert out.flags.c_contiguous
        out.reshape(-1)[:] = np.frombuffer(self._map, np.uint8, entry.num_bytes, entry.offset).view(kinds[entry.type_name])


def _read_table(path: Path, data: mmap.mmap) -> dict[str, SafetensorsEntry]:
    length = int.from_bytes(data[:8], "little")
    if length > _MAX_HEADER or length > len(data) - 8:
        raise ModelError(
            f"{path}: truncated or not a safetensors file: its header claims {length} bytes, the file has {len(data)}"
        )
    header = parse_json_object(data[8 : 8 + length], path)
    start = 8 + length
    tensors = {name: _entry(path, name, value, start) for name, value in header.items() if name != "__metadata__"}
    end = start
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if entry.offset != end:
            raise ModelError(f"{path}: damaged safetensors file: tensor {name!r} leaves a gap or overlaps; download it again")
        end += entry.num_bytes
    if end != len(data):
        what = "truncated" if end > len(data) else "damaged"
        raise ModelError(
            f"{path}: {what} safetensors file: its header needs {end} bytes, the file has {len(data)}; download it again"
        )
    return tensors


def _entry(path: Path, name: str, value: Any, start: int) -> SafetensorsEntry:
    try:
        kind, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        numbers = (*shape, begin, end)
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{path}: damaged safetensors file: the entry of tensor {name!r} cannot be read") from None
    if kind not in _ITEM_SIZES:
        raise UnsupportedModelError(f"{path}: tensor {name!r} has dtype {kind!r}, which is not known")
    whole = all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers)
    if not whole or end - begin != math.prod(shape) * _ITEM_SIZES[kind]:
        raise ModelError(f"{path}: damaged safetensors file: shape and offsets of tensor {name!r} do not agree")
    return SafetensorsEntry(kind, shape, start + begin, end - begin)
