"""The `loadtest` stage: traffic of a declared shape on an engine, percentiles and a report. The work is in `llmjax/loadtest`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, model_validator

from llmjax.errors import ConfigError
from llmjax.pipeline.schema import Duration, InputPath, OneOrMore, OutputPath, Section, Share, StageSection, located
from llmjax.pipeline.stages import Missed, StageContext, StageInput, StageKind

Baseline = Literal["static", "fifo", "whole_length"]


class LengthsSection(Section):
    """Token counts, log-normal and clipped."""

    median: int = Field(ge=1, description="Half of the counts are below it.")
    sigma: float = Field(0.0, ge=0, le=5, description="Standard deviation of the logarithm; 0 makes all alike.")
    min: int = Field(1, ge=1, description="Smaller counts become this.")
    max: int | None = Field(None, ge=1, description="Larger counts become this; by default none do.")

    @model_validator(mode="after")
    def _order(self) -> LengthsSection:
        if self.max is not None and self.max < self.min:
            raise located(f"max {self.max} is below min {self.min}", "max")
        return self


class SharedPrefixSection(Section):
    """Beginnings that several prompts have in common, such as a system prompt."""

    tokens: int = Field(ge=1, description="Tokens of a beginning; a prompt's own tokens come after them.")
    share: Share = Field(description="Share of the prompts that have one, e.g. 20%.")
    groups: int = Field(1, ge=1, description="Number of different beginnings.")


class PromptsSection(Section):
    """What is asked: random tokens of given lengths, or the lines of a file."""

    file: InputPath | None = Field(
        None,
        description='JSONL traffic: a text a line, or {"prompt": …} or {"messages": […]}, with `output_tokens` or `max_tokens` '
        "and `arrival` (seconds) if it likes.",
    )
    tokens: LengthsSection | None = Field(
        None, description="Lengths of random prompts; by default log-normal around 256, from 16 to 1024 tokens."
    )
    shared_prefix: SharedPrefixSection | None = Field(None, description="Beginnings that random prompts have in common.")

    @model_validator(mode="after")
    def _one_source(self) -> PromptsSection:
        for name in ("tokens", "shared_prefix"):
            if self.file is not None and getattr(self, name) is not None:
                raise located(f"give either file or {name}, not both: the file has its own prompts", name)
        return self


class BurstSection(Section):
    """Requests that come all at once, again and again."""

    size: int = Field(ge=1, description="Requests of one burst.")
    every: Duration = Field(description="Time from one burst to the next, e.g. 5s.")


class ServiceLevelSection(Section):
    """What the engine must reach; missing one is exit code 4. Goodput counts the requests within them."""

    ttft_p95: Duration | None = Field(None, description="95th percentile of the time to the first token.")
    itl_p95: Duration | None = Field(None, description="95th percentile of the gap between two events with tokens.")
    tpot_p95: Duration | None = Field(None, description="95th percentile of the time per output token after the first.")
    e2e_p95: Duration | None = Field(None, description="95th percentile of the whole time of a request.")
    errors: int | None = Field(None, ge=0, description="Failed requests at most.")


class HttpSection(Section):
    """How a server is asked, when the target is a URL or a serve stage."""

    model: str | None = Field(None, min_length=1, description="The model's name at the server; by default the first it serves.")
    api_key: SecretStr | None = Field(None, description="Key that the server wants as a bearer token.")
    endpoint: Literal["completions", "chat"] = Field(
        "completions", description="Of prompts that are texts. Token ids go to completions, messages to chat."
    )
    usage_per_event: bool = Field(
        True,
        description="Ask for continuous_usage_stats, so that the tokens of each event are known. Off for a server that refuses "
        "it: an event then counts as one token, and what the usage at the end has beyond that as the last event's.",
    )
    retries: int = Field(0, ge=0, description="How often a request that was answered with 429 or 503 is sent again.")
    silence: Duration = Field(300.0, gt=0, description="Time without a byte after which a request has failed.")
    vocabulary: int = Field(1000, ge=1, description="Random prompts are token ids below this.")
    tokenizer: InputPath | None = Field(
        None,
        description="A model folder or .gguf file whose tokenizer makes texts of random prompts, so that the server's has to "
        "work; ids are then drawn from all it has. Lengths are about those asked for, and told as the server counts them.",
    )


class LoadtestSection(StageSection):
    """Send traffic of a declared shape and report percentiles, throughput and errors."""

    target: str | None = Field(
        None,
        description="What is loaded: an engine stage (by default the only earlier one), a serve stage, or the URL of any "
        "OpenAI-compatible server.",
    )
    http: HttpSection = Field(
        default_factory=lambda: HttpSection.model_validate({}), description="How a server is asked that is the target."
    )
    profile: Literal["closed", "poisson", "burst", "sweep", "recorded"] = Field(
        "closed",
        description="closed: clients that each wait for their answer; sweep: the same over several numbers of clients; poisson: "
        "arrivals at a mean rate; burst: many at once; recorded: at the times of the traffic file.",
    )
    concurrency: Annotated[list[int], OneOrMore] = Field(
        default_factory=list, description="Numbers of clients of closed and sweep, each a run of its own."
    )
    peak: int | None = Field(
        None,
        ge=1,
        description="Clients at the declared peak: a sweep without `concurrency` goes from 1 to three times as many, and service "
        "levels hold up to it.",
    )
    rate: Annotated[list[float], OneOrMore] = Field(
        default_factory=list, description="Requests a second of poisson, each a run of its own."
    )
    burstiness: float = Field(
        1.0, gt=0, description="Shape of the gaps of poisson: 1 is a Poisson process, below it requests come in clusters."
    )
    burst: BurstSection | None = Field(None, description="The bursts of the burst profile.")
    requests: int = Field(100, ge=1, description="Requests of each run; of a traffic file the first so many.")
    duration: Duration | None = Field(None, description="After this, a run sends nothing new; those on their way are waited for.")
    prompts: PromptsSection = Field(default_factory=lambda: PromptsSection.model_validate({}), description="What is asked.")
    output_tokens: LengthsSection | None = Field(
        None,
        description="Lengths of answers; by default log-normal around 128, from 8 to 512. With a traffic file, the median is for "
        "lines that name none.",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="What requests ask for at most. By default their own length, known ahead; with it, they are stopped by "
        "their client when they have theirs, as if it could not be foreseen.",
    )
    ignore_eos: bool = Field(True, description="Go on after the model's own end, so that answers have the lengths drawn.")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Of lengths, contents and arrivals.")
    slo: ServiceLevelSection = Field(
        default_factory=lambda: ServiceLevelSection.model_validate({}), description="Service levels."
    )
    baselines: Annotated[list[Baseline], OneOrMore] = Field(
        default_factory=list,
        description="Run beside the engine as it is configured, on the same programs and traffic. static: batches that are "
        "waited for; fifo: without lanes; whole_length: the pages of a request's full length are reserved when it starts.",
    )
    static_batch: int = Field(8, ge=1, description="Requests of a static batch.")
    report: OutputPath = Field(
        OutputPath("out/loadtest.html"), description="The report, one HTML file; the figures are beside it as JSON."
    )

    @model_validator(mode="after")
    def _check(self) -> LoadtestSection:
        wanted = {"closed": "concurrency", "poisson": "rate", "burst": "burst"}.get(self.profile)
        if wanted is not None and not getattr(self, wanted):
            raise located(f"the profile {self.profile} needs '{wanted}'", "profile")
        if self.profile == "sweep" and not self.concurrency and self.peak is None:
            raise located("the profile sweep needs 'concurrency' or 'peak'", "profile")
        if self.profile == "recorded" and self.prompts.file is None:
            raise located("the profile recorded needs 'prompts.file' with an 'arrival' in each line", "profile")
        owners = {"concurrency": ("closed", "sweep"), "rate": ("poisson",), "burst": ("burst",)}
        for name, profiles in owners.items():
            if getattr(self, name) and self.profile not in profiles:
                raise located(f"belongs to the profile {' or '.join(profiles)}, not to {self.profile}", name)
        for name in ("concurrency", "rate", "baselines"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise located("the same value twice", name)
            for index, value in enumerate(values):
                if name != "baselines" and not 0 < value < 1e6:
                    raise located(f"expected a number above 0 and below a million, got {value}", name, index)
        if not self.report.endswith((".html", ".htm")):
            raise located(f"expected a name that ends in .html, got '{self.report}'", "report")
        return self


class LoadtestKind(StageKind[LoadtestSection]):
    """Runs on every `run`. Gives the report."""

    name = "loadtest"
    section = LoadtestSection
    gives = "report"
    inputs = (StageInput("target", "engine", also=("serve",), urls=True),)

    def run(self, context: StageContext[LoadtestSection]) -> Any:
        """Loads the engine and writes the report. Interrupted, it writes what it has."""
        from llmjax.pipeline.loadtest_runner import run_loadtest

        config = context.config
        if config.max_tokens is not None and config.output_tokens is not None and config.output_tokens.max is not None:
            longest = config.output_tokens.max
            if longest > config.max_tokens:
                raise ConfigError(f"output_tokens.max {longest} is above max_tokens {config.max_tokens}: raise the second")
        report = run_loadtest(context.inputs.get("target"), context)
        if report.interrupted:
            raise KeyboardInterrupt
        return Missed(report, "; ".join(report.missed)) if report.missed else report

    def summary(self, value: Any) -> Mapping[str, Any]:
        """A row a run, and where the report is."""
        from llmjax.pipeline.loadtest_runner import table_row

        return {"runs": [table_row(run) for run in value.runs], **value.facts, "missed": len(value.missed)}


KIND = LoadtestKind()
