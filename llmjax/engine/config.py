"""`EngineConfig`: the numbers an engine is built from. Plain data, no JAX, no pydantic: it is part of the research layer."""

from __future__ import annotations

import dataclasses
import math

from llmjax.errors import ConfigError
from llmjax.scheduling.buckets import choose_row_buckets, choose_token_buckets, pick
from llmjax.scheduling.lane_config import FIFO as FIFO
from llmjax.scheduling.lane_config import LaneConfig as LaneConfig
from llmjax.scheduling.speculation_config import SpeculationConfig as SpeculationConfig

PAGE_SIZES = (16, 32, 64)
KV_CACHE_DTYPES = (None, "int8")
DEFAULT_MAX_CONTEXT = 8192
MAX_PROGRAMS = 20
MAX_SPECULATIVE_PROGRAMS = 11
"""More of them with speculation: two numbers of drafts in each of five row buckets, and one that fills a draft model's cache. A
launch of the full number costs rows that are unsure of their drafts more than it gives them, and plain programs stay in use."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and policies of one engine.

    Attributes:
        max_context: tokens of prompt and output together, at most; None takes the model's, at most 8192.
        page_size: tokens a page (16, 32 or 64).
        kv_cache_dtype: what keys and values are stored as: None for the model's dtype, or "int8", with a scale for each token's
            head: about half the bytes of bfloat16.
        kv_cache_bytes: size of the page pool in bytes; None takes `kv_cache_fraction` of what the device has left.
        kv_cache_fraction: share of the memory left after weights and temporaries (only with a GPU).
        max_sequences: rows of the device batch.
        max_tokens_per_step: token budget of an extend launch, decoding rows included; None takes 2048 on a GPU, 512 on a CPU.
        prefill_chunk: tokens of one prompt in one launch, at most.
        decode_steps: decode steps in one launch when no waiting request could be taken in before it ends and, if it lasts longer
            than 5 ms, none is likely to come meanwhile; None takes 8 on a GPU, 1 on a CPU, whose steps dwarf the host's work.
        row_buckets: batch sizes decode programs are compiled for; empty chooses by `max_sequences`.
        token_buckets: token counts that extend programs, and those that score prompts, are compiled for; empty chooses by
            `max_tokens_per_step`.
        lanes: of the queue, from that of the shortest requests to that of the longest. One lane is first come, first served.
        max_wait: seconds after which a lane that nobody was taken from is next, whatever the weights say.
        seed: for requests without one; None draws from the operating system.
        compile_cache: folder of the persistent compile cache; None leaves JAX's setting alone.
        deterministic: a request's tokens and logprobs are the same to the bit whatever runs beside it and whenever it came.
            Its launches depend on the request alone: one prompt's chunk a launch, of one token bucket, begun at multiples of
            the chunk size; decoding rows never join it, and decode in one row bucket, always `decode_steps` steps. A request
            is admitted only when the pool holds all of its full length, so that none is preempted. Costs throughput while
            prompts come in, and pages. (It rests on kernels whose result for a row does not depend on the other rows.)
        prefix_cache: keep the pages of what was computed until their room is needed, and read them again for requests that
            begin with the same tokens (and have the same `cache_salt`). Results are those without it.
        reserve_full_length: admit a request only when the pool holds all of its full length, so that none is preempted: what
            engines without paging do, and the baseline that paging is measured against.
        speculative: drafts several tokens a row and verifies them at once; None never does, and costs nothing. With
            `deterministic` rows draft whenever they may, and all the same number of tokens.
    """

    max_context: int | None = None
    page_size: int = 16
    kv_cache_dtype: str | None = None
    kv_cache_bytes: int | None = None
    kv_cache_fraction: float = 0.9
    max_sequences: int = 64
    max_tokens_per_step: int | None = None
    prefill_chunk: int = 1024
    decode_steps: int | None = None
    row_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()
    lanes: tuple[LaneConfig, ...] = FIFO
    max_wait: float = 10.0
    seed: int | None = None
    compile_cache: str | None = None
    deterministic: bool = False
    prefix_cache: bool = True
    reserve_full_length: bool = False
    speculative: SpeculationConfig | None = None

    def __post_init__(self) -> None:
        if self.page_size not in PAGE_SIZES:
            raise ConfigError(f"page_size must be one of {', '.join(map(str, PAGE_SIZES))}, got {self.page_size}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(f"kv_cache_dtype must be int8, or None for the model's dtype, got {self.kv_cache_dtype!r}")
        for name in ("max_context", "kv_cache_bytes", "max_sequences", "max_tokens_per_step", "prefill_chunk", "decode_steps"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not 0.0 < self.kv_cache_fraction <= 1.0:
            raise ConfigError(f"kv_cache_fraction must be above 0 and at most 1, got {self.kv_cache_fraction}")
        self._check_lanes()
        if self.max_tokens_per_step is not None and self.max_tokens_per_step < self.max_sequences:
            raise ConfigError(
                f"max_tokens_per_step {self.max_tokens_per_step} is below max_sequences {self.max_sequences}: "
                "a launch must hold one token of every row; raise the first or lower the second"
            )
        for name, largest in (("row_buckets", "max_sequences"), ("token_buckets", "max_tokens_per_step")):
            buckets, last = getattr(self, name), getattr(self, largest)
            if buckets and (list(buckets) != sorted(set(buckets)) or buckets[0] < 1 or buckets[-1] != last):
                raise ConfigError(f"{name} must rise and end at {largest} ({last or 'not set'}), got {list(buckets)}")

    def _check_lanes(self) -> None:
        if not (math.isfinite(self.max_wait) and self.max_wait >= 0):
            raise ConfigError(f"max_wait must be at least 0 seconds, got {self.max_wait}")
        names = [lane.name for lane in self.lanes]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"lanes must be one or more with names of their own, got {', '.join(names) or 'none'}")
        sizes = [lane.max_tokens for lane in self.lanes]
        bounds = [size for size in sizes[:-1] if size is not None]
        if sizes[-1] is not None or len(bounds) < len(sizes) - 1 or bounds != sorted(set(bounds)) or (bounds and bounds[0] < 1):
            raise ConfigError(f"lanes need a max_tokens that rises from lane to lane, and none in the last; got {sizes}")
        for lane in self.lanes:
            if lane.weight < 1 or (lane.depth is not None and lane.depth < 1) or (lane.timeout is not None and lane.timeout <= 0):
                raise ConfigError(f"lanes: weight and depth of lane '{lane.name}' must be at least 1, its timeout above 0")

    def _check_speculative_programs(self, speculative: SpeculationConfig, row_buckets: int) -> None:
        lengths = speculative.compiled_lengths(deterministic=self.deterministic)
        programs = row_buckets * len(lengths) + (speculative.method == "draft")
        if programs > MAX_SPECULATIVE_PROGRAMS:
            raise ConfigError(
                f"row_buckets make {programs} programs for drafts, at most {MAX_SPECULATIVE_PROGRAMS} are allowed: name fewer "
                "sizes, or lower speculative.disable_above_batch"
            )

    def resolved(self, *, gpu: bool, model_max_context: int) -> ResolvedConfig:
        """The same with every None that depends on device or model filled in.

        Raises:
            ConfigError: `max_context` is above the model's, or there are too many programs.
        """
        if self.max_context is not None and self.max_context > model_max_context:
            raise ConfigError(f"max_context {self.max_context} is above the {model_max_context} positions of the model; lower it")
        tokens = self.max_tokens_per_step or max(2048 if gpu else 512, self.max_sequences)
        if self.deterministic:  # a launch holds one chunk
            tokens = max(min(tokens, self.prefill_chunk), self.max_sequences)
        steps = self.decode_steps or (8 if gpu else 1)
        rows, token_buckets = choose_row_buckets(self.max_sequences), choose_token_buckets(tokens)
        if not gpu:  # a program takes ten seconds to compile on a CPU, and padding costs little there: fewer sizes
            rows, token_buckets = tuple(sorted({1, self.max_sequences})), token_buckets[-2:]
        rows, token_buckets = self.row_buckets or rows, self.token_buckets or token_buckets
        step_counts = tuple(dict.fromkeys((1, steps)))
        if self.deterministic:  # one program each, so that a row's arithmetic does not depend on its neighbours
            rows, token_buckets, step_counts = rows[-1:], (tokens,), (steps,)
        programs = len(rows) * len(step_counts) + 2 * len(token_buckets) + 2  # extend and score; and reset and wipe
        speculating: tuple[int, ...] = ()
        if self.speculative is not None:
            last = pick(rows, min(self.speculative.disable_above_batch, rows[-1]))
            speculating = tuple(size for size in rows if size <= last)
            self._check_speculative_programs(self.speculative, len(speculating))
        if programs > MAX_PROGRAMS:
            raise ConfigError(
                f"row_buckets and token_buckets make {programs} programs, at most {MAX_PROGRAMS} are allowed: name fewer sizes"
            )
        return ResolvedConfig(
            **dataclasses.asdict(self)
            | {
                "lanes": self.lanes,
                "speculative": self.speculative,
                "speculate_row_buckets": speculating,
                "max_context": self.max_context or min(model_max_context, DEFAULT_MAX_CONTEXT),
                "max_tokens_per_step": tokens,
                "decode_steps": steps,
                "step_counts": step_counts,
                "row_buckets": rows,
                "token_buckets": token_buckets,
            }
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """An `EngineConfig` with nothing left open; what the parts of an engine are given.

    Attributes:
        step_counts: the numbers of decode steps programs are compiled for.
        speculate_row_buckets: batch sizes that programs with drafts are compiled for; none without speculation.
    """

    max_context: int = 0
    max_tokens_per_step: int = 0
    decode_steps: int = 0
    step_counts: tuple[int, ...] = ()
    speculate_row_buckets: tuple[int, ...] = ()

    @property
    def max_pages(self) -> int:
        """Pages of a row at full length."""
        return -(-self.max_context // self.page_size)

    @property
    def history_length(self) -> int | None:
        """Tokens of a row's history on the device; None without speculation, which alone reads it."""
        return None if self.speculative is None else self.max_pages * self.page_size

    @property
    def mask_places(self) -> int:
        """Masks of a row on the device: of its next token and, with speculation, of the one behind each draft."""
        return 1 if self.speculative is None else 1 + self.speculative.tokens
