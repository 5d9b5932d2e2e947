"""The `data` section of calibrate and gate: a file of texts, as token ids. Reading is `llmjax.quantization.samples`'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from llmjax.errors import RequestError
from llmjax.pipeline.schema import InputPath, Section

if TYPE_CHECKING:
    from llmjax.engine.tokenizer import Tokenizer
    from llmjax.pipeline.report import Reporter
    from llmjax.quantization.samples import ReadSamples, SampleTokenizer


class DataSection(Section):
    """A file of texts: plain text, JSON lines or a server's traffic log; which one is told from its first line."""

    path: InputPath = Field(
        description="Plain text (cut into pieces of whole lines), or JSON lines: texts, messages, token ids, or a traffic log "
        "with its answers."
    )
    column: str | None = Field(
        None,
        min_length=1,
        description="Of JSON lines, where the sample is; by default the first of messages, prompt_ids, prompt and text.",
    )
    template: Literal["chat"] | None = Field(
        None,
        description="chat makes a user's message of each plain text; by default texts are read as they are. Messages always go "
        "through the model's chat template.",
    )
    limit: int | None = Field(
        None, ge=1, description="Samples of the file that are looked at, from its beginning; by default all."
    )


def read_data(
    data: DataSection, tokenizer: Tokenizer | None, reporter: Reporter, *, count: int | None = None, seed: int = 0
) -> ReadSamples:
    """`count` of the samples, chosen by `seed`; what was left out is told. Raises as `read_samples` does."""
    from llmjax.quantization.samples import read_samples

    reads: SampleTokenizer = _NoTokenizer() if tokenizer is None else tokenizer
    if data.template == "chat":
        reads = _AsMessages(reads)
    found = read_samples(Path(data.path), reads, count=count, limit=data.limit, seed=seed, column=data.column)
    if found.left_out:
        reporter.message("warning", f"{data.path}: {found.left_out} lines were left out; {found.problem}")
    return found


class _AsMessages:
    """A tokenizer for which a text is what a user says."""

    def __init__(self, inner: SampleTokenizer) -> None:
        self._inner = inner
        self.apply_chat_template = inner.apply_chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text as a conversation of one message. The template has the special tokens."""
        return self._inner.apply_chat_template([{"role": "user", "content": text}])


class _NoTokenizer:
    """Stands for the tokenizer of a model that has none."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Refuses."""
        raise RequestError("the model has no tokenizer: give token ids, in a column prompt_ids")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """Refuses."""
        return self.encode("")
