"""`MemoryMap`: where the memory of an engine is, page by page and by purpose. For debugging; owns nothing, changes nothing."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import jax

from llmjax.engine.runner import ModelRunner
from llmjax.model.kv_cache import page_arrays
from llmjax.scheduling.page_map import PageUse
from llmjax.scheduling.page_pool import PagePool


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on the device by purpose.

    Attributes:
        weights, cache, state: arrays the engine holds all the time (an array that occurs twice counts once).
        temporaries: of the program that needs most, while it runs.
        in_use, limit: of the whole process, as the device tells; None where it does not (a CPU).
    """

    weights: int
    cache: int
    state: int
    temporaries: int
    in_use: int | None
    limit: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryMap:
    """A moment of an engine's memory.

    Attributes:
        step: launches so far; ages count from here.
        page_size: tokens a page. page_bytes: bytes a page over all layers.
        num_pages: pages of the pool (the null page is not counted).
        num_held: pages that requests hold, a shared one once. num_shared: those of them that several hold.
        num_kept: free pages whose content the prefix cache still finds. num_empty: the rest.
        pages: every page that is held or kept.
        device: bytes by purpose.
    """

    step: int
    page_size: int
    page_bytes: int
    num_pages: int
    num_held: int
    num_shared: int
    num_kept: int
    num_empty: int
    pages: tuple[PageUse, ...]
    device: DeviceMemory

    def to_json(self) -> dict[str, Any]:
        """The same as numbers, texts, lists and dicts, fit for `json.dumps`. A large pool's pages are many: they are not copied
        by `dataclasses`, which takes ten times as long, beside an engine that runs."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"pages": [page.to_json() for page in self.pages], "device": dataclasses.asdict(self.device)}


def memory_map(pool: PagePool, pages: list[PageUse], step: int, runner: ModelRunner, temp_bytes: int) -> MemoryMap:
    """The present moment; `pages` are the scheduler's (`Scheduler.page_uses`), `temp_bytes` those of the largest program."""
    device = _device_memory(runner, temp_bytes)
    return MemoryMap(
        step=step,
        page_size=pool.page_size,
        page_bytes=_bytes(page_arrays(runner.arrays[1])) // pool.num_pages,
        num_pages=pool.capacity,
        num_held=pool.num_used,
        num_shared=sum(page.shared for page in pages),
        num_kept=pool.num_kept,
        num_empty=pool.num_free - pool.num_kept,
        pages=tuple(pages),
        device=device,
    )


def live_bytes() -> int:
    """Bytes of all arrays that are alive in this process."""
    gc.collect()
    return sum(int(array.nbytes) for array in jax.live_arrays())


def _device_memory(runner: ModelRunner, temp_bytes: int) -> DeviceMemory:
    stats = jax.devices()[0].memory_stats() or {}
    params, cache, state = runner.arrays
    return DeviceMemory(
        weights=_bytes(params),
        cache=_bytes(cache),
        state=_bytes(state),
        temporaries=temp_bytes,
        in_use=stats.get("bytes_in_use"),
        limit=stats.get("bytes_limit"),
    )


def _bytes(tree: Any) -> int:
    return sum(int(array.nbytes) for array in {id(leaf): leaf for leaf in jax.tree.leaves(tree)}.values())
