"""From a model's shapes to a runner that has answered: plan the memory, compile, take the weights, allocate, warm up, check.

Owns the order, and what runs beside what: programs need shapes only, so they are made while the weights are still being read, and
the kernels are compared with their references meanwhile. Must not know requests.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from llmjax.engine.compile_pool import LoweringPool, useful_workers
from llmjax.engine.compile_programs import DraftShapes, Program, Shapes, abstract, compile_programs, wanted
from llmjax.engine.compile_store import ProgramStore
from llmjax.engine.config import ResolvedConfig
from llmjax.engine.draft_model import DraftModel
from llmjax.engine.memory import MIB, DeviceMemory, MemoryPlan, device_memory, plan_memory, tell_out_of_memory, tree_bytes
from llmjax.engine.runner import ModelRunner, on_device
from llmjax.engine.self_check import check_finite, check_kernels
from llmjax.model.checkpoint.load import PendingParams
from llmjax.model.kv_cache import INT8
from llmjax.model.registry import DecoderConfig, Model, is_shared_decoder
from llmjax.telemetry.startup import Timeline

log = logging.getLogger(__name__)

_KERNELS_AGREE = {False: "the kernels agree with their references", True: "and those of int8 too"}  # facts of the store


@dataclasses.dataclass(frozen=True)
class Started:
    """An engine's device side, ready: the runner, where the memory went, and the programs."""

    runner: ModelRunner
    memory: MemoryPlan
    programs: list[Program]


def start_runner(
    model: Model,
    config: DecoderConfig,
    params: Any,
    engine_config: ResolvedConfig,
    timeline: Timeline,
    draft: DraftModel | None = None,
) -> Started:
    """Build a `ModelRunner` and warm it up.

    Args:
        params: on the device, on the host, or `PendingParams`; those of the draft model likewise.
        timeline: gets the phases.

    Raises:
        ConfigError, OutOfMemoryError: the memory plan does not work out, or memory ran out all the same.
        BackendError: a kernel computes wrong numbers here.
        NonFiniteError: the weights give NaN or infinite values.
        Whatever loading the weights raises.
    """
    shapes, draft_params = _shapes(params), None if draft is None else draft.params
    drafts = None if draft is None else DraftShapes(draft.config, _shapes(draft.params))
    sizes = Shapes(config, shapes, engine_config, 0, drafts)
    ours, store = sizes.only_shared_decoders(model), None
    if engine_config.compile_cache is not None and ours:  # of another model's source nothing is known
        store = ProgramStore(engine_config.compile_cache)
    with contextlib.ExitStack() as stack, given_up_on_failure(params, draft_params):
        start_pool = functools.cache(functools.partial(_start_pool, ours, engine_config, stack))
        if store is None or store.recall(sizes.identity(("all", 0, 0))) is None:
            start_pool()  # nothing is compiled: JAX is imported there while it is loaded and the memory is planned here
        exceeded = sizes.identity(("temporaries", engine_config.token_buckets[-1], engine_config.row_buckets[-1]))
        with timeline.phase("plan memory"):
            make_plan = functools.partial(
                plan_memory, model, config, shapes, engine_config, _memory_of_others(params, draft_params), draft=drafts
            )
            plan = make_plan(temporaries=None if store is None else store.recall(exceeded))
        checking = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="check"))
        weights = jax.tree.leaves((shapes, None if drafts is None else drafts.params))
        int8 = engine_config.kv_cache_dtype == INT8 or any(leaf.dtype == np.int8 for leaf in weights)
        check = functools.partial(_check_kernels, store, timeline, jax.config.jax_default_device, int8=int8)
        start_check = functools.cache(functools.partial(checking.submit, check))
        compile_for = functools.partial(
            compile_programs, model, timeline=timeline, store=store, start_pool=start_pool, on_idle_cores=start_check
        )
        executables, programs = compile_for(dataclasses.replace(sizes, num_pages=plan.num_pages))
        needed = max(program.temp_bytes for program in programs)
        if not plan.leaves_room_for(needed):
            log.info("programs need %.0f MiB beside their arguments: planned and compiled again", needed / MIB)
            plan = make_plan(temporaries=needed)
            executables, programs = compile_for(dataclasses.replace(sizes, num_pages=plan.num_pages))
            if store is not None:
                store.note(exceeded, needed)
        start_check().result()
        if store is not None:
            store.note(sizes.identity(("all", 0, 0)), [program.name for program in programs])
    plan = plan.with_temporaries(max(program.temp_bytes for program in programs), "compiled")
    with tell_out_of_memory(plan):
        params, draft_params = _awaited(params, timeline), _awaited(draft_params, timeline)
        with timeline.phase("allocate"):
            params = on_device(params)
            runner = ModelRunner(
                config,
                params,
                engine_config,
                num_pages=plan.num_pages,
                executables=executables,
                draft_config=None if draft is None else draft.config,
                draft_params=on_device(draft_params),
                key_channels=_key_channels(model, config, params, engine_config),
            )
            runner.wait()
        with timeline.phase("warm up"):
            runner.warm_up()
        with timeline.phase("self check"):
            check_finite(runner, model, config, engine_config)
    log.info("memory: %s", plan.text())
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if peak is not None:
        log.info("memory: planned %.0f MiB without the reserve, peak so far %.0f MiB", plan.total / MIB, peak / MIB)
    return Started(runner, plan, programs)


