"""`calibrate`: runs a float model over samples and collects what goes into its linears.

Owns the order of samples, what is cut, and the checkpoint of a run. Ranges, smoothing and plans are made from its result.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from llmjax.errors import ConfigError, NonFiniteError, StoreError
from llmjax.model.config import ModelConfig
from llmjax.quantization.calibration import Calibration, LinearStatistics
from llmjax.quantization.layer_walk import (
    Params,
    check_walkable,
    embed,
    groups,
    linear_names,
    linear_params,
    pack,
    refuse_bad_weights,
    run_layer,
)
from llmjax.quantization.log_bins import histogram
from llmjax.quantization.observers import Summary
from llmjax.quantization.samples import choose
from llmjax.quantization.summaries import summarise

log = logging.getLogger(__name__)

CHECKPOINT = "calibration.npz"
"""Name of the checkpoint in its directory; when the run is done, its result."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateSettings:
    """How a model is calibrated.

    Attributes:
        samples: how many of those given are run, chosen by `seed`; None for all.
        sequence_length: tokens of a sample that are run at most, and about as many go through the model together.
        checkpoint_every: samples between two checkpoints, about.
    """

    samples: int | None = None
    sequence_length: int = 1024
    seed: int = 0
    checkpoint_every: int = 64

    def __post_init__(self) -> None:
        for name in ("samples", "sequence_length", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"calibrate: {name} must be at least 1, got {value}")


