"""What docs/grafana/llmjax.json asks for is what the server has: names and labels; and docs/monitoring.md lists every series."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fakes_text import plain_byte_tokenizer
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from scripted_model import Scripted
from served import Served

from llmjax.pipeline.recalibration import State
from llmjax.server.recalibration_series import recalibration_registry
from llmjax.telemetry.reading import SpeculationReading
from llmjax.telemetry.speculation_series import speculation_series

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Labels by the name of a sample, of a server that has answered and has recalibrated."""
    state = tmp_path_factory.mktemp("state") / "state.json"
    State(drift={"lengths": 0.1}).write(state)
    served = Served(Scripted(plain_byte_tokenizer(), kv_cache_bytes=16 * 1024).engine)
    served.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "ignore_eos": True})
    found: dict[str, set[str]] = {}
    text = served.get("/metrics").text + generate_latest(recalibration_registry(state)).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    served.engine.stop()
    speculation = SpeculationReading(
        rounds=1, drafted=3, accepted=1, accepted_at=[1, 0, 0], switches=[("off", "cost", 1)], off="cost", acceptance=0.5,
        by_lane={"all": 0.5}, by_class={"code": 0.5},
    )  # fmt: skip
    for family in speculation_series("llmjax:", speculation, ["model_name"], ["a"]):  # an engine that drafts has these too
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_query_finds_its_series_and_labels(labels: dict[str, set[str]]) -> None:
    dashboard = json.loads((DOCS / "grafana" / "llmjax.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [f"{name}" for name in re.findall(r"label_values\((\S+),", json.dumps(dashboard))]
    assert len(queries) > 40
    for query in queries:
        series = re.findall(r"\b(llmjax:[a-z0-9_]+|http_[a-z_]+)", query)
        assert series, query
        for name in series:
            assert name in labels, f"{name} of {query}"
        known = set().union(*(labels[name] for name in series))
        for group in re.findall(r"\bby \(([a-z_, ]+)\)", query):
            assert set(re.split(r", *", group)) <= known, query
        for selector in re.findall(r"\{([^}]*)\}", query):
            assert set(re.findall(r"([a-z_]+)(?:=~|!=|=)", selector)) <= known, query
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


def test_the_page_names_every_series_and_no_other(labels: dict[str, set[str]]) -> None:
    text = (DOCS / "monitoring.md").read_text()
    ending = re.compile(r"_(bucket|count|sum|created|total)$")
    names = {ending.sub("", name) for name in labels} - {"llmjax:iteration_tokens"} | {"llmjax:iteration_tokens_total"}
    named = set(re.findall(r"`((?:llmjax:|http_)[a-z0-9_]+)`", text))
    assert named == names
