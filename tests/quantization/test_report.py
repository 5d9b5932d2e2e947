"""The page holds the figures it was given, escaped, and nothing from elsewhere; the JSON holds the same."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser

import pytest

from llmjax.quantization.agreement import Agreement
from llmjax.quantization.gate import judge
from llmjax.quantization.quality import Quality, Sample
from llmjax.quantization.report import LayerFigures, QuantizationReport
from llmjax.quantization.report_page import render
from llmjax.quantization.tasks import Paired

HOSTILE = "</pre><script>alert(1)</script>&\"'<img src=x onerror=alert(2)>"


def layer(name: str, **figures) -> LayerFigures:
    sizes = {"dtype_before": "bfloat16", "dtype_after": "int8", "parameters": 1000, "bytes_before": 2000, "bytes_after": 1040}
    return LayerFigures(name=name, **sizes | figures)


def quality(*samples: Sample) -> Quality:
    read = Agreement(texts=3, tokens=2000, baseline_nll=4000.0, candidate_nll=4020.0, square_sum=20.0, same_best=1960, kl_sum=6.0)
    return Quality(read, loops=Paired(neither=32), samples=samples)


def report(text: str = "x", **changes) -> QuantizationReport:
    layers = [
        layer("layers.0.down", relative_l2=0.01, cosine=0.9999, kl=0.002, error_before=0.3, error_after=0.02),
        layer(f"layers.1.{text}", relative_l2=0.5, dtype_after="bfloat16", bytes_after=2000, kept=f"sensitive {text}"),
        layer("layers.2.down", relative_l2=math.nan, weight_range=(-1.5, 0.25), input_range=(-354.0, 12.5), input_clip=99.0),
        layer(
            "final_norm",
            dtype_before="float32",
            dtype_after="float32",
            linear=False,
            parameters=10,
            bytes_before=40,
            bytes_after=40,
        ),
    ]
    samples = [Sample("loop", text, f"base {text}", f"cand {text}", False, True)]
    samples.append(Sample("exact_match", "2+2", "4", text, True, False, expected=text))
    verdict = judge(quality(*samples)).as_json()
    fields = {"title": f"int8 {text}", "date": "2026-01-02", "layers": layers, "facts": {text: text}, "verdict": verdict}
    return QuantizationReport(**fields | changes)


class Tags(HTMLParser):
    """Every tag with its attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_sums_and_ranking():
    found = report()
    assert (found.bytes_before, found.bytes_after) == (6040, 1040 + 2000 + 1040 + 40)
    assert found.linear_share == pytest.approx(2 / 3)
    assert [one.name for one in found.ranking()] == ["layers.2.down", "layers.1.x", "layers.0.down"]  # NaN is the worst
    assert QuantizationReport(title="", date="", layers=[]).linear_share is None
    wider = layer("layers.3.down", dtype_after="float32")  # kept in more than it had
    assert report(layers=[*found.layers, wider]).linear_share == pytest.approx(2 / 4)


def test_the_page_tells_everything():
    page = Tags(render(report()))
    assert page.open == []
    for text in (
        "The candidate passed the gate", "perplexity_ratio", "at most 1.02", "1.0101", "98.00 %", "66.67 %", "sensitive x", "354",
        "0.682", "base x", "cand x", "expected: x", "loops", "does not loop", "layers.0.down", "0.9999", "99",
        "rounding everywhere",
        "Not measured: block_error, exact_match_ratio, arithmetic_drop.",
    ):  # fmt: skip
        assert text in page.text, text


def test_nothing_from_models_or_files_becomes_html_and_nothing_is_loaded():
    page = Tags(render(report(HOSTILE)))
    plain = Tags(render(report()))
    assert page.open == []
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]  # the hostile text adds no tag
    assert {"script", "img", "link", "iframe"}.isdisjoint(tag for tag, _ in page.tags)
    for _, attributes in page.tags:
        assert not any(name in ("src", "href") or name.startswith("on") for name in attributes)
    assert not re.search(r"url\(|@import", render(report()))
    assert HOSTILE in page.text


@pytest.mark.parametrize("on_fail", ["stop", "fallback"])
def test_a_refusal_stands_on_top_and_in_every_word(on_fail):
    bad = dataclasses.replace(quality(), loops=Paired(only_candidate=32))
    page = render(report(verdict=judge(bad, on_fail=on_fail).as_json()))
    said = {"stop": "nothing is served", "fallback": "the baseline is served"}[on_fail]
    assert f'<p class="bad">The candidate was refused{"," if on_fail == "stop" else ":"}' in page
    assert said in page
    assert "FAILED" in page


def test_a_verdict_without_values_and_a_report_without_a_gate_or_layers():
    page = Tags(render(report(verdict=judge(Quality(Agreement())).as_json())))
    assert "0 tokens of held-out text: too few to judge" in page.text
    assert "Gate" not in Tags(render(report(verdict=None))).text
    assert "Sensitivity" not in Tags(render(QuantizationReport(title="t", date="d", layers=[]))).text


def test_the_json_has_the_same_numbers_and_is_json():
    found = report()
    plain = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert plain["ranking"][0] == "layers.2.down"
    assert plain["layers"][2]["relative_l2"] is None
    assert plain["layers"][2]["input_range"] == [-354.0, 12.5]
    assert plain["verdict"]["decision"] == "pass"
    assert (plain["bytes_before"], plain["bytes_after"]) == (found.bytes_before, found.bytes_after)
    assert {field.name for field in dataclasses.fields(LayerFigures)} == set(plain["layers"][0])
