"""Chat templates: rendering, what messages may be, and errors that say what is wrong (B34, B35)."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from fakes_text import BOS_ID, byte_backend, byte_tokenizer, plain_byte_tokenizer, write_byte_tokenizer

from llmjax.engine.chat_template import reads_variable
from llmjax.engine.tokenizer import Tokenizer, load_tokenizer
from llmjax.errors import ModelError, RequestError

LLAMA_LIKE = """{{- bos_token }}
{%- for message in messages %}
    {%- set header = '<|start|>' + message['role'] + '<|end|>\\n\\n' %}
    {{- header + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}"""

ALTERNATING = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{ message['content'] + eos_token }}{% endif %}
{% endfor %}"""

USER = {"role": "user", "content": "Hi"}
TALK = [USER, {"role": "assistant", "content": " Hello "}, {"role": "user", "content": "Bye"}]


def tokenizer_with(template: str | None, **more: str) -> Tokenizer:
    templates = {} if template is None else {"default": template}
    return plain_byte_tokenizer(chat_templates={**templates, **more}, name="fake-model")


def test_a_llama_like_template() -> None:
    text = tokenizer_with(LLAMA_LIKE).render_chat(TALK)
    assert text == (
        "<bos><|start|>user<|end|>\n\nHi<|eot|><|start|>assistant<|end|>\n\nHello<|eot|><|start|>user<|end|>\n\nBye<|eot|>"
        "<|start|>assistant<|end|>\n\n"
    )
    assert tokenizer_with(LLAMA_LIKE).render_chat([USER], add_generation_prompt=False).endswith("Hi<|eot|>")


def test_alternating_roles() -> None:
    tokenizer = tokenizer_with(ALTERNATING)
    assert tokenizer.render_chat(TALK) == "<bos>[INST] Hi [/INST] Hello <eos>[INST] Bye [/INST]"
    with pytest.raises(RequestError, match="refuses these messages: Conversation roles must alternate") as caught:
        tokenizer.render_chat([USER, USER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        ("{{ tools | length }}", True),
        ("{% if a is defined %}{% set tools = a %}{% endif %}{% if tools %}x{% endif %}", True),
        ("{# tools #}tools{{ messages[0].tools }}", False),
        ("{% for tools in messages %}{{ tools }}{% endfor %}", False),
        ("{% if", True),  # rendering says what is wrong
    ],
)
def test_whether_a_template_looks_at_a_variable(template: str, reads: bool) -> None:
    assert reads_variable(template, "tools") is reads


@pytest.mark.parametrize("template", [LLAMA_LIKE, ALTERNATING])
def test_a_chat_has_exactly_one_bos(tmp_path: Path, template: str) -> None:
    tokenizer = byte_tokenizer(tmp_path, adds_bos=True, chat_template=template)
    assert tokenizer.adds_bos
    ids = tokenizer.apply_chat_template([USER])
    assert ids[0] == BOS_ID
    assert ids.count(BOS_ID) == 1
    assert ids == tokenizer.encode(tokenizer.render_chat([USER]), add_special_tokens=False)


def test_without_a_template_the_error_names_the_file_to_add() -> None:
    tokenizer = tokenizer_with(None)
    assert tokenizer.chat_template is None
    with pytest.raises(RequestError, match=r"fake-model has no chat template .*chat_template\.jinja"):
        tokenizer.render_chat([USER])
    assert tokenizer.render_chat([USER], template="{{ messages[0].content }}!") == "Hi!"


def test_named_templates() -> None:
    tokenizer = tokenizer_with("d", tool_use="t{{ tools[0].name }}", rag="r")
    assert tokenizer.render_chat([USER]) == "d"
    assert tokenizer.render_chat([USER], tools=[{"name": "f"}]) == "tf"
    assert tokenizer.render_chat([USER], template="rag") == "r"
    with pytest.raises(RequestError, match="no default: pass template= one of rag, tool_use"):
        tokenizer_with(None, tool_use="t", rag="r").render_chat([USER])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}\n    {{ m.content }}\n{% endfor %}", "    Hi\n"),  # trim_blocks, lstrip_blocks
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),  # loopcontrols
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}.", "Hi."),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ missing }}{{ enable_thinking }}{{ add_generation_prompt }}", "FalseTrue"),
        ("{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}", "<bos><eos>False"),
        ("{% if tools is none %}no tools{% endif %}", "no tools"),
    ],
)
def test_templates_have_what_their_authors_expect(template: str, text: str) -> None:
    assert tokenizer_with(template).render_chat([USER], enable_thinking=False) == text


