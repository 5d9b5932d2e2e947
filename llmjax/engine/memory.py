"""What an engine needs of the device's memory, and how many pages that leaves for the pool.

One function, `plan_memory`, makes the plan; an engine allocates by it, and `llmjax doctor --memory` prints it before anything is
loaded. What programs need beside their arguments is expected before they are compiled, and known from them afterwards. Owns
nothing on the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.engine.compile_programs import DraftShapes, Key, Shapes, compile_lowered, draft_lengths, lower, temp_bytes
from llmjax.engine.config import ResolvedConfig
from llmjax.engine.prompt_scores import SCORE_CHUNK
from llmjax.errors import ConfigError, OutOfMemoryError
from llmjax.model.kv_cache import bytes_beside_pages, cache_bytes_per_page
from llmjax.model.registry import Model, is_shared_decoder

MIB = 2**20
CPU_POOL_BYTES = 1024 * MIB  # at most this much where the device does not tell what it has
DEVICE_RESERVE_BYTES = 1536 * MIB  # code, CUDA graphs, libraries' workspaces
PAGE_STEP = 256  # page counts are rounded down to a multiple, so that small changes of free memory hit the compile cache
PROBE_LAYERS = (2, 3)  # temporaries grow evenly with the layers from the second on (the first is another program's shape)


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What the device lets this process have, and what of it is taken by others than the engine that is planned: bytes."""

    limit: int
    in_use: int


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Where the device's memory goes, in bytes.

    Attributes:
        limit: what this process may have; None where the device does not tell.
        in_use: taken before the engine: another engine, a researcher's arrays.
        weights: the parameters, a draft model's too.
        state: the rows' state (token counts above all; with speculation also their tokens and masks of drafts), and what a
            cache has beside its pages.
        temporaries: of the largest program; None where the pool does not depend on them.
        reserve: left free for code, CUDA graphs and libraries.
        page_bytes: of one page over all layers, keys and values; with a draft model over its layers too.
        num_pages: pages a layer, the null page included.
        page_size, max_sequences, max_context: sizes of the engine, in tokens and rows.
        temporaries_from: how `temporaries` is known: "expected" (of the shapes), "probe" (reckoned from compiled programs of a
            few layers), "compiled" (the programs themselves), or "" (not known).
    """

    limit: int | None
    in_use: int
    weights: int
    state: int
    temporaries: int | None
    reserve: int
    page_bytes: int
    num_pages: int
    page_size: int
    max_sequences: int
    max_context: int
    temporaries_from: Literal["expected", "probe", "compiled", ""]

    @property
    def pool(self) -> int:
        """Bytes of the page pool."""
        return self.num_pages * self.page_bytes

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values the pool holds; its first page, the null page, holds none."""
        return (self.num_pages - 1) * self.page_size

    @property
    def full_rows(self) -> float:
        """Requests of full length that the pool holds at once."""
        return self.tokens / self.max_context

    @property
    def total(self) -> int:
        """All of it but the reserve: the peak to be expected."""
        return self.in_use + self.weights + self.state + (self.temporaries or 0) + self.pool

    @property
    def held(self) -> int:
        """What is on the device between launches, that of others included."""
        return self.total - (self.temporaries or 0)

    def lines(self) -> list[tuple[str, str]]:
        """The plan as lines of two columns, for people."""
        known = {
            "expected": "at most, by the shapes",
            "probe": "reckoned from compiled programs of 2 and 3 layers",
            "compiled": "of the compiled programs",
            "": "",
        }
        notes = {
            "temporaries": known[self.temporaries_from],
            "weights": "of their shapes",
            "reserve": "an estimate: code, graphs",
        }
        lines = [(name, f"{_mib(size)} {notes.get(name, '')}".rstrip()) for name, size in self.parts().items()]
        if self.temporaries is None:
            lines.append(("temporaries", "not asked: the pool does not depend on them here"))
        lines.append(("page", f"{self.page_bytes / 2**10:,.1f} KiB over all layers, {self.page_size} tokens"))
        lines.append(("pages", f"{self.num_pages - 1:,} and the null page"))
        lines.append(("tokens", f"{self.tokens:,}"))
        lines.append(("rows", f"{self.max_sequences:,}, {self.full_rows:,.1f} of them at {self.max_context:,} tokens"))
        limit = "; the device does not tell what it has" if self.limit is None else f" of {_mib(self.limit)}"
        return [*lines, ("in all", _mib(self.total + self.reserve) + limit)]

    def leaves_room_for(self, temporaries: int) -> bool:
        """Whether programs that need so much fit beside the rest without the reserve, or another plan would not differ: this one
        has counted on as much, or its pool does not depend on them."""
        fits = self.limit is None or self.held + temporaries + self.reserve <= self.limit
        return fits or self.temporaries is None or temporaries <= self.temporaries

    def with_temporaries(self, temporaries: int, source: Literal["probe", "compiled"]) -> MemoryPlan:
        """The same with what programs were found to need. Raises `OutOfMemoryError` when it is more than there is."""
        plan = dataclasses.replace(self, temporaries=temporaries, temporaries_from=source)
        if plan.limit is not None and plan.total > plan.limit:
            raise OutOfMemoryError(f"the programs' temporaries do not fit beside the rest ({plan.text()}): {plan.advice()}")
        return plan

    def parts(self) -> dict[str, int]:
        """Name and bytes of each part there is, the reserve included."""
        temporaries = {} if self.temporaries is None else {"temporaries": self.temporaries}
        others = {"in use by others": self.in_use} if self.in_use else {}
        reserve = {"reserve": self.reserve} if self.reserve else {}
        return others | {"weights": self.weights, "pool": self.pool, "state": self.state} | temporaries | reserve

    def text(self) -> str:
        """The plan in one line."""
        parts = ", ".join(f"{name} {_mib(size)}" for name, size in self.parts().items())
        limit = "" if self.limit is None else f" of {_mib(self.limit)}"
        return f"{parts}{limit}; {self.tokens:,} tokens, {self.full_rows:.1f} requests of {self.max_context:,} tokens"

    def advice(self) -> str:
        """Which number to lower when memory runs out at the start: the largest part that a number decides."""
        temporaries = self.temporaries or 0
        if self.pool >= max(temporaries, self.state):
            return "lower the cache's memory (kv_cache_bytes or kv_cache_fraction)"
        if temporaries >= self.state:
            return "lower max_tokens_per_step"
        return "lower max_sequences"


