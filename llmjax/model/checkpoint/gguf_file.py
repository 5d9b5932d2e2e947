"""Open a GGUF file safely: its metadata as plain values, its tensors as memory-mapped bytes.

Owns the file format (magic, version, key-values, tensor table, block types) and the check of every count, length and
offset in the header against the file's size *before* anything is allocated by it. Host only: no JAX, so that the
tokenizer and `llmjax inspect` can use it. Knows nothing of architectures; `gguf.py` maps names and shapes.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llmjax.errors import ModelError, UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_ARRAY_ITEMS = 1 << 24  # a vocabulary has less than a million; a list of Python objects costs far more than its bytes
_MAX_ARRAY_DEPTH = 4
_DEQUANTISE_BLOCKS = 8192  # about 1 MB of float32 at a time stays in the cache and bounds the temporary

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# Value type number -> numpy dtype (metadata). 7 is bool, 8 string, 9 array.
_NUMBERS: dict[int, str] = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Tensor type number -> (name, elements a block, bytes a block).
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_PLAIN_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor table.

    Attributes:
        name: as written in the file.
        shape: outermost dimension first (the file stores the reverse).
        type_number: key of `TENSOR_TYPES`.
        offset: first byte, counted from the start of the file.
        num_bytes: bytes in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int
    num_bytes: int

    @property
    def type_name(self) -> str:
        """Name of the block type, e.g. "Q4_K"."""
        return TENSOR_TYPES[self.type_number][0]


class _Header:
    """A cursor over the mapped file that never reads past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def take(self, num_bytes: int, what: str) -> int:
        """Advance over `num_bytes` and return where they start; ModelError if the file is shorter."""
        start = self.position
        if num_bytes > self.size - start:
            raise ModelError(
                f"{self.path}: truncated or damaged GGUF: {what} needs {num_bytes} bytes at offset {start}, "
                f"the file has {self.size}; download it again"
            )
        self.position = start + num_bytes
        return start

    def count(self, what: str, min_bytes_each: int) -> int:
        """Read a 64-bit count and check that so many items can be in the rest of the file."""
        value = self.u64(what)
        if value * min_bytes_each > self.size - self.position:
            raise ModelError(
                f"{self.path}: damaged GGUF: {what} is {value}, which cannot fit into the {self.size} bytes of the file; "
                "download it again"
            )
        return value

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def string(self, what: str) -> str:
        length = self.u64(what)
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{self.path}: damaged GGUF: {what} at offset {start} is not UTF-8") from None

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(f"value of {key!r}")
        if kind == _BOOL:
            return bool(self.data[self.take(1, f"value of {key!r}")])
        if kind in _NUMBERS:
            return self._numbers(_NUMBERS[kind], 1, key)[0]
        if kind == _ARRAY:
            return self._array(key, depth)
        raise ModelError(f"{self.path}: damaged GGUF: metadata {key!r} has unknown value type {kind}")

    def _numbers(self, dtype: str, count: int, key: str) -> list[Any]:
        start = self.take(count * np.dtype(dtype).itemsize, f"value of {key!r}")
        # A copy through bytes: views on the map would keep it from being closed.
        return np.frombuffer(self.data[start : self.position], dtype).tolist()

    def _array(self, key: str, depth: int) -> list[Any]:
        if depth >= _MAX_ARRAY_DEPTH:
            raise ModelError(f"{self.path}: damaged GGUF: metadata {key!r} nests arrays more than {_MAX_ARRAY_DEPTH} deep")
        kind = self.u32(f"type of {key!r}")
        smallest = {_STRING: 8, _ARRAY: 12}.get(kind) or (np.dtype(_NUMBERS[kind]).itemsize if kind in _NUMBERS else 1)
        count = self.count(f"length of {key!r}", smallest)
        if count > _MAX_ARRAY_ITEMS:
            raise ModelError(f"{self.path}: metadata {key!r} has {count} items; at most {_MAX_ARRAY_ITEMS} are read")
        if kind in _NUMBERS:
            return self._numbers(_NUMBERS[kind], count, key)
        return [self.value(kind, key, depth + 1) for _ in range(count)]