def test_templates_may_ask_for_the_date() -> None:
    assert re.fullmatch(r"\d{4}", tokenizer_with("{{ strftime_now('%Y') }}").render_chat([USER]))
    assert abs(int(tokenizer_with("{{ strftime_now('%Y') }}").render_chat([USER])) - datetime.now().year) <= 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "not valid Jinja, line 1"),
        (
            "{{ messages[5].content }}",
            "fails on these messages: .*undefined|fails on these messages: list object has no element 5",
        ),
        ("{{ 1 / 0 }}", "fails on these messages: division by zero"),
        ("{{ 'a' + 1 }}", "fails on these messages: can only concatenate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|safely"),
        ("{{ raise_exception('two\nlines') }}", "refuses these messages: two lines$"),
        ("{{ raise_exception('') }}", "refuses these messages: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on these messages: maximum recursion"),
        ("{{ range(10 ** 9) | list }}", "fails on these messages: "),
    ],
)
def test_a_template_that_fails_is_an_error_of_the_request(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        tokenizer_with(template).render_chat([USER])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("Hi", "must be a list of objects"),
        (USER, "must be a list of objects"),
        (None, "must be a list of objects"),
        (["Hi"], r"messages\[0\] must be an object"),
        ([USER, {"content": "x"}], r"messages\[1\].role"),
        ([{"role": 5, "content": "x"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": None}], r"messages\[0\].content is missing"),
        ([{"role": "assistant", "content": None}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\]"),
        ([{"role": "assistant", "content": "", "tool_calls": 5}], r"messages\[0\].tool_calls must be a list"),
    ],
)
def test_malformed_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tokenizer_with("x").render_chat(messages)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert tokenizer_with("{{ messages[0].content }}").render_chat([{"role": "user", "content": parts}]) == "a b"


def test_tool_calls_reach_the_template_as_objects() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    template = "{{ messages[0].content is none }}{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert tokenizer_with(template).render_chat([message]) == 'True{"x": 1}'
    assert call["function"]["arguments"] == '{"x": 1}'  # the caller's own message is not touched
    broken = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
    assert tokenizer_with(template).render_chat([broken]) == 'False"{"'


def test_a_lone_surrogate_in_a_message_is_refused() -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer_with("{{ messages[0].content }}").apply_chat_template([{"role": "user", "content": "a\ud83d"}])


# -- where templates come from


def test_a_template_field_may_be_a_list_of_named_ones(tmp_path: Path) -> None:
    field = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tokenizer = byte_tokenizer(tmp_path, chat_template=field)
    assert tokenizer.chat_template == "D"
    assert tokenizer.render_chat([USER], tools=[]) == "T"


def test_files_come_before_the_field(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, chat_template="field")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "old file"}))
    assert load_tokenizer(tmp_path).chat_template == "old file"
    (tmp_path / "chat_template.jinja").write_text("file é", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("more")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat_template == "file é"
    assert tokenizer.render_chat([USER], template="rag") == "more"


@pytest.mark.parametrize("field", [5, [5], [{"name": "default"}], {"default": 5}])
def test_a_template_that_is_no_text_is_refused_with_its_file(tmp_path: Path, field: Any) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template must be"):
        byte_tokenizer(tmp_path, chat_template=field)


def test_a_template_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: cannot read"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_needs_no_names() -> None:
    assert Tokenizer(byte_backend()).render_chat([USER], template="{{ bos_token }}.") == "."
