"""Programs kept between starts: what is kept is used, what does not fit any more is not, and a bad folder stops nobody."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS, random_params

from llmjax.engine import compile_store
from llmjax.engine.compile_counter import CompileCounter
from llmjax.engine.compile_programs import Shapes, abstract, compile_programs
from llmjax.engine.compile_store import ProgramStore
from llmjax.engine.config import EngineConfig
from llmjax.model.registry import get_model
from llmjax.telemetry.startup import Timeline

CONFIG = CONFIGS["llama"].replace(num_layers=1, sliding_windows=(0,))


def shapes(*, pages: int = 9, rows: tuple[int, ...] = (2,)) -> Shapes:
    options = EngineConfig(
        max_context=64, max_sequences=rows[-1], max_tokens_per_step=16, row_buckets=rows, token_buckets=(16,), decode_steps=1
    )
    engine_config = options.resolved(gpu=False, model_max_context=CONFIG.max_positions)
    return Shapes(CONFIG, abstract(random_params(CONFIG)), engine_config, pages)


def sources(sizes: Shapes, store: ProgramStore | None) -> tuple[dict[Any, Any], dict[str, str]]:
    """The executables, and where each program came from."""
    executables, programs = compile_programs(get_model("llama"), sizes, timeline=Timeline(), store=store)
    return executables, {program.name: program.source for program in programs}


def run(executable: Any, sizes: Shapes) -> tuple[Any, Any]:
    """An extend of five tokens of one prompt into page 1; the outputs as numpy, and the cache that was given away."""
    from llmjax.engine.state import init_state
    from llmjax.engine.step import extend_layout
    from llmjax.model.kv_cache import init_cache

    config = sizes.engine_config
    cache = init_cache(CONFIG, num_pages=sizes.num_pages, page_size=config.page_size)
    state = init_state(max_sequences=config.max_sequences, max_pages=sizes.engine_config.max_pages, vocab_size=CONFIG.vocab_size)
    layout = extend_layout(tokens=16, rows=config.max_sequences, page_size=config.page_size)
    fields = {name: np.zeros(size, np.int32) for name, size in layout.sizes}
    fields["tokens"][:5] = [3, 1, 4, 1, 5]
    fields["query_starts"][1:] = 5
    fields["rows"][:] = [0, config.max_sequences]
    fields["samples"][0] = 1
    fields["page_rows"][:] = config.max_sequences
    fields["page_rows"][0], fields["page_ids"][0] = 0, 1
    out = executable(random_params(CONFIG), state, layout.pack(**fields), cache)
    return jax.tree.map(np.asarray, out), cache


@pytest.fixture
def _everything_is_cached() -> Iterator[None]:
    """Small programs too."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 0.0)
    yield
    jax.config.update(name, before)


@pytest.mark.usefixtures("_everything_is_cached")
def test_b79_a_second_start_compiles_nothing_and_computes_the_same(tmp_path: Path) -> None:
    first, made = sources(shapes(), ProgramStore(tmp_path / "new" / "folder"))
    assert set(made.values()) == {"lowered"}
    counter = CompileCounter()
    second, found = sources(shapes(), ProgramStore(tmp_path / "new" / "folder"))
    assert set(found.values()) == {"store"}
    assert counter.hits == counter.count == len(made)  # what the store gives is to the bit what was compiled
    assert list(found) == list(made)
    key = ("extend", 16, 1)
    (expected, _), (got, given_away) = run(first[key], shapes()), run(second[key], shapes())
    assert expected[1].summary[0, 0, 0] >= 0  # it did sample
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given_away))  # donated, as before
    assert first[key].memory_analysis().alias_size_in_bytes == second[key].memory_analysis().alias_size_in_bytes > 0


