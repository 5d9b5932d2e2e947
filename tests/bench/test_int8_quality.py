"""What the bench of int8's quality keeps, and that its texts are held out."""

from __future__ import annotations

import pytest
from tiny_models import CONFIGS

from bench.int8_quality import linear_sizes, worst
from bench.int8_texts import HELD_OUT, calibration, held_out
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


@pytest.mark.parametrize("name", HELD_OUT)
def test_held_out_texts_are_as_long_as_asked_for(name: str) -> None:
    texts = held_out(name, Bytes(), 10000, 256)
    assert 10000 <= sum(map(len, texts)) < 10256
    assert max(map(len, texts)) == 256
    assert len({bytes(text) for text in texts}) > 0.9 * len(texts)


def test_code_that_is_calibrated_with_is_not_held_out() -> None:
    seen = calibration("code", Bytes(), 20, 200)
    held = held_out("code", Bytes(), 4000, 200)
    assert (len(seen), len(held)) == (20, 20)
    assert {len(text) for text in (*seen, *held)} == {200}
    assert not {bytes(text) for text in seen} & {bytes(text) for text in held}


def test_prose_to_calibrate_with_is_in_pieces_of_one_length() -> None:
    texts = calibration("prose", Bytes(), 5, 300)
    assert [len(text) for text in texts] == [300] * 5
