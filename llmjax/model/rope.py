"""Rotary position embedding: frequencies of every scaling kind, and the cos/sin tables of given positions.

Pure functions of positions and config. The frequencies follow the formulas of transformers'
`modeling_rope_utils.py` in its own order of float32 operations, because at position 8000 a last-bit difference of a
frequency is already 5e-4 rad. Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), Llama 3.1's scaling.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, Int

from llmjax.errors import UnsupportedModelError
from llmjax.model.config import ModelConfig, RopeScaling

Frequencies = npt.NDArray[np.float32]


def inv_frequencies(config: ModelConfig) -> tuple[Frequencies, float]:
    """Radians a token of each rotated pair, and the factor cos and sin are multiplied by.

    Returns:
        (float32 [H/2], attention factor). The factor is 1 except for yarn. For `dynamic` these are the frequencies up to the
        trained length; beyond it `cos_sin` stretches them by position.

    Raises:
        UnsupportedModelError: the number of `frequency_factors` is not H/2.
    """
    scaling = config.rope_scaling
    base = _base_frequencies(config)
    if scaling is None or scaling.kind == "dynamic":
        return base, 1.0
    if scaling.kind == "linear":
        return base / np.float32(scaling.factor), 1.0
    if scaling.kind == "llama3":
        return _llama3(base, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(config, scaling), yarn_attention_factor(scaling)
    if len(scaling.frequency_factors) != base.size:
        raise UnsupportedModelError(
            f"model config: {len(scaling.frequency_factors)} rope frequency factors for {base.size} rotated pairs"
        )
    return base / np.asarray(scaling.frequency_factors, np.float32), 1.0


def cos_sin(positions: Int[Array, "T"], config: ModelConfig) -> tuple[Float[Array, "T H2"], Float[Array, "T H2"]]:
    """Tables for `pallas_kernels.rope_kv_write`, float32 [T, H/2], the attention factor of yarn included.

    A token's angles depend on its own position alone. For `dynamic` (NTK) that is a choice: transformers takes the longest
    position of a forward call, so that its results depend on how a prompt is cut and batched; here token p is rotated as in a
    sequence that ends with it (length p + 1), and chunking, batching and prefix reuse change nothing.
    """
    frequencies, attention_factor = inv_frequencies(config)
    place = positions.astype(jnp.float32)[:, None]
    angles = place * jnp.asarray(frequencies)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        # theta' = theta * stretch ** (H / (H - 2)), hence frequency' = frequency * stretch ** (-2i / (H - 2)):
        # written so, it keeps full precision (log of a small number) and is exact below the trained length.
        length = jnp.maximum(place + 1.0, float(scaling.original_max_positions))
        stretch = scaling.factor * length / scaling.original_max_positions - (scaling.factor - 1.0)
        exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / max(config.head_dim - 2, 1)
        angles = angles * jnp.exp(-jnp.log(stretch) * jnp.asarray(exponent.astype(np.float32)))
    factor = np.float32(attention_factor)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """What YaRN multiplies cos and sin by: given, or from `mscale` and `mscale_all_dim`, or 0.1 ln(factor) + 1."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def _powers(config: ModelConfig) -> Frequencies:
    """theta ** (2i / H), each float32 step rounded once (the power through float64)."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    return np.asarray(np.float64(config.rope_theta) ** exponents.astype(np.float64), np.float32)


def _base_frequencies(config: ModelConfig) -> Frequencies:
    return np.float32(1.0) / _powers(config)


def _llama3(base: Frequencies, scaling: RopeScaling) -> Frequencies:
    """Long wavelengths divided by `factor`, short ones kept, a linear blend between."""
    trained, factor = scaling.original_max_positions, np.float32(scaling.factor)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = np.float32(2 * math.pi) / base
    scaled = np.where(wavelength > np.float32(trained / low), base / factor, base)
    blend = (np.float32(trained) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1.0) - blend) * scaled / factor + blend * scaled
    between = (wavelength >= np.float32(trained / high)) & (wavelength <= np.float32(trained / low))
    return np.where(between, blended, scaled)


def _yarn(config: ModelConfig, scaling: RopeScaling) -> Frequencies:
    """Pairs that turn often within the trained length are kept, those that turn rarely are stretched, a ramp between."""
    size, powers = config.head_dim, _powers(config)
    kept, stretched = np.float32(1.0) / powers, np.float32(1.0) / (np.float32(scaling.factor) * powers)

    def pair_with(rotations: float) -> float:
        length = scaling.original_max_positions / (rotations * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(config.rope_theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(size // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = np.float32(1.0) - ramp
    return stretched * (np.float32(1.0) - keep) + kept * keep
