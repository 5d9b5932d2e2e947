"""The work of the `quantize` stage: which weights become int8, rounding them, the artifact, the export and the report.

Owns the order of these and the figures of the report. Host side: what starts JAX is imported in functions.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmjax.errors import ConfigError, StoreError
from llmjax.pipeline.digest import write_whole
from llmjax.pipeline.model_source import ModelSource, StoredModel, TokenizerFiles, open_model, write_model
from llmjax.pipeline.stored_calibration import StoredCalibration

if TYPE_CHECKING:
    from llmjax.model.checkpoint.load import LoadedModel
    from llmjax.model.config import ModelConfig
    from llmjax.model.quantization import Quantization
    from llmjax.pipeline.stages import StageContext
    from llmjax.pipeline.stages.quantize import QuantizeSection
    from llmjax.quantization.plan import Plan
    from llmjax.quantization.report import LayerFigures, QuantizationReport, Range

REPORT = "report.json"
REPORT_PAGE = "report.html"
_PLAN = "plan.json"
_RATIO_SAMPLES = 32
"""Samples that a perplexity ratio is measured with, at most: each plan that is tried takes a pass of the model over them."""

_SMOOTHING_SAMPLES = 256
"""Samples that smoothing is fitted to, at most; it takes their first few thousand tokens."""

_ERROR_SAMPLES = 4
"""Samples that show the error of each linear: an average over thousands of values a token."""


def run_quantize(context: StageContext[QuantizeSection]) -> StoredModel:
    """Quantise the input model into the stage's folder.

    Raises:
        ConfigError: a pattern that matches nothing, no weight that would be int8, a calibration of another model.
        ModelError: the model is damaged or holds NaN, by the weight's name.
        StoreError: a file cannot be written, or the export is there already.
    """
    from llmjax.quantization.quantize import quantize_params

    config, folder = context.config, context.folder
    assert folder is not None
    source: ModelSource = context.inputs["model"]
    calibration: StoredCalibration | None = context.inputs.get("calibration")
    export = None if config.export is None else Path(config.export)
    if export is not None and export.exists():
        raise StoreError(f"export: {export} exists already; choose another folder or remove it")
    if calibration is not None and calibration.model_key != source.key:
        raise ConfigError("the calibration is of another model than the one to quantise: name the stages with 'model' in both")
    loaded = open_model(source, context)
    files = source.tokenizer_files(loaded)
    _check_float(loaded.config)
    original = loaded.params
    if config.smoothing is not None:
        loaded = dataclasses.replace(loaded, params=_smoothed(loaded, calibration, context))
    plan = _measured(loaded, calibration, context)
    quantization = _decided(loaded.config, config, plan)
    plan = None if plan is None else _settled(plan, quantization, loaded.config.dtype)
    if plan is not None and config.max_perplexity_ratio is not None:
        plan = _fitted(plan, original, loaded, calibration, context)
        quantization = _decided(loaded.config, config, plan)
    errors = None if calibration is None else _errors(original, loaded, quantization, calibration, context)
    del original
    ranges = _weight_ranges(loaded)
    before = loaded.config
    params, after = quantize_params(
        loaded.params,
        before,
        quantization,
        granularity=config.granularity.weights,
        take_apart=True,
        progress=lambda done, total: context.reporter.progress(context.name, done, total),
    )
    made = dataclasses.replace(loaded, params=params, config=after)
    name = f"{_name(source, loaded)}-{config.scheme}"
    write_model(folder, made, name=name, files=files)
    if plan is not None:
        write_whole(folder / _PLAN, plan.to_json() + "\n")
    layers = _layers(before, after, plan, ranges, calibration, errors)
    report = _report(name, layers, config, calibration, plan)
    write_report(folder, report)
    if export is not None:
        _export(export, made, files)
        context.reporter.message("info", f"{context.name}: exported to {export}")
    return StoredModel(folder, context.key, name, files, _figures(report))


def write_report(folder: Path, report: QuantizationReport) -> None:
    """The page and the same numbers as JSON, into a folder. Raises `OSError`."""
    from llmjax.quantization.report_page import render

    write_whole(folder / REPORT, json.dumps(report.as_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write_whole(folder / REPORT_PAGE, render(report))


def read_report(folder: Path) -> QuantizationReport | None:
    """What `write_report` left there; None where there is nothing that can be read."""
    from llmjax.quantization.report import LayerFigures, QuantizationReport

    try:
        told = json.loads((folder / REPORT).read_text("utf-8"))
        plain: list[dict[str, Any]] = [
            {name: tuple(value) if isinstance(value, list) else value for name, value in layer.items()}
            for layer in told["layers"]
        ]
        layers = [LayerFigures(**layer) for layer in plain]
        return QuantizationReport(
            title=told["title"], date=told["date"], layers=layers, facts=told["facts"], verdict=told["verdict"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_float(config: ModelConfig) -> None:
    if config.quantization is not None:
        raise ConfigError("the model is quantised already; name the stage of the float model it was made from")


def _smoothed(loaded: LoadedModel, calibration: StoredCalibration | None, context: StageContext[QuantizeSection]) -> Any:
    """The parameters with smoothing folded in."""
    from llmjax.quantization.fitted_smoothing import fit_smoothing
    from llmjax.quantization.smoothing import smooth

    how = context.config.smoothing
    assert calibration is not None, "the wiring refuses smoothing without a calibration"
    if isinstance(how, float):
        return smooth(loaded.params, loaded.config, calibration.statistics(), alpha=how)
    context.reporter.message("info", f"{context.name}: fitting the smoothing of every linear")
    return fit_smoothing(
        loaded.params,
        loaded.config,
        calibration.samples(_SMOOTHING_SAMPLES),
        scheme=context.config.scheme,
        sequence_length=calibration.sequence_length,
        progress=lambda done, total: context.reporter.progress(context.name, done, total),
    )


def _measured(loaded: LoadedModel, calibration: StoredCalibration | None, context: StageContext[QuantizeSection]) -> Plan | None:
    """What each linear does when it alone is quantised, and which stay by that; None without a limit to be kept."""
    config = context.config
    if config.max_sensitivity is None and config.max_perplexity_ratio is None:
        return None
    assert calibration is not None, "the wiring refuses a limit without a calibration"
    if config.max_perplexity_ratio is not None:
        _ratio_samples(config, calibration)  # told before the measurement, which may take hours
    from llmjax.quantization.plan import make_plan
    from llmjax.quantization.sensitivity import measure_sensitivity

    context.reporter.message("info", f"{context.name}: measuring the sensitivity of every linear")
    found = measure_sensitivity(
        loaded.params,
        loaded.config,
        calibration.samples(config.sensitivity_samples),
        scheme=config.scheme,
        weights=config.granularity.weights,
        sequence_length=calibration.sequence_length,
        kl_samples=config.kl_samples,
        progress=lambda done, total: context.reporter.progress(context.name, done, total),
    )
    return make_plan(
        found, scheme=config.scheme, model_dtype=loaded.config.dtype, max_sensitivity=config.max_sensitivity, keep=config.keep
    )


def _ratio_samples(config: QuantizeSection, calibration: StoredCalibration) -> list[list[int]]:
    """What a perplexity ratio is measured on. Raises `ConfigError` where there is nothing."""
    seen = config.sensitivity_samples
    samples = calibration.samples(seen + _RATIO_SAMPLES)[seen:]
    if not any(len(sample) > 1 for sample in samples):
        raise ConfigError(
            f"max_perplexity_ratio is measured on samples of the calibration behind the {seen} of sensitivity_samples, and there "
            f"are none: calibrate with more, or lower that"
        )
    return samples


def _fitted(
    plan: Plan, original: Any, loaded: LoadedModel, calibration: StoredCalibration | None, context: StageContext[QuantizeSection]
) -> Plan:
    """The plan within `max_perplexity_ratio`, measured on samples that sensitivity has not seen."""
    from llmjax.quantization.plan import fit_perplexity
    from llmjax.quantization.variants import Variant, mean_nll

    config = context.config
    assert calibration is not None
    assert config.max_perplexity_ratio is not None
    limit, model = calibration.sequence_length, loaded.config
    samples = _ratio_samples(config, calibration)
    context.reporter.message("info", f"{context.name}: looking for the linears to keep, on {len(samples)} samples")
    truth = mean_nll(Variant(original, {}), model, samples, scheme=config.scheme, limit=limit)

    def ratio_of(tried: Plan) -> float:
        dtypes = {name: decision.dtype for name, decision in tried.linears.items()}
        variant = Variant(loaded.params, dtypes, config.granularity.weights)
        worse = mean_nll(variant, model, samples, scheme=config.scheme, limit=limit) - truth
        return math.exp(worse) if worse < 700 else math.inf  # NaN stays NaN

    return fit_perplexity(
        plan,
        ratio_of,
        model_dtype=model.dtype,
        max_ratio=config.max_perplexity_ratio,
        progress=lambda done: context.reporter.progress(context.name, done, None),
    )


def _errors(
    original: Any,
    loaded: LoadedModel,
    quantization: Quantization,
    calibration: StoredCalibration,
    context: StageContext[QuantizeSection],
) -> tuple[dict[str, float], dict[str, float]]:
    """Of each linear, the error of its output in the quantised model: with nothing but rounding everywhere, and as it becomes."""
    from llmjax.quantization.layer_walk import linear_names
    from llmjax.quantization.variants import Variant, output_errors

    config, model = context.config, loaded.config
    names, weights = linear_names(model), config.granularity.weights
    now = {name: quantization.dtype_of(f"{name}.weight") or model.dtype for name in names}
    samples = calibration.samples(_ERROR_SAMPLES)
    before, after = (
        output_errors(Variant(params, dtypes, weights), model, samples, scheme=config.scheme, limit=calibration.sequence_length)
        for params, dtypes in ((original, dict.fromkeys(names, "int8")), (loaded.params, now))
    )
    return before, after


def _decided(model: ModelConfig, config: QuantizeSection, plan: Plan | None) -> Quantization:
    """The dtypes of the file, over them what was measured, over that what the file keeps."""
    from llmjax.quantization.quantize import plan_quantization

    measured: dict[str, str] = {}
    if plan is not None:
        kept = {name: decision for name, decision in plan.linears.items() if decision.dtype != "int8"}
        measured = {f"{name}.weight": decision.dtype for name, decision in kept.items()}
    try:
        return plan_quantization(model, config.scheme, dtypes=config.dtypes, keep=measured | dict(config.keep))
    except ConfigError as error:
        if plan is not None and plan.max_sensitivity is not None and not plan.quantised:
            raise ConfigError(
                f"no linear is within max_sensitivity {plan.max_sensitivity:g}: raise it, or choose w8a16"
            ) from None
        raise error


def _settled(plan: Plan, quantization: Quantization, dtype: str) -> Plan:
    """The plan with the patterns' word in it: what becomes of each linear in the end."""
    from llmjax.quantization.plan import Decision

    linears = {}
    for name, decision in plan.linears.items():
        own = quantization.dtype_of(f"{name}.weight") or dtype
        linears[name] = decision if decision.dtype == own else Decision(own, "kept by a pattern", decision.sensitivity)
    return dataclasses.replace(plan, linears=linears)


