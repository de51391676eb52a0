"""What fits with data parallelism: the lowest ZeRO stage, offloading, the largest micro-batch, the longest samples."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autotune.prediction.planning.ladder import Ladder, RungAnswer
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.prediction.planning.question import Question, with_adapters
from search_spaces.models.model import FactoryModel
from search_spaces.plain import to_plain
from search_spaces.trial_config import TrialConfig

ADAPTER_RANK = 16
"""Rank of the adapters tried if a model cannot be trained in full."""
QUANTISED_BITS = 4


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
    ADAPTERS = "adapters"
    """Rank of low-rank adapters, with all else frozen."""
    FROZEN_BITS = "frozen_bits"
    """Bits per frozen parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A remedy and its value."""

    remedy: Remedy
    value: int


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What fits on every rung."""

    question: Question
    """With the global batch of one step."""
    micro_batch_size: int
    """Samples used to find the stage and the longest samples: 1, or the pinned value."""
    probability: float
    """The required probability that a configuration fits."""
    rungs: tuple[RungAnswer, ...]
    """In order of increasing time."""
    ways_out: tuple[Way, ...] = ()
    """If the requested sample length fits on no rung: remedies, each sufficient on its own by prediction."""

    @property
    def needed(self) -> RungAnswer | None:
        """The first rung on which the requested sample length fits; None: it fits on none."""
        return next((answer for answer in self.rungs if answer.fits), None)

    @property
    def most_samples(self) -> RungAnswer | None:
        """The rung with the largest micro-batch among those that offload no more than needed."""
        return max(self._alike(), key=lambda answer: answer.micro_batch_size, default=None)

    @property
    def longest(self) -> RungAnswer | None:
        """The rung with the longest samples among those that offload no more than needed."""
        return max(self._alike(), key=lambda answer: answer.sequence_length, default=None)

    @property
    def nearest(self) -> RungAnswer:
        """The rung with the smallest shortage of card memory, then of main memory."""
        return min(self.rungs, key=lambda answer: (answer.lacks_card, answer.lacks_host))

    def document(self) -> dict[str, Any]:
        """The JSON representation."""
        most, longest = self.most_samples, self.longest
        return {
            "sequence_length": self.question.sequence_length,
            "micro_batch_size": self.micro_batch_size,
            "fit_probability": self.probability,
            "needed": _rung_document(self.needed) if self.needed else None,
            "largest_micro_batch": None
            if most is None
            else {"micro_batch_size": most.micro_batch_size, "config": _config_document(most.micro_batch)},
            "longest_samples": None
            if longest is None
            else {"sequence_length": longest.sequence_length, "config": _config_document(longest.sequence_config)},
            "nearest": _rung_document(self.nearest),
            "ways_out": [to_plain(option) for option in self.ways_out],
            "rungs": [_rung_document(answer) for answer in self.rungs],
        }

    def _alike(self) -> list[RungAnswer]:
        most = self.needed.rung.offloaded if self.needed else -1
        return [answer for answer in self.rungs if answer.rung.offloaded <= most]


def capacity(question: Question, probability: float = PROBABILITY) -> Capacity:
    """What fits on each rung of the ladder, and remedies if nothing fits.

    Raises:
        RequestError: the probability is invalid, or a pin has several values.
        IllegalConfigError: the rules, the engine or the pins leave no rung.
    """
    ladder = Ladder(question, probability)
    rungs, size = ladder.rungs(), ladder.micro_batch_size
    rung_question = ladder.asked(ladder.ways(rungs[0], size)[0], question.sequence_length)
    result = Capacity(
        question=rung_question,
        micro_batch_size=size,
        probability=probability,
        rungs=tuple(ladder.answer(rung) for rung in rungs),
    )
    return result if result.needed else dataclasses.replace(result, ways_out=tuple(_ways_out(question, result)))


def fits(question: Question, probability: float) -> bool:
    """Whether the requested sample length fits on any rung. Raises like `capacity`."""
    ladder = Ladder(question, probability)
    size, tokens = ladder.micro_batch_size, question.sequence_length
    return any(ladder.first_way(rung, size, tokens) is not None for rung in ladder.rungs())


def _ways_out(question: Question, result: Capacity) -> Iterator[Way]:
    """The remedies, each predicted on its own like the rungs."""
    shorter = max(answer.sequence_length for answer in result.rungs)
    if shorter:
        yield Way(remedy=Remedy.SHORTER_SAMPLES, value=shorter)
    cluster = question.cluster
    yield from _least(Remedy.CARD_MEMORY, cluster.device.memory_bytes, [a.lacks_card for a in result.rungs if not a.lacks_host])
    yield from _least(Remedy.HOST_MEMORY, cluster.host_memory_bytes, [a.lacks_host for a in result.rungs if not a.lacks_card])
    for doubling in range(1, 1 if cluster.groups else 7):
        nodes = cluster.nodes * 2**doubling
        if fits(dataclasses.replace(question, cluster=dataclasses.replace(cluster, nodes=nodes)), result.probability):
            yield Way(remedy=Remedy.NODES, value=nodes)
            break
    yield from _smaller(question, result.probability)


def _smaller(question: Question, probability: float) -> Iterator[Way]:
    """Fewer trained parameters, or fewer bits per frozen one."""
    model = question.model
    if isinstance(model, FactoryModel):
        return
    if not model.adapts:
        option, smaller = Way(remedy=Remedy.ADAPTERS, value=ADAPTER_RANK), with_adapters(model, ADAPTER_RANK)
    elif model.frozen_bits > QUANTISED_BITS:
        option = Way(remedy=Remedy.FROZEN_BITS, value=QUANTISED_BITS)
        smaller = dataclasses.replace(model, frozen_bits=QUANTISED_BITS)
    else:
        return
    if fits(dataclasses.replace(question, model=smaller), probability):
        yield option


def _least(remedy: Remedy, has: int, lacks: Sequence[float]) -> Iterator[Way]:
    if lacks:
        yield Way(remedy=remedy, value=int(has + min(lacks)))


def _rung_document(answer: RungAnswer) -> dict[str, Any]:
    return {
        **to_plain(answer.rung),
        "fits": answer.fits,
        "needed_bytes": answer.needed,
        "lacks_card_bytes": answer.lacks_card,
        "lacks_host_bytes": answer.lacks_host,
        "largest_micro_batch_size": answer.micro_batch_size,
        "longest_sequence_length": answer.sequence_length,
        **answer.estimate.document(every_rank=False),
    }


def _config_document(config: TrialConfig | None) -> dict[str, Any] | None:
    return config.values() if config else None
