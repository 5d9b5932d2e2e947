"""`EngineTrace`: an engine's launches and requests as a process of a trace file. Knows what they mean; reads no clock."""

from __future__ import annotations

import dataclasses

from llmjax.engine.outputs import RequestOutput
from llmjax.scheduling.request import ScheduledBatch, StepOutput
from llmjax.telemetry.timings import RequestTimeline
from llmjax.telemetry.trace import ProcessTrace, TraceWriter


class EngineTrace:
    """Tracks "host" (schedule, dispatch, wait, update) and "device" (launches), curves of requests and pages, the requests."""

    def __init__(self, writer: TraceWriter, name: str) -> None:
        self._process: ProcessTrace = writer.process(name)
        self._launched_ns: dict[int, int] = {}  # of launches in flight, by step id
        self._last_read_ns = 0

    def launched(
        self, batch: ScheduledBatch, scheduled_ns: tuple[int, int], now_ns: int, *, running: int, waiting: int, pages: int
    ) -> None:
        """A launch, scheduled from the first to the second mark, is with the device."""
        process = self._process
        process.span("host", "schedule", *scheduled_ns, step=batch.step_id, preempted=len(batch.preempted))
        process.span("host", "dispatch", scheduled_ns[1], now_ns, step=batch.step_id)
        process.curve("requests", now_ns, running=running, waiting=waiting)
        process.curve("pages", now_ns, used=pages)
        self._launched_ns[batch.step_id] = now_ns

    def read(self, output: StepOutput, waits_ns: int, read_ns: int, now_ns: int) -> None:
        """A launch's result, waited for from `waits_ns` to `read_ns`, has been worked into the requests.

        It has had the device from when it was launched or the one before had ended, whichever is later.
        """
        batch = output.batch
        began_ns = max(self._launched_ns.pop(batch.step_id, waits_ns), self._last_read_ns)
        self._last_read_ns = read_ns
        facts = {"step": batch.step_id, "rows": len(batch.rows), "tokens": batch.num_tokens, "steps": batch.num_steps}
        if output.proposed is not None and output.accepted is not None:
            facts |= {"drafted": int(output.proposed.sum()), "accepted": int(output.accepted.sum())}
        self._process.span("device", batch.kind, began_ns, read_ns, **facts)
        self._process.span("host", "wait", waits_ns, read_ns, step=batch.step_id)
        self._process.span("host", "update", read_ns, now_ns, step=batch.step_id)

    def finished(self, timeline: RequestTimeline, last: RequestOutput, *, lane: str, reason: str) -> None:
        """A request has ended."""
        assert last.timings is not None
        facts = {"lane": lane, "finish_reason": reason, **dataclasses.asdict(last.timings)}
        if last.speculation is not None:
            facts["speculation"] = dataclasses.asdict(last.speculation)
        self._process.request(last.request_id, timeline.marks, last.timings.end_ns, **facts)
