"""The GGUF container: block types against the gguf package, and hostile headers."""

from __future__ import annotations

import os
import struct

import gguf
import numpy as np
import pytest
from fake_checkpoints import random_weights, tiny_config, write_gguf

from llmjax.errors import LlmjaxError, ModelError, UnsupportedModelError
from llmjax.model.checkpoint.gguf_file import GGUFFile, is_gguf, read_metadata


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    config = tiny_config()
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    metadata = {
        "test.list": [1, 2, 3],
        "test.floats": [0.5, -1.5],
        "test.flag": True,
        "test.text": "héllo 模型",
        "tokenizer.ggml.tokens": ["a", "é", ""],
    }
    write_gguf(path, config, random_weights(config), metadata=metadata)
    return path


def header(num_tensors: int = 0, num_values: int = 0, *, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_values)


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def test_metadata_are_plain_values(good):
    metadata = read_metadata(good)
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 2
    assert metadata["test.list"] == [1, 2, 3]
    assert metadata["test.floats"] == [0.5, -1.5]
    assert metadata["test.flag"] is True
    assert metadata["test.text"] == "héllo 模型"
    assert metadata["tokenizer.ggml.tokens"] == ["a", "é", ""]


def test_tensors_agree_with_the_package(good):
    reader = gguf.GGUFReader(good)
    with GGUFFile(good) as file:
        assert [t.name for t in reader.tensors] == list(file.tensors)
        for expected in reader.tensors:
            info = file.tensors[expected.name]
            assert info.shape == tuple(reversed(expected.shape.tolist()))
            assert (info.offset, info.num_bytes) == (expected.data_offset, expected.n_bytes)
            out = np.empty(info.shape, np.float32)
            file.read_into(expected.name, out)
            np.testing.assert_array_equal(out, expected.data)


