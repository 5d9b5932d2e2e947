"""The command line. Results go to stdout, everything else to stderr; heavy modules are imported inside the commands.

Owns options, exit codes and how things look on a terminal, and decides nothing about pipelines, models or engines.
"""

from __future__ import annotations

import sys

import typer

from llmjax.cli import bench, look, pipelines, talk, tune
from llmjax.cli.options import Command
from llmjax.cli.terminal import safe_streams, tell
from llmjax.errors import LlmjaxError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
config_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at a pipeline's configuration.")
for command in (
    pipelines.run,
    pipelines.validate,
    pipelines.plan,
    pipelines.explain,
    pipelines.schema,
    pipelines.new,
    tune.tune,
    pipelines.batch,
    pipelines.serve,
    talk.generate,
    talk.chat,
    look.inspect,
    look.doctor,
):
    app.command(cls=Command)(command)
config_app.command(cls=Command)(pipelines.show)
config_app.callback()(lambda: None)  # keeps "show" a name of its own while it is the only one
app.add_typer(config_app, name="config")
bench_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Load an engine or a server and report latencies and throughput."
)
bench_app.command(cls=Command)(bench.throughput)
bench_app.command(cls=Command)(bench.latency)
bench_app.command(cls=Command)(bench.serve)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Entry point: runs a command and exits. An `LlmjaxError` is a line on stderr and its exit code, never a traceback."""
    safe_streams()
    try:
        app(prog_name="llmjax")
    except LlmjaxError as error:
        tell(error)
        sys.exit(error.exit_code)
