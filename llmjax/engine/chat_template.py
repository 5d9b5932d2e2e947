"""Chat templates: where a model keeps them, and how messages become a prompt.

Templates are Jinja from the model's files, so they run in a sandbox, set up as transformers sets it up (that is what
their authors test with). Knows nothing of token ids.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from llmjax.errors import ModelError, RequestError
from llmjax.model.checkpoint.json_file import read_json_object

DEFAULT = "default"
TEMPLATE_FILE = "chat_template.jinja"
_OLD_TEMPLATE_FILE = "chat_template.json"
_MORE_TEMPLATES = "additional_chat_templates"


class _RefusedError(jinja2.TemplateError):
    """A template called `raise_exception`."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what to train on; for a prompt it is its body."""

    tags = {"generation"}  # noqa: RUF012 -- Jinja declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def read_templates(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Templates of a Hugging Face directory by name; the usual one is "default". Empty when there is none.

    The file chat_template.jinja comes before chat_template.json, and both before the field of tokenizer_config.json.
    Raises `ModelError` for a template that is not text.
    """
    where = directory / "tokenizer_config.json"
    templates = _named_templates(tokenizer_config.get("chat_template"), where)
    old = directory / _OLD_TEMPLATE_FILE
    if old.is_file():
        templates |= _named_templates(read_json_object(old).get("chat_template"), old)
    files = {DEFAULT: directory / TEMPLATE_FILE}
    files |= {path.stem: path for path in sorted((directory / _MORE_TEMPLATES).glob("*.jinja"))}
    for name, path in files.items():
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"{path}: cannot read the chat template: {error}") from None
    return templates


def _named_templates(field: Any, where: Path) -> dict[str, str]:
    """A `chat_template` field: one text, or a list of {"name", "template"}, or an object name -> text."""
    if field is None:
        return {}
    if isinstance(field, str):
        return {DEFAULT: field}
    if isinstance(field, list) and all(isinstance(item, dict) for item in field):
        field = {item.get("name"): item.get("template") for item in field}
    if isinstance(field, dict) and all(isinstance(part, str) for item in field.items() for part in item):
        return dict(field)
    raise ModelError(f"{where}: chat_template must be a text or a list of objects with name and template")


def render_template(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The prompt that `template` makes of `messages`, which `check_messages` has seen.

    Raises `RequestError` with the template's own words when it refuses them (`raise_exception`), when it fails, or when
    it is no valid Jinja.
    """
    try:
        return _compiled(template).render(messages=messages, **variables)
    except _RefusedError as error:
        raise RequestError(f"the chat template refuses these messages: {_one_line(error)}", "messages") from None
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"the chat template is not valid Jinja, line {error.lineno}: {_one_line(error)}", "messages") from None
    except Exception as error:  # a template is a program: any Python error can come out of it
        raise RequestError(f"the chat template fails on these messages: {_one_line(error)}", "messages") from None


@functools.lru_cache(maxsize=32)
def reads_variable(template: str, name: str) -> bool:
    """Whether a template looks at this variable. True for one that is no valid Jinja: rendering tells that."""
    try:
        return name in jinja2.meta.find_undeclared_variables(_environment().parse(template))
    except jinja2.TemplateSyntaxError:
        return True


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """A conversation as templates expect it; raises `RequestError` naming the message at fault.

    Contents become plain text (text parts are joined without anything between), null is left for an assistant with tool
    calls, and the arguments of tool calls become objects where they are JSON texts.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list of objects with role and content, got {type(messages).__name__}", "messages")
    if not messages:
        raise RequestError("messages is empty: give at least one", "messages")
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content, got {type(message).__name__}", "messages")
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a text such as user, got {role!r:.40}", "messages")
    if content is None:
        if role != "assistant" or not calls:
            raise RequestError(f"{where}.content is missing: give a text", "messages")
    elif not isinstance(content, str):
        content = _joined_parts(content, f"{where}.content")
    checked = {**message, "content": content}
    if calls:
        if not isinstance(calls, list | tuple):
            raise RequestError(f"{where}.tool_calls must be a list, got {type(calls).__name__}", "messages")
        checked["tool_calls"] = [_with_object_arguments(call) for call in calls]
    return checked


def _joined_parts(parts: Any, where: str) -> str:
    if not isinstance(parts, list | tuple):
        raise RequestError(f"{where} must be a text or a list of text parts, got {type(parts).__name__}", "messages")
    texts = []
    for index, part in enumerate(parts):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(f'{where}[{index}] must be {{"type": "text", "text": …}}: only text is supported', "messages")
        texts.append(text)
    return "".join(texts)


def _with_object_arguments(call: Any) -> Any:
    """OpenAI writes a call's arguments as JSON in a string; templates write an object out as JSON themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt does not want."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
