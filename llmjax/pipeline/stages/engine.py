"""The `engine` stage: an engine in memory, for the stages after it. Gives the object of the Python API, `LLM`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from llmjax.engine.config import FIFO, EngineConfig, LaneConfig
from llmjax.errors import ConfigError
from llmjax.pipeline.schema import Duration, OneOrMore, Section, Share, Size, StageSection, located
from llmjax.pipeline.speculative_section import SpeculativeSection
from llmjax.pipeline.stages import StageContext, StageInput, StageKind
from llmjax.pipeline.tree import KeyPath
from llmjax.telemetry.startup import Timeline

if TYPE_CHECKING:
    from llmjax.engine.llm import LLM
    from llmjax.pipeline.model_source import ModelSource

_DEFAULTS = EngineConfig()
DRAFT = "speculative.draft"

# EngineConfig's field -> where it is in the file; its errors name the former.
_PLACES: Mapping[str, tuple[str, ...]] = {
    "max_context": ("max_context",),
    "page_size": ("kv_cache", "page_size"),
    "kv_cache_dtype": ("kv_cache", "dtype"),
    "kv_cache_bytes": ("kv_cache", "memory"),
    "kv_cache_fraction": ("kv_cache", "fraction"),
    "max_sequences": ("batching", "max_sequences"),
    "max_tokens_per_step": ("batching", "max_tokens_per_step"),
    "prefill_chunk": ("batching", "prefill_chunk"),
    "decode_steps": ("batching", "decode_steps"),
    "row_buckets": ("batching", "buckets", "rows"),
    "token_buckets": ("batching", "buckets", "tokens"),
    "max_wait": ("queue", "max_wait"),
    "deterministic": ("deterministic",),
    "prefix_cache": ("kv_cache", "prefix_cache"),
    **{f"speculative.{name}": ("speculative", name) for name in SpeculativeSection.model_fields},
}


class KVCacheSection(Section):
    """The pages that hold keys and values."""

    dtype: Literal["int8"] | None = Field(
        None,
        description="int8 stores keys and values in about half the bytes, with a scale for each token's head. By default they "
        "have the model's dtype.",
    )
    page_size: Literal[16, 32, 64] = Field(16, description="Tokens a page.")
    memory: Size | None = Field(None, description="Size of the page pool, e.g. 256MiB. Either this or `fraction`.")
    fraction: Share | None = Field(
        None,
        description="Share of the process's memory budget that is left after all weights; by default 90%. "
        "The fractions of a file's engines add up to at most 100%.",
    )

    prefix_cache: bool = Field(
        _DEFAULTS.prefix_cache,
        description="Keep computed pages until their room is needed, and read them again for requests that begin alike. "
        "The answers are those without it.",
    )

    @model_validator(mode="after")
    def _one_size(self) -> KVCacheSection:
        if self.memory is not None and self.fraction is not None:
            raise located("give either memory or fraction, not both", "fraction")
        return self


class BucketsSection(Section):
    """Static shapes to compile for. By default chosen by the maxima."""

    rows: Annotated[list[int], OneOrMore] = Field(
        default_factory=list, description="Batch sizes of decode programs, rising, the last one max_sequences."
    )
    tokens: Annotated[list[int], OneOrMore] = Field(
        default_factory=list, description="Token counts of extend programs, rising, the last one max_tokens_per_step."
    )


class BatchingSection(Section):
    """How requests share a launch."""

    max_sequences: int = Field(_DEFAULTS.max_sequences, ge=1, description="Requests computed at the same time, at most.")
    max_tokens_per_step: int | None = Field(
        None,
        ge=1,
        description="Tokens of one extend launch, decoding requests included; by default 2048 on a GPU, 512 on a CPU.",
    )
    prefill_chunk: int = Field(_DEFAULTS.prefill_chunk, ge=1, description="Tokens of one prompt in one launch, at most.")
    decode_steps: int | None = Field(
        None,
        ge=1,
        description="Decode steps in one launch when no waiting request could be taken in before it ends and, if it lasts longer "
        "than 5 ms, none is likely to come meanwhile; by default 8 on a GPU, 1 on a CPU.",
    )
    buckets: BucketsSection = Field(
        default_factory=lambda: BucketsSection.model_validate({}), description="Static shapes to compile for."
    )


class LongLaneSection(Section):
    """A lane of the queue."""

    depth: int | None = Field(
        None, ge=1, description="Requests that wait in it, at most; one more is refused. By default no limit."
    )
    timeout: Duration | None = Field(
        None, gt=0, description="A request that has waited this long without being begun ends with an error. By default never."
    )


class ShortLaneSection(LongLaneSection):
    """The lane of short requests."""

    max_tokens: int = Field(
        640,
        ge=1,
        description="Tokens of prompt and expected output of the requests in it, at most; longer ones go to the long lane. "
        "The output is guessed from those of earlier requests, and never cut.",
    )


class LanesSection(Section):
    """Two lanes, by the length of a request."""

    short: ShortLaneSection = Field(
        default_factory=lambda: ShortLaneSection.model_validate({}), description="The lane of short requests."
    )
    long: LongLaneSection = Field(
        default_factory=lambda: LongLaneSection.model_validate({}), description="The lane of all others."
    )


class QueueSection(Section):
    """In which order waiting requests are begun."""

    order: Literal["lanes", "fifo"] = Field(
        "lanes", description="fifo is first come, first served, and leaves `lanes` aside, to compare the two."
    )
    lanes: LanesSection | None = Field(
        None, description="Two lanes, so that short requests pass long ones. By default there is one, first come, first served."
    )
    weights: str = Field(
        "3:1", pattern=r"^[1-9][0-9]{0,3}:[1-9][0-9]{0,3}$", description="Tokens of the short lane to tokens of the long one."
    )
    max_wait: Duration = Field(
        _DEFAULTS.max_wait, description="The head of a lane is begun next once its lane has waited this long for a turn."
    )

    def lane_configs(self) -> tuple[LaneConfig, ...]:
        """The engine's lanes, the short one first."""
        if self.lanes is None or self.order == "fifo":
            return FIFO
        weights = [int(weight) for weight in self.weights.split(":")]
        short, long = self.lanes.short, self.lanes.long
        return (
            LaneConfig(name="short", max_tokens=short.max_tokens, weight=weights[0], depth=short.depth, timeout=short.timeout),
            LaneConfig(name="long", weight=weights[1], depth=long.depth, timeout=long.timeout),
        )


