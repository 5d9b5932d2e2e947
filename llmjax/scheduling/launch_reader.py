"""`LaunchReader`: what a launch's result means for the requests in it.

Appends their tokens, takes back what was promised and not given, makes the pages that were filled findable, and says which
requests have ended and why. Decides nothing else: what an end means for rows and lanes is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable

from llmjax.scheduling.finish_reason import FinishReason
from llmjax.scheduling.held_pages import HeldPages
from llmjax.scheduling.launch_rows import note_ended, take_back
from llmjax.scheduling.prefix_cache import PrefixCache
from llmjax.scheduling.request import Request, RequestState, StepOutput
from llmjax.scheduling.results import RequestUpdate, read_row
from llmjax.scheduling.speculation import Speculation


class LaunchReader:
    """Reads results in the order of their launches.

    Args:
        pages: those that requests hold.
        prefixes: where pages are made findable, if anywhere.
        speculation: is told how drafts fared.
        end: called when a request has ended.
    """

    def __init__(
        self,
        pages: HeldPages,
        prefixes: PrefixCache | None,
        speculation: Speculation | None,
        end: Callable[[Request, FinishReason], None],
    ) -> None:
        self._pages, self._prefixes, self._speculation, self._end = pages, prefixes, speculation, end

    def read(self, output: StepOutput) -> list[RequestUpdate]:
        """One entry a row of the launch whose request had not ended before, in the order of the launch's rows."""
        batch, updates = output.batch, []
        every_finite, drafted = output.every_finite, batch.kind == "speculate"
        plain = every_finite and not drafted
        prefixes, decoded = self._prefixes, batch.kind != "extend"
        over = RequestState.FINISHED
        for column, (row, tokens) in enumerate(zip(batch.rows, output.token_lists, strict=True)):
            request = row.request
            if request.state is over:
                if not every_finite and not output.is_finite(column):
                    self._pages.condemn(request)
                continue  # ended by an earlier launch, by `finish` or by `abort`
            assert row.epoch == request.epoch
            samples = row.samples
            request.num_in_flight -= samples  # what was promised: a row that ended on the device gave less
            reason: FinishReason | None = None
            if plain and len(tokens) == samples and request.ending_ids.isdisjoint(tokens):  # nearly every row
                assert tokens[-1] >= 0, "the device ended a row that the host's rules let go on"
                request.output_ids += tokens
            else:
                if drafted and row.drafts:
                    self._observe(output, column)
                tokens, reason = read_row(output, column)
            num_output = len(request.output_ids)
            if reason is None and num_output == request.limit:
                # With limit 0 only the prompt's logprobs were asked for: done when the prompt is.
                done = samples > 0 or row.start + row.num_tokens == request.num_prompt_tokens
                reason = "length" if done else None
            if reason is not None:
                note_ended(request)
            elif len(tokens) < samples:
                take_back(request, samples - len(tokens))
            if prefixes is not None and reason != "error":
                # Of a row that decodes the last token is known but not computed; where it began may not have been known.
                end = row.start + row.num_tokens if row.token_ids else len(request.prompt_ids) + num_output - 1
                if end >= request.commit_at:
                    prefixes.commit(request, row.start, end, decoded=decoded)
            if reason is not None:
                self._end(request, reason)
            updates.append(RequestUpdate(request, column, tokens, reason is not None))
        return updates

    def _observe(self, output: StepOutput, column: int) -> None:
        """How the drafts of a row fared."""
        assert self._speculation is not None
        assert output.proposed is not None
        assert output.accepted is not None
        request = output.batch.rows[column].request
        self._speculation.observe(request, int(output.proposed[column]), int(output.accepted[column]))
