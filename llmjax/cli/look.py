"""Commands that look at things and change nothing: inspect (a model, or a server's memory) and doctor (this machine)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from llmjax.cli.live import show_memory
from llmjax.cli.options import AsJson, Package, Random, Sets, check_one_model
from llmjax.cli.terminal import table
from llmjax.errors import ConfigError, LlmjaxError


def inspect(
    model: Annotated[Path | None, typer.Argument(help="A model folder or a .gguf file.")] = None,
    package: Package = None,
    random: Random = None,
    live: Annotated[str | None, typer.Option(metavar="URL", help="Instead: where the memory of this llmjax server is.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="With --live: a file as the server has it; the first key is sent.")
    ] = None,
    to_json: AsJson = False,
) -> None:
    """Tell what a model is, without loading it, or where a running server's memory is."""
    if live is not None:
        if (model, package, random) != (None, None, None):
            raise ConfigError("--live asks a server: name no model beside it")
        show_memory(live, api_key_file, to_json=to_json)
        return
    if api_key_file is not None:
        raise ConfigError("--api-key-file is for --live")
    check_one_model(model, package, random)
    from llmjax.model.checkpoint.describe import describe

    facts = describe(path=model, package=package, random=random)
    config = facts.pop("config")
    shape = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    facts["path"] = None if facts["path"] is None else str(facts["path"])
    facts["tokenizer"] = _tokenizer_facts(facts["path"])
    if to_json:
        typer.echo(json.dumps({**facts, "config": shape}, ensure_ascii=False, indent=2, default=dataclasses.asdict))
        return
    facts["num_params"] = f"{facts['num_params']:,}"
    facts["file_bytes"] = f"{facts['file_bytes']:,} ({facts['file_bytes'] / 2**20:.1f} MiB)"
    facts["tensor_types"] = ", ".join(f"{count} {name}" for name, count in facts["tensor_types"].items())
    facts["tokenizer"] = ", ".join(f"{name} {value}" for name, value in facts["tokenizer"].items()) or "none"
    table(("model", ""), [(name, str(value)) for name, value in facts.items()])
    table(("config", ""), [(name, str(value)) for name, value in shape.items()])


def doctor(
    memory: Annotated[str | None, typer.Option(metavar="FILE", help="Tell what this pipeline needs of the device.")] = None,
    sets: Sets = None,
) -> None:
    """Look at this machine: Python, JAX, devices, caches."""
    if memory is not None:
        _show_memory(memory, sets or ())
        return
    from llmjax.telemetry.environment import examine

    findings = examine(compile_cache=Path(".llmjax", "compile_cache"))
    table(("", "", "level", "what to do"), [(f.name, f.value, f.level, f.advice) for f in findings])
    raise typer.Exit(LlmjaxError.exit_code if any(f.level == "error" for f in findings) else 0)


def _show_memory(file: str, sets: Sequence[str]) -> None:
    from llmjax.pipeline import load
    from llmjax.pipeline.memory_plan import memory_plan

    for engine in memory_plan(load(file, sets=sets)):
        assumed = [("assumed", engine.assumed)] if engine.assumed else []
        table((engine.stage, ""), [("model", engine.model), *engine.plan.lines(), *assumed])


def _tokenizer_facts(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    from llmjax.engine.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(Path(path))
    except LlmjaxError as error:
        return {"error": str(error)}
    return {"vocab_size": tokenizer.vocab_size, "eos_ids": list(tokenizer.eos_ids)}