class GGUFFile:
    """A GGUF whose whole header was checked. Tensor data stay in the file (memory map) until they are read.

    Opening raises `ModelError` (wrong magic, truncated, impossible sizes) or `UnsupportedModelError` (a tensor of a
    type that is not read here) before any weight is touched. Reading is safe from several threads. Use as a context
    manager, or call `close`; arrays returned by `read_into` are copies and outlive the file.

    Attributes:
        path: where it lies.
        metadata: key-values as plain Python values; arrays are lists.
        tensors: name -> `TensorInfo`, in file order.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._map = _map_file(self.path)
        try:
            header = _Header(self.path, self._map)
            num_tensors, self.metadata = _read_preamble(header)
            self.tensors = _read_tensor_table(header, num_tensors, self.metadata)
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Dequantise tensor `name` into `out`, cast to its dtype.

        Args:
            name: a key of `tensors`.
            out: C-contiguous float array with as many elements as the tensor; overwritten.
        """
        info = self.tensors[name]
        assert out.size == math.prod(info.shape), (name, out.shape, info.shape)
        assert out.flags.c_contiguous
        flat = out.reshape(-1)
        type_name, block, block_bytes = TENSOR_TYPES[info.type_number]
        raw = np.frombuffer(self._map, np.uint8, count=info.num_bytes, offset=info.offset)
        if type_name in _PLAIN_DTYPES:
            flat[:] = raw.view(_PLAIN_DTYPES[type_name])
            return
        import gguf  # 0.5 s to import, and only needed for quantised tensors

        kind = gguf.GGMLQuantizationType(info.type_number)
        step = _DEQUANTISE_BLOCKS
        for first in range(0, info.num_bytes // block_bytes, step):
            piece = raw[first * block_bytes : (first + step) * block_bytes]
            # One row of many blocks: the package works in groups of 16 rows, slow for narrow matrices.
            flat[first * block : (first + step) * block] = gguf.dequantize(piece.reshape(1, -1), kind)[0]


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The key-values of a GGUF as plain Python values (arrays as lists), without looking at its tensors.

    Raises `ModelError`, naming the file, when it cannot be read, is no GGUF, is truncated or has impossible sizes.
    """
    path = Path(path)
    with _map_file(path) as data:
        return _read_preamble(_Header(path, data))[1]


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins with GGUF's magic bytes; False when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == _MAGIC
    except OSError:
        return False


def _map_file(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            if file.read(4) != _MAGIC:
                raise ModelError(f"{path}: not a GGUF file (it does not begin with the magic bytes 'GGUF')")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: cannot read the GGUF file: {error.strerror or error}") from None


def _read_preamble(header: _Header) -> tuple[int, dict[str, Any]]:
    """Magic, version, counts and key-values; returns (number of tensors, metadata)."""
    path = header.path
    header.take(4, "magic")
    version = header.u32("version")
    if version not in _VERSIONS:
        if version & 0xFFFF == 0:
            raise UnsupportedModelError(f"{path}: big-endian GGUF files are not supported; convert it to little endian")
        raise UnsupportedModelError(f"{path}: GGUF version {version} is not supported (2 and 3 are); convert it anew")
    num_tensors = header.u64("number of tensors")
    num_values = header.count("number of metadata values", 13)
    if num_tensors * 24 > header.size - header.position:
        raise ModelError(
            f"{path}: damaged GGUF: number of tensors is {num_tensors}, which cannot fit into the {header.size} bytes of the "
            "file; download it again"
        )
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = header.string("metadata key")
        if key in metadata:
            raise ModelError(f"{path}: damaged GGUF: metadata {key!r} appears twice")
        metadata[key] = header.value(header.u32(f"type of {key!r}"), key)
    return num_tensors, metadata


def _read_tensor_table(header: _Header, num_tensors: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
    path = header.path
    entries: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(num_tensors):
        name = header.string("tensor name")
        num_dims = header.u32(f"dimensions of {name!r}")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ModelError(f"{path}: damaged GGUF: tensor {name!r} has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible")
        shape = tuple(reversed([header.u64(f"shape of {name!r}") for _ in range(num_dims)]))
        entries.append((name, shape, header.u32(f"type of {name!r}"), header.u64(f"offset of {name!r}")))

    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"{path}: damaged GGUF: general.alignment is {alignment!r}; it must be a power of two")
    data_start = -(-header.position // alignment) * alignment

    _refuse_other_types(path, entries)
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_number, offset in entries:
        if name in tensors:
            raise ModelError(f"{path}: damaged GGUF: tensor {name!r} appears twice")
        type_name, block, block_bytes = TENSOR_TYPES[type_number]
        if min(shape) < 1 or shape[-1] % block:
            raise ModelError(f"{path}: damaged GGUF: tensor {name!r} has shape {shape}, impossible for type {type_name}")
        if offset % alignment:
            raise ModelError(f"{path}: damaged GGUF: tensor {name!r} lies at {offset}, not a multiple of {alignment}")
        num_bytes = math.prod(shape) // block * block_bytes
        start = data_start + offset
        if start + num_bytes > header.size:
            raise ModelError(
                f"{path}: truncated GGUF: tensor {name!r} {shape} {type_name} ends at byte {start + num_bytes}, "
                f"the file has {header.size}; download it again"
            )
        tensors[name] = TensorInfo(name, shape, type_number, start, num_bytes)
    return tensors


def _refuse_other_types(path: Path, entries: list[tuple[str, tuple[int, ...], int, int]]) -> None:
    other = [(name, number) for name, _, number, _ in entries if number not in TENSOR_TYPES]
    if not other:
        return
    import gguf

    def type_name(number: int) -> str:
        try:
            return str(gguf.GGMLQuantizationType(number).name)
        except ValueError:
            return f"number {number}"

    types = ", ".join(sorted({type_name(number) for _, number in other}))
    known = ", ".join(name for name, _, _ in TENSOR_TYPES.values())
    raise UnsupportedModelError(
        f"{path}: tensor type {types} is not supported ({len(other)} tensors, first {other[0][0]!r}); use a file of {known}"
    )
