"""The step programs of an engine: which there are, and how each is lowered and compiled, from shapes alone.

Owns the list of programs and the order of the work: what the store has is taken from it, everything else is lowered (in other
processes where there are some), and all are compiled side by side. Must not know requests, and holds no array: a model can be
compiled for while its weights are read.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib
import logging
import math
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import numpy as np

from llmjax.engine.compile_counter import CompileCounter
from llmjax.engine.compile_pool import LoweringFailed, LoweringPool
from llmjax.engine.compile_store import ProgramStore
from llmjax.engine.config import ResolvedConfig
from llmjax.engine.drafting import Drafter, ModelDrafter, NgramDrafter, TruncatedDrafter
from llmjax.engine.prompt_scores import Unscored, score_step
from llmjax.engine.speculative import catch_up_layout, catch_up_step, extend_with_draft, speculate_layout, speculate_step
from llmjax.engine.state import ROWS_A_RESET, init_state, no_known_tokens, no_seen_tokens, pack_masks, pack_resets, reset_rows
from llmjax.engine.step import decode_layout, decode_steps, extend_layout, extend_step
from llmjax.engine.token_masks import num_mask_words
from llmjax.model.kv_cache import PAGES_A_WIPE, KVCache, init_cache, zero_pages
from llmjax.model.registry import DecoderConfig, Model, get_model, is_shared_decoder
from llmjax.scheduling.buckets import pick
from llmjax.telemetry.startup import Timeline
from pallas_kernels import kernel_names

log = logging.getLogger(__name__)

Key = tuple[str, int, int]
"""Kind, rows, pages or tokens, and steps or drafts.

Kinds are "reset", "wipe", "decode", "extend" and "score"; with speculation "speculate", and with a draft model "catch_up"."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: its name in the start-up log, seconds to lower and compile it, and bytes it needs beside its arguments.

    `source` tells where it came from: "store" (lowered by a start before this one), else "lowered". JAX's cache may have spared
    compiling it either way.
    """

    name: str
    lower_seconds: float
    compile_seconds: float
    temp_bytes: int
    source: str = "lowered"

    def __str__(self) -> str:
        lowered = "from the store" if self.source == "store" else f"lowered in {self.lower_seconds:.2f} s"
        return f"{self.name}: {lowered}, compiled in {self.compile_seconds:.2f} s"


Compiling = concurrent.futures.Future[tuple[Any, Program]]
"""Gives an executable, and what to tell of it."""

CATCH_UP_TOKENS = 256
"""Tokens of a launch that fills a draft model's cache, about: few rows have holes, and these are short or of any length."""


MEMORY_SLOP = 1000
"""Percent of what XLA takes to be free. It counts the donated pool twice, as an argument and as a result, would take the memory
for full, and compute small things once a layer rather than keep them. Whether temporaries have room is for the plan to say."""

FEW_ROWS = 16
"""Up to so many rows XLA may take Triton for matmuls that are not our kernels: for a single row cuBLAS is far slower. For more
rows and for prompts cuBLAS is as good or better in bfloat16, and trying both takes a cold start eight seconds. Of int8 that is
not known, and Triton widens weights as it reads them."""

FEW_MATMULS = 3
"""Where our kernels leave XLA no more than that, a head and a projection, cuBLAS is as good for few rows too."""

AUTOTUNE_LEVEL = 3
"""XLA times the ways to a matmul on fresh buffers. One level more, its default, compares their results too, one after the other
on the device, and logs what differs: the same way is taken."""


