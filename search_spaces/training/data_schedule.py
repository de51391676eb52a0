"""Documents packed into rows, and data schedules: shorter sequences first (curriculum), or fewer tokens in the middle layers
first (random-LTD).

A row has `sequence_length` tokens; a step trains `global_batch_size` rows. Without packing a row is one document and padding;
with packing it has as many documents as first-fit decreasing puts there.

A schedule grows linearly from its start to the full length, in increments of `GRANULARITY` tokens like DeepSpeed's
`fixed_linear`, and stays there for the rest of the job. A job costs the sum over its steps; only a few points are measured or
predicted.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MOST_DOCUMENTS = 1000
"""Maximum lengths in a workload: a sample of the user's data is as informative as all of them."""

Rows = tuple[tuple[int, ...], ...]
"""The documents in each row, as indices in `Workload.document_lengths`."""


@functools.lru_cache(maxsize=64)
def packed_rows(lengths: tuple[int, ...], sequence_length: int) -> Rows:
    """Pack documents into rows by first-fit decreasing [Johnson 1973]: at most 11/9 of the minimum number of rows, plus 1.

    1. Sort the documents by length, longest first; equal lengths keep their order.
    2. Put each into the first row with enough free tokens; if there is none, start a new row.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for document in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[document]
        row = next((index for index, free_tokens in enumerate(free) if free_tokens >= length), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(sequence_length)
        rows[row].append(document)
        free[row] -= length
    return tuple(map(tuple, rows))


def rows_of(config: TrialConfig, workload: Workload) -> Rows:
    """The rows of all documents of a workload, in the order of creation."""
    lengths = workload.document_lengths
    if config.pack_sequences:
        return packed_rows(lengths, workload.sequence_length)
    return tuple((document,) for document in range(len(lengths)))


def rows_share(config: TrialConfig, workload: Workload) -> float:
    """Document tokens as a share of all tokens, averaged over all rows."""
    lengths = workload.document_lengths
    return sum(lengths) / (len(rows_of(config, workload)) * workload.sequence_length) if lengths else 1.0


@functools.lru_cache(maxsize=64)
def attended_tokens(lengths: tuple[int, ...], sequence_length: int, chunk: int = 0) -> float:
    """Mean number of tokens of its own document that a token of a packed row attends to, causality not discounted; the padding
    after the last document counts as one more document, because it is computed too. `chunk`: tokens that a document is cut
    after, if attention stays within chunks; 0: it is not cut.
    """
    rows = packed_rows(lengths, sequence_length)
    padding = [sequence_length - sum(lengths[document] for document in row) for row in rows]
    whole = (*lengths, *padding)
    pieces = [min(chunk, length - first) for length in whole for first in range(0, length, chunk)] if chunk else whole
    return _over_tokens(tuple(pieces), float)


def documents_problem(lengths: object, sequence_length: int) -> tuple[str, str] | None:
    """The problem with a workload's lengths, and the remedy; None: no problem."""
    if not isinstance(lengths, list | tuple):
        return f"{lengths!r} is not a list of numbers", "list the tokens of each document, such as [128, 17, 64]"
    if len(lengths) > MOST_DOCUMENTS:
        return f"{len(lengths)} lengths are more than {MOST_DOCUMENTS}", f"give a sample of at most {MOST_DOCUMENTS} documents"
    wrong = next((length for length in lengths if not isinstance(length, int) or isinstance(length, bool) or length < 1), None)
    if wrong is not None:
        return f"{wrong!r} is not a whole number of 1 or more", "give the tokens of each document"
    longest = max(lengths, default=0)
    if longest > sequence_length:
        problem = f"a document of {longest} tokens does not fit into a sample of {sequence_length}"
        return problem, "cut such documents into several, or raise the sequence length (--sequence-length)"
    return None


def _over_tokens(lengths: tuple[int, ...], of: Callable[[int], float]) -> float:
    """The mean over all tokens of a function of their document's length."""
    return sum(of(length) * length for length in lengths if length) / sum(lengths)


GRANULARITY = 8
"""Increment of a schedule in tokens: suits tensor cores, and DeepSpeed recommends it for its schedules."""
UNSCHEDULED_LAYERS = 2
"""Layers that process every token under random-LTD: the first and the last [Yao et al. 2022, 3.1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePosition:
    """A point of a job's schedule that represents a share of its steps."""

    step: int
    """A step of the job at which the schedule is at this point."""
    length: int
    """Tokens of a sample in training."""
    kept: int
    """Tokens of these that a middle layer processes."""
    weight: float
    """Share of the job's steps; the weights of all points sum to 1."""


def is_scheduled(config: TrialConfig) -> bool:
    """Whether the size of a step changes in the course of a job."""
    return bool(config.curriculum_start_length or config.random_ltd_start_tokens)


def length_at(config: TrialConfig, workload: Workload, step: int) -> int:
    """Tokens of a sample in step `step` of the job."""
    return _grown(config.curriculum_start_length, workload.sequence_length, config.curriculum_steps, step)


def kept_at(config: TrialConfig, workload: Workload, step: int) -> int:
    """Tokens that a middle layer processes in step `step` of the job."""
    length = length_at(config, workload, step)
    return min(_grown(config.random_ltd_start_tokens, length, config.random_ltd_steps, step), length)


def job_step(workload: Workload, step: int) -> int:
    """The job's step that determines the schedules in a session's step `step`."""
    return step if workload.schedule_step is None else workload.schedule_step


