"""Cases of paged attention with int8 pages, rounded by NumPy in float64, and what the float64 oracle makes of them."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.shapes import make_biases, make_inputs
from pallas_kernels.quantized_pages import QuantizedPages, dequantize_pages


def quantized(cache, layers, *, channels, seed):
    """Pages [LP, K, page, H], of which NaN is what nobody owns, rounded by NumPy in float64."""
    factors = None
    if channels:
        random = np.random.default_rng(seed)
        factors = 2.0 ** random.integers(-6, 1, (layers, cache.shape[1], cache.shape[3]))
        cache = cache * np.repeat(factors, cache.shape[0] // layers, axis=0)[:, :, None] * 4  # large where the factors are
    unscaled = cache if factors is None else cache / np.repeat(factors, cache.shape[0] // layers, axis=0)[:, :, None]
    scale = np.abs(unscaled).max(axis=-1) / 127
    with np.errstate(invalid="ignore"):
        qvalue = np.where(np.isnan(scale)[..., None], -128, np.round(unscaled / scale[..., None])).astype(np.int8)
    arrays = (qvalue, scale.astype(np.float32), None if factors is None else factors.astype(np.float32))
    return QuantizedPages(*(None if array is None else jnp.asarray(array) for array in arrays))


def make(case, *, channels=True, seed=0):
    """Arguments of a case with its caches quantised, and the page offset of its layer."""
    inputs, offset = make_inputs(case, seed=seed)
    k_cache = quantized(inputs.k_cache.astype(np.float64), case.layers, channels=channels, seed=seed)
    v_cache = quantized(inputs.v_cache.astype(np.float64), case.layers, channels=False, seed=seed)
    return (jnp.asarray(inputs.q, case.dtype), k_cache, v_cache, *map(jnp.asarray, inputs[3:])), offset


def options(case):
    return {"scale": case.scale, "window": case.window, "soft_cap": case.soft_cap, **make_biases(case)}


def expected(case, args, offset):
    q, k_cache, v_cache, *batch = args
    pages = [np.asarray(dequantize_pages(cache), np.float64) for cache in (k_cache, v_cache)]
    rows = [np.asarray(x) for x in batch]
    return reference.paged_attention(np.asarray(q, np.float64), *pages, *rows, page_offset=offset, **options(case))
