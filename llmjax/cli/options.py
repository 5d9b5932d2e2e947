"""Options that several commands share, and how a command reads them. Knows nothing of what they are for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperOption

from llmjax.errors import ConfigError


class Command(TyperCommand):
    """A command whose single-valued options may be given once: of two, the first would be dropped without a word."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click."""
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for param, times in Counter(given).items():
            if times > 1 and isinstance(param, TyperOption) and not param.multiple:
                ctx.fail(f"{param.opts[0]} is given {times} times, but takes one value")
        return super().parse_args(ctx, args)


LogForm = Literal["text", "json"]
Platform = Literal["auto", "cpu", "cuda"]
DType = Literal["float32", "bfloat16", "float16"]
File = Annotated[str, typer.Argument(metavar="FILE", help="A pipeline file, or the name of one that comes with llmjax.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value; read as YAML. Repeatable.")]
Overlays = Annotated[list[Path] | None, typer.Option("--overlay", metavar="FILE", help="Lay a file over it. Repeatable.")]
Until = Annotated[str | None, typer.Option(metavar="STAGE", help="Stop after this stage.")]
Force = Annotated[list[str] | None, typer.Option(metavar="STAGE", help="Run it although its result is stored. Repeatable.")]
Log = Annotated[LogForm | None, typer.Option(help="Form of the log on stderr.")]
ModelPath = Annotated[Path | None, typer.Option("--model", "-m", help="A model folder or a .gguf file.")]
Package = Annotated[str | None, typer.Option(help="An installed package that holds a .gguf file.")]
Random = Annotated[str | None, typer.Option(metavar="PRESET", help="Random weights of a known shape, such as llama-8b.")]
MaxContext = Annotated[int | None, typer.Option(help="Tokens of prompt and output together, at most.")]
PlatformOption = Annotated[Platform | None, typer.Option(help="Device to compute on.")]
DTypeOption = Annotated[DType | None, typer.Option(help="Dtype of weights and cache; bfloat16 on a GPU, float32 on a CPU.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Tell what the engine does.")]
MaxTokens = Annotated[int | None, typer.Option(help="New tokens at most.")]
Temperature = Annotated[float | None, typer.Option(help="0 takes the likeliest token.")]
TopK = Annotated[int | None, typer.Option(help="Sample among this many; 0 for all.")]
TopP = Annotated[float | None, typer.Option(help="Sample among the likeliest with this share of probability.")]
MinP = Annotated[float | None, typer.Option(help="Sample among those at least this likely, relative to the likeliest.")]
Penalty = Annotated[float | None, typer.Option("--repetition-penalty", help="Above 1, seen tokens become less likely.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.")]
Trace = Annotated[Path | None, typer.Option(metavar="FILE", help="Write what ran when as a Chrome trace, for ui.perfetto.dev.")]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]


def check_one_model(model: Path | None, package: str | None, random: str | None) -> None:
    """Raise `ConfigError` unless exactly one of the three names a model."""
    if sum(value is not None for value in (model, package, random)) != 1:
        raise ConfigError("name exactly one model: a path, --package or --random")