def _weight_ranges(loaded: LoadedModel) -> dict[str, Range]:
    """Smallest and largest value of each leaf, by name."""
    import jax.numpy as jnp

    from llmjax.model.param_spec import iter_params, leaf_name

    found: dict[str, Range] = {}
    for path, _, _ in iter_params(loaded.config):
        leaf = loaded.params
        for part in path:
            leaf = leaf[part]
        found[leaf_name(path)] = (float(jnp.min(leaf)), float(jnp.max(leaf)))
    return found


def _layers(
    before: ModelConfig,
    after: ModelConfig,
    plan: Plan | None,
    ranges: Mapping[str, Range],
    calibration: StoredCalibration | None,
    errors: tuple[dict[str, float], dict[str, float]] | None,
) -> list[LayerFigures]:
    """The report's figures of every leaf."""
    from llmjax.model.param_spec import iter_params, leaf_name
    from llmjax.quantization.report import LayerFigures

    statistics = None if calibration is None else calibration.statistics()
    layers = []
    for (path, shape, dtype), (_, _, new) in zip(iter_params(before), iter_params(after), strict=True):
        whole = leaf_name(path)
        name, size = whole.removesuffix(".weight"), math.prod(shape)
        linear = path[0] == "layers" and path[-1] == "weight" and len(shape) == 2
        decision = None if plan is None else plan.linears.get(name)
        measured = None if decision is None else decision.sensitivity
        kept = ""
        if linear and new != "int8":
            kept = "kept by a pattern" if decision is None else decision.reason
        seen = None if statistics is None or calibration is None else statistics.linears.get(name)
        magnitude = None if seen is None else float(seen.tensor.absmax[0])
        layers.append(
            LayerFigures(
                name=name,
                dtype_before=dtype,
                dtype_after=new,
                parameters=size,
                bytes_before=_bytes(size, shape[0], dtype),
                bytes_after=_bytes(size, shape[0], new),
                linear=linear,
                kept=kept,
                weight_range=ranges[whole],
                input_range=None if magnitude is None else (-magnitude, magnitude),
                input_clip=None if seen is None or calibration is None else float(seen.tensor.range(calibration.observer)[0]),
                relative_l2=None if measured is None else measured.relative_l2,
                cosine=None if measured is None else measured.cosine,
                kl=None if measured is None else measured.kl,
                error_before=None if errors is None else errors[0].get(name),
                error_after=None if errors is None else errors[1].get(name),
            )
        )
    return layers