def device_memory() -> DeviceMemory | None:
    """What the default device tells of its memory now; None on a CPU, which tells nothing."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return DeviceMemory(int(stats["bytes_limit"]), int(stats["bytes_in_use"]))


@contextlib.contextmanager
def tell_out_of_memory(plan: MemoryPlan) -> Iterator[None]:
    """Turn the device's running out of memory into one line that says where it went and which number to lower."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(f"the device ran out of memory at the start ({plan.text()}): {plan.advice()}") from error


def tree_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def plan_memory(
    model: Model,
    config: Any,
    params: Any,
    engine_config: ResolvedConfig,
    device: DeviceMemory | None,
    *,
    temporaries: int | None = None,
    draft: DraftShapes | None = None,
) -> MemoryPlan:
    """The plan of an engine. Allocates nothing, and compiles nothing but another's model.

    With `kv_cache_bytes` as many pages as fit into it. Else `kv_cache_fraction` of what the device has left after everything
    that is on it, the weights, the state and the temporaries; on a CPU, which tells nothing, enough for every row at full
    length, within 1 GiB.

    Args:
        params: the parameters' shapes and dtypes; `device.in_use` must not count them.
        temporaries: bytes to count on for them where the pool's size depends on it; by default `expected_temporaries`.
        draft: the draft model's shapes; a page of the pool is one of its cache too.

    Raises:
        ConfigError: `kv_cache_bytes` holds less than two pages.
        OutOfMemoryError: the rest does not leave the pool two pages, or the weights and the given pool exceed the device.
    """
    page_bytes = cache_bytes_per_page(config, engine_config.page_size, engine_config.kv_cache_dtype)
    weights = tree_bytes(params)
    if draft is not None:
        page_bytes += cache_bytes_per_page(draft.config, engine_config.page_size)
        weights += tree_bytes(draft.params)
    shapes = Shapes(config, params, engine_config, 2, draft)
    plan = MemoryPlan(
        limit=None if device is None else device.limit,
        in_use=0 if device is None else device.in_use,
        weights=weights,
        state=tree_bytes(shapes.state()) + bytes_beside_pages(config, engine_config.kv_cache_dtype),
        temporaries=None,
        reserve=0 if device is None else DEVICE_RESERVE_BYTES,
        page_bytes=page_bytes,
        num_pages=0,
        page_size=engine_config.page_size,
        max_sequences=engine_config.max_sequences,
        max_context=engine_config.max_context,
        temporaries_from="",
    )
    full = 1 + engine_config.max_sequences * engine_config.max_pages
    if engine_config.kv_cache_bytes is not None:
        pages = engine_config.kv_cache_bytes // page_bytes
        if pages < 2:
            raise ConfigError(f"{_too_few(pages, page_bytes)}: raise the cache's memory")
        plan = dataclasses.replace(plan, num_pages=pages)
        if plan.limit is not None and plan.total > plan.limit:
            left = max(plan.limit - (plan.total - plan.pool), 0)
            raise OutOfMemoryError(
                f"a cache of {_mib(plan.pool)} does not fit, the device has {_mib(left)} left for it ({plan.text()}): "
                "lower the cache's memory"
            )
        return plan
    if device is None:
        pages = min(full, CPU_POOL_BYTES // page_bytes)
        if pages < 2:
            raise OutOfMemoryError(f"{_too_few(pages, page_bytes)}: set the cache's memory")
        return dataclasses.replace(plan, num_pages=pages)
    source: Literal["expected", "compiled"] = "expected" if temporaries is None else "compiled"
    temporaries = expected_temporaries(model, shapes) if temporaries is None else temporaries
    left = device.limit - plan.in_use - plan.weights - plan.state - temporaries - plan.reserve
    pages = int(max(left, 0) * engine_config.kv_cache_fraction) // page_bytes
    if pages > PAGE_STEP:
        pages = pages // PAGE_STEP * PAGE_STEP
    plan = dataclasses.replace(plan, num_pages=min(full, pages), temporaries=temporaries, temporaries_from=source)
    if plan.num_pages < 2:
        advice = "use a smaller model or dtype" if plan.weights + plan.reserve > device.limit else plan.advice()
        if plan.in_use > plan.weights + temporaries:
            advice = "free device memory"
        raise OutOfMemoryError(f"{_too_few(plan.num_pages, page_bytes)} ({plan.text()}): {advice}")
    return plan


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"


def _too_few(pages: int, page_bytes: int) -> str:
    size = f"{page_bytes / MIB:.2f} MiB"
    return f"the KV cache has room for {max(pages, 0)} pages of {size}, it needs at least 2 (one is the null page)"


def expected_temporaries(model: Model, shapes: Shapes) -> int:
    """Bytes that the largest program will hardly exceed beside its arguments, before any is compiled.

    They do not depend on the pool, but the pool's size depends on them, and compiled programs on the pool's. Of the shared
    decoder: what a layer makes of a launch's tokens, and the logits twice; the 8B's programs needed 0.75 of it. Whoever compiles
    the programs knows better and asks `MemoryPlan.leaves_room_for`. Another's model is compiled with a tiny pool.
    """
    if not is_shared_decoder(model):
        return measure_temporaries(model, shapes)[0]
    config = shapes.engine_config
    tokens = config.token_buckets[-1]
    # Rows of them that exist at once: those that a launch samples from, or scores.
    logits = max(config.row_buckets[-1], min(tokens, max(config.max_sequences, SCORE_CHUNK)))
    if config.speculative is not None:
        logits = max(logits, config.speculate_row_buckets[-1] * (1 + draft_lengths(config)[-1]))
    decoders: list[Any] = [shapes.config, *([] if shapes.draft is None else [shapes.draft.config])]  # `ModelConfig`s
    expected = 0
    for decoder in decoders:
        heads = (decoder.num_heads + 2 * decoder.num_kv_heads) * decoder.head_dim
        width = 6 * decoder.hidden_size + heads + 2 * decoder.mlp_size
        expected += tokens * width * jnp.dtype(decoder.dtype).itemsize
        expected += 2 * logits * decoder.vocab_size * np.dtype(np.float32).itemsize
    return expected


def measure_temporaries(model: Model, shapes: Shapes) -> tuple[int, Literal["probe", "compiled"]]:
    """Bytes that the largest program needs beside its arguments, found by compiling, and how.

    They do not depend on the pool, so it is compiled with a tiny one. Those of the shared decoder grow evenly with its layers, so
    for it programs of a few layers are compiled, in a tenth of the time.
    """
    keys, shapes = _largest(shapes.engine_config), dataclasses.replace(shapes, num_pages=2)
    layers = shapes.config.num_layers
    if not is_shared_decoder(model) or layers <= max(PROBE_LAYERS):
        return max(_temporaries(model, [(key, shapes) for key in keys])), "compiled"
    measured = _temporaries(model, [(key, _with_layers(shapes, count)) for key in keys for count in PROBE_LAYERS])
    few, more = PROBE_LAYERS
    reckoned = [
        first + (layers - few) * max(second - first, 0) // (more - few)
        for first, second in zip(measured[::2], measured[1::2], strict=True)
    ]
    return max(*reckoned, *measured), "probe"


def _largest(engine_config: ResolvedConfig) -> list[Key]:
    """The programs one of which needs most: the most tokens, and the most rows with logits."""
    keys: list[Key] = [
        ("extend", engine_config.token_buckets[-1], 1),
        ("score", engine_config.token_buckets[-1], 1),
        ("decode", engine_config.row_buckets[-1], max(engine_config.step_counts)),
    ]
    if engine_config.speculative is not None:
        keys.append(("speculate", engine_config.speculate_row_buckets[-1], draft_lengths(engine_config)[-1]))
    return keys


def _with_layers(shapes: Shapes, count: int) -> Shapes:
    config: Any = shapes.config  # a ModelConfig: the shared decoder has no other
    config = config.replace(num_layers=count, sliding_windows=config.sliding_windows[:count])
    params = shapes.params | {"layers": {index: shapes.params["layers"][index] for index in range(count)}}
    return dataclasses.replace(shapes, config=config, params=params)


def _temporaries(model: Model, programs: list[tuple[Key, Shapes]]) -> list[int]:
    """Temporaries and outputs that are no donated argument, of each program."""
    with ThreadPoolExecutor(max(len(programs), 1), thread_name_prefix="probe") as threads:
        compiling = [(key, threads.submit(compile_lowered, key, lower(key, model, shapes))) for key, shapes in programs]
        return [temp_bytes(key, future.result()) for key, future in compiling]