class EngineSection(StageSection):
    """An engine: continuous batching over one model."""

    model: str | None = Field(None, description="Stage that gives the model; by default the only earlier one.")
    max_context: int | None = Field(
        None, ge=1, description="Tokens of prompt and output together; by default the model's, at most 8192."
    )
    kv_cache: KVCacheSection = Field(
        default_factory=lambda: KVCacheSection.model_validate({}), description="The pages that hold keys and values."
    )
    batching: BatchingSection = Field(
        default_factory=lambda: BatchingSection.model_validate({}), description="How requests share a launch."
    )
    queue: QueueSection = Field(
        default_factory=lambda: QueueSection.model_validate({}), description="In which order waiting requests are begun."
    )
    deterministic: bool = Field(
        False,
        description="The same tokens and logprobs to the bit whatever runs beside a request and whenever it came; "
        "slower while prompts come in.",
    )
    speculative: SpeculativeSection = Field(
        default_factory=lambda: SpeculativeSection.model_validate({}), description="Speculative decoding; off by default."
    )

    @model_validator(mode="after")
    def _check(self) -> EngineSection:
        try:
            self.engine_config()
        except ConfigError as error:
            text = str(error)
            field = text.split(" ", 1)[0]
            for name, place in _PLACES.items():
                if name != place[-1]:
                    text = text.replace(name, ".".join(place))
            raise located(text, *_PLACES.get(field, ())) from None
        return self

    def engine_config(self, *, seed: int | None = None, compile_cache: str | None = None) -> EngineConfig:
        """The engine's own configuration. Raises `ConfigError` for numbers that do not fit each other."""
        batching = self.batching
        fraction = self.kv_cache.fraction
        return EngineConfig(
            max_context=self.max_context,
            page_size=self.kv_cache.page_size,
            kv_cache_dtype=self.kv_cache.dtype,
            kv_cache_bytes=self.kv_cache.memory,
            kv_cache_fraction=_DEFAULTS.kv_cache_fraction if fraction is None else fraction,
            max_sequences=batching.max_sequences,
            max_tokens_per_step=batching.max_tokens_per_step,
            prefill_chunk=batching.prefill_chunk,
            decode_steps=batching.decode_steps,
            row_buckets=tuple(batching.buckets.rows),
            token_buckets=tuple(batching.buckets.tokens),
            lanes=self.queue.lane_configs(),
            max_wait=self.queue.max_wait,
            seed=seed,
            compile_cache=compile_cache,
            deterministic=self.deterministic,
            prefix_cache=self.kv_cache.prefix_cache,
            speculative=self.speculative.config(),
        )


