"""A pipeline whose last stage is `serve`, as processes: one runs the pipeline and has the engine, others speak HTTP.

What can be known before the model is loaded is checked here: the keys, the settings, whether the port is free and whether the
traffic log can be written.
"""

from __future__ import annotations

from typing import Any

from llmjax.pipeline.loading import Pipeline, Stage
from llmjax.pipeline.stages.serve import ServeSection, read_keys, server_options


def final_server(pipeline: Pipeline, until: str | None = None) -> Stage | None:
    """The `serve` stage that a run of the pipeline ends with, if it ends with one."""
    names = [stage.name for stage in pipeline.stages]
    considered = pipeline.stages if until is None or until not in names else pipeline.stages[: names.index(until) + 1]
    on = [stage for stage in considered if stage.when != "never"]
    return on[-1] if on and isinstance(on[-1].config, ServeSection) else None


def run_service(
    pipeline: Pipeline, stage: Stage, *, engine_module: str, engine_job: dict[str, Any], recalibration_module: str
) -> int:
    """Run the processes until a signal, or until the service ends by itself. The pipeline's exit code.

    Args:
        stage: from `final_server`.
        engine_module: see `Program`; its process runs the pipeline.
        engine_job: its job; gets the server's address as "url". Its "run" has the options of the pipeline's run: what a
            recalibration changes of them is "values".
        recalibration_module: the process beside, where the pipeline recalibrates; its job is the engine's.

    Raises:
        ConfigError: the keys or the settings are wrong, or the traffic log cannot be written.
        LlmjaxError: the port is taken, or a process was killed.
    """
    from llmjax.pipeline.recalibration import State, chain_of, check_service, state_path, with_data
    from llmjax.server.config import ServerConfig, WorkerJob
    from llmjax.server.listener import listen, url_of
    from llmjax.server.supervisor import Program, Supervisor
    from llmjax.server.traffic_log import TrafficLog

    section = stage.config
    assert isinstance(section, ServeSection)
    options = server_options(section, read_keys(section))
    config = ServerConfig(**options | {"served_names": options["served_names"] or (stage.name,)})  # wrong settings are told now
    chain, _ = chain_of(pipeline.stages)
    run = engine_job["run"]
    check_service(chain, frozen=run["frozen"])
    state = None if chain is None else state_path(pipeline)
    values = run["values"] if chain is None or state is None else with_data(chain, run["values"], State.read(state).data)
    with listen(section.host, section.port) as listener:
        if config.traffic is not None:
            TrafficLog(config.traffic, lambda ids: "").close()  # and so is a file that cannot be written
        job = engine_job | {"url": url_of(listener)}
        worker = WorkerJob(
            options, pipeline.runtime.log, section.http_workers == 1, recalibration=None if state is None else str(state)
        )
        return Supervisor(
            listener,
            engine=Program(engine_module, job | {"run": run | {"values": values}}),
            worker=Program("llmjax.server.worker", worker),
            workers=section.http_workers,
            restart=section.restart,
            beside=None if chain is None else Program(recalibration_module, job),
        ).run()
