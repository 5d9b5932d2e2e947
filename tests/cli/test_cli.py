"""The command line as a user meets it: exit codes, what goes to stdout and stderr, and both spellings of every option."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_checkpoints import random_weights, tiny_config, write_hf
from fakes_engine import FakeLLM

from llmjax import cli
from llmjax.cli import talk
from llmjax.errors import GateRejectedError
from llmjax.pipeline.stages import engine as engine_stage
from llmjax.sampling_params import SamplingParams

Result = tuple[int, str, str]
Run = Callable[..., Result]

PIPELINE = """\
apiVersion: llmjax/v1
name: small
stages:
  model: {source: {random: {preset: llama-8b}}}
  engine: {max_context: 64}
  batch:
    input: in.jsonl
    output: out.jsonl
    defaults: {max_tokens: 4}
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs `llmjax ARGS` in this process, in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run_cli(*args: object, stdin: str | None = None) -> Result:
        monkeypatch.setattr(sys, "argv", ["llmjax", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin or ""))
        code: Any = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run_cli


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """A fake in place of every engine."""
    fake = FakeLLM()
    monkeypatch.setattr(talk, "_llm", lambda *args, **options: fake)
    monkeypatch.setattr(engine_stage, "build_engine", lambda *args, **options: fake)
    return fake


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_text('"one"\n"two"\n')
    path = tmp_path / "small.yaml"
    path.write_text(PIPELINE)
    return path


