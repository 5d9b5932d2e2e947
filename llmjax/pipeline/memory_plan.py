"""What a pipeline's engines will need of the device's memory, worked out without loading a weight. For `llmjax doctor --memory`.

The plan of an engine is `llmjax.engine.memory.plan_memory`, the same function by which the engine allocates. Owns only the
question which engines there are, and what they find on the device when they start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmjax.pipeline.loading import Pipeline
from llmjax.pipeline.model_source import StoredModel
from llmjax.pipeline.planning import StagePlan, plan
from llmjax.pipeline.stages.engine import DRAFT
from llmjax.pipeline.store import Store

if TYPE_CHECKING:
    from llmjax.engine.memory import DeviceMemory, MemoryPlan


@dataclasses.dataclass(frozen=True)
class EngineMemory:
    """One engine stage's plan.

    Attributes:
        stage, model: names of the engine's and of its model's stage.
        plan: where the memory goes.
        assumed: what had to be assumed of the weights, "" where they are known.
    """

    stage: str
    model: str
    plan: MemoryPlan
    assumed: str = ""


def memory_plan(pipeline: Pipeline) -> list[EngineMemory]:
    """The needs of every engine that a run would start, in the order in which they start: a later one finds the earlier ones on
    the device. Raises `ConfigErrors`, `ModelError` and `OutOfMemoryError` as a run would."""
    from llmjax.engine.backend import configure_backend

    planned = plan(pipeline)
    configure_backend(platform=planned.runtime.requested, memory_fraction=planned.runtime.memory_fraction)
    from llmjax.engine.memory import device_memory

    stages = {stage.name: stage for stage in planned.stages}
    engines = [stage.name for stage in planned.stages if stage.kind == "engine" and stage.action in ("run", "reuse")]
    device, plans = device_memory(), []
    for name in engines:
        model = _model_behind(pipeline, pipeline.stage(name).inputs["model"])
        shape, assumed = _shape_behind(pipeline, stages, pipeline.stage(name).inputs["model"])
        drafting = pipeline.stage(name).inputs.get(DRAFT)
        draft, draft_assumed = (None, "") if drafting is None else _shape_behind(pipeline, stages, drafting)
        made = _plan_engine(stages[name].config, shape, draft, device)
        plans.append(EngineMemory(name, model, made, assumed or draft_assumed))
        if device is not None:
            device = dataclasses.replace(device, in_use=made.held)
    return plans


def _model_behind(pipeline: Pipeline, stage: str) -> str:
    """The model stage that a stage's model comes from, through whatever stages lie between."""
    name = stage
    while pipeline.stage(name).kind.name != "model":
        name = _input_of(pipeline, name)
    return name


def _input_of(pipeline: Pipeline, name: str) -> str:
    """The stage whose model a stage gives or makes another of. A gate is expected to let its candidate through."""
    inputs = pipeline.stage(name).inputs
    return inputs.get("model") or inputs["candidate"]


def _shape_behind(pipeline: Pipeline, stages: Mapping[str, StagePlan], name: str) -> tuple[Any, str]:
    """The config of the model that a stage gives, and what had to be assumed of it: a quantized one that is not in the store yet
    counts by its section's patterns, as nobody knows what a measurement will keep."""
    stage = stages[name]
    if stage.kind == "model":
        return _model_shape(stage.config), ""
    if stage.kind != "quantize":
        return _shape_behind(pipeline, stages, _input_of(pipeline, name))
    store = Store(pipeline.artifacts / "store")
    if stage.key is not None and stage.action == "reuse" and store.has(stage.kind, stage.key):
        from llmjax.model.checkpoint.orbax import read_orbax_config

        return read_orbax_config(StoredModel.open(store.folder(stage.kind, stage.key), stage.key).weights)[0], ""
    from llmjax.quantization.quantize import plan_quantization

    section: Any = stage.config
    shape, _ = _shape_behind(pipeline, stages, _input_of(pipeline, name))
    quantization = plan_quantization(shape, section.scheme, dtypes=section.dtypes, keep=section.keep)
    limits = [limit for limit in ("max_sensitivity", "max_perplexity_ratio") if getattr(section, limit) is not None]
    verb = "keep" if len(limits) > 1 else "keeps"
    kept = f"{name} is not made yet: what {' and '.join(limits)} {verb} in {shape.dtype} is counted as int8"
    assumed = kept if limits else ""
    return shape.replace(quantization=quantization), assumed


def _model_shape(section: Any) -> Any:
    """The model's config as it will be loaded."""
    from llmjax.model.checkpoint.describe import describe

    source, dtype = section.source, section.dtype
    random = None
    if source.random is not None:
        random = source.random.preset or source.random.config.shape(dtype)
    return describe(path=source.path, package=source.package, random=random)["config"].replace(dtype=dtype)


def _plan_engine(section: Any, shape: Any, draft: Any, device: DeviceMemory | None) -> MemoryPlan:
    from llmjax.engine.backend import is_gpu
    from llmjax.engine.compile_programs import DraftShapes, Shapes
    from llmjax.engine.memory import measure_temporaries, plan_memory
    from llmjax.model.checkpoint.load import param_structs
    from llmjax.model.registry import get_model

    config = section.engine_config().resolved(gpu=is_gpu(), model_max_context=shape.max_positions)
    model, params = get_model(shape.family), param_structs(shape)
    drafts = None if draft is None else DraftShapes(draft, param_structs(draft))
    made = plan_memory(model, shape, params, config, device, draft=drafts)
    if device is None:
        return made
    needed, source = measure_temporaries(model, Shapes(shape, params, config, made.num_pages, drafts))
    if not made.leaves_room_for(needed):
        made = plan_memory(model, shape, params, config, device, temporaries=needed, draft=drafts)
    return made.with_temporaries(needed, source)
