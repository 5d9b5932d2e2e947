"""What the bench of int8's quality keeps, and that its texts are held out."""

from __future__ import annotations

from tiny_models import CONFIGS

from bench.int8_quality import held_out, linear_sizes, worst
from llmjax.quantization.layer_walk import linear_names
from llmjax.quantization.plan import LinearSensitivity


def test_the_worst_for_each_weight_stay_while_the_share_allows() -> None:
    costs = [("layers.0.mlp.down", 0.3, 100), ("layers.0.attention.out", 0.2, 20), ("layers.1.mlp.down", 0.01, 100)]
    found = [LinearSensitivity(name, 0.1, 0.9, kl, size) for name, kl, size in costs]
    assert worst(found, 0.9) == ["layers.0.attention.out"]  # the next one would leave less than 90 %
    assert worst(found, 0.4) == ["layers.0.attention.out", "layers.0.mlp.down"]
    assert worst(found, 1.0) == []


def test_sizes_are_those_of_the_linears() -> None:
    sizes = linear_sizes(CONFIGS["mixed-window"])  # with biases, which are none
    assert list(sizes) == linear_names(CONFIGS["mixed-window"])
    assert sizes["layers.0.mlp.gate_up"] == 160 * 48


class Bytes:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


def test_held_out_texts_are_as_long_as_asked_for() -> None:
    texts = held_out(Bytes(), 5000, 64)
    assert 5000 <= sum(map(len, texts)) < 5064
    assert max(map(len, texts)) == 64
    assert len({bytes(text) for text in texts}) > 0.9 * len(texts)
