"""What a pipeline's engines will need of the device's memory, worked out without loading a weight. For `llmjax doctor --memory`.

Asks JAX for the device's size. Temporaries of the compiled programs are known only once they are compiled; an engine subtracts
them at start, so the pages told here for a share of a device are an upper bound.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from llmjax.pipeline.loading import Pipeline
from llmjax.pipeline.planning import plan


@dataclasses.dataclass(frozen=True)
class EngineMemory:
    """One engine stage's needs, in bytes and pages.

    Attributes:
        stage, model: names of the engine's and of its model's stage.
        weight_bytes: of the parameters as loaded.
        page_bytes: of one page over all layers.
        pages: usable pages (the null page not counted); None where the device does not tell its size.
        page_size: tokens a page.
        max_context: tokens of one request at most.
    """

    stage: str
    model: str
    weight_bytes: int
    page_bytes: int
    pages: int | None
    page_size: int
    max_context: int

    @property
    def full_requests(self) -> float | None:
        """Requests of full length that the pool holds at once."""
        return None if self.pages is None else self.pages * self.page_size / self.max_context


def memory_plan(pipeline: Pipeline) -> list[EngineMemory]:
    """The needs of every engine that a run would start. Raises `ConfigErrors` and `ModelError` as a run would."""
    from llmjax.engine.backend import configure_backend

    planned = plan(pipeline)
    configure_backend(platform=planned.runtime.requested, memory_fraction=planned.runtime.memory_fraction)
    configs = {stage.name: stage.config for stage in planned.stages}
    engines = [stage.name for stage in planned.stages if stage.kind == "engine" and stage.action in ("run", "reuse")]
    models = {name: _model_behind(pipeline, name) for name in engines}
    facts = {name: _model_facts(configs[models[name]]) for name in engines}
    left = _device_bytes()
    if left is not None:
        left -= sum(weights for _, weights in facts.values())
    return [_engine_memory(name, models[name], configs[name], *facts[name], left) for name in engines]


def _model_behind(pipeline: Pipeline, engine: str) -> str:
    """The model stage that an engine's model comes from, through whatever stages lie between."""
    name = pipeline.stage(engine).inputs["model"]
    while pipeline.stage(name).kind.name != "model":
        inputs = pipeline.stage(name).inputs
        name = inputs.get("model") or inputs["candidate"]
    return name


def _model_facts(section: Any) -> tuple[Any, int]:
    """The model's shape as it will be loaded, and the bytes of its parameters."""
    from llmjax.model.checkpoint.describe import describe, param_bytes

    source, dtype = section.source, section.dtype
    random = None
    if source.random is not None:
        random = source.random.preset or source.random.config.shape(dtype)
    shape = describe(path=source.path, package=source.package, random=random)["config"].replace(dtype=dtype)
    return shape, param_bytes(shape)


def _device_bytes() -> int | None:
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit")


def _engine_memory(name: str, model: str, section: Any, shape: Any, weights: int, left: int | None) -> EngineMemory:
    from llmjax.engine.config import DEFAULT_MAX_CONTEXT
    from llmjax.model.kv_cache import cache_bytes_per_page

    config = section.engine_config()
    page_bytes = cache_bytes_per_page(shape, config.page_size)
    pool = config.kv_cache_bytes
    if pool is None and left is not None:
        pool = int(max(left, 0) * config.kv_cache_fraction)
    return EngineMemory(
        stage=name,
        model=model,
        weight_bytes=weights,
        page_bytes=page_bytes,
        pages=None if pool is None else max(pool // page_bytes - 1, 0),
        page_size=config.page_size,
        max_context=config.max_context or min(shape.max_positions, DEFAULT_MAX_CONTEXT),
    )