def test_b79_only_changed_shapes_compile_anew(tmp_path: Path) -> None:
    sources(shapes(rows=(2,)), ProgramStore(tmp_path))
    seeded = dataclasses.replace(shapes().engine_config, seed=7, prefill_chunk=8, kv_cache_bytes=123456)
    _, found = sources(dataclasses.replace(shapes(), engine_config=seeded), ProgramStore(tmp_path))
    assert set(found.values()) == {"store"}  # numbers that no program depends on
    _, found = sources(shapes(rows=(1, 2)), ProgramStore(tmp_path))
    names = ("reset 8 rows", "wipe 16 pages", "decode 2 rows", "extend 16 tokens", "score 16 tokens")
    stored = dict.fromkeys(names, "store")
    assert found == stored | {"decode 1 rows": "lowered"}
    _, found = sources(shapes(pages=10), ProgramStore(tmp_path))
    assert found == dict.fromkeys(stored, "lowered")


def double(width: int = 3) -> Any:
    """A program that lowers in a moment."""
    exported = jax.export.export(jax.jit(lambda x: 2 * x))(jax.ShapeDtypeStruct((width,), jnp.float32))
    return dataclasses.replace(exported, _get_vjp=None)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_b79_a_damaged_entry_is_as_good_as_absent(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    store = ProgramStore(tmp_path)
    store.save("double", double())
    (path,) = tmp_path.glob("*.program")
    content = path.read_bytes()
    store._write(tmp_path / "junk", b"whole, but no program")
    bad = {
        "cut": content[: len(content) // 2],
        "flipped": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
        "empty": b"",
        "other": (tmp_path / "junk").read_bytes(),
    }
    path.write_bytes(bad[damage])
    assert store.load("double") is None
    assert "made again" in caplog.text
    store.save("double", double())
    loaded = store.load("double")
    assert loaded is not None
    np.testing.assert_array_equal(loaded.call(jnp.arange(3.0)), [0.0, 2.0, 4.0])


def test_b79_a_folder_that_is_only_read_still_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ProgramStore(tmp_path)
    store.save("double", double())

    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", denied)
    monkeypatch.setattr(os, "utime", denied)
    assert store.load("double") is not None
    store.save("other", double(4))
    store.note("fact", 1)
    assert (store.load("other"), store.recall("fact")) == (None, None)
    (tmp_path / "file").write_text("")
    nowhere = ProgramStore(tmp_path / "file" / "folder")
    nowhere.note("fact", 1)
    assert nowhere.recall("fact") is None


def test_nothing_is_found_when_what_surrounds_a_program_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ProgramStore(tmp_path).note("fact", 1)
    assert ProgramStore(tmp_path).recall("fact") == 1
    with jax.default_matmul_precision("highest"):
        assert ProgramStore(tmp_path).recall("fact") is None
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to=/nowhere")
    assert ProgramStore(tmp_path).recall("fact") is None
    monkeypatch.undo()
    assert ProgramStore(tmp_path).recall("fact") == 1
    monkeypatch.setattr(compile_store, "_code_digest", lambda: "another version of the code")
    assert ProgramStore(tmp_path).recall("fact") is None


def test_replicas_that_start_at_once_never_read_half_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stores = [ProgramStore(tmp_path) for _ in range(4)]
    wrong: list[Any] = []

    def replica(store: ProgramStore, number: int) -> None:
        for turn in range(25):
            store.note("fact", [number, turn] * 5000)
            fact = store.recall("fact")
            if fact is None or len(fact) != 10000 or fact != fact[:2] * 5000:
                wrong.append(fact)

    threads = [threading.Thread(target=replica, args=(store, number)) for number, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not caplog.records
    assert len(list(tmp_path.iterdir())) == 1  # and nothing half-written is left


def test_the_longest_unused_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ProgramStore(tmp_path)
    for age, name in enumerate(("new", "used", "old")):
        store.note(name, "x" * 1000)
        os.utime(store._path(name, "fact"), (10**9 - age, 10**9 - age))
    assert store.recall("old") is not None
    store.save("double", double())
    os.utime(store._path("old", "fact"), (10**9 + 1, 10**9 + 1))
    monkeypatch.setattr(compile_store, "MAX_BYTES", sum(p.stat().st_size for p in tmp_path.iterdir()))
    store.note("last", "x" * 1000)
    assert {name: store.recall(name) is not None for name in ("new", "used", "old", "last")} == {
        "new": True,
        "used": False,
        "old": True,
        "last": True,
    }