def _shapes(params: Any) -> Any:
    return params.shapes if isinstance(params, PendingParams) else abstract(params)


def _awaited(params: Any, timeline: Timeline) -> Any:
    """The parameters themselves, when they have been loaded."""
    if not isinstance(params, PendingParams):
        return params
    with timeline.phase("wait for weights"):
        loaded = params.result()
    timeline.add("load weights", params.begun, params.ended)
    return loaded


@contextlib.contextmanager
def given_up_on_failure(*trees: Any) -> Iterator[None]:
    """A start that fails does not go on reading weights: of parameters that are `PendingParams`."""
    try:
        yield
    except BaseException:
        for params in trees:
            if isinstance(params, PendingParams):
                params.give_up()
        raise


def _key_channels(model: Model, config: DecoderConfig, params: Any, engine_config: ResolvedConfig) -> jax.Array | None:
    """Factors of an int8 cache, where we know what the parameters mean."""
    if engine_config.kv_cache_dtype != INT8 or not is_shared_decoder(model):
        return None
    from llmjax.model.key_channels import key_channels

    own: Any = config  # a ModelConfig: the shared decoder has no other
    return key_channels(params, own)


def _memory_of_others(*trees: Any) -> DeviceMemory | None:
    """The device's memory, the engine's own parameters not counted."""
    device = device_memory()
    if device is None:
        return None
    pending = [params.bytes_in_use for params in trees if isinstance(params, PendingParams)]
    loaded = jax.tree.leaves([params for params in trees if not isinstance(params, PendingParams)])
    own = tree_bytes([leaf for leaf in loaded if isinstance(leaf, jax.Array)])
    in_use = min(pending, default=device.in_use)  # before the first of them began to load
    return dataclasses.replace(device, in_use=max(in_use - own, 0))


def _start_pool(ours: bool, engine_config: ResolvedConfig, stack: contextlib.ExitStack) -> LoweringPool | None:
    """Processes to lower in, where they are worth it; closed with `stack`. None for models of somebody else's."""
    workers = useful_workers(len(wanted(engine_config)), os.cpu_count() or 1) if ours else 0
    return None if workers == 0 else stack.enter_context(contextlib.closing(LoweringPool(workers)))


def _check_kernels(store: ProgramStore | None, timeline: Timeline, device: Any, *, int8: bool) -> None:
    """Once for each device kind, driver and version: what was right stays right while none of them changes."""
    if store is not None and store.recall(_KERNELS_AGREE[int8]) is not None:
        return
    with timeline.phase("check kernels"), contextlib.nullcontext() if device is None else jax.default_device(device):
        check_kernels(int8=int8)
    if store is not None:
        store.note(_KERNELS_AGREE[int8], True)