@functools.lru_cache(maxsize=4096)
def points_of(config: TrialConfig, workload: Workload) -> tuple[SchedulePosition, ...]:
    """The points of a job's schedule that determine its cost: the first, a middle one and the last; one without a schedule.

    1. The cost of a step is a polynomial of degree two in its tokens: products grow with them, attention with their square.
       Three points determine it, and with it the cost of every step of the schedule.
    2. Summed over the job's steps, the cost is a weighted sum of the three: the weights are the sums of Lagrange's polynomials
       over the steps. If tokens grow evenly these are Simpson's 1/6, 4/6 and 1/6 of the growing steps; all steps after them
       count for the last.
    3. A schedule of one or two values has no middle point.

    `workload.training_steps` is required with a schedule (rules `curriculum-steps`, `random-ltd-steps`).
    """
    whole, steps = workload.sequence_length, workload.training_steps or 0
    start, growing = _schedule(config)
    if not 0 < start < whole or not 0 < growing < steps:
        return (SchedulePosition(step=steps, length=whole, kept=whole, weight=1.0),)
    counts = _counts(start, whole, growing)
    at_steps = list(dict.fromkeys((0, growing // 2, growing)))
    nodes = {_grown(start, whole, growing, step): step for step in reversed(at_steps)}
    tokens = sorted(nodes)
    weights = dict.fromkeys(tokens, 0.0)
    for value, count in (*counts.items(), (whole, steps - growing)):
        for node in tokens:
            weights[node] += count * _lagrange(tokens, node, value) / steps
    return tuple(
        SchedulePosition(
            step=nodes[node],
            length=length_at(config, workload, nodes[node]),
            kept=kept_at(config, workload, nodes[node]),
            weight=weights[node],
        )
        for node in tokens
    )


@functools.lru_cache(maxsize=4096)
def useful_share(config: TrialConfig, workload: Workload) -> float:
    """Tokens that count toward the loss in a step, relative to full-length samples, averaged over the job.

    For a workload at one point of the schedule: the share at that point. Tokens that middle layers drop also count. For
    documents, which exclude schedules (rule `documents-schedule`): the share of a row that is not padding.
    """
    whole = workload.sequence_length
    if workload.document_lengths:
        return rows_share(config, workload)
    if workload.schedule_step is not None:
        return length_at(config, workload, workload.schedule_step) / whole
    return sum(point.weight * point.length for point in points_of(config, workload)) / whole


def useful_samples(config: TrialConfig, workload: Workload) -> float:
    """Tokens that count toward the loss in a step, in full-length samples: the numerator of rates in samples/s."""
    return workload.global_batch_size * useful_share(config, workload)


def flops_per_sample(model: ModelSpec, config: TrialConfig, workload: Workload) -> float:
    """Model FLOPs per full-length sample of useful tokens, without recomputation: averaged over the job, or at the workload's
    point of the schedule.

    `flops_per_token` at the sample's length, less the FLOPs of the tokens that middle layers skip.
    """
    if workload.document_lengths:
        # Each token attends only to its own document.
        return _over_tokens(workload.document_lengths, model.flops_per_token) * workload.sequence_length
    if not is_scheduled(config):
        return model.flops_per_token(workload.sequence_length) * workload.sequence_length
    step = workload.schedule_step
    if step is None:
        flops = sum(point.weight * _flops(model, point.length, point.kept) for point in points_of(config, workload))
    else:
        flops = _flops(model, length_at(config, workload, step), kept_at(config, workload, step))
    return flops / useful_share(config, workload)


def _flops(model: ModelSpec, length: int, kept_tokens: int) -> float:
    middle = max(model.num_layers - UNSCHEDULED_LAYERS, 0) / model.num_layers
    head = (4.0 if model.adapts else 6.0) * model.vocab_size * model.table_width

    def of_layers(tokens: int) -> float:
        return (model.flops_per_token(tokens) - head) * tokens

    return model.flops_per_token(length) * length - middle * (of_layers(length) - of_layers(kept_tokens))


def _schedule(config: TrialConfig) -> tuple[int, int]:
    """Start and number of growing steps of the active schedule. (No engine supports both at the same time.)"""
    if config.curriculum_start_length:
        return config.curriculum_start_length, config.curriculum_steps
    return config.random_ltd_start_tokens, config.random_ltd_steps


def _grown(start: int, whole: int, steps: int, step: int) -> int:
    if not start or step >= steps:
        return whole
    return min(start + (whole - start) * step // steps // GRANULARITY * GRANULARITY, whole)


def _counts(start: int, whole: int, steps: int) -> dict[int, int]:
    """Value of a schedule -> number of growing steps with it, computed per value, not per step."""
    most = (whole - start) // GRANULARITY
    # The first step with start + j x GRANULARITY, for each j: (whole - start) x step // steps >= j x GRANULARITY.
    firsts = [-(-index * GRANULARITY * steps // (whole - start)) for index in range(most + 1)]
    ends = [*(min(first, steps) for first in firsts[1:]), steps]
    return {start + index * GRANULARITY: end - first for index, (first, end) in enumerate(zip(firsts, ends, strict=True))}


def _lagrange(nodes: list[int], node: int, value: int) -> float:
    result = 1.0
    for other in nodes:
        if other != node:
            result *= (value - other) / (node - other)
    return result
