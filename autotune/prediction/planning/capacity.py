"""What fits with data parallelism: the lowest ZeRO stage, offloading, the largest micro-batch, the longest samples."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.cases import Array
from autotune.prediction.equations.memory import memory
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.largest import LONGEST, largest_count
from autotune.prediction.planning.memory_fit import PROBABILITY, MemoryLimits, memory_limits_of
from autotune.prediction.planning.question import Question, single_values, with_adapters
from autotune.request.engines import capability_of
from search_spaces.capability import SpaceContext
from search_spaces.errors import IllegalConfigError
from search_spaces.knob import Value
from search_spaces.models.model import FactoryModel, ModelSpec, Position
from search_spaces.plain import to_plain
from search_spaces.rules.table import check_config
from search_spaces.spaces import device_defaults, settled
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

TOKENS = 128
"""Granularity of the longest samples."""
SAVINGS: Mapping[str, tuple[Value, ...]] = {
    "activation_checkpointing": ("none", "selective", "full"),
    "loss_chunk_size": (0, 1024),
    "reduce_bucket_size": (40_000_000, 5_000_000),
}
"""Memory savings available at every level: knobs and their values, slowest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingLevel:
    """How a model's states are sharded over ranks, and which of them are in main memory."""

    zero_stage: int
    offload_optimizer: bool = False
    offload_param: bool = False

    @property
    def offloaded(self) -> int:
        """How many of the two are in main memory."""
        return self.offload_optimizer + self.offload_param

    @property
    def knobs(self) -> dict[str, Value]:
        """Its knobs and their values."""
        offload_device = {False: "none", True: "cpu"}
        return {
            "zero_stage": self.zero_stage,
            "offload_optimizer": offload_device[self.offload_optimizer],
            "offload_param": offload_device[self.offload_param],
        }


