"""The `serve` stage and its command: what reaches the server, who is warned, and what is kept secret. The engine is a fake."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fakes_engine import FakeLLM

from llmjax import cli
from llmjax.errors import ConfigError
from llmjax.pipeline import load, make_reporter, run, show
from llmjax.pipeline.service import final_server
from llmjax.pipeline.stages import engine as engine_stage
from llmjax.pipeline.stages.serve import ServeKind, ServeSection, read_keys
from llmjax.server.listener import listen
from llmjax.server.supervisor import Supervisor

PIPELINE = """\
apiVersion: llmjax/v1
name: small
stages:
  model: {source: {random: {preset: llama-8b}}}
  engine: {max_context: 64}
  serve: SECTION
"""


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, str]]:
    """Runs a pipeline with this section; `visit` gets a client while the server stands. Returns the result and the log."""
    monkeypatch.chdir(tmp_path)

    def run_it(section: str, visit: Callable[[httpx2.Client], None]) -> tuple[Any, str]:
        fake = FakeLLM()
        monkeypatch.setattr(engine_stage, "build_engine", lambda *args, **options: fake)

        def wait(self: ServeKind, value: Any) -> None:
            with httpx2.Client(base_url=value.url, timeout=20) as client:
                visit(client)

        monkeypatch.setattr(ServeKind, "wait", wait)
        (tmp_path / "small.yaml").write_text(PIPELINE.replace("SECTION", section))
        log = io.StringIO()
        result = run(load(tmp_path / "small.yaml"), reporter=make_reporter("json", stream=log))
        return result, log.getvalue()

    return run_it


def test_the_file_says_how_it_is_served(serve: Callable[..., tuple[Any, str]], tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("# two\nfile-key # of the file\n\n")
    urls: list[str] = []

    def visit(client: httpx2.Client) -> None:
        urls.append(str(client.base_url).rstrip("/"))
        assert client.get("/v1/models").status_code == 401
        for key in ("yaml-key", "file-key"):
            names = client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).json()["data"]
            assert [name["id"] for name in names] == ["one", "two"]
        client.headers["authorization"] = "Bearer yaml-key"
        body = {"prompt": "ab", "max_tokens": 3}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "aba"
        assert client.post("/v1/completions", json={**body, "x": 1}).status_code == 400
        assert client.post("/v1/completions", json={"prompt": "a" * 3000}).status_code == 413

    result, log = serve(
        "{port: 0, served_name: [one, two], api_key: yaml-key, api_key_file: keys.txt, strict: true, limits: {body: 2KiB}}", visit
    )
    assert result.ok, result.stages
    assert result.stage("serve").summary["url"] == urls[0]
    assert "yaml-key" not in log
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{urls[0]}/livez")


def test_a_server_that_is_open_to_all_is_a_warning(serve: Callable[..., tuple[Any, str]]) -> None:
    def visit(client: httpx2.Client) -> None:
        models = client.get("/v1/models", headers={"authorization": "Bearer k"}).json()
        assert models["data"][0]["id"] == "fake-model"

    for section, warned in (
        ("{port: 0, host: 0.0.0.0}", True),
        ("{port: 0, host: 0.0.0.0, api_key: k}", False),
        ("{port: 0}", False),
    ):
        result, log = serve(section, visit)
        assert result.ok
        assert ("may use this server" in log) == warned, section


def test_a_port_that_is_taken_fails_the_stage_with_one_line(serve: Callable[..., tuple[Any, str]]) -> None:
    def visit(client: httpx2.Client) -> None:
        port = httpx2.URL(str(client.base_url)).port
        result, _ = serve(f"{{port: {port}}}", lambda client: None)
        assert (result.exit_code, result.stage("serve").status) == (5, "failed")
        assert f"cannot listen on 127.0.0.1 port {port}" in result.stage("serve").error

    result, _ = serve("{port: 0}", visit)
    assert result.ok


def test_keys_are_secret_and_a_key_file_must_hold_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "very-secret")
    path = tmp_path / "p.yaml"
    path.write_text(PIPELINE.replace("SECTION", '{api_key: "${env:MY_KEY}"}'))
    assert "very-secret" not in show(load(path))
    assert read_keys(load(path).stage("serve").config) == ("very-secret",)
    assert read_keys(ServeSection.model_validate({"api_key": ""})) == ()
    empty = tmp_path / "keys"
    empty.write_text("# nothing\n\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(ServeSection.model_validate({"api_key_file": str(empty)}))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(ServeSection.model_validate({"api_key_file": str(tmp_path / "none")}))


def test_what_is_wrong_with_the_server_is_told_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A key file without a key, a key that no header can carry, a port that is taken: no process is started."""
    started: list[object] = []
    monkeypatch.setattr(Supervisor, "run", lambda self: started.append(self) or 0)
    monkeypatch.setattr("llmjax.cli.pipelines.run_here", lambda *args, **options: started.append(args) or 0)
    monkeypatch.chdir(tmp_path)

    def command(section: str) -> tuple[Any, str]:
        (tmp_path / "small.yaml").write_text(PIPELINE.replace("SECTION", section))
        monkeypatch.setattr("sys.argv", ["llmjax", "run", "small.yaml"])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        return code, capsys.readouterr().err

    (tmp_path / "keys").write_text("# none\n")
    assert command("{port: 0, api_key_file: keys}") == (
        2,
        f"llmjax: the key file {tmp_path / 'keys'} holds no key: write one a line\n",
    )
    code, err = command('{port: 0, api_key: "a b"}')
    assert (code, "an API key must be printable" in err) == (2, True)
    with listen("127.0.0.1", 0) as other:
        code, err = command(f"{{port: {other.getsockname()[1]}}}")
        assert (code, "cannot listen on 127.0.0.1" in err) == (5, True)
    (tmp_path / "file").touch()
    code, err = command("{port: 0, traffic: {path: file/traffic.jsonl}}")
    assert (code, "file/traffic.jsonl cannot be written" in err, err.count("\n")) == (2, True, 1)
    assert not started
    assert command("{port: 0}") == (0, "")
    assert len(started) == 1