@dataclasses.dataclass(frozen=True)
class DraftShapes:
    """A draft model: its config, a static argument, and its parameters as a tree of `jax.ShapeDtypeStruct`."""

    config: DecoderConfig
    params: Any


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Everything that the programs of an engine depend on.

    Attributes:
        config: the model's; a static argument.
        params: its parameters as a tree of `jax.ShapeDtypeStruct`.
        engine_config: sizes.
        num_pages: pages a layer, the null page included.
        draft: the draft model's; None without one.
    """

    config: DecoderConfig
    params: Any
    engine_config: ResolvedConfig
    num_pages: int
    draft: DraftShapes | None = None

    def identity(self, key: Key) -> str:
        """Tells apart all programs that differ, those of other models too. Sizes that do not change a program are not in it."""
        sizes = (self.engine_config.max_sequences, self.engine_config.page_size, self.engine_config.max_pages, self.num_pages)
        speculative = self.engine_config.speculative
        drafts = () if speculative is None else (self._drafting(), self.draft)
        return repr((key, sizes, self.engine_config.kv_cache_dtype, self.config, self.params, *drafts))

    def _drafting(self) -> tuple[Any, ...]:
        s = self.engine_config.speculative
        assert s is not None
        return s.method, self.draft_layers, s.ngram_min, s.ngram_max, self.engine_config.mask_places

    @property
    def draft_layers(self) -> int:
        """Layers of the target that a truncated one has."""
        speculative, layers = self.engine_config.speculative, self.config.num_layers
        wanted = None if speculative is None else speculative.layers
        return min(layers, wanted or max(layers // 4, 1))

    @property
    def drafter(self) -> Drafter | None:
        """Who drafts; None without speculation."""
        speculative = self.engine_config.speculative
        if speculative is None:
            return None
        if speculative.method == "ngram":
            return NgramDrafter(speculative.ngram_min, speculative.ngram_max)
        if speculative.method == "truncated":
            return TruncatedDrafter(self.draft_layers)
        assert self.draft is not None
        return ModelDrafter(get_model(self.draft.config.family), self.draft.config)

    def only_shared_decoders(self, model: Model) -> bool:
        """Whether all that is compiled is our own source: `model`, and the draft model if there is one."""
        return is_shared_decoder(model) and (self.draft is None or is_shared_decoder(get_model(self.draft.config.family)))

    def state(self) -> Any:
        """The device state's shapes."""
        make = functools.partial(
            init_state,
            max_sequences=self.engine_config.max_sequences,
            max_pages=self.engine_config.max_pages,
            vocab_size=self.config.vocab_size,
            history_length=self.engine_config.history_length,
            mask_places=self.engine_config.mask_places,
        )
        return jax.eval_shape(make)

    def cache(self) -> Any:
        """The cache's shapes."""
        return self._cache(self.config, self.engine_config.kv_cache_dtype)

    def draft_cache(self) -> Any:
        """Those of the draft model's, in its own dtype; None without one."""
        return None if self.draft is None else self._cache(self.draft.config)

    def _cache(self, config: DecoderConfig, dtype: str | None = None) -> Any:
        sizes = {"num_pages": self.num_pages, "page_size": self.engine_config.page_size}
        return jax.eval_shape(functools.partial(init_cache, config, **sizes, dtype=dtype))


def abstract(params: Any) -> Any:
    """The shapes and dtypes of a tree of arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)


def wanted(engine_config: ResolvedConfig) -> list[Key]:
    """The programs of an engine, in the order in which they are warmed up."""
    keys: list[Key] = [("reset", ROWS_A_RESET, 1), ("wipe", PAGES_A_WIPE, 1)]
    keys += [("decode", rows, steps) for rows in engine_config.row_buckets for steps in engine_config.step_counts]
    keys += [(kind, tokens, 1) for kind in ("extend", "score") for tokens in engine_config.token_buckets]
    speculative = engine_config.speculative
    if speculative is None:
        return keys
    keys += [("speculate", rows, k) for rows in engine_config.speculate_row_buckets for k in draft_lengths(engine_config)]
    return keys + ([catch_up_key(engine_config)] if speculative.method == "draft" else [])


def draft_lengths(engine_config: ResolvedConfig) -> tuple[int, ...]:
    """The numbers of drafts that programs are compiled for, rising: one only in a deterministic engine."""
    speculative = engine_config.speculative
    assert speculative is not None
    return speculative.compiled_lengths(deterministic=engine_config.deterministic)


def catch_up_key(engine_config: ResolvedConfig) -> Key:
    """The program that fills a draft model's cache where plain steps have left it empty."""
    buckets = engine_config.token_buckets
    return ("catch_up", pick(buckets, min(CATCH_UP_TOKENS, buckets[-1])), 1)


