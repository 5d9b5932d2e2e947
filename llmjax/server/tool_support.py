"""What a model means for a request with tools: whether its template knows tools, and how it writes calls. Host only."""

from __future__ import annotations

import dataclasses

from llmjax.engine.chat_template import reads_variable
from llmjax.engine.tokenizer import Tokenizer, needed
from llmjax.errors import RequestError
from llmjax.server.protocol import ApiRequest
from llmjax.server.tool_parsers import FORMATS, CallFormat, ToolParserName, format_of


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
    if template is not None and not reads_variable(template, "tools"):
        raise RequestError(
            "this model's chat template takes no tools: leave out tools, or give the model a template that knows them", "tools"
        )
    form = _format(template or "", parser)
    if form is None and use.required:
        raise RequestError("tool_choice can force a call only with a known format of calls: set tool_parser", "tool_choice")
    params = request.params
    if form is not None and any(map(tokenizer.is_special, form.markers)):
        params = dataclasses.replace(params, skip_special_tokens=False)  # or the marks of a call would not be seen
    return dataclasses.replace(request, params=params, tools=dataclasses.replace(use, form=form))


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