def quantised_rows(kind: gguf.GGMLQuantizationType, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a matrix of a type the package can read but not write: random codes, finite scales."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows, columns // block, size), np.uint8)
    scale = rng.uniform(-1, 1, (rows, columns // block, 2)).astype(np.float16).view(np.uint8)
    if kind == gguf.GGMLQuantizationType.Q4_K:
        data[..., :4] = scale
    else:
        data[..., -2:] = scale[..., :2]
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K"])
def test_every_type_dequantises_as_in_the_package(kind, tmp_path):
    rng = np.random.default_rng(3)
    number = gguf.GGMLQuantizationType[kind]
    values = rng.standard_normal((40, 512)).astype(np.float32)
    if kind in ("Q4_K", "Q6_K"):
        raw = quantised_rows(number, 40, 512, rng)
    elif kind in ("F32", "F16"):
        raw = values.astype({"F32": np.float32, "F16": np.float16}[kind])
    else:
        raw = gguf.quantize(values, number)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = gguf.dequantize(raw, number)
    assert np.isfinite(expected).all()
    with GGUFFile(tmp_path / "t.gguf") as file:
        assert (file.tensors["t"].type_name, file.tensors["t"].shape) == (kind, (40, 512))
        out = np.full((40, 512), np.nan, np.float32)
        file.read_into("t", out)
        np.testing.assert_array_equal(out, expected)
        half = np.empty((40, 512), np.float16)
        file.read_into("t", half)
        np.testing.assert_array_equal(half, expected.astype(np.float16))
    if not kind.endswith("_K"):
        tolerance = {"F32": 0, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 3e-2, "Q5_0": 0.2, "Q4_1": 0.3, "Q4_0": 0.4}[kind]
        np.testing.assert_allclose(out, values, atol=tolerance)


def test_tensors_larger_than_one_piece(tmp_path):
    values = np.random.default_rng(0).standard_normal((300, 1024)).astype(np.float32)  # 9600 blocks
    raw = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    out = np.empty(values.shape, np.float32)
    with GGUFFile(tmp_path / "t.gguf") as file:
        file.read_into("t", out)
    np.testing.assert_array_equal(out, gguf.dequantize(raw, gguf.GGMLQuantizationType.Q8_0))


HUGE = 2**60
HOSTILE = {
    "empty": (b"", "not a GGUF"),
    "wrong magic": (header(magic=b"GGML"), "magic"),
    "only the magic": (b"GGUF", "truncated or damaged GGUF: version needs 4 bytes"),
    "version 1": (header(version=1), "version 1 is not supported"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "too many tensors": (header(HUGE, 0), "number of tensors is 1152921504606846976"),
    "too many values": (header(0, HUGE), "number of metadata values is"),
    "counts at the limit": (header(2**64 - 1, 2**64 - 1), "damaged GGUF"),
    "long key": (header(0, 1) + struct.pack("<Q", HUGE) + b"k" * 20, "metadata key needs 1152921504606846976 bytes"),
    "long string": (header(0, 1) + text("k") + struct.pack("<IQ", 8, HUGE), "value of 'k' needs"),
    "long array": (header(0, 1) + text("k") + struct.pack("<IIQ", 9, 6, HUGE), "length of 'k' is"),
    "long array of strings": (header(0, 1) + text("k") + struct.pack("<IIQ", 9, 8, HUGE), "length of 'k' is"),
    "array of arrays": (header(0, 1) + text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50, "more than 4 deep"),
    "unknown value type": (header(0, 1) + text("k") + struct.pack("<I", 77) + bytes(9), "unknown value type 77"),
    "unknown item type": (header(0, 1) + text("k") + struct.pack("<IIQ", 9, 77, 2) + bytes(9), "unknown value type 77"),
    "key not UTF-8": (header(0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(20), "not UTF-8"),
    "key twice": (header(0, 2) + (text("k") + struct.pack("<IB", 0, 1)) * 2, "'k' appears twice"),
    "alignment 0": (header(0, 1) + text("general.alignment") + struct.pack("<II", 4, 0), "must be a power of two"),
    "alignment text": (header(0, 1) + text("general.alignment") + struct.pack("<I", 8) + text("x"), "must be a power of two"),
    "no dimensions": (header(1) + tensor("t", [], 0, 0) + bytes(64), "has 0 dimensions"),
    "many dimensions": (header(1) + text("t") + struct.pack("<I", 2**31) + bytes(64), "2147483648 dimensions"),
    "zero size": (header(1) + tensor("t", [32, 0], 0, 0) + bytes(64), r"shape \(0, 32\), impossible"),
    "product overflows 64 bits": (header(1) + tensor("t", [2**32, 2**32], 0, 0) + bytes(64), "truncated GGUF: tensor 't'"),
    "beyond the end": (header(1) + tensor("t", [32], 0, 2**40) + bytes(200), "truncated GGUF: tensor 't'"),
    "partly beyond the end": (header(1) + tensor("t", [32], 0, 32) + bytes(96), "truncated GGUF: tensor 't'"),
    "unaligned": (header(1) + tensor("t", [8], 0, 4) + bytes(200), "not a multiple of 32"),
    "half a block": (header(1) + tensor("t", [48], 8, 0) + bytes(200), "impossible for type Q8_0"),
    "tensor twice": (header(2) + tensor("t", [8], 0, 0) * 2 + bytes(200), "'t' appears twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_with_the_files_name(name, tmp_path):
    data, message = HOSTILE[name]
    path = tmp_path / "bad 模型.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message) as error:
        GGUFFile(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("number", "name"), [(10, "Q2_K"), (7, "Q5_1"), (22, "IQ2_S"), (24, "I8"), (4, "number 4"), (9999, "number 9999")]
)
def test_other_tensor_types_are_refused_by_name(number, name, tmp_path):
    path = tmp_path / "t.gguf"
    path.write_bytes(header(2) + tensor("ok", [8], 0, 0) + tensor("blk.0.t", [256], number, 32) + bytes(4096))
    with pytest.raises(UnsupportedModelError, match=rf"tensor type {name} is not supported \(1 tensors, first 'blk.0.t'\); use"):
        GGUFFile(path)
    assert read_metadata(path) == {}


def test_every_cut_is_an_error_not_a_crash(good, tmp_path):
    data = good.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 3000, 41), *range(3000, len(data), 17001), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(LlmjaxError):
            GGUFFile(path)


def test_random_damage_in_the_header_never_crashes(good, tmp_path):
    rng = np.random.default_rng(1)
    data = good.read_bytes()
    path = tmp_path / "damaged.gguf"
    for _ in range(200):
        bad = bytearray(data)
        for position in rng.integers(0, 2500, 4):
            bad[position] = rng.integers(0, 256)
        path.write_bytes(bad)
        try:
            GGUFFile(path).close()
        except LlmjaxError:
            continue


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ModelError, match=r"none.gguf: cannot read the GGUF file: No such file"):
        read_metadata(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="Is a directory"):
        read_metadata(tmp_path)
    assert not is_gguf(tmp_path)


def test_a_sparse_file_with_a_huge_array_allocates_nothing(tmp_path):
    path = tmp_path / "sparse.gguf"
    path.write_bytes(header(0, 1) + text("k") + struct.pack("<IIQ", 9, 0, 2**33))
    os.truncate(path, 2**34)
    with pytest.raises(ModelError, match="at most 16777216 are read"):
        read_metadata(path)
