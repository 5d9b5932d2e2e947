"""`ModelConfig`: the shape of a decoder, as plain data. Host only: parsing a config must not start JAX.

One config drives one `forward` for every family; nothing in here names a file. `hf_config.py` and `gguf.py` produce it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from llmjax.errors import UnsupportedModelError
from llmjax.model.quantization import Quantization

DTYPES = ("float32", "bfloat16", "float16")
ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn", "factors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    Fields a kind does not use keep their defaults. `original_max_positions` is the trained length (tokens). Kind "factors"
    divides each of the H/2 frequencies by its own entry of `frequency_factors` (what GGUF stores instead of llama3's numbers).
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "factors"]
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise UnsupportedModelError(
                f"model config: rope scaling {self.kind!r} is not supported; known: {', '.join(ROPE_KINDS)}"
            )
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise UnsupportedModelError(f"model config: rope scaling {name} must be a positive number, got {value!r}")
        if self.kind in ("dynamic", "llama3", "yarn") and self.original_max_positions < 1:
            raise UnsupportedModelError(f"model config: rope scaling {self.kind} needs original_max_positions of at least 1")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise UnsupportedModelError(
                f"model config: rope scaling llama3 needs high_freq_factor {self.high_freq_factor} above "
                f"low_freq_factor {self.low_freq_factor}"
            )
        if self.kind == "factors" and not all(0.0 < factor < math.inf for factor in self.frequency_factors):
            raise UnsupportedModelError("model config: rope frequency_factors must all be positive numbers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder's shape. Letters as everywhere: L layers, N query heads, K kv heads, H head dim, D hidden, F mlp, V vocabulary.

    Attributes:
        family: name under which the model is registered (`model/registry.py`), e.g. "llama".
        vocab_size: V, rows of the embedding and of the head, padding included.
        num_tokens: ids below this are real; logits of the padding rows above are -inf. At most V.
        max_positions: context the model declares, in tokens.
        sliding_windows: one entry a layer; 0 is full attention, w > 0 lets a query see itself and the w - 1 before it.
        qkv_bias, output_bias, mlp_bias: which projections carry a bias.
        qk_norm: RMSNorm over each head's q and k before the rotary embedding.
        activation: gate activation of the MLP.
        dtype: dtype of weights, activations and cache; norms, softmax and logits are computed in float32.
        quantization: which weights are stored as something else than `dtype`; None for none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_positions: int
    num_tokens: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int, ...] = ()
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    dtype: str = "float32"
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (0,) * self.num_layers)
        if not self.num_tokens:
            object.__setattr__(self, "num_tokens", self.vocab_size)
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_size",
            "max_positions",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UnsupportedModelError(f"model config: {name} must be a positive whole number, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"model config: {self.num_heads} query heads are not a multiple of {self.num_kv_heads} kv heads"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"model config: head_dim {self.head_dim} is odd; rotary embedding needs it even")
        if len(self.sliding_windows) != self.num_layers:
            raise UnsupportedModelError(f"model config: {len(self.sliding_windows)} sliding windows for {self.num_layers} layers")
        if self.num_tokens > self.vocab_size:
            raise UnsupportedModelError(f"model config: {self.num_tokens} tokens do not fit {self.vocab_size} vocabulary rows")
        if self.dtype not in DTYPES:
            raise UnsupportedModelError(f"model config: dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}")

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)