def _bytes(size: int, rows: int, dtype: str) -> int:
    from llmjax.model.param_spec import SCALE_BYTES

    return size + SCALE_BYTES * rows if dtype == "int8" else size * {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]


def _report(
    name: str, layers: list[LayerFigures], config: QuantizeSection, calibration: StoredCalibration | None, plan: Plan | None
) -> QuantizationReport:
    from llmjax.quantization.report import QuantizationReport

    facts: dict[str, str] = {"scheme": config.scheme, "scales a": config.granularity.weights}
    if config.smoothing is not None:
        facts["smoothing"] = f"alpha {config.smoothing:g}" if isinstance(config.smoothing, float) else config.smoothing
    if config.max_sensitivity is not None:
        facts["most relative L2"] = f"{config.max_sensitivity:g}"
    if plan is not None and plan.perplexity_ratio is not None:
        facts["perplexity ratio"] = f"{plan.perplexity_ratio:.4f}, at most {plan.max_perplexity_ratio:g}"
    if calibration is not None:
        facts |= {what: str(count) for what, count in calibration.figures.items()}
        facts |= {"observer": calibration.observer, "ranges of activations are": "of magnitudes"}
    date = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return QuantizationReport(title=name, date=date, layers=layers, facts=facts)


def _figures(report: QuantizationReport) -> dict[str, Any]:
    """What became of how much, for people."""
    linears = [layer for layer in report.layers if layer.linear]
    share = report.linear_share
    return {
        "model": report.title,
        "int8 linears": f"{sum(layer.dtype_after == 'int8' for layer in linears)} of {len(linears)}",
        "share of linear weights": f"{100 * (share or 0):.1f}%",
        "MiB": round(report.bytes_after / 2**20, 1),
        "MiB before": round(report.bytes_before / 2**20, 1),
    }


def _export(folder: Path, made: LoadedModel, files: TokenizerFiles) -> None:
    from llmjax.model.checkpoint.export import export_safetensors

    place = files.place if files.place is not None and files.place.is_dir() else None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"export: {folder.parent} cannot be made: {error.strerror or error}") from None
    export_safetensors(folder, made.params, made.config, eos_token_ids=made.eos_token_ids, files_from=place)


def _name(source: ModelSource, loaded: LoadedModel) -> str:
    """What an engine would call the float model."""
    if source.name is not None:
        return source.name
    if loaded.path is None:
        return loaded.config.family
    return loaded.path.stem if loaded.path.is_file() else loaded.path.name
