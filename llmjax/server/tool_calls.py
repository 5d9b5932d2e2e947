"""What a chat body says of tools (`tools`, `tool_choice`, `parallel_tool_calls`), checked, and how calls are answered.

Knows nothing of the model: what its template and tokenizer mean for a request with tools is in `tool_support.py`.
"""

from __future__ import annotations

import dataclasses
import re
import uuid
from collections.abc import Mapping
from typing import Any

from llmjax.errors import RequestError
from llmjax.server.prompts import check_encodable
from llmjax.server.strict_json import kind
from llmjax.server.tool_parsers import CallDelta, CallFormat, ToolParser

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The functions that an answer may call.

    Attributes:
        tools: as the chat template gets them: objects with type and function, which has name and parameters.
        required: at least one must be called.
        name: the only one that may be, None for any.
        parallel: several calls may be made in one answer.
        strict: names of functions whose arguments must keep to their schemas.
        form: how the model writes calls; None where its text is not looked at.
    """

    tools: tuple[dict[str, Any], ...]
    required: bool = False
    name: str | None = None
    parallel: bool = True
    strict: frozenset[str] = frozenset()
    form: CallFormat | None = None

    @property
    def callable(self) -> dict[str, dict[str, Any]]:
        """The functions that may be called: name to JSON schema of the arguments."""
        functions = [tool["function"] for tool in self.tools]
        return {one["name"]: one["parameters"] for one in functions if self.name in (None, one["name"])}


# -- the fields


def read_tools(fields: Mapping[str, Any]) -> ToolUse | None:
    """The three fields of a chat body. None when nothing may be called. Raises `RequestError`."""
    parallel = fields.get("parallel_tool_calls", True)
    if not isinstance(parallel, bool):
        raise RequestError(f"parallel_tool_calls must be true or false, got {kind(parallel)}", "parallel_tool_calls")
    tools, strict = _tools(fields.get("tools", []))
    names = [tool["function"]["name"] for tool in tools]
    choice = fields.get("tool_choice", "auto")
    name = None
    if isinstance(choice, Mapping):
        name = _named(choice, names)
    elif choice not in ("none", "auto", "required"):
        told = repr(choice)[:40] if isinstance(choice, str) else kind(choice)
        raise RequestError(
            f"tool_choice must be none, auto, required, or an object that names a function, got {told}", "tool_choice"
        )
    required = name is not None or choice == "required"
    if required and not tools:
        raise RequestError("tool_choice asks for a call, but there are no tools: give tools", "tool_choice")
    if not tools or choice == "none":
        return None
    return ToolUse(tools=tools, required=required, name=name, parallel=parallel and name is None, strict=strict)


def _named(choice: Mapping[str, Any], names: list[str]) -> str:
    if choice.get("type") != "function":
        raise RequestError(f"tool_choice.type is {choice.get('type')!a:.40}: only function is supported", "tool_choice")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError('tool_choice must name a function: {"type": "function", "function": {"name": ...}}', "tool_choice")
    if name not in names:
        raise RequestError(f"tool_choice names the function {name!a:.80}, which is not among the tools", "tool_choice")
    return name


def _tools(value: Any) -> tuple[tuple[dict[str, Any], ...], frozenset[str]]:
    """The tools as templates get them, and the names of the strict ones."""
    if not isinstance(value, list):
        raise RequestError(f"tools must be a list, got {kind(value)}", "tools")
    if len(value) > MAX_TOOLS:
        raise RequestError(f"tools holds {len(value)} tools, at most {MAX_TOOLS} are taken", "tools")
    tools: dict[str, dict[str, Any]] = {}
    strict: set[str] = set()
    for index, item in enumerate(value):
        where = f"tools[{index}]"
        if not isinstance(item, Mapping):
            raise RequestError(f"{where} must be an object with type and function, got {kind(item)}", "tools")
        check_encodable(item, where, "tools")
        if item.get("type") != "function":
            raise RequestError(f"{where}.type is {item.get('type')!a:.40}: only function is supported", "tools")
        function = _function(item.get("function"), f"{where}.function")
        if function["name"] in tools:
            raise RequestError(f"{where}.function.name {function['name']!r} is given twice", "tools")
        tools[function["name"]] = {"type": "function", "function": function}
        if function.pop("strict", False):
            strict.add(function["name"])
    return tuple(tools.values()), frozenset(strict)


def _function(value: Any, where: str) -> dict[str, Any]:
    """A function, checked: null fields left out, and with a schema of its arguments."""
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} must be an object with a name, got {kind(value)}", "tools")
    function = {name: item for name, item in value.items() if item is not None}
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{where}.name must be 1 to 64 letters, digits, _ or -, got {name!a:.80}", "tools")
    if not isinstance(function.get("description", ""), str):
        raise RequestError(f"{where}.description must be a string, got {kind(function['description'])}", "tools")
    if not isinstance(function.get("strict", False), bool):
        raise RequestError(f"{where}.strict must be true or false", "tools")
    parameters = function.setdefault("parameters", _NO_PARAMETERS)
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{where}.parameters must be a JSON schema of an object, got {kind(parameters)}", "tools")
    if parameters.get("type", "object") != "object" or not isinstance(parameters.get("properties", {}), Mapping):
        raise RequestError(
            f'{where}.parameters must be a JSON schema of an object: {{"type": "object", "properties": ...}}', "tools"
        )
    if not parameters:
        function["parameters"] = _NO_PARAMETERS
    return function


# -- the answer


class CallWriter:
    """One output as the deltas of a stream, or as a message, in OpenAI's form. Ids are made up here, one a call."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the output ended, for the client: a model that stopped by itself, or at a stop string, has made its calls."""
        return "tool_calls" if reason == "stop" and self._parser.num_calls else reason

    def deltas(self, text: str, *, final: bool) -> list[dict[str, Any]]:
        """What is new, first the content; with `final` the output has ended."""
        found = [self._parser.feed(text), *([self._parser.finish()] if final else [])]
        deltas: list[dict[str, Any]] = []
        if content := "".join(parsed.content for parsed in found):
            deltas.append({"content": content})
        return deltas + [{"tool_calls": [_call_delta(delta)]} for parsed in found for delta in parsed.calls]

    def message(self, text: str) -> dict[str, Any]:
        """A whole output. Content beside calls is None when there is none."""
        content, calls = "", list[dict[str, Any]]()
        for delta in self.deltas(text, final=True):
            content += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append({name: part for name, part in call.items() if name != "index"})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if not calls:
            return {"content": content}
        return {"content": content or None, "tool_calls": calls}


def call_writer(use: ToolUse | None) -> CallWriter | None:
    """A writer for one output, None where no call is looked for."""
    if use is None or use.form is None:
        return None
    names = [tool["function"]["name"] for tool in use.tools]
    return CallWriter(ToolParser(use.form, names, None if use.parallel else 1))


def _call_delta(delta: CallDelta) -> dict[str, Any]:
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {
        "index": delta.index,
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": delta.name, "arguments": delta.arguments},
    }