def calibrate(
    params: Params,
    config: ModelConfig,
    samples: Sequence[Sequence[int]],
    settings: CalibrateSettings,
    *,
    model_identity: str = "",
    directory: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Statistics of what goes into every linear of a decoder.

    Args:
        params: a float model, as `forward` takes it.
        samples: token ids of each; those longer than the sequence length or the model's context are cut, and counted.
        model_identity: whatever tells this model from others. A checkpoint of another one is refused.
        directory: made if it is not there. A run that was cut off goes on from its checkpoint there, with the numbers of one that
            was not. When the run is done, the file holds its result, and another run returns it at once.
        progress: called with the samples that are done, and of how many, at the start and after each group.

    Raises:
        ConfigError: there is no sample with a token, a token id is not the model's, or the checkpoint is of another calibration.
        ModelError: the weight of a linear holds NaN or infinity; it names the parameter.
        NonFiniteError: an input is NaN or infinite; it names the linear and the samples. The checkpoint stays as it was.
        UnsupportedModelError: not a float decoder of llmjax.model.
        StoreError: the checkpoint cannot be read or written.
    """
    check_walkable(params, config)
    chosen, total = _prepared(samples, config, settings)
    limit = min(settings.sequence_length, config.max_positions)
    lengths = [min(len(sample), limit) for sample in chosen]
    identity = _identity(chosen, config, settings, model_identity)
    calibration = _begun(directory, identity, params, config)
    if calibration.samples < len(chosen):
        refuse_bad_weights(params, config)  # those of the last layer would be seen by no linear
    calibration.empty = total - len(chosen)
    _warn(chosen, limit, calibration.empty)
    tell = progress or (lambda finished, of: None)
    saved = done = calibration.samples
    tell(done, len(chosen))
    for group in groups(lengths, limit):
        if group.stop <= done:
            continue
        collect(calibration, params, config, [chosen[index] for index in group], limit=limit)
        if directory is not None and (calibration.samples - saved >= settings.checkpoint_every or group.stop == len(chosen)):
            calibration.save(directory / CHECKPOINT)
            saved = calibration.samples
        tell(calibration.samples, len(chosen))
    return calibration


def collect(
    calibration: Calibration, params: Params, config: ModelConfig, samples: Sequence[Sequence[int]], *, limit: int
) -> None:
    """Run at most `ROWS` samples, none empty, each up to `limit` tokens, and add their statistics. Raises `NonFiniteError` as
    `calibrate` does; nothing is added then.
    """
    packed = pack([sample[:limit] for sample in samples])
    x = embed(params, packed, config=config)
    seen: list[tuple[str, _Counted]] = []
    for index in range(config.num_layers):
        x, inputs = run_layer(params, index, x, packed, config=config)
        seen += [(given.name, _counted(given.x, packed.counted)) for given in inputs]
    taken = jax.device_get(seen)
    for name, ((_, _, bad), _, _) in taken:
        if bad:
            number = calibration.samples
            raise NonFiniteError(
                f"{name}: {int(bad)} of its inputs are NaN or infinite in samples {number} to {number + len(samples) - 1}: the "
                f"model cannot be calibrated; look at its weights, or load it in a wider dtype"
            )
    for name, (tensor, token, channels) in taken:
        linear = calibration.linears[name]
        linear.tensor.add(Summary(*tensor))
        linear.token.add(Summary(*token))
        np.maximum(linear.channel_absmax, channels, out=linear.channel_absmax)
    calibration.samples += len(samples)
    calibration.tokens += sum(min(len(sample), limit) for sample in samples)
    calibration.cut += sum(len(sample) > limit for sample in samples)
    calibration.lengths += histogram(np.asarray([len(sample) for sample in samples]))


def begin(identity: str, params: Params, config: ModelConfig) -> Calibration:
    """A calibration that has seen nothing; `collect` adds to it. Live traffic is looked at this way, for `drift`."""
    sizes = {name: linear_params(params, name)["weight"].shape[1] for name in linear_names(config)}
    return Calibration(identity, {name: LinearStatistics.empty(size) for name, size in sizes.items()})


_Counted = tuple[tuple[Array, Array, Array], tuple[Array, Array, Array], Array]


@jax.jit
def _counted(x: Float[Array, "T D"], counted: Bool[Array, "T"]) -> _Counted:
    """Summaries over the tensor and over tokens, and the largest magnitude of each channel."""
    channels = jnp.max(jnp.where(counted[:, None], jnp.abs(x.astype(jnp.float32)), 0.0), axis=0)
    return summarise(x, counted, granularity="tensor"), summarise(x, counted, granularity="token"), channels


def _prepared(
    samples: Sequence[Sequence[int]], config: ModelConfig, settings: CalibrateSettings
) -> tuple[list[Sequence[int]], int]:
    """The samples that have tokens, of those chosen, and how many were chosen."""
    chosen = list(samples) if settings.samples is None else choose(samples, settings.samples, seed=settings.seed)
    filled = [sample for sample in chosen if len(sample)]
    if not filled:
        what = f"all {len(chosen)} samples are empty" if chosen else "there are no samples"
        raise ConfigError(f"calibrate: {what}: give at least one text with a token")
    for number, sample in enumerate(filled):
        if not 0 <= min(sample) <= max(sample) < config.num_tokens:
            raise ConfigError(
                f"calibrate: sample {number} has token ids from {min(sample)} to {max(sample)}, and the model knows 0 to "
                f"{config.num_tokens - 1}: use the model's own tokenizer"
            )
    return filled, len(chosen)


def _warn(chosen: list[Sequence[int]], limit: int, empty: int) -> None:
    long = sum(len(sample) > limit for sample in chosen)
    if long:
        log.warning(
            "calibrate: %d of %d samples are longer than %d tokens: the rest of them is not run", long, len(chosen), limit
        )
    if empty:
        log.warning("calibrate: %d samples are empty, and left out", empty)


def _identity(chosen: list[Sequence[int]], config: ModelConfig, settings: CalibrateSettings, model_identity: str) -> str:
    digest = hashlib.sha256(f"{model_identity}\n{config}\n{settings.sequence_length}\n{len(chosen)}\n".encode())
    for sample in chosen:
        digest.update(np.asarray([len(sample), *sample], np.int64).tobytes())
    return digest.hexdigest()


def _begun(directory: Path | None, identity: str, params: Params, config: ModelConfig) -> Calibration:
    if directory is None:
        return begin(identity, params, config)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{directory} cannot be made: {error.strerror or error}") from None
    path = directory / CHECKPOINT
    if not path.exists():
        return begin(identity, params, config)
    calibration = Calibration.load(path)
    if calibration.identity != identity:
        raise ConfigError(f"{path} is of another model, other samples or settings: delete it, or choose another directory")
    return calibration