SHARDING_LEVELS = (
    *(ShardingLevel(zero_stage=stage) for stage in range(4)),
    *(ShardingLevel(zero_stage=stage, offload_optimizer=True) for stage in range(1, 4)),
    ShardingLevel(zero_stage=3, offload_param=True),
    ShardingLevel(zero_stage=3, offload_optimizer=True, offload_param=True),
)
"""The levels, in order of increasing time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingLevelAnswer:
    """What fits at one level."""

    level: ShardingLevel
    estimate: StepEstimate
    """For samples of the requested length: with the fastest savings that suffice, else with those needing the least memory."""
    lacks_card: float
    """Additional bytes per card needed to fit with the required probability; 0: none."""
    lacks_host: float
    """Additional bytes of main memory needed per node; 0: none."""
    micro_batch: TrialConfig | None
    """With the largest micro-batch of such samples; None: not even one sample fits."""
    sequence_length: int
    """Tokens of the longest samples; 0: not even `TOKENS`, or (a user's module) only one length is known."""
    sequence_config: TrialConfig | None
    """The configuration for the longest samples."""

    @property
    def fits(self) -> bool:
        """Whether samples of the requested length fit."""
        return not self.lacks_card and not self.lacks_host

    @property
    def needed(self) -> float:
        """Bytes per card required to run."""
        return self.estimate.fullest.needed

    @property
    def micro_batch_size(self) -> int:
        """Samples of the largest micro-batch; 0: not even one fits."""
        return self.micro_batch.micro_batch_size if self.micro_batch else 0


class ShardingLevels:
    """The levels of one question.

    Degrees other than data are 1 unless pinned; a pinned knob has its one value at every level.

    Raises:
        RequestError: the probability is invalid, or a pin has several values.
        IllegalConfigError: the rules, the engine or the pins leave no level; from `levels`.
    """

    def __init__(self, question: Question, probability: float) -> None:
        self._question, self._capability = question, capability_of(question.engine)
        self._limits, self._rates = memory_limits_of(question, probability), question.rates
        self._pins = single_values(question.pins)
        module = question.model if isinstance(question.model, FactoryModel) else None
        self._base = device_defaults(question.cluster, self._capability, module).replace(self._pins)

    @property
    def micro_batch_size(self) -> int:
        """1, or the pinned value."""
        return self._base.micro_batch_size

    def levels(self) -> list[ShardingLevel]:
        """The levels that pins, rules and the engine allow."""
        allowed = [
            level
            for level in SHARDING_LEVELS
            if all(self._pins.get(name, value) == value for name, value in level.knobs.items())
        ]
        if self._question.cluster.world_size == 1:  # stages differ only in what they offload
            first_levels = {(level.offload_optimizer, level.offload_param): level for level in reversed(allowed)}
            allowed = list(first_levels.values())[::-1]
        refused = {}
        for level in allowed:
            config = self.ways(level, self.micro_batch_size)[0]
            refused[level] = check_config(config, self._context(config))
        legal = [level for level in allowed if not refused[level]]
        if not legal:
            if refusals := next(iter(refused.values()), None):
                raise IllegalConfigError(refusals[0].rule, refusals[0].message, refusals[0].remedy)
            pinned = ", ".join(f"{name}={self._pins[name]}" for name in SHARDING_LEVELS[0].knobs if name in self._pins)
            message = f"no ZeRO stage or offloading is possible with {pinned}"
            raise IllegalConfigError("set", message, "pin fewer of these knobs")
        return legal

    def ways(self, level: ShardingLevel, micro_batch_size: int) -> list[TrialConfig]:
        """The level with every combination of savings, in order of increasing time."""
        fixed = {**level.knobs, "micro_batch_size": micro_batch_size}
        return [self._base.replace({**fixed, **savings}) for savings in self._savings]

    def answer(self, level: ShardingLevel) -> ShardingLevelAnswer:
        """What fits at the level; the largest micro-batch and longest samples by bisection, since memory grows with both."""
        question, size = self._question, self.micro_batch_size
        configs = self.ways(level, size)
        device_bytes, host = self._needs(configs, question.sequence_length)
        at = _chosen(self._limits, device_bytes, host)
        samples = largest_count(lambda count: self.first_way(level, count, question.sequence_length) is not None, 1 << 16)
        # A user's module is described for samples of its own length.
        steps = 0 if isinstance(question.model, FactoryModel) else largest_count(
            lambda count: self.first_way(level, size, self._tokens(count)) is not None, -(-self._longest // TOKENS)
        )  # fmt: skip
        tokens = self._tokens(steps) if steps else 0
        (estimate,) = estimates(self.question_at(configs[at], question.sequence_length), [configs[at]])
        cluster = question.cluster
        return ShardingLevelAnswer(
            level=level,
            estimate=estimate,
            lacks_card=_lacks(float(device_bytes[at]), self._limits.device, cluster.device.memory_bytes),
            lacks_host=_lacks(float(host[at]), self._limits.host, cluster.host_memory_bytes),
            micro_batch=self.first_way(level, samples, question.sequence_length) if samples else None,
            sequence_length=tokens,
            sequence_config=self.first_way(level, size, tokens) if tokens else None,
        )

    def first_way(self, level: ShardingLevel, micro_batch_size: int, tokens: int) -> TrialConfig | None:
        """The fastest way that fits; None: none does."""
        configs = self.ways(level, micro_batch_size)
        fits = np.flatnonzero(self._limits.holds(*self._needs(configs, tokens)))
        return configs[int(fits[0])] if len(fits) else None

    def question_at(self, config: TrialConfig, tokens: int) -> Question:
        """The question with samples of `tokens` tokens and the global batch of one step of the configuration."""
        batch = self._workload(config, tokens).global_batch_size
        return dataclasses.replace(self._question, sequence_length=tokens, global_batch_size=batch)

    @cached_property
    def _savings(self) -> list[dict[str, Value]]:
        honours = self._capability.honours
        choices = {
            name: [value for value in values if honours(name, value)]
            for name, values in SAVINGS.items()
            if name not in self._pins
        }
        free = {name: values for name, values in choices.items() if values}
        combinations: list[dict[str, Value]] = []
        for values in itertools.product(*free.values()):
            savings = dict(zip(free, values, strict=True))
            config = self._base.replace(savings)
            # Without compiled blocks if they are incompatible with these.
            compiled = settled(config, self._context(config), self._pins).compile_blocks
            combinations.append(savings if compiled == config.compile_blocks else {**savings, "compile_blocks": compiled})
        return combinations

    def _context(self, config: TrialConfig) -> SpaceContext:
        question = self._question
        return SpaceContext(
            model=question.model, cluster=question.cluster, workload=self._workload(config, question.sequence_length),
            world_size=question.cluster.world_size, capability=self._capability,
        )  # fmt: skip

    @property
    def _longest(self) -> int:
        model = self._question.model
        return model.sequence_length if isinstance(model, ModelSpec) and model.position is Position.LEARNED else LONGEST

    def _tokens(self, steps: int) -> int:
        return min(steps * TOKENS, self._longest)

    def _workload(self, config: TrialConfig, tokens: int) -> Workload:
        replicas = max(config.data_parallel_size(self._question.cluster.world_size), 1)
        # Two micro-batches per step: gradients are held for accumulation, so that more micro-batches need no more memory.
        return Workload(global_batch_size=2 * config.micro_batch_size * replicas, sequence_length=tokens)

    def _needs(self, configs: Sequence[TrialConfig], tokens: int) -> tuple[Array, Array]:
        """Bytes per rank on its card and in main memory, for each configuration."""
        question = self._question
        workload = self._workload(configs[0], tokens)
        usage = memory(
            cases_of(question.model, question.cluster, workload, configs, question.engine, question.arguments), self._rates
        )
        return np.broadcast_to(usage.needed, len(configs)), np.broadcast_to(usage.host, len(configs))


def _chosen(limits: MemoryLimits, device_bytes: Array, host: Array) -> int:
    """Index of the first way that fits; if none does, of the first that fits the card, else of the one that needs the least."""
    for good in (limits.holds(device_bytes, host), device_bytes <= limits.device):
        if good.any():
            return int(np.argmax(good))
    return int(np.argmin(device_bytes))


def _lacks(needed: float, limit: float, whole: int) -> float:
    """Additional bytes needed by memory of `whole` bytes, of which predictions may use `limit`."""
    return max((needed / limit - 1) * whole, 0.0)


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
    """What fits at every level."""

    question: Question
    """With the global batch of one step."""
    micro_batch_size: int
    """Samples used to find the stage and the longest samples: 1, or the pinned value."""
    probability: float
    """The required probability that a configuration fits."""
    levels: tuple[ShardingLevelAnswer, ...]
    """In order of increasing time."""
    ways_out: tuple[Way, ...] = ()
    """If the requested sample length fits at no level: remedies, each sufficient on its own by prediction."""

    @property
    def needed(self) -> ShardingLevelAnswer | None:
        """The first level on which the requested sample length fits; None: it fits at none."""
        return next((answer for answer in self.levels if answer.fits), None)

    @property
    def most_samples(self) -> ShardingLevelAnswer | None:
        """The level with the largest micro-batch among those that offload no more than needed."""
        return max(self._alike(), key=lambda answer: answer.micro_batch_size, default=None)

    @property
    def longest(self) -> ShardingLevelAnswer | None:
        """The level with the longest samples among those that offload no more than needed."""
        return max(self._alike(), key=lambda answer: answer.sequence_length, default=None)

    @property
    def nearest(self) -> ShardingLevelAnswer:
        """The level with the smallest shortage of card memory, then of main memory."""
        return min(self.levels, key=lambda answer: (answer.lacks_card, answer.lacks_host))

    def document(self) -> dict[str, Any]:
        """The JSON representation."""
        most, longest = self.most_samples, self.longest
        return {
            "sequence_length": self.question.sequence_length,
            "micro_batch_size": self.micro_batch_size,
            "fit_probability": self.probability,
            "needed": _level_document(self.needed) if self.needed else None,
            "largest_micro_batch": None
            if most is None
            else {"micro_batch_size": most.micro_batch_size, "config": _config_document(most.micro_batch)},
            "longest_samples": None
            if longest is None
            else {"sequence_length": longest.sequence_length, "config": _config_document(longest.sequence_config)},
            "nearest": _level_document(self.nearest),
            "ways_out": [to_plain(option) for option in self.ways_out],
            "levels": [_level_document(answer) for answer in self.levels],
        }

    def _alike(self) -> list[ShardingLevelAnswer]:
        most = self.needed.level.offloaded if self.needed else -1
        return [answer for answer in self.levels if answer.level.offloaded <= most]


def capacity(question: Question, probability: float = PROBABILITY) -> Capacity:
    """What fits at each level of sharding, and remedies if nothing fits.

    Raises:
        RequestError: the probability is invalid, or a pin has several values.
        IllegalConfigError: the rules, the engine or the pins leave no level.
    """
    sharding_levels = ShardingLevels(question, probability)
    levels, size = sharding_levels.levels(), sharding_levels.micro_batch_size
    level_question = sharding_levels.question_at(sharding_levels.ways(levels[0], size)[0], question.sequence_length)
    result = Capacity(
        question=level_question,
        micro_batch_size=size,
        probability=probability,
        levels=tuple(sharding_levels.answer(level) for level in levels),
    )
    return result if result.needed else dataclasses.replace(result, ways_out=tuple(_ways_out(question, result)))


def fits(question: Question, probability: float) -> bool:
    """Whether the requested sample length fits at any level. Raises like `capacity`."""
    sharding_levels = ShardingLevels(question, probability)
    size, tokens = sharding_levels.micro_batch_size, question.sequence_length
    return any(sharding_levels.first_way(level, size, tokens) is not None for level in sharding_levels.levels())


def _ways_out(question: Question, result: Capacity) -> Iterator[Way]:
    """The remedies, each predicted on its own like the levels."""
    shorter = max(answer.sequence_length for answer in result.levels)
    if shorter:
        yield Way(remedy=Remedy.SHORTER_SAMPLES, value=shorter)
    cluster = question.cluster
    yield from _least(
        Remedy.CARD_MEMORY, cluster.device.memory_bytes, [a.lacks_card for a in result.levels if not a.lacks_host]
    )
    yield from _least(Remedy.HOST_MEMORY, cluster.host_memory_bytes, [a.lacks_host for a in result.levels if not a.lacks_card])
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
    # Rank of the adapters tried if a model cannot be trained in full.
    adapter_rank = 16
    quantised_bits = 4
    if not model.adapts:
        option, smaller = Way(remedy=Remedy.ADAPTERS, value=adapter_rank), with_adapters(model, adapter_rank)
    elif model.frozen_bits > quantised_bits:
        option = Way(remedy=Remedy.FROZEN_BITS, value=quantised_bits)
        smaller = dataclasses.replace(model, frozen_bits=quantised_bits)
    else:
        return
    if fits(dataclasses.replace(question, model=smaller), probability):
        yield option


def _least(remedy: Remedy, has: int, lacks: Sequence[float]) -> Iterator[Way]:
    if lacks:
        yield Way(remedy=remedy, value=int(has + min(lacks)))


def _level_document(answer: ShardingLevelAnswer) -> dict[str, Any]:
    return {
        **to_plain(answer.level),
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
