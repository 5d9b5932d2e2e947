"""The store: whole results or none (rule 10); a full disk and a read-only folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import stage_kinds

from llmjax.errors import StoreError
from llmjax.pipeline import load, run
from llmjax.pipeline.digest import write_whole
from llmjax.pipeline.store import Store

Write = Callable[..., Path]
FULL = OSError(28, "No space left on device")


def everything(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.name != "cwd")


def test_a_result_appears_whole_and_last(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with store.writing("make", "abc", {"samples": 1}) as folder:
        (folder / "sub").mkdir()
        (folder / "sub/x.bin").write_bytes(b"12345")
        assert not store.has("make", "abc")
        assert not store.folder("make", "abc").exists()
    assert store.has("make", "abc")
    manifest = store.manifest("make", "abc")
    assert (manifest["kind"], manifest["key"], manifest["identity"], manifest["files"]) == (
        "make",
        "abc",
        {"samples": 1},
        {"sub/x.bin": 5},
    )
    assert everything(tmp_path) == [
        "store",
        "store/make",
        "store/make/abc",
        "store/make/abc/manifest.json",
        "store/make/abc/sub",
        "store/make/abc/sub/x.bin",
    ]


def test_a_failing_stage_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")

    def fail() -> None:
        with store.writing("make", "abc", {}) as folder:
            (folder / "x").write_text("half")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert set(everything(tmp_path)) <= {"store", "store/make"}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FULL, StoreError),
        (OSError(28, "No space left on device", "elsewhere"), OSError),
        (ConnectionRefusedError(111, "Connection refused"), ConnectionRefusedError),
        (FileNotFoundError(2, "No such file", "elsewhere"), FileNotFoundError),
    ],
)
def test_only_errors_of_the_store_are_told_as_such(tmp_path: Path, error: OSError, kind: type[Exception]) -> None:
    def fail() -> None:
        with Store(tmp_path / "store").writing("make", "abc", {}):
            raise error

    with pytest.raises(kind) as caught:
        fail()
    assert isinstance(caught.value, StoreError) == (kind is StoreError)


@pytest.mark.parametrize("call", ["replace", "mkdir", "manifest"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store = Store(tmp_path / "store")

    def full(*args: object, **kwargs: object) -> None:
        raise FULL

    if call == "replace":
        monkeypatch.setattr(os, "replace", full)
    elif call == "mkdir":
        real = Path.mkdir
        monkeypatch.setattr(Path, "mkdir", lambda self, *a, **k: full() if self.name.startswith(".") else real(self, *a, **k))
    else:
        monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(StoreError, match="cannot be written: No space left on device") as caught,
        store.writing("make", "abc", {}) as folder,
    ):
        (folder / "x").write_text("all")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 5
    assert not store.has("make", "abc")
    assert set(everything(tmp_path)) <= {"store", "store/make"}


def test_an_older_result_survives_a_failed_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")
    with store.writing("make", "abc", {}) as folder:
        (folder / "x").write_text("old")
    with store.writing("make", "abc", {}) as folder:
        (folder / "x").write_text("new")
    assert (store.folder("make", "abc") / "x").read_text() == "new"
    real = os.replace

    def full(source: object, target: object) -> None:
        if str(target).endswith("abc"):
            raise FULL
        real(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StoreError), store.writing("make", "abc", {}) as folder:
        (folder / "x").write_text("newer")
    assert (store.folder("make", "abc") / "x").read_text() == "new"
    assert store.has("make", "abc")


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with (
        pytest.raises(StoreError, match="Read-only file system; free space there or set 'artifacts'"),
        Store(tmp_path / "s").writing("make", "a", {}),
    ):
        pass


def test_the_artifacts_folder_is_a_file(write: Write, kinds: stage_kinds.Log, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    result = run(load(write("stages:\n  make: {}\n"), values={"artifacts": tmp_path / "taken"}))
    assert result.exit_code == 5
    assert "cannot be written: Not a directory" in result.stage("make").error


def test_a_damaged_manifest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.folder("make", "abc").mkdir(parents=True)
    assert not store.has("make", "abc")
    (store.folder("make", "abc") / "manifest.json").write_text("[")
    with pytest.raises(StoreError, match="delete the folder"):
        store.manifest("make", "abc")


def test_a_stage_that_fills_the_disk(write: Write, kinds: stage_kinds.Log) -> None:
    pipeline = load(write("stages:\n  make: {full: true}\n  refine: {}\n"))
    result = run(pipeline)
    assert [(s.name, s.status) for s in result.stages] == [("make", "failed"), ("refine", "blocked")]
    assert "No space left on device" in result.stage("make").error
    assert result.exit_code == 5
    assert everything(pipeline.artifacts) == ["store", "store/make"]


def test_a_rerun_starts_at_the_first_stage_without_a_result(write: Write, kinds: stage_kinds.Log) -> None:
    path = write("stages:\n  make: {}\n  refine: {}\n  again: {uses: refine, source: refine}\n")
    run(load(path))
    kinds.events.clear()
    folder = next((load(path).artifacts / "store/refine").iterdir())
    manifests = list((load(path).artifacts / "store/refine").glob("*/manifest.json"))
    assert len(manifests) == 2
    assert folder.is_dir()
    for manifest in manifests:
        manifest.unlink()
    result = run(load(path))
    assert [(s.name, s.status) for s in result.stages] == [("make", "reused"), ("refine", "done"), ("again", "done")]
    assert kinds.events == ["load make", "run refine", "load refine", "run again"]


def test_write_whole_leaves_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_whole(path, "old")

    def full(*args: object) -> None:
        raise FULL

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert everything(tmp_path) == ["f"]
    assert path.read_text() == "old"


def test_files_are_as_readable_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_whole(tmp_path / "whole", "")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode
    with Store(tmp_path).writing("make", "abc", {}) as folder:
        (folder / "x").write_text("")
    (tmp_path / "folder").mkdir()
    assert (tmp_path / "make/abc").stat().st_mode == (tmp_path / "folder").stat().st_mode
