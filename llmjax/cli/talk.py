"""Commands that let a model write: generate and chat."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmjax.cli.options import (
    AsJson,
    DType,
    DTypeOption,
    MaxContext,
    MaxTokens,
    MinP,
    ModelPath,
    Package,
    Penalty,
    Platform,
    PlatformOption,
    Random,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    Trace,
    Verbose,
    check_one_model,
)
from llmjax.cli.terminal import open_trace, stdin_text, turns
from llmjax.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from llmjax.engine.llm import LLM
    from llmjax.engine.outputs import RequestOutput
    from llmjax.sampling_params import SamplingParams


def generate(
    prompt: Annotated[list[str] | None, typer.Argument(help="One or more prompts; without any, stdin is one.")] = None,
    model: ModelPath = None,
    package: Package = None,
    random: Random = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    stop: Stop = None,
    n: Annotated[int | None, typer.Option("-n", help="Choices for each prompt.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's own end.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Prompts and outputs are token ids, not text.")] = False,
    max_context: MaxContext = None,
    platform: PlatformOption = None,
    dtype: DTypeOption = None,
    to_json: AsJson = False,
    verbose: Verbose = False,
    trace: Trace = None,
) -> None:
    """Continue prompts. One prompt is shown as it is written."""
    check_one_model(model, package, random)
    flags = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed, "n": n}
    params = _params(flags, max_tokens=max_tokens, temperature=temperature, stop=stop, ignore_eos=ignore_eos)
    texts = prompt or [stdin_text()]
    prompts: list[str | list[int]] = [_token_ids(text) if ids else text for text in texts]
    with open_trace(trace) as writer:
        llm = _llm(model, package, random, max_context=max_context, platform=platform, dtype=dtype, verbose=verbose)
        if writer is not None:
            from llmjax.engine.engine_trace import EngineTrace

            llm.engine.trace = EngineTrace(writer, "engine")
        if len(prompts) == 1 and params.n == 1 and not to_json and not ids:
            _, interrupted = _stream(llm, llm.engine.add_request(prompts[0], params))
            if interrupted:
                raise KeyboardInterrupt
            return
        outputs = llm.generate(prompts, params)
    for given, output in zip(texts, outputs, strict=True):
        for choice in output.outputs:
            record = {"prompt": given, "index": choice.index, "text": choice.text, "token_ids": choice.token_ids}
            if to_json:
                typer.echo(json.dumps({**record, "finish_reason": choice.finish_reason}, ensure_ascii=False))
            else:
                typer.echo(" ".join(map(str, choice.token_ids)) if ids else choice.text)


def chat(
    model: ModelPath = None,
    package: Package = None,
    random: Random = None,
    system: Annotated[str | None, typer.Option(help="Instructions before the conversation.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    max_context: MaxContext = None,
    platform: PlatformOption = None,
    dtype: DTypeOption = None,
    verbose: Verbose = False,
) -> None:
    """Talk to a model, line by line. Ctrl-C stops an answer, Ctrl-D ends. From a pipe, each line is a turn."""
    check_one_model(model, package, random)
    flags = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed}
    params = _params(flags, max_tokens=max_tokens, temperature=temperature)
    llm = _llm(model, package, random, max_context=max_context, platform=platform, dtype=dtype, verbose=verbose)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for line in turns():
        messages.append({"role": "user", "content": line})
        try:
            answer, _ = _stream(llm, llm.engine.add_chat(messages, params))
        except RequestError as error:
            typer.echo(f"llmjax: {error}", err=True)
            del messages[-1]
            continue
        messages.append({"role": "assistant", "content": answer})


def _llm(
    model: Path | None,
    package: str | None,
    random: str | None,
    *,
    max_context: int | None,
    platform: Platform | None,
    dtype: DType | None,
    verbose: bool,
) -> LLM:
    """An engine for one user: few rows, so that it starts quickly."""
    from llmjax.telemetry.logs import configure_logging

    configure_logging(verbose=verbose)
    from llmjax.engine.backend import configure_backend

    configure_backend(platform=platform or "auto")
    from llmjax.engine.llm import LLM

    sizes: dict[str, Any] = {"max_sequences": 8, "max_tokens_per_step": 1024, "max_context": max_context}
    return LLM(model, package=package, random=random, dtype=dtype, **sizes)


def _params(flags: Mapping[str, Any], **more: Any) -> SamplingParams:
    from llmjax.sampling_params import SamplingParams

    try:
        given = {name: value for name, value in {**flags, **more}.items() if value is not None}
        return SamplingParams(**{"max_tokens": None, **given})
    except RequestError as error:
        raise ConfigError(str(error)) from None


def _token_ids(text: str) -> list[int]:
    try:
        return [int(item) for item in text.replace(",", " ").split()]
    except ValueError:
        raise ConfigError(f"--ids takes whole numbers with spaces or commas between, got {text!r:.60}") from None


def _stream(llm: LLM, request_id: str) -> tuple[str, bool]:
    """Show a request's text as it comes; returns it, and whether Ctrl-C cut it short. Raises what ended it in error."""
    output: RequestOutput | None = None
    with _interruption() as interrupted:
        while (output is None or not output.finished) and not interrupted.is_set():
            for changed in llm.engine.step(closed=True):
                if changed.request_id == request_id:
                    output = changed
                    typer.echo(changed.new_text[0], nl=False)
    if interrupted.is_set():
        llm.engine.abort(request_id)
    typer.echo()
    if output is None:
        return "", True
    choice = output.outputs[0]
    if choice.error is not None:
        raise RequestError(choice.error)
    return choice.text, interrupted.is_set()


@contextlib.contextmanager
def _interruption() -> Iterator[threading.Event]:
    """Inside, the first Ctrl-C sets the event, so that it never falls into the middle of a step; a second one raises."""
    event = threading.Event()

    def on_interrupt(number: int, frame: types.FrameType | None) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
