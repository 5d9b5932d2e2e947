"""What a model means for a request with tools: whether its template knows tools, and how it writes calls. Host only."""

from __future__ import annotations

import dataclasses

from llmjax.engine.chat_template import reads_variable
from llmjax.engine.tokenizer import Tokenizer, needed
from llmjax.errors import RequestError
from llmjax.sampling_params import SamplingParams
from llmjax.server.protocol import ApiRequest
from llmjax.server.tool_calls import ToolUse
from llmjax.server.tool_grammar import call_grammar
from llmjax.server.tool_parsers import FORMATS, CallFormat, ToolParserName, format_of
from llmjax.structured_output import StructuredOutput


def with_tools(request: ApiRequest, tokenizer: Tokenizer | None, parser: ToolParserName) -> ApiRequest:
    """The request as this model serves it; the same one without tools.

    Args:
        tokenizer: the model's.
        parser: the setting: a format by name, "auto" for the one that the chat template teaches, "none" to leave the model's
            text as it is.

    Raises `RequestError` when the model cannot do what is asked.
    """
    use = request.tools
    if use is None:
        return request
    tokenizer = needed(tokenizer, "chat")
    template = tokenizer.tool_template
    if template is None:
        return request  # rendering says what is missing
    if not reads_variable(template, "tools"):
        raise RequestError(
            "this model's chat template takes no tools: leave out tools, or give the model a template that knows them", "tools"
        )
    form = _format(template, parser)
    if form is None and use.required:
        raise RequestError("tool_choice can force a call only with a known format of calls: set tool_parser", "tool_choice")
    use = dataclasses.replace(use, form=form)
    params = request.params if form is None else _params(request.params, use, form, tokenizer)
    return dataclasses.replace(request, params=params, tools=use)


def _params(params: SamplingParams, use: ToolUse, form: CallFormat, tokenizer: Tokenizer) -> SamplingParams:
    if params.structured is not None:
        raise params.structured.error("it cannot be combined with tools: leave out one of them, or set tool_choice to none")
    tokens = {mark: token for mark in form.markers if (token := tokenizer.added_id(mark)) is not None}
    special = {mark: token for mark, token in tokens.items() if token in tokenizer.special_ids}
    if special:
        params = dataclasses.replace(params, skip_special_tokens=False)  # or the marks of a call would not be seen
    if use.required or (use.strict and not form.bare):
        try:
            grammar = call_grammar(use, tokens if use.required else special)
        except RecursionError:
            raise RequestError("tools: a schema of parameters is nested too deeply", "tools") from None
        params = dataclasses.replace(params, structured=StructuredOutput(grammar=grammar, field="tools"))
    return params


def _format(template: str, parser: ToolParserName) -> CallFormat | None:
    if parser != "auto":
        return FORMATS.get(parser)
    form = format_of(template)
    if form is None:
        raise RequestError(
            f"how this model writes calls is not known from its chat template: set tool_parser to {' or '.join(FORMATS)}, or to "
            f"none for its text as it is; or leave out tools",
            "tools",
        )
    return form
