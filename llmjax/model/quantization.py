"""`Quantization`: which weights of a model are stored as what, as plain data. Host only.

Owns the record that a config carries, that artifacts keep and that sizes are worked out from. Must not know how weights are
quantised, nor who decided which.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Literal, get_args

from llmjax.errors import UnsupportedModelError

Scheme = Literal["w8a16", "w8a8"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

STORED_DTYPES = ("int8", "float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Quantization:
    """What has a dtype of its own, whatever the config's is, and how int8 weights are multiplied.

    Attributes:
        scheme: "w8a16" leaves activations as they are. "w8a8" quantises them token by token in front of an int8 weight, unless
            the device's table has measured that leaving them is faster for so many tokens.
        weights: (name, dtype) of each such weight, as ("layers.3.mlp.down.weight", "int8"), sorted. An int8 weight is symmetric,
            with a float32 scale an output channel.
    """

    scheme: Scheme
    weights: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise UnsupportedModelError(f"quantization: scheme {self.scheme!r}; choose one of {', '.join(SCHEMES)}")
        object.__setattr__(self, "weights", tuple(sorted((name, dtype) for name, dtype in self.weights)))
        for name, dtype in self.weights:
            if dtype not in STORED_DTYPES:
                raise UnsupportedModelError(f"quantization: {name} in {dtype!r}; choose one of {', '.join(STORED_DTYPES)}")
            if not name.endswith(".weight") or name.endswith("norm.weight"):
                raise UnsupportedModelError(f"quantization: {name} has no dtype of its own; norms and biases stay as they are")
        if len(dict(self.weights)) != len(self.weights):
            raise UnsupportedModelError("quantization: a weight is named twice")

    def __str__(self) -> str:
        counts = Counter(dtype for _, dtype in self.weights)
        return f"{self.scheme}: {', '.join(f'{count} weights {dtype}' for dtype, count in counts.most_common())}"

    def dtype_of(self, name: str) -> str | None:
        """What a weight is stored as; None for the config's dtype."""
        return _by_name(self).get(name)


@functools.lru_cache(maxsize=16)
def _by_name(quantization: Quantization) -> dict[str, str]:
    return dict(quantization.weights)