@pytest.mark.parametrize(("until", "expected"), [(None, "serve"), ("serve", "serve"), ("engine", None)])
def test_a_server_is_a_service_only_as_the_last_stage(tmp_path: Path, until: str | None, expected: str | None) -> None:
    (tmp_path / "small.yaml").write_text(PIPELINE.replace("SECTION", "{http_workers: 2, restart: 1}"))
    found = final_server(load(tmp_path / "small.yaml"), until)
    assert (found and found.name) == expected
    (tmp_path / "off.yaml").write_text(PIPELINE.replace("SECTION", "{when: never}"))
    assert final_server(load(tmp_path / "off.yaml"), until) is None


def test_stages_after_a_server_that_do_not_use_it_are_refused(tmp_path: Path) -> None:
    """They would begin when somebody stops the server."""
    after = '  batch: {input: "in.jsonl", output: "out.jsonl"EXTRA}\n'
    path = tmp_path / "p.yaml"
    path.write_text(PIPELINE.replace("SECTION", "{port: 0}") + after.replace("EXTRA", ""))
    with pytest.raises(
        ConfigError, match=r"stages.serve: it stays until it is stopped, and 'batch' would wait for that: put it last"
    ):
        load(path)
    path.write_text(PIPELINE.replace("SECTION", "{port: 0}") + after.replace("EXTRA", ", needs: [serve]"))
    assert final_server(load(path)) is None
    path.write_text(PIPELINE.replace("SECTION", "{port: 0}") + after.replace("EXTRA", ", when: never"))
    found = final_server(load(path))
    assert found is not None


def test_the_command_makes_a_pipeline_of_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def command(*args: str) -> tuple[Any, str, str]:
        monkeypatch.setattr("sys.argv", ["llmjax", "serve", *args])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    code, out, _ = command("models/tiny", "--port", "9000", "--served-name", "a", "--served-name", "b", "--print-yaml")
    assert code == 0
    path = tmp_path / "printed.yaml"
    path.write_text(out)
    printed = load(path)
    assert printed.stage("model").config.source.path == str(tmp_path / "models/tiny")
    section = printed.stage("serve").config
    assert (section.port, section.served_name, section.host) == (9000, ["a", "b"], "0.0.0.0")
    code, out, _ = command("--random", "llama-8b", "--print-yaml")
    assert (code, "preset: llama-8b" in out, "path:" in out) == (0, True, False)
    code, out, _ = command("printed.yaml", "--host", "127.0.0.1", "--print-yaml")
    assert (code, "host: 127.0.0.1" in out, "port: 9000" in out) == (0, True, True)
    for wrong in ((), ("a", "--package", "b"), ("printed.yaml", "--package", "b"), ("none.yaml",)):
        code, out, err = command(*wrong)
        assert (code, out) == (2, ""), wrong
        assert err.startswith("llmjax: ")
