"""What else computes the same on this device: for attention cuDNN, JAX's own Triton kernel, and tokamax where it is installed;
for int8 matmuls XLA's dot of int8 without scales, and of bfloat16.

A peer gets the case's data in the layout it wants. It is timed, not compared, and never chosen; where it cannot run, the
reason is its row.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bench.flash_cases import FlashCase
from bench.kernel_cases import Case
from bench.kernel_timing import Contender
from pallas_kernels.dispatch import REFERENCE
from pallas_kernels.int8_matmul import INT8_DENSE, W8A8, W8A16
from pallas_kernels.matmul import dense
from pallas_kernels.paged_attention import PAGED_ATTENTION
from pallas_kernels.quantized import dequantize
from pallas_kernels.smoke import Call

CONTIGUOUS_COPIES = 4  # layers whose keys and values are also laid out without pages


def peers(case: Case) -> Sequence[Contender]:
    """The peers of a case."""
    if isinstance(case, FlashCase):  # cuDNN wants a bias written out over all pairs: no peer of those
        return () if case.biased else (_prefill(case),)
    if case.operation in (W8A16, W8A8, INT8_DENSE):
        return _matmuls(case)
    if case.operation is not PAGED_ATTENTION or case.flops or case.peerless:
        return ()
    found = [
        Contender(label="jax triton paged", function=_triton, arguments=case.arguments, data=_heads_first),
        _contiguous("cudnn, contiguous", case, _cudnn),
    ]
    if importlib.util.find_spec("tokamax") is not None:
        found += [_contiguous(f"tokamax {name}, contiguous", case, _tokamax(name)) for name in ("mosaic", "triton")]
    return found


def _matmuls(case: Case) -> Sequence[Contender]:
    """XLA's dots of the same sizes, without what goes before and behind."""

    def widened(data: list[dict[str, Any]]) -> list[jax.Array]:
        return [dequantize(one["w"], jnp.bfloat16) for one in data]

    def bf16(query: Any, _: Any, w: jax.Array, __: Any) -> Call:
        return Call((query[0].astype(jnp.bfloat16), w), {"implementation": REFERENCE})

    def int8(query: Any, _: Any, turn: dict[str, Any], __: Any) -> Call:
        return Call((query[0], turn["w"].qvalue), {})

    def dot(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)

    found = [Contender(label="xla bf16", function=dense, arguments=bf16, data=widened)]
    if case.operation is W8A8:
        found.append(Contender(label="xla int8, no scales", function=dot, arguments=int8))
    return found


def _prefill(case: FlashCase) -> Contender:
    """cuDNN over the same contiguous keys."""

    def function(q: Any, k: Any, v: Any, *_: Any, scale: float, **__: Any) -> Any:
        window = (case.window - 1, 0) if case.window else None
        return jax.nn.dot_product_attention(
            q[None], k[None], v[None], scale=scale, is_causal=True, local_window_size=window, implementation="cudnn"
        )[0]

    return Contender(label="cudnn", function=function, arguments=case.arguments)


def _heads_first(data: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return data | {name: jnp.nan_to_num(data[name].swapaxes(0, 1)) for name in ("k", "v")}


def _triton(q: Any, k: Any, v: Any, table: Any, lengths: Any, starts: Any, *, page_offset: Any, scale: float, **_: Any) -> Any:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    return paged_attention(q * jnp.asarray(scale, q.dtype), k, v, table + page_offset, lengths)


def _contiguous(label: str, case: Case, function: Callable[..., Any]) -> Contender:
    """A peer whose keys and values are arrays [R, S, K, H], a pair for each of a few layers. (With short contexts these fit
    into the cache, which flatters the peer.)"""

    def data(data: dict[str, jax.Array]) -> list[dict[str, jax.Array]]:
        def laid_out(cache: jax.Array, layer: int) -> jax.Array:
            q = jnp.zeros((), cache.dtype)
            pages = data["table"] + case.arguments(q, data, layer, jnp.int32(0)).kwargs["page_offset"]
            found = jnp.nan_to_num(cache[pages]).transpose(0, 1, 3, 2, 4)  # [R, M, page, K, H]
            return found.reshape(found.shape[0], -1, *found.shape[3:])

        copies = range(CONTIGUOUS_COPIES)
        return [{"k": laid_out(data["k"], i), "v": laid_out(data["v"], i), "lengths": data["lengths"]} for i in copies]

    def arguments(q: jax.Array, own: list[dict[str, jax.Array]], turn: int, _: jax.Array) -> Call:
        layer = own[turn % len(own)]
        return Call((q[:, None], layer["k"], layer["v"], layer["lengths"]), {"scale": q.shape[-1] ** -0.5})

    return Contender(label=label, function=function, arguments=arguments, data=data)


def _cudnn(q: Any, k: Any, v: Any, lengths: Any, *, scale: float) -> Any:
    ones = jnp.ones_like(lengths)
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, implementation="cudnn", query_seq_lengths=ones, key_value_seq_lengths=lengths
    )


def _tokamax(name: str) -> Callable[..., Any]:
    def function(q: Any, k: Any, v: Any, lengths: Any, *, scale: float) -> Any:
        import tokamax

        return tokamax.dot_product_attention(q, k, v, scale=scale, key_value_seq_lengths=lengths, implementation=name)

    return function
