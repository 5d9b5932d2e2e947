"""Sampling written to be read: a float64 oracle that sorts, and `draw`, which calls the real one with plain rows."""

import dataclasses

import jax
import numpy as np

from llmjax.engine.sample import MAX_BIAS, MAX_STOPS, NUM_TOP, PROMPT_BIT, SamplingSettings, sample

ROWS, VOCAB = 6, 37

run_sample = jax.jit(lambda logits, options, counts, *rest: sample(logits, options, lambda: counts, *rest))


@dataclasses.dataclass
class Row:
    """One row's settings and history, with everything off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    choice: int = 0
    num_logprobs: int = NUM_TOP
    processed_logprobs: bool = True
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    position: int = 0

    def counts(self, vocab):
        counts = np.bincount(np.array(self.output, int), minlength=vocab).astype(np.int32)
        counts[list(self.prompt)] |= PROMPT_BIT
        return counts


IDLE = Row(temperature=0.0, num_logprobs=-1)


def draw(logits, rows):
    """`sample` for rows of logits [R, V]. Small batches are padded to one shape, so that they share a compiled program."""
    logits = np.asarray(logits, np.float32)
    wanted = len(rows)
    if wanted <= ROWS and logits.shape[1] <= VOCAB:
        logits = np.pad(logits, ((0, 0), (0, VOCAB - logits.shape[1])), constant_values=-np.inf)
        logits = np.concatenate([logits, np.zeros((ROWS - wanted, VOCAB), np.float32)])
        rows = [*rows, *[IDLE] * (ROWS - wanted)]

    def padded(values, size, dtype, fill):
        out = np.full((len(values), size), fill, dtype)
        for line, value in zip(out, values, strict=True):
            line[: len(value)] = value
        return out

    def column(name, dtype):
        return np.array([getattr(row, name) for row in rows], dtype)

    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    options = SamplingSettings(
        **{name: column(name, np.float32) for name in floats},
        **{name: column(name, np.int32) for name in ("top_k", "choice", "num_logprobs", "min_tokens")},
        seed=np.array([[row.seed & 0xFFFFFFFF, row.seed >> 32] for row in rows], np.uint32),
        processed_logprobs=column("processed_logprobs", bool),
        stop_ids=padded([row.stop_ids for row in rows], MAX_STOPS, np.int32, -1),
        bias_ids=padded([[i for i, _ in row.bias] for row in rows], MAX_BIAS, np.int32, -1),
        bias_values=padded([[v for _, v in row.bias] for row in rows], MAX_BIAS, np.float32, 0),
    )
    counts = np.stack([row.counts(logits.shape[1]) for row in rows])
    positions = column("position", np.int32)
    num_output = np.array([len(row.output) for row in rows], np.int32)
    sampled = run_sample(logits, options, counts, positions, num_output)
    return jax.tree.map(lambda field: np.asarray(field)[:wanted], sampled)


def log_softmax(x):
    with np.errstate(divide="ignore"):
        x = x - x.max()
        return x - np.log(np.exp(x).sum())


def adjusted(logits, row):
    """float64 logits after bias, penalties and the stop mask."""
    x = logits.astype(np.float64).copy()
    for token, value in row.bias:
        x[token] += value
    repetition = np.float64(np.float32(row.repetition_penalty))
    for token in {*row.prompt, *row.output}:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(row.output):
        x[token] -= np.float32(row.presence_penalty) + np.float64(np.float32(row.frequency_penalty)) * row.output.count(token)
    if len(row.output) < row.min_tokens:
        x[list(row.stop_ids)] = -np.inf
    return x


def oracle(logits, row):
    """The final log distribution in float64 by sorting, and whether a filter's decision hangs on rounding."""
    x = adjusted(logits, row)
    if row.temperature < 1e-3:
        return log_softmax(x), False
    order = np.argsort(-x, kind="stable")
    keep = np.ones(len(x), bool)
    if row.top_k:
        keep &= x >= x[order[min(row.top_k, len(x)) - 1]]
    scaled = (x - x.max()) / np.float64(np.float32(row.temperature))
    p = np.where(keep, np.exp(scaled), 0.0)
    p /= p.sum()
    close = False
    if row.top_p < 1:
        mass = np.cumsum(p[order])
        wanted = np.float64(np.float32(row.top_p))
        last = order[min(np.searchsorted(mass, wanted), len(x) - 1)]
        keep &= x >= x[last]
        close = bool((abs(mass - wanted) < 1e-5).any())
    relative = np.exp(scaled)
    keep &= relative >= np.float32(row.min_p)
    close |= bool((abs(relative - np.float32(row.min_p)) < 1e-6 * relative).any()) and 0 < row.min_p < 1
    with np.errstate(divide="ignore"):
        return log_softmax(np.where(keep, scaled, -np.inf)), close


def distribution(sampled, row):
    """The processed log distribution as reported, if at most 20 tokens are kept."""
    out = np.full(VOCAB, -np.inf)
    ids = sampled.top_ids[row]
    out[ids[ids >= 0]] = sampled.top_logprobs[row][ids >= 0]
    return out


def near_tie(x):
    """Whether rounding to float32 may order two tokens another way, or make them equal."""
    gaps = np.diff(np.sort(x[np.isfinite(x)]))
    size = np.abs(x[np.isfinite(x)]).max()
    return bool(((gaps > 0) & (gaps < 1e-5 * max(size, 1e-30))).any())