class EngineKind(StageKind[EngineSection]):
    """Lives in memory and is closed after the last stage that uses it."""

    name = "engine"
    section = EngineSection
    gives = "engine"
    inputs = (StageInput("model", "model"), StageInput(DRAFT, "model", implicit=False))
    live = True

    def check_together(self, stages: Sequence[tuple[str, EngineSection]]) -> Sequence[tuple[str, KeyPath, str]]:
        """The engines of a file share one device: their fractions add up to at most 100 %."""
        sharing = [(name, config.kv_cache.fraction) for name, config in stages if config.kv_cache.memory is None]
        total = sum(_DEFAULTS.kv_cache_fraction if fraction is None else fraction for _, fraction in sharing)
        if total <= 1.0 + 1e-9:
            return ()
        names = ", ".join(f"{name} {100 * (_DEFAULTS.kv_cache_fraction if f is None else f):g}%" for name, f in sharing)
        message = f"the engines' shares add up to {100 * total:g}%, more than 100% ({names}; the default is 90%)"
        return [(sharing[-1][0], ("kv_cache", "fraction"), message)]

    def run(self, context: StageContext[EngineSection]) -> LLM:
        """Loads the model and builds the engine: returns when it is warm."""
        config = context.config.engine_config(seed=context.runtime.seed, compile_cache=str(context.artifacts / "compile_cache"))
        llm = build_engine(context.inputs["model"], config, context, draft=context.inputs.get(DRAFT))
        if context.trace is not None:
            from llmjax.engine.engine_trace import EngineTrace

            llm.engine.trace = EngineTrace(context.trace, context.name)
        return llm

    def summary(self, value: Any) -> Mapping[str, Any]:
        """The pages it has, and the seconds of each phase of its start; phases run beside each other."""
        pages = {"pages": value.engine.stats.num_pages, "page size": value.engine.config.page_size}
        return pages | {f"{name} s": round(seconds, 2) for name, seconds in value.engine.startup.seconds().items()}


def build_engine(
    reference: ModelSource, config: EngineConfig, context: StageContext[EngineSection], draft: ModelSource | None = None
) -> LLM:
    """The one call into the engine; imported here because it starts JAX. The process's settings come first."""
    startup, runtime = Timeline(), context.runtime
    with startup.phase("import"):
        from llmjax.engine.backend import configure_backend, is_gpu, use_compile_cache

        configure_backend(platform=runtime.requested, memory_fraction=runtime.memory_fraction)
        from llmjax.engine.llm import LLM
    with startup.phase("device"):
        is_gpu()
    if config.compile_cache is not None:
        use_compile_cache(config.compile_cache)  # before loading, which compiles too

    loaded = reference.load(context.digests)
    drafting = None if draft is None else draft.load(context.digests)
    tokenizer = reference.tokenizer_files(loaded).open()
    llm = LLM(loaded, engine_config=config, tokenizer=tokenizer, draft=drafting, startup=startup)
    if reference.name is not None:
        llm.name = reference.name
    return llm


KIND = EngineKind()