def child(*args: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", "from llmjax.cli import main; main()", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, timeout=60, check=False, **options)


# -- looking at pipelines


def test_help_names_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for name in (
        "run",
        "validate",
        "plan",
        "explain",
        "config",
        "schema",
        "generate",
        "chat",
        "batch",
        "serve",
        "inspect",
        "doctor",
        "new",
        "tune",
        "bench",
    ):
        assert f"  {name} " in out


def test_shipped_pipelines_validate_by_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMJAX_MODEL", raising=False)
    assert run("validate", "quickstart")[0] == 0
    code, out, err = run("validate", "batch")
    assert (code, "valid" in out) == (0, True)
    assert "warning: " in err
    assert "LLMJAX_MODEL" in err


def test_mistakes_are_located_lines_and_exit_2(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(PIPELINE.replace("max_context: 64", "max_contxt: 64").replace("max_tokens", "max_token"))
    for command in ("validate", "plan", "run"):
        code, out, err = run(command, "bad.yaml")
        assert (code, out) == (2, "")
        lines = err.splitlines()
        assert len(lines) == 2
        assert all(line.startswith("llmjax: bad.yaml:") for line in lines)
        assert "max_context" in lines[0]


@pytest.mark.parametrize("role", ["file", "overlay"])
@pytest.mark.parametrize(
    ("content", "why"), [(None, "no such file"), (b"", "empty"), (b"\xff\xfe\x00", "utf-8"), ("folder", "folder")], ids=repr
)
def test_files_that_cannot_be_a_pipeline(run: Run, tmp_path: Path, role: str, content: Any, why: str) -> None:
    """Report B73."""
    path = tmp_path / "f.yaml"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    code, out, err = run("run", path) if role == "file" else run("run", "quickstart", "--overlay", path)
    assert (code, out) == (2, "")
    assert "f.yaml" in err
    assert why in err.lower()
    assert len(err.splitlines()) == 1


def test_plan_for_people_and_machines(run: Run, pipeline: Path) -> None:
    code, out, _ = run("plan", pipeline)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["model", "engine", "batch"]
    code, out, _ = run("plan", pipeline, "--json", "--until", "engine")
    stages = json.loads(out)["stages"]
    assert [stage["name"] for stage in stages] == ["model", "engine", "batch"]
    assert stages[2]["action"] == "beyond"


def test_explain_schema_and_origin(run: Run, pipeline: Path) -> None:
    assert "256MiB" in run("explain", "engine.kv_cache.memory")[1]
    code, _, err = run("explain", "engine.kv_cash")
    assert (code, "kv_cache" in err) == (2, True)
    assert json.loads(run("schema")[1])["properties"]["apiVersion"]
    _, out, _ = run("config", "show", pipeline, "--origin", "--set", "stages.engine.max_context=32")
    assert "max_context: 32" in out
    assert "--set" in out


# -- options: report B73


@pytest.mark.parametrize("spelling", [("--set", "{}"), ("--set={}",)])
def test_both_spellings_of_an_option_mean_the_same(run: Run, pipeline: Path, spelling: tuple[str, ...]) -> None:
    options = [part.format("stages.engine.max_context=48") for part in spelling]
    for args in ((pipeline, *options), (*options, pipeline)):
        code, out, _ = run("config", "show", *args)
        assert (code, "max_context: 48" in out) == (0, True)


def test_every_option_takes_both_spellings_and_single_ones_once(run: Run) -> None:
    """Of every command: parsed only, but for a repeated option, which must be refused before anything happens."""
    import typer

    group = typer.main.get_command(cli.app)
    checked = 0
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        for param in getattr(command, "params", []):
            if not param.opts[0].startswith("--") or param.is_flag or name == "config":
                continue
            value = {"platform": "cpu", "log": "json", "dtype": "float32"}.get(param.name, "1")
            for spelling in ([param.opts[0], value], [f"{param.opts[0]}={value}"]):
                context = command.make_context(name, [*spelling, *_required(command, param)], resilient_parsing=True)
                assert context.params[param.name], f"{name} {spelling}"
                if not param.multiple:
                    code, _, err = run(name, *spelling, *spelling, *_required(command, param))
                    assert (code, "given 2 times" in err) == (2, True), f"{name} {spelling}: {err}"
                checked += 1
    assert checked > 60


def _required(command: Any, but: Any) -> list[str]:
    args: list[str] = []
    for param in command.params:
        if param.required and param is not but:
            args += [param.opts[0], "x"] if param.opts[0].startswith("-") else ["x"]
    return args


@pytest.mark.parametrize(
    "args",
    [("run",), ("nonsense",), ("run", "x", "--nonsense"), ("run", "x", "--until"), ("batch", "-i", "x"), ("run", "x", "y")],
)
def test_usage_errors_exit_2(run: Run, args: tuple[str, ...]) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert "Error: " in err


@pytest.mark.parametrize("args", [(), ("-m", "a", "--random", "b"), ("--package", "a", "--random", "b")])
def test_exactly_one_model(run: Run, args: tuple[str, ...]) -> None:
    for command in (["generate", "x"], ["chat"], ["batch", "-i", "a", "-o", "b"]):
        code, _, err = run(*command, *args)
        assert (code, err) == (2, "llmjax: name exactly one model: a path, --package or --random\n")


# -- running


def test_a_run_shows_its_table_and_writes_its_files(run: Run, pipeline: Path, llm: FakeLLM, tmp_path: Path) -> None:
    code, out, err = run("run", pipeline)
    assert code == 0
    for column in ("stage", "status", "seconds", "tokens/s", "pages used", "output tokens"):
        assert column in out
    assert "batch: done" in err
    texts = {record["text"] for record in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert texts == {"oneo", "twot"}
    code, out, err = run("run", pipeline)
    assert (code, "exists: resume: true" in err) == (5, True)
    assert "failed" in out
    assert run("run", pipeline, "--set", "stages.batch.resume=replace", "--until=batch")[0] == 0


def test_a_trace_is_a_file_beside_the_run(run: Run, pipeline: Path, llm: FakeLLM, tmp_path: Path) -> None:
    assert run("run", pipeline, "--trace", tmp_path / "t.json")[0] == 0
    spans = [event["name"] for event in json.loads((tmp_path / "t.json").read_text()) if event["ph"] == "X"]
    assert spans == ["model", "engine", "batch"]
    assert llm.engine.trace is not None
    assert run("generate", "a", "b", "--random", "llama-8b", "--trace", tmp_path / "g.json")[0] == 0
    assert json.loads((tmp_path / "g.json").read_text())
    (tmp_path / "file").write_text("")
    code, out, err = run("run", pipeline, "--trace", tmp_path / "file" / "t.json")
    assert (code, out) == (2, "")
    assert "llmjax: --trace" in err
    assert "cannot be written" in err


def test_a_run_for_machines(run: Run, pipeline: Path, llm: FakeLLM) -> None:
    code, out, err = run("run", pipeline, "--log", "json")
    result = json.loads(out)
    assert (code, result["exit_code"], result["stages"][2]["summary"]["answered"]) == (0, 0, 2)
    events = [json.loads(line) for line in err.splitlines()]
    assert {"stage.start", "stage.done", "progress"} <= {event["event"] for event in events}
    code, out, err = run("run", pipeline, "--log=json", "--until", "nothing")
    assert (code, out) == (2, "")
    assert json.loads(err)["level"] == "error"


def test_a_bad_line_is_counted_and_the_run_succeeds(run: Run, pipeline: Path, llm: FakeLLM, tmp_path: Path) -> None:
    """Rule 18."""
    (tmp_path / "in.jsonl").write_text('"fine"\n{bad\n')
    code, out, _ = run("run", pipeline, "--log", "json")
    summary = json.loads(out)["stages"][2]["summary"]
    assert (code, summary["answered"], summary["failed"]) == (0, 1, 1)


def test_exit_codes_of_a_run(run: Run, pipeline: Path, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 13, as far as it shows on the command line."""

    def raising(error: BaseException) -> Callable[..., Any]:
        def build(*args: Any, **options: Any) -> Any:
            raise error

        return build

    for error, expected in ((GateRejectedError("no"), 3), (KeyboardInterrupt(), 130)):
        monkeypatch.setattr(engine_stage, "build_engine", raising(error))
        assert run("run", pipeline)[0] == expected


def test_the_batch_command_is_the_shipped_pipeline(run: Run, llm: FakeLLM, tmp_path: Path) -> None:
    (tmp_path / "입력 1.jsonl").write_text('"one"\n{bad\n', "utf-8")
    args = ("batch", "-i", "입력 1.jsonl", "-o", "out 1.jsonl", "--random", "llama-8b", "--max-tokens", "3", "--errors=err.jsonl")
    code, out, _ = run(*args)
    assert (code, "batch" in out) == (0, True)
    (record,) = map(json.loads, (tmp_path / "out 1.jsonl").read_text().splitlines())
    assert record["text"] == "one"
    assert len((tmp_path / "err.jsonl").read_text().splitlines()) == 1
    before = llm.engine.added
    assert run(*args)[0] == 0  # does what is missing: nothing
    assert llm.engine.added == before
    assert run(*args, "--no-resume")[0] == 5
    assert run(*args, "--replace", "--temperature", "0")[0] == 0
    assert llm.engine.added == before + 1
    assert run(*args, "--replace", "--resume")[0] == 2
    assert run(*args, "--replace", "--set", "stages.batch.defaults.temperature=-1")[0] == 2


def test_new_writes_a_pipeline_that_runs_and_overwrites_nothing(run: Run, llm: FakeLLM, tmp_path: Path) -> None:
    code, out, _ = run("new", "mine")
    assert (code, "mine.yaml" in out) == (0, True)
    assert run("validate", "mine.yaml")[2] == ""
    assert run("run", "mine.yaml")[0] == 0
    before = (tmp_path / "mine.yaml").read_bytes()
    assert run("new", "mine")[0] == 2
    (tmp_path / "other.jsonl").write_text("mine")
    assert run("new", "other")[0] == 2
    assert not (tmp_path / "other.yaml").exists()
    assert (tmp_path / "mine.yaml").read_bytes() == before
    for name in ("../x", "", "a b", "A"):
        assert run("new", name)[0] == 2


# -- talking


def test_generate_from_arguments_and_stdin(run: Run, llm: FakeLLM) -> None:
    assert run("generate", "hello", "-m", "x", "--max-tokens", 7)[:2] == (0, "hellohe\n")
    assert run("generate", "--model=x", "--max-tokens=3", stdin="ab\n")[:2] == (0, "aba\n")
    assert run("generate", "ab", "xy", "-m", "x", "--max-tokens", 2, "-n", 2)[1] == "ab\nba\nxy\nyx\n"
    assert run("generate", "97, 98", "-m", "x", "--ids", "--max-tokens", 3)[1] == "97 98 97\n"
    _, out, _ = run("generate", "é", "-m", "x", "--json", "--max-tokens", 2)
    assert json.loads(out) == {"prompt": "é", "index": 0, "text": "é", "token_ids": [195, 169], "finish_reason": "length"}


def test_generate_refuses_clearly(run: Run, llm: FakeLLM) -> None:
    for args, code, why in (
        (("x", "--temperature", "nan"), 2, "temperature"),
        (("x", "--top-p=2"), 2, "top_p"),
        (("x", "--max-tokens", "0"), 2, "max_tokens"),
        (("x", "--stop", ""), 2, "stop"),
        (("x y", "--ids"), 2, "whole numbers"),
        (("x" * 100,), 5, "100 tokens"),
        (("",), 5, "empty"),
    ):
        got, out, err = run("generate", *args, "-m", "m")
        assert (got, out) == (code, "")
        assert why in err
        assert len(err.splitlines()) == 1


def test_chat_keeps_the_conversation_and_survives_a_bad_turn(run: Run, llm: FakeLLM) -> None:
    seen: list[list[dict[str, Any]]] = []
    add_chat = llm.engine.add_chat

    def recording(messages: Any, params: SamplingParams, **options: Any) -> str:
        seen.append([dict(message) for message in messages])
        return add_chat(messages, params, **options)

    llm.engine.add_chat = recording  # type: ignore[method-assign]
    stdin = "hi\n\n" + "x" * 70 + "\nbye\n"
    code, out, err = run("chat", "-m", "x", "--system", "S", "--max-tokens", 4, stdin=stdin)
    assert (code, out) == (0, "<sys\n<sys\n")
    assert "tokens" in err
    assert [[message["role"] for message in messages] for messages in seen] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user", "assistant", "user"],
    ]
    assert seen[2][1:] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<sys"},
        {"role": "user", "content": "bye"},
    ]


def test_ctrl_c_ends_an_answer_between_two_steps(run: Run, llm: FakeLLM) -> None:
    step, steps = llm.engine.step, 0

    def interrupted_step(**options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(**options)

    llm.engine.step = interrupted_step  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGINT)
    code, out, _ = run("generate", "abcdef", "-m", "x")
    assert (code, out) == (130, "abc\n")
    assert llm.engine.num_running == 0
    steps = 0
    code, out, _ = run("chat", "-m", "x", "--max-tokens", 5, stdin="one\ntwo\n")
    assert (code, out) == (0, "<us\n<user\n")  # the first answer was cut short, the conversation went on
    assert signal.getsignal(signal.SIGINT) is before


# -- looking at models and the machine


def test_inspect_tells_a_model_without_loading_it(run: Run, tmp_path: Path) -> None:
    """Report B43: a folder with spaces and letters beyond ASCII."""
    config = tiny_config("qwen2")
    folder = write_hf(tmp_path / "模型 é" / "tiny", config, random_weights(config))
    code, out, _ = run("inspect", folder, "--json")
    facts = json.loads(out)
    assert (code, facts["kind"], facts["config"]["family"], facts["config"]["hidden_size"]) == (0, "safetensors", "qwen2", 48)
    assert facts["path"] == str(folder)
    assert facts["file_bytes"] == 4 * facts["num_params"]
    code, out, _ = run("inspect", folder)
    assert (code, "模型 é" in out) == (0, True)
    code, out, _ = run("inspect", "--random", "llama-8b")
    assert (code, "8,030,261,248" in out) == (0, True)


def test_inspect_refuses_what_is_no_model(run: Run, tmp_path: Path) -> None:
    for args in ((tmp_path / "none",), (tmp_path,), ("--random", "gpt-9"), ("--package", "no-such-package")):
        code, out, err = run("inspect", *args)
        assert (code, out) == (5, "")
        assert len(err.splitlines()) == 1


def test_doctor_looks_at_the_machine(run: Run) -> None:
    code, out, _ = run("doctor")
    assert code == 0
    for name in ("python", "jax", "device 0", "compile cache"):
        assert name in out


def test_doctor_works_out_the_memory_of_a_pipeline(run: Run, pipeline: Path) -> None:
    code, out, _ = run(
        "doctor", "--memory", pipeline, "--set", "stages.engine.kv_cache.memory=64MiB", "--set=stages.model.dtype=bfloat16"
    )
    assert code == 0
    assert "15,317.0" in out  # MiB of llama-8b's weights in bfloat16
    assert "2,048.0" in out  # KiB a page: 2 x 32 layers x 8 heads x 128 x 16 tokens x 2 bytes
    assert "31 and the null page" in out  # of 64 MiB


# -- as a process


def test_commands_that_only_look_start_without_jax(tmp_path: Path) -> None:
    code = (
        "import sys, time; start = time.process_time(); from llmjax.cli import main; sys.argv = ['llmjax', *{args!r}]\n"
        "try: main()\nexcept SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {{'jax', 'jaxlib', 'flax', 'orbax', 'transformers', 'torch'}} & set(sys.modules)\n"
        "assert not heavy, heavy\nprint(time.process_time() - start)"
    )
    for args in (["--help"], ["validate", "quickstart"], ["plan", "quickstart"], ["schema"], ["inspect", "--random", "llama-8b"]):
        done = subprocess.run(
            [sys.executable, "-c", code.format(args=args)], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.splitlines()[-1]) < 3.0  # seconds of CPU; about a third of it on a quiet machine


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from llmjax.cli import main; main()", "schema"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=60)
    assert b"Traceback" not in err


def test_a_terminal_of_few_letters_shows_the_rest(tmp_path: Path) -> None:
    env = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    done = child("validate", "模型.yaml", cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert done.stderr.startswith(b"llmjax: ")
    assert done.stderr.endswith(b".yaml: no such file\n")


def test_interrupting_a_process_is_exit_130(tmp_path: Path) -> None:
    code = (
        "import llmjax.cli, llmjax.cli.talk as talk, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job inherits it as ignored
        "talk.stdin_text = lambda: print('up', flush=True) or time.sleep(60)\n"
        "llmjax.cli.main()"
    )
    command = [sys.executable, "-c", code, "generate", "-m", "x"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, b"")