def name(key: Key) -> str:
    """A program's name in the log: "decode 8 rows x 4 steps"."""
    kind, size, steps = key
    if kind == "speculate":
        return f"speculate {size} rows x {steps} drafts"
    unit = {"reset": "rows", "wipe": "pages", "decode": "rows", "extend": "tokens", "score": "tokens", "catch_up": "tokens"}[kind]
    return f"{kind} {size} {unit}" + (f" x {steps} steps" if steps > 1 else "")


def step_function(key: Key, model: Model, shapes: Shapes) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
    """The function of a program, the shapes of its arguments, and the numbers of those that are donated."""
    step: Any
    kind, size, steps = key
    page_size, config, drafter = shapes.engine_config.page_size, shapes.config, shapes.drafter
    state, cache, draft_cache = shapes.state(), shapes.cache(), shapes.draft_cache()
    draft_params = None if shapes.draft is None else shapes.draft.params
    rows = min(size, shapes.engine_config.max_sequences)  # of a launch of so many tokens
    if kind == "reset":
        known = None if shapes.engine_config.history_length is None else no_known_tokens()
        packed = abstract(pack_resets([], no_seen_tokens(), max_pages=shapes.engine_config.max_pages, known=known))
        masks = abstract(pack_masks([], [], num_words=num_mask_words(config.vocab_size)))
        return reset_rows, (state, packed, masks), (0,)
    if kind == "wipe":
        step = functools.partial(zero_pages, num_layers=config.num_layers)
        arguments: tuple[Any, ...] = (cache,)
        if shapes.draft is not None:
            step = functools.partial(_zero_both, num_layers=config.num_layers, draft_layers=shapes.draft.config.num_layers)
            arguments = (cache, draft_cache)
        step.__name__ = kind
        return step, (*arguments, jax.ShapeDtypeStruct((size,), np.int32)), tuple(range(len(arguments)))
    if kind == "score":
        step = functools.partial(score_step, model=model, config=config)
        step.__name__ = kind
        return step, (shapes.params, *_unscored(size, model, shapes)), ()
    if kind == "decode":
        width = decode_layout(rows=size, num_steps=steps, page_size=page_size).width
        step = functools.partial(decode_steps, model=model, config=config, rows=size, num_steps=steps)
    elif kind == "extend":
        width = extend_layout(tokens=size, rows=rows, page_size=page_size).width
        step = functools.partial(extend_step, model=model, config=config, tokens=size, rows=rows)
        if isinstance(drafter, ModelDrafter):
            step = functools.partial(extend_with_draft, model=model, config=config, drafter=drafter, tokens=size, rows=rows)
    elif kind == "speculate":
        assert drafter is not None
        width = speculate_layout(rows=size, length=steps, page_size=page_size).width
        step = functools.partial(speculate_step, model=model, config=config, drafter=drafter, rows=size, length=steps)
    else:
        assert isinstance(drafter, ModelDrafter)
        width = catch_up_layout(rows=rows).width
        step = functools.partial(catch_up_step, drafter=drafter, tokens=size, rows=rows)
    step.__name__ = kind  # the program's name in profiles
    update = jax.ShapeDtypeStruct((width,), np.int32)
    if kind == "catch_up":
        return step, (draft_params, state, update, draft_cache), (3,)
    if kind == "speculate" or (kind == "extend" and shapes.draft is not None):
        return step, (shapes.params, draft_params, state, update, cache, draft_cache), (2, 4, 5)
    return step, (shapes.params, state, update, cache), (1, 3)


def _unscored(tokens: int, model: Model, shapes: Shapes) -> Unscored:
    """The shapes of what an extend launch leaves to be scored."""
    if is_shared_decoder(model):
        own: Any = shapes.config  # a `ModelConfig`: the shared decoder has no other
        return Unscored(jax.ShapeDtypeStruct((tokens, own.hidden_size), own.dtype), jax.ShapeDtypeStruct((tokens,), np.int32))
    step, arguments, _ = step_function(("extend", tokens, 1), model, shapes)
    unscored: Unscored = jax.eval_shape(step, *arguments)[2]
    return unscored


