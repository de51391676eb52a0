"""What fits on a few cards: of each way of training, its memory, its sizes and its time."""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import le
from typing import Any

import numpy as np

from autotune.errors import RequestError
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.cases import Array, Cases, Flags
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.step import predict
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.largest import largest_count, sizes_of_models
from autotune.prediction.planning.memory_fit import PROBABILITY, MemoryLimits, memory_limits_of
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.training_setups import TrainingSetup, packs, setups_of, step_workload
from autotune.question.field import option_name
from autotune.question.question import PlanningFields
from search_spaces.models.model import ModelSpec, Position
from search_spaces.plain import to_plain
from search_spaces.training.data_schedule import rows_share
from search_spaces.trial import Interval, Workload
from search_spaces.trial_config import TrialConfig

TOKENS, LONGEST = 128, 1 << 20
"""Granularity and limit of the longest samples."""
TIE = 0.05
"""Relative difference of rates that predictions cannot rank: the error between two good configurations (plans' ties)."""


@dataclass(frozen=True, kw_only=True)
class SetupAnswer:
    """What a way needs and gives."""

    setup: TrainingSetup
    estimate: StepEstimate
    """At the fastest micro-batch that fits; if none does, at the smallest."""
    least: StepEstimate
    """At the smallest micro-batch."""
    fits: bool
    lacks_card: float
    """Additional bytes per card needed at the smallest micro-batch, to fit with the required probability; 0: none."""
    lacks_host: float
    """Additional bytes of main memory needed per node; 0: none."""
    micro_batch_size: int
    """The largest that fits; 0: none does."""
    sequence_length: int | None = None
    """Tokens of the longest samples at the smallest micro-batch; None: not computed, or only one length is known."""

    @property
    def shortage(self) -> tuple[float, float]:
        """What it lacks of card memory, then of main memory."""
        return self.lacks_card, self.lacks_host

    def document(self, amount: "RunAmount | None") -> dict[str, Any]:
        """The JSON representation."""
        method = self.setup.method
        return {
            "method": method.name or None,
            "sharding": self.setup.sharding.name,
            "recomputes": self.setup.recomputes,
            "fits": self.fits,
            "lora_rank": self.setup.question.model.lora_rank if isinstance(self.setup.question.model, ModelSpec) else None,
            "frozen_bits": method.bits if method.adapts else None,
            "optimizer": method.optimizer,
            "needed_bytes": self.estimate.fullest.needed,
            "least_bytes": self.least.fullest.needed,
            "lacks_card_bytes": self.lacks_card,
            "lacks_host_bytes": self.lacks_host,
            "largest_micro_batch_size": self.micro_batch_size,
            "longest_sequence_length": self.sequence_length,
            "hours": to_plain(hours_of(amount, self.estimate)) if amount and self.fits else None,
            **self.estimate.document(every_rank=False),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAmount:
    """How much is to be trained."""

    samples: float
    """Of the question's length."""
    text: str


def hours_of(amount: RunAmount, estimate: StepEstimate) -> Interval:
    """Hours that the samples take, with the band of the rate; without evaluation, loading and checkpoints."""
    rate = estimate.samples_per_second
    seconds = (amount.samples / rate.mean, amount.samples / rate.high, amount.samples / rate.low)
    mean, low, high = (value / 3600 for value in seconds)
    return Interval(mean=mean, low=low, high=high)


class Remedy(StrEnum):
    """Changes that would make the requested sample length fit."""

    SHORTER_SAMPLES = "shorter_samples"
    """Tokens of the longest samples that fit."""
    CARD_MEMORY = "card_memory"
    """Required bytes per card."""
    HOST_MEMORY = "host_memory"
    """Required bytes of main memory per node."""
    NODES = "nodes"
    """Required number of nodes of this type."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What fits in every way."""

    question: Question
    probability: float
    """The required probability that a configuration fits."""
    answers: tuple[SetupAnswer, ...]
    """In the order of `EVERY_METHOD`, then of `SHARDINGS`."""
    amount: RunAmount | None = None
    remedies: Mapping[Remedy, int] = field(default_factory=dict)
    """If nothing fits: changes and their values, each sufficient on its own by prediction."""

    @property
    def fitting(self) -> list[SetupAnswer]:
        """The ways that fit."""
        return [answer for answer in self.answers if answer.fits]

    @property
    def fastest(self) -> SetupAnswer | None:
        """The way that is surely fast, of those that fit: with the highest lower end of its rate's interval; of several within
        `TIE` the one that offloads least."""
        return _fastest_of(self.fitting)

    @property
    def ranked(self) -> list[SetupAnswer]:
        """The ways that fit: the fastest, then the others by the lower ends of their rates."""
        fastest = self.fastest
        return sorted(self.fitting, key=lambda answer: (answer is not fastest, -answer.estimate.samples_per_second.low))

    @property
    def leanest(self) -> SetupAnswer | None:
        """The way that needs the least memory of a card, the fastest of several."""

        def key(answer: SetupAnswer) -> tuple[float, float]:
            return answer.least.fullest.needed, -answer.estimate.samples_per_second.mean

        return min(self.fitting, key=key, default=None)

    @property
    def nearest(self) -> SetupAnswer:
        """The way with the smallest shortage of card memory, then of main memory."""
        return min(self.answers, key=lambda answer: answer.shortage)

    def worthwhile(self) -> list[str]:
        """Names of the ways that no other way surpasses in the memory of cards, in main memory and in the rate."""
        figures = [
            (answer.least.fullest.needed, answer.least.host_memory_bytes, -answer.least.samples_per_second.mean)
            for answer in self.answers
        ]

        def is_surpassed(costs: tuple[float, float, float]) -> bool:
            return any(rival != costs and all(map(le, rival, costs)) for rival in figures)

        return [answer.setup.name for answer, costs in zip(self.answers, figures, strict=True) if not is_surpassed(costs)]

    def best_of(self, method: str) -> SetupAnswer:
        """The fastest way of a method that fits; if none does, the nearest."""
        answers = [answer for answer in self.answers if answer.setup.method.name == method]
        fastest = _fastest_of([answer for answer in answers if answer.fits])
        return fastest or min(answers, key=lambda answer: answer.shortage)

    def document(self) -> dict[str, Any]:
        """The JSON representation."""
        rows = {id(answer): number for number, answer in enumerate(self.answers)}
        best = {id(self.best_of(answer.setup.method.name)) for answer in self.answers}
        return {
            "fit_probability": self.probability,
            "samples_of_run": None if self.amount is None else self.amount.samples,
            "fastest": None if self.fastest is None else rows[id(self.fastest)],
            "leanest": None if self.leanest is None else rows[id(self.leanest)],
            "nearest": rows[id(self.nearest)],
            "remedies": [{"remedy": name.value, "value": value} for name, value in self.remedies.items()],
            "setups": [{**answer.document(self.amount), "best_of_method": id(answer) in best} for answer in self.answers],
        }


def _fastest_of(answers: Sequence[SetupAnswer]) -> SetupAnswer | None:
    if not answers:
        return None
    rates = [answer.estimate.samples_per_second.low for answer in answers]
    ties = [(answer, rate) for answer, rate in zip(answers, rates, strict=True) if rate >= (1 - TIE) * max(rates)]

    def key(pair: tuple[SetupAnswer, float]) -> tuple[int, float]:
        sharding = pair[0].setup.sharding
        return sharding.offload_optimizer + sharding.offload_param, -pair[1]

    return min(ties, key=key)[0]


def run_amount(question: Question, inputs: PlanningFields) -> RunAmount | None:
    """How much the fields say is to be trained; None: they do not.

    Raises:
        RequestError: they say it in several ways, or only half.
    """
    length, rows = question.sequence_length, inputs.dataset_rows
    amounts = {
        "training_steps": inputs.training_steps, "run_tokens": inputs.run_tokens, "epochs": inputs.epochs or rows,
    }  # fmt: skip
    fields = [name for name, value in amounts.items() if value]
    if len(fields) > 1:
        raise RequestError(fields[1], f"says what {option_name(fields[0])} says too", "give one of them")
    if inputs.epochs and rows is None:
        raise RequestError("dataset_rows", "is missing, beside --epochs", "give the number of samples of the dataset")
    if inputs.training_steps:
        samples = float(inputs.training_steps * question.global_batch_size)
        return RunAmount(samples=samples, text=f"{inputs.training_steps:,} steps of {question.global_batch_size:,} samples")
    if inputs.run_tokens:
        return RunAmount(samples=inputs.run_tokens / length, text=f"{inputs.run_tokens:,} tokens")
    if rows is None:
        return None
    epochs, lengths = inputs.epochs or 1.0, question.document_lengths
    passes = f"{epochs:g} epoch{'s' if epochs != 1 else ''} of {rows:,} rows"
    if not lengths:
        return RunAmount(samples=epochs * rows, text=f"{passes}, each padded to {length:,} tokens")
    mean, laid = sum(lengths) / len(lengths), f"padded to {length:,}"
    if packs(question):
        full = rows_share(TrialConfig().replace({"pack_sequences": True}), question.workload)
        laid = f"packed to {length:,}" + (f", which are {full:.0%} full" if full < 0.95 else "")
    return RunAmount(samples=epochs * rows * mean / length, text=f"{passes} of {mean:,.0f} tokens, {laid}")


def fit(
    question: Question,
    probability: float = PROBABILITY,
    methods: Sequence[str] = (),
    amount: RunAmount | None = None,
    among: Collection[str] = (),
) -> Fit:
    """What fits in every way, and remedies if nothing does; with `among` only in the ways of these names, without the longest
    samples and remedies.

    Raises:
        RequestError: the probability or a method is invalid, or a pin has several values.
        IllegalConfigError: the rules, the engine or the pins leave no way.
    """
    limits = memory_limits_of(question, probability)
    setups = [setup for setup in setups_of(question, methods) if not among or setup.name in among]
    answers = tuple(answer for group in _alike(setups) for answer in _answers(group, limits, briefly=bool(among)))
    order = {id(setup): number for number, setup in enumerate(setups)}
    ordered = tuple(sorted(answers, key=lambda answer: order[id(answer.setup)]))
    result = Fit(question=question, probability=probability, answers=ordered, amount=amount)
    if among:
        return result
    shown = [*result.fitting, *([] if result.fitting else [result.nearest])]
    lengths = {id(answer): _longest(answer.setup, limits) for answer in shown if isinstance(question.model, ModelSpec)}
    ordered = tuple(dataclasses.replace(answer, sequence_length=lengths.get(id(answer))) for answer in ordered)
    result = dataclasses.replace(result, answers=ordered)
    return result if result.fitting else dataclasses.replace(result, remedies=dict(_remedies(result, limits, methods)))


def anything_fits(question: Question, probability: float, methods: Sequence[str] = ()) -> bool:
    """Whether samples of the question's length fit in some way. Raises as `fit`."""
    limits = memory_limits_of(question, probability)
    needs = (
        _needs(group, [group[0].base.micro_batch_size], question.sequence_length)
        for group in _alike(setups_of(question, methods))
    )
    return any(bool(limits.holds(device, host).any()) for device, host in needs)


def largest_model(question: Question, probability: float, methods: Sequence[str] = ()) -> Question | None:
    """The question with the model scaled, in depth and width, to the largest that fits; None: none does.

    Raises:
        RequestError: the model is a user's module.
    """
    sizes = sizes_of_models(question)
    count = largest_count(lambda number: anything_fits(sizes[number - 1], probability, methods), len(sizes))
    return sizes[count - 1] if count else None


def _alike(setups: Sequence[TrainingSetup]) -> Iterator[list[TrainingSetup]]:
    """Ways of one model and one set of arguments, which are predicted together."""
    groups: dict[tuple[str, str], list[TrainingSetup]] = {}
    for setup in setups:
        groups.setdefault((setup.method.name, setup.sharding.library), []).append(setup)
    yield from groups.values()


_SIZES = np.unique(np.round(2.0 ** (np.arange(0, 16 * 8 + 1) / 8))).astype(int)
"""Micro-batches that are tried: eight for each doubling."""


def _answers(setups: Sequence[TrainingSetup], limits: MemoryLimits, *, briefly: bool) -> Iterator[SetupAnswer]:
    """Answers of ways of one model and arguments; `briefly`: of micro-batches that a step has, each with one estimate."""
    sizes, question = sizes_of_step(setups[0])
    tried = np.array(sizes) if briefly else _SIZES
    device, host = _needs(setups, [int(size) for size in tried], setups[0].question.sequence_length)
    holds = limits.holds(device, host)
    column = int(np.searchsorted(tried, setups[0].base.micro_batch_size))
    fastest = _fastest(question, setups, sizes, holds[:, np.minimum(np.searchsorted(tried, sizes), len(tried) - 1)])
    predictions = estimates(question, [setup.config(size) for setup, size in zip(setups, fastest, strict=True)])
    smallest_predictions = predictions if briefly else estimates(question, [setup.base for setup in setups])
    cluster = question.cluster
    for row, setup in enumerate(setups):
        yield SetupAnswer(
            setup=setup,
            estimate=predictions[row],
            least=smallest_predictions[row],
            fits=bool(holds[row, column]),
            lacks_card=_lacks(float(device[row, column]), limits.device, cluster.device.memory_bytes),
            lacks_host=_lacks(float(host[row, column]), limits.host, cluster.host_memory_bytes),
            micro_batch_size=int(tried[np.flatnonzero(holds[row])[-1]]) if holds[row].any() else 0,
        )


def sizes_of_step(setup: TrainingSetup) -> tuple[list[int], Question]:
    """The micro-batches that divide a replica's share of the global batch, and the question, with a larger global batch if a
    pinned micro-batch is not among them."""
    question, smallest = setup.question, setup.base.micro_batch_size
    replicas = max(setup.base.data_parallel_size(question.cluster.world_size), 1)
    share = -(-question.global_batch_size // (smallest * replicas)) * smallest
    question = dataclasses.replace(question, global_batch_size=share * replicas)
    if "micro_batch_size" in question.pins:
        return [smallest], question
    return [size for size in range(1, share + 1) if share % size == 0], question


def _fastest(question: Question, setups: Sequence[TrainingSetup], sizes: Sequence[int], fits: Flags) -> list[int]:
    """The fastest micro-batch of each way that fits: the smallest of those within 1 %; the smallest if none does."""
    configs = [setup.config(size) for setup in setups for size in sizes]
    cases = _cases(question, question.workload, configs)
    seconds = np.broadcast_to(predict(cases, question.rates).seconds, len(configs)).reshape(len(setups), len(sizes))
    possible = np.where(fits, seconds, np.inf)
    ties = possible <= 1.01 * possible.min(axis=1, keepdims=True)
    return [sizes[int(np.argmax(row))] if fit.any() else sizes[0] for row, fit in zip(ties, fits, strict=True)]


def _needs(setups: Sequence[TrainingSetup], sizes: Sequence[int], tokens: int) -> tuple[Array, Array]:
    """(ways, sizes) Bytes per rank on its card and in main memory."""
    question = setups[0].question
    configs = [setup.config(size) for setup in setups for size in sizes]
    # Two micro-batches of the largest: gradients are held for accumulation in all.
    workload = step_workload(setups[0].config(max(sizes)), question, tokens)
    usage = memory(_cases(question, workload, configs), question.rates, tagged=False)
    shape = len(setups), len(sizes)
    device, host = (np.broadcast_to(values, len(configs)).reshape(shape) for values in (usage.needed, usage.host))
    return device, host


def _cases(question: Question, workload: Workload, configs: Sequence[TrialConfig]) -> Cases:
    software = question.profile or question.engine
    return cases_of(question.model, question.cluster, workload, configs, software, question.arguments)


def _longest(setup: TrainingSetup, limits: MemoryLimits) -> int:
    """Tokens of the longest samples that fit, one micro-batch at a time, by the false position: memory grows with them, and
    nearly in proportion."""
    shape, size = setup.question.shape, setup.base.micro_batch_size
    most = shape.sequence_length if shape.position is Position.LEARNED else LONGEST

    def beyond(steps: int) -> float:
        """How far the fuller memory is beyond its limit, relative to it."""
        device, host = _needs([setup], [size], min(steps * TOKENS, most))
        return max(float(device[0, 0]) / limits.device, float(host[0, 0]) / limits.host) - 1

    low, high = 0, -(-most // TOKENS)
    if (at_high := beyond(high)) <= 0:
        return most
    if (at_low := beyond(1)) > 0:
        return 0
    low = 1
    while high - low > 1:
        guess = low + int((high - low) * at_low / (at_low - at_high))
        # Both sides move: a guess that is just inside is followed by one that is just outside.
        steps = min(max(guess, low + 1), high - 1)
        at = beyond(steps)
        low, at_low, high, at_high = (steps, at, high, at_high) if at <= 0 else (low, at_low, steps, at)
        if at <= 0 and high - low > 1 and (after := beyond(steps + 1)) > 0:
            high, at_high = steps + 1, after
    return min(low * TOKENS, most)


def _lacks(needed: float, limit: float, whole: int) -> float:
    """Additional bytes needed by memory of `whole` bytes, of which predictions may use `limit`."""
    return max((needed / limit - 1) * whole, 0.0)


def _remedies(result: Fit, limits: MemoryLimits, methods: Sequence[str]) -> Iterator[tuple[Remedy, int]]:
    """The remedies, each predicted on its own."""
    question, answers = result.question, result.answers
    cluster = question.cluster
    if isinstance(question.model, ModelSpec):
        # What needs the least memory at this length does so at others.
        least = min(answers, key=lambda answer: answer.least.fullest.needed)
        if shorter := max(_longest(answer.setup, limits) for answer in (least, result.nearest)):
            yield Remedy.SHORTER_SAMPLES, shorter
    for remedy, has, lacks in (
        (Remedy.CARD_MEMORY, cluster.device.memory_bytes, [a.lacks_card for a in answers if not a.lacks_host]),
        (Remedy.HOST_MEMORY, cluster.host_memory_bytes, [a.lacks_host for a in answers if not a.lacks_card]),
    ):
        if lacks:
            yield remedy, math.ceil(has + min(lacks))
    for doubling in range(1, 1 if cluster.groups else 7):
        nodes = cluster.nodes * 2**doubling
        larger = dataclasses.replace(question, cluster=dataclasses.replace(cluster, nodes=nodes))
        if anything_fits(larger, result.probability, methods):
            yield Remedy.NODES, nodes
            break
