"""`LLM`: offline generation, the three-line way in. A thin layer over `Engine`."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmjax.engine.backend import use_compile_cache
from llmjax.engine.config import EngineConfig
from llmjax.engine.draft_model import DraftModel
from llmjax.engine.engine import Engine
from llmjax.engine.outputs import RequestOutput
from llmjax.engine.startup import given_up_on_failure
from llmjax.engine.tokenizer import Tokenizer, load_tokenizer
from llmjax.errors import ConfigError, QueueFullError, RequestError
from llmjax.model.checkpoint.load import LoadedModel, load_model
from llmjax.model.config import ModelConfig
from llmjax.model.registry import DecoderConfig
from llmjax.sampling_params import SamplingParams
from llmjax.telemetry.startup import Timeline

Prompt = str | Sequence[int]


class LLM:
    """A model ready to generate. `name` is the model's own: its package, file or folder, or its family.

    Give exactly one of
        model: a path (Hugging Face directory, GGUF file, orbax directory) or a `LoadedModel`;
        package: an installed package that holds a GGUF file;
        random: a preset name ("llama-8b", "qwen2.5-1.5b") or a config: random weights, no files;
        params and config: a parameter pytree of your own, with the config whose `family` is registered.

    Args:
        tokenizer: a `Tokenizer`, or a path to one; default: the one beside the weights. None with `params` or
            `random`: token ids only.
        dtype: of weights and cache; default bfloat16 on GPU, float32 on CPU.
        startup: the timeline of a start that began earlier.
        draft: the model that drafts, with `speculative=SpeculationConfig(method="draft")`: a path, or a `LoadedModel`.
        engine_config, options: sizes (`EngineConfig`); options are its fields, e.g. `LLM("…", max_sequences=8)`.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | None = None,
        *,
        package: str | None = None,
        random: str | ModelConfig | None = None,
        params: Any = None,
        config: DecoderConfig | None = None,
        tokenizer: Tokenizer | str | Path | None = None,
        dtype: str | None = None,
        engine_config: EngineConfig | None = None,
        startup: Timeline | None = None,
        draft: str | Path | LoadedModel | None = None,
        **options: Any,
    ) -> None:
        startup = startup if startup is not None else Timeline()
        given = [
            name
            for name, value in (("model", model), ("package", package), ("random", random), ("params", params))
            if value is not None
        ]
        if len(given) != 1:
            raise ConfigError(f"LLM takes exactly one of model, package, random, params; got {', '.join(given) or 'none'}")
        if (params is None) != (config is None):
            raise ConfigError("LLM(params=…) and config=… belong together")
        engine_config = _engine_config(engine_config, options)
        eos_ids: tuple[int, ...] = ()
        if engine_config.compile_cache is not None:
            use_compile_cache(engine_config.compile_cache)  # before loading, which compiles too
        if params is None:
            loaded = (
                model
                if isinstance(model, LoadedModel)
                else load_model(path=model, package=package, random=random, dtype=dtype, wait=False)
            )
            params, config, eos_ids = loaded.params, loaded.config, loaded.eos_token_ids
            if tokenizer is None and loaded.path is not None:
                tokenizer = load_tokenizer(loaded.path)
        if isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(Path(tokenizer))
        assert config is not None
        self.name = _name(model, package, config)
        with given_up_on_failure(params):
            drafting = None if draft is None else _draft_model(draft, dtype)
            with given_up_on_failure(None if drafting is None else drafting.params):
                self.engine = Engine(config, params, tokenizer, engine_config, eos_ids=eos_ids, startup=startup, draft=drafting)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in use."""
        return self.engine.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids), all batched together. Outputs come in the order of the prompts.

        Raises `RequestError` for the first prompt that cannot be served, before anything is computed.
        """
        many = _as_list(prompts)
        return self._run([functools.partial(self.engine.add_request, prompt) for prompt in many], params)

    def chat(
        self,
        conversations: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages with role and content) or several."""
        single = not conversations or isinstance(conversations[0], dict)
        many: list[Any] = [conversations] if single else list(conversations)
        return self._run([functools.partial(self.engine.add_chat, one, **template_options) for one in many], params)

    def update_params(self, params: Any) -> None:
        """See `Engine.update_params`."""
        self.engine.update_params(params)

    def _run(
        self, adders: Sequence[Callable[[SamplingParams], str]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(adders)
        else:
            each = list(params)
            if len(each) != len(adders):
                raise RequestError(
                    f"{len(adders)} prompts but {len(each)} sampling params: give one for all, or one each", "params"
                )
        outputs: dict[str, RequestOutput] = {}
        ids: dict[str, None] = {}  # in the order of the prompts

        def step() -> None:
            outputs.update(
                {one.request_id: one for one in self.engine.step(closed=True) if one.finished and one.request_id in ids}
            )

        try:
            for add, one in zip(adders, each, strict=True):
                while True:
                    try:
                        ids[add(one)] = None
                        break
                    except QueueFullError:
                        step()
            while len(outputs) < len(ids):
                step()
        except BaseException:  # an interrupt too: nothing of this call may run on inside the next one
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        return [outputs[request_id] for request_id in ids]


def _draft_model(draft: str | Path | LoadedModel, dtype: str | None) -> DraftModel:
    loaded = draft if isinstance(draft, LoadedModel) else load_model(path=draft, dtype=dtype, wait=False)
    return DraftModel(loaded.config, loaded.params, None if loaded.path is None else load_tokenizer(loaded.path))


def _name(model: str | Path | LoadedModel | None, package: str | None, config: DecoderConfig) -> str:
    if package is not None:
        return package
    path = model.path if isinstance(model, LoadedModel) else model
    return config.family if path is None else Path(path).stem if Path(path).is_file() else Path(path).name


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    if not hasattr(prompts, "tolist") and not isinstance(prompts, list | tuple):
        raise RequestError(f"prompts are texts or lists of token ids, got {prompts!r:.60}", "prompt")
    many = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    return [many] if many and all(isinstance(item, numbers.Number) for item in many) else many


def _engine_config(engine_config: EngineConfig | None, options: dict[str, Any]) -> EngineConfig:
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    for name in options:
        if name not in known:
            raise ConfigError(f"LLM has no option {name!r}; engine options are {', '.join(sorted(known))}")
    return dataclasses.replace(engine_config or EngineConfig(), **options)