def _zero_both(
    cache: KVCache, draft_cache: KVCache, pages: jax.Array, *, num_layers: int, draft_layers: int
) -> tuple[KVCache, KVCache]:
    return zero_pages(cache, pages, num_layers=num_layers), zero_pages(draft_cache, pages, num_layers=draft_layers)


def lower(key: Key, model: Model, shapes: Shapes) -> jax.stages.Lowered:
    """A program, traced and lowered here, for the default device."""
    step, arguments, donated = step_function(key, model, shapes)
    if platform() == "cuda":
        kernel_names.keep_stable()
    return jax.jit(step, donate_argnums=donated).lower(*arguments)


def export(key: Key, model: Model, shapes: Shapes, platform: str) -> jax.export.Exported:
    """A program, traced and lowered for "cuda" or "cpu", in a form that can be pickled: for a store, or another process.

    On "cuda" for the device of the abstract mesh in force, else the default device.
    """
    step, arguments, donated = step_function(key, model, shapes)
    if platform == "cuda":
        kernel_names.keep_stable()
    kernels = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")  # the same JAX compiles it, so it need not be stable
    jitted = jax.jit(step, donate_argnums=donated)
    exported = jax.export.export(jitted, platforms=(platform,), disabled_checks=(kernels,))(*arguments)
    return dataclasses.replace(exported, _get_vjp=None)  # a closure, which cannot be pickled


def lower_exported(exported: jax.export.Exported, key: Key, model: Model, shapes: Shapes) -> jax.stages.Lowered:
    """What `lower` gives, from what `export` gave; a hundredth of the time."""
    _, arguments, donated = step_function(key, model, shapes)

    def call(*args: Any) -> Any:
        return exported.call(*args)

    call.__name__ = key[0]  # the program's name in profiles
    return jax.jit(call, donate_argnums=donated).lower(*arguments)


def platform() -> str:
    """The default device's platform, as `export` wants it."""
    return "cuda" if jax.devices()[0].platform == "gpu" else "cpu"


def compile_programs(
    model: Model,
    shapes: Shapes,
    *,
    timeline: Timeline,
    store: ProgramStore | None = None,
    start_pool: Callable[[], LoweringPool | None] = lambda: None,
    on_idle_cores: Callable[[], object] = lambda: None,
) -> tuple[dict[Key, Any], list[Program]]:
    """Every program of the engine, ready to run: executables by key, and what to tell of them.

    Args:
        on_idle_cores: called when there are fewer programs left to compile than cores, as far as can be told: a good moment for
            other work.
        store: where earlier starts left what they lowered; new ones are added. Executables are JAX's own cache's.
        start_pool: gives processes that lower; called only if there is anything to lower. Without any, and for what they cannot
            lower, it is done in this process.
    """
    keys, counter, on_gpu = wanted(shapes.engine_config), CompileCounter(), platform() == "cuda"
    if on_gpu:
        importlib.import_module("jax.experimental.mosaic.gpu")  # sets what links kernels that others lowered or compiled
    # On a GPU half of the programs wait for others.
    workers = len(keys) if on_gpu else min(len(keys), os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="compile") as threads:
        compiling: dict[Key, Compiling] = {}
        if store is not None:
            with timeline.phase("load programs"):
                for key in keys:
                    if (stored := store.load(shapes.identity(key))) is not None:
                        lowered = lower_exported(stored, key, model, shapes)
                        compiling[key] = threads.submit(_compile, key, lowered, 0.0, "store", timeline)
        missing = sorted((key for key in keys if key not in compiling), key=lambda key: one_step(key) is not None)
        pool = start_pool() if missing else None
        waiting = {} if pool is None else {key: pool.submit(key, shapes) for key in missing}
        for key in missing:
            # Tracing holds the interpreter lock, so lower one after the other; XLA compiles outside it, in parallel.
            start = time.perf_counter()
            lowered = _lower_and_store(key, model, shapes, waiting.get(key), store)
            timeline.add("lower", start, end := time.perf_counter())
            one = one_step(key)
            first = compiling.get(one) if on_gpu and one is not None else None
            compiling[key] = threads.submit(_compile, key, lowered, end - start, "lowered", timeline, first)
        # Those of one step take about as long each, on all cores; behind the first of them come those that waited for it.
        of_one_step = [compiling[key] for key in missing if key[0] in ("decode", "extend") and one_step(key) is None]
        concurrent.futures.wait(of_one_step, return_when=concurrent.futures.FIRST_COMPLETED)
        on_idle_cores()
        made = {key: compiling[key].result() for key in keys}
    programs = [program for _, program in made.values()]
    log.info("%d compilations meanwhile, loading included; JAX's cache had %d of them", counter.count, counter.hits)
    for program in programs:
        log.info("program %s", program)
    return {key: executable for key, (executable, _) in made.items()}, programs


