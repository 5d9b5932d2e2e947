"""The tuning tables: which entry a call gets, for which device a trace is, and that the shipped files fit the kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import smoke, tuning

H200 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    yield tmp_path
    tuning.load.cache_clear()


def entry(**key: int | str) -> tuning.Entry:
    return {
        "key": key, "implementation": "mosaic", "config": {"splits": 2}, "microseconds": 10.5, "xla_microseconds": 20.0,
        "bytes_per_second": 3.3e12, "date": "2026-01-01", "command": "python -m bench.kernels --tune",
    }  # fmt: skip


def test_the_target_is_the_device_a_trace_is_for() -> None:
    assert jax.default_backend() == "cpu"
    assert tuning.target() is None
    seen = []
    with use_abstract_mesh(H200):
        assert tuning.target() == "NVIDIA H200"
        jax.jit(lambda x: (seen.append(tuning.target()), x)[1]).trace(jax.ShapeDtypeStruct((2,), np.float32))
    assert seen == ["NVIDIA H200"]
    with jax.default_device(jax.devices()[0]):
        assert tuning.target() is None


def test_a_device_without_a_file_has_no_entries(folder: Path) -> None:
    assert tuning.lookup("dense", {"tokens": 8}) is None
    with use_abstract_mesh(H200):
        assert tuning.lookup("dense", {"tokens": 8}) is None
    tuning.save(tuning.path_of("NVIDIA H200"), "NVIDIA H200", {"dense": [entry(tokens=8)]})
    with use_abstract_mesh(H200):
        assert tuning.lookup("dense", {"tokens": 8}) == entry(tokens=8)
        assert tuning.lookup("other", {"tokens": 8}) is None
    assert tuning.lookup("dense", {"tokens": 8}) is None  # on this CPU


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"rows": 1, "context": 100, "dtype": "bfloat16"}, (8, 256)),
        ({"rows": 8, "context": 256, "dtype": "bfloat16"}, (8, 256)),
        ({"rows": 9, "context": 257, "dtype": "bfloat16"}, (32, 2048)),
        ({"rows": 32, "context": 1, "dtype": "bfloat16"}, (32, 2048)),  # the smallest context tuned for these rows
        ({"rows": 300, "context": 9000, "dtype": "bfloat16"}, (32, 8192)),  # beyond both: the largest
        ({"rows": 8, "context": 5000, "dtype": "bfloat16"}, (32, 8192)),  # rather more rows than too short a context
        ({"rows": 8, "context": 9000, "dtype": "bfloat16"}, (8, 4096)),  # no entry has as much of both
        ({"rows": 8, "context": 256, "dtype": "float16"}, None),
        ({"rows": 8, "context": 256}, None),
        ({"rows": 8, "context": 256, "dtype": "bfloat16", "page": 16}, None),
    ],
)
def test_rows_and_contexts_go_up_to_the_next_tuned_or_down_to_the_largest(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, int | str], found: tuple[int, int] | None
) -> None:
    monkeypatch.setattr(tuning, "target", lambda: "Card")
    cases = [(32, 8192), (8, 256), (32, 2048), (8, 4096)]
    tuning.save(folder / "card.json", "Card", {"x": [entry(rows=r, context=c, dtype="bfloat16") for r, c in cases]})
    got = tuning.lookup("x", asked)
    assert (got and (got["key"]["rows"], got["key"]["context"])) == found


@pytest.mark.parametrize(("tokens", "found"), [(1, 1), (2, 8), (8, 8), (9, 64), (64, 64), (65, None)])
def test_tokens_go_up_but_not_beyond_the_largest(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, found: int | None
) -> None:
    monkeypatch.setattr(tuning, "target", lambda: "Card")
    cases = [entry(tokens=n, out=4096) for n in (64, 1, 8)] + [entry(tokens=256, out=1)]
    tuning.save(folder / "card.json", "Card", {"x": cases})
    got = tuning.lookup("x", {"tokens": tokens, "out": 4096})
    assert (got and got["key"]["tokens"]) == found


def test_a_file_does_not_depend_on_the_order_of_the_runs(folder: Path) -> None:
    path = folder / "card.json"
    first, second, third = entry(tokens=8), entry(tokens=16), entry(rows=1, dtype="bfloat16")
    tuning.save(path, "Card", {"b": [second], "a": [third]})
    tuning.save(path, "Card", {"b": [first]})
    text = path.read_text()
    path.unlink()
    tuning.save(path, "Card", {"a": [third], "b": [first, second]})
    assert path.read_text() == text
    assert json.loads(text)["device"] == "Card"
    assert max(map(len, text.splitlines())) < 300  # an entry is a line
    slower = entry(tokens=16) | {"microseconds": 99.0}
    tuning.save(path, "Card", {"b": [slower]})  # type: ignore[list-item]
    changed = [line for line in path.read_text().splitlines() if line not in text]
    assert len(changed) == 1
    assert tuning.load(path)["b"] == (first, slower)


def test_shipped_tables_fit_the_kernels_they_name() -> None:
    operations = {operation.name: operation for operation, *_ in smoke.PROBES}
    for path in tuning.FOLDER.glob("*.json"):
        assert path == tuning.path_of(json.loads(path.read_text())["device"])
        for name, found in tuning.load(path).items():
            for one in found:
                implementation = operations[name].implementations[one["implementation"]]  # else nobody checks it at start
                assert one["microseconds"] <= one["xla_microseconds"]
                if implementation.config_type is not None:
                    implementation.config_type(**one["config"])