def _lower_and_store(
    key: Key,
    model: Model,
    shapes: Shapes,
    elsewhere: concurrent.futures.Future[jax.export.Exported] | None,
    store: ProgramStore | None,
) -> jax.stages.Lowered:
    """Take what another process lowers (`elsewhere`), or lower here. Without a store and another process nothing is exported."""
    exported = None
    if elsewhere is not None:
        try:
            exported = elsewhere.result()
        except LoweringFailed as error:
            log.warning("program %s is lowered again in this process: %s", name(key), error)
    elif store is not None:
        try:
            exported = export(key, model, shapes, platform())
        except Exception as error:  # what cannot be exported may still be lowered; else that raises
            log.warning("program %s cannot be stored: %s", name(key), (str(error).splitlines() or [type(error).__name__])[0])
    if exported is None:
        return lower(key, model, shapes)
    if store is not None:
        store.save(shapes.identity(key), exported)
    return lower_exported(exported, key, model, shapes)


def one_step(key: Key) -> Key | None:
    """The program of one decode step for that of several: they have the same kernels and matmuls. None for others.

    Once it is compiled, XLA and Mosaic have in this process what they found out about these, and need not do so twice.
    """
    kind, size, steps = key
    return ("decode", size, 1) if kind == "decode" and steps > 1 else None


def _compile(
    key: Key, lowered: jax.stages.Lowered, lower_seconds: float, source: str, timeline: Timeline, first: Compiling | None = None
) -> tuple[Any, Program]:
    """Compile, after `first` where there is one."""
    if first is not None:
        concurrent.futures.wait([first])
    start = time.perf_counter()
    executable = compile_lowered(key, lowered)
    timeline.add("compile", start, end := time.perf_counter())
    return executable, Program(name(key), lower_seconds, end - start, temp_bytes(key, executable), source)


def compile_lowered(key: Key, lowered: jax.stages.Lowered) -> Any:
    """The executable of a program, compiled as XLA's defaults would not."""
    if platform() != "cuda":
        return lowered.compile()
    int8 = any(leaf.dtype == np.int8 for leaf in jax.tree.leaves(lowered.args_info))
    few_rows = key[0] in ("decode", "speculate") and key[1] <= FEW_ROWS
    triton = int8 or (few_rows and lowered.as_text().count("stablehlo.dot_general") > FEW_MATMULS)
    options = {
        "xla_gpu_memory_limit_slop_factor": MEMORY_SLOP,
        "xla_gpu_enable_triton_gemm": triton,
        "xla_gpu_autotune_level": AUTOTUNE_LEVEL,
    }
    return lowered.compile(compiler_options=options)


def temp_bytes(key: Key, executable: Any) -> int:
    """Bytes a program needs beside what is held between launches, by what its executable says: temporaries, outputs that take no
    donated argument's place, and what another program left for it. 0 where it does not say."""
    memory = executable.memory_analysis()
    if memory is None:
        return 0
    left = jax.tree.leaves(executable.args_info[0][1:]) if key[0] == "score" else []  # all but the parameters
    outputs = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
    return int(memory.temp_size_in_bytes + outputs + sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in left))
