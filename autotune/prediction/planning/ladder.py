"""Ways of dividing a model over data-parallel ranks and main memory, from the fastest to the one needing the least memory."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.cases import Array
from autotune.prediction.equations.memory import memory
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.largest import LONGEST
from autotune.prediction.planning.memory_fit import Room, room_of
from autotune.prediction.planning.question import Question, single_values
from autotune.request.engines import capability_of
from search_spaces.capability import SpaceContext
from search_spaces.errors import IllegalConfigError
from search_spaces.knob import Value
from search_spaces.models.model import FactoryModel, ModelSpec, Position
from search_spaces.rules.table import check_config
from search_spaces.spaces import device_defaults, settled
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MICRO_BATCHES = 2
"""Micro-batches per step: gradients are held for accumulation, so that more micro-batches need no more memory."""
MOST_SAMPLES = 1 << 16
"""Largest micro-batch that is tried."""
TOKENS = 128
"""Granularity of the longest samples."""
SAVINGS: Mapping[str, tuple[Value, ...]] = {
    "activation_checkpointing": ("none", "selective", "full"),
    "loss_chunk_size": (0, 1024),
    "reduce_bucket_size": (40_000_000, 5_000_000),
}
"""Memory savings available on every rung: knobs and their values, slowest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
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


LADDER = (
    *(Rung(zero_stage=stage) for stage in range(4)),
    *(Rung(zero_stage=stage, offload_optimizer=True) for stage in range(1, 4)),
    Rung(zero_stage=3, offload_param=True),
    Rung(zero_stage=3, offload_optimizer=True, offload_param=True),
)
"""The rungs, in order of increasing time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RungAnswer:
    """What fits on one rung."""

    rung: Rung
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


class Ladder:
    """The rungs of one question.

    Degrees other than data are 1 unless pinned; a pinned knob has its one value on every rung.

    Raises:
        RequestError: the probability is invalid, or a pin has several values.
        IllegalConfigError: the rules, the engine or the pins leave no rung; from `rungs`.
    """

    def __init__(self, question: Question, probability: float) -> None:
        self._question, self._capability = question, capability_of(question.engine)
        self._room, self._rates = room_of(question, probability), question.rates
        self._pins = single_values(question.pins)
        module = question.model if isinstance(question.model, FactoryModel) else None
        self._base = device_defaults(question.cluster, self._capability, module).replace(self._pins)

    @property
    def fixed_length(self) -> bool:
        """Whether samples have only the requested length: a user's module is described for its own batches."""
        return isinstance(self._question.model, FactoryModel)

    @property
    def micro_batch_size(self) -> int:
        """1, or the pinned value."""
        return self._base.micro_batch_size

    def rungs(self) -> list[Rung]:
        """The rungs that pins, rules and the engine allow."""
        allowed = [rung for rung in LADDER if all(self._pins.get(name, value) == value for name, value in rung.knobs.items())]
        refused = {}
        for rung in allowed:
            config = self.ways(rung, self.micro_batch_size)[0]
            refused[rung] = check_config(config, self._context(config))
        legal = [rung for rung in allowed if not refused[rung]]
        if not legal:
            if refusals := next(iter(refused.values()), None):
                raise IllegalConfigError(refusals[0].rule, refusals[0].message, refusals[0].remedy)
            pinned = ", ".join(f"{name}={self._pins[name]}" for name in LADDER[0].knobs if name in self._pins)
            message = f"no ZeRO stage or offloading is possible with {pinned}"
            raise IllegalConfigError("set", message, "pin fewer of these knobs")
        return legal

    def ways(self, rung: Rung, micro_batch_size: int) -> list[TrialConfig]:
        """The rung with every combination of savings, in order of increasing time."""
        fixed = {**rung.knobs, "micro_batch_size": micro_batch_size}
        return [self._base.replace({**fixed, **savings}) for savings in self._savings]

    def answer(self, rung: Rung) -> RungAnswer:
        """What fits on the rung; the largest micro-batch and the longest samples by bisection, since memory grows with both."""
        question, size = self._question, self.micro_batch_size
        configs = self.ways(rung, size)
        device_bytes, host = self._needs(configs, question.sequence_length)
        at = _chosen(self._room, device_bytes, host)
        samples = _most(lambda count: self.first_way(rung, count, question.sequence_length) is not None, MOST_SAMPLES)
        steps = 0 if self.fixed_length else _most(
            lambda count: self.first_way(rung, size, self._tokens(count)) is not None, -(-self._longest // TOKENS)
        )  # fmt: skip
        tokens = self._tokens(steps) if steps else 0
        (estimate,) = estimates(self.asked(configs[at], question.sequence_length), [configs[at]])
        cluster = question.cluster
        return RungAnswer(
            rung=rung,
            estimate=estimate,
            lacks_card=_lacks(float(device_bytes[at]), self._room.device, cluster.device.memory_bytes),
            lacks_host=_lacks(float(host[at]), self._room.host, cluster.host_memory_bytes),
            micro_batch=self.first_way(rung, samples, question.sequence_length) if samples else None,
            sequence_length=tokens,
            sequence_config=self.first_way(rung, size, tokens) if tokens else None,
        )

    def first_way(self, rung: Rung, micro_batch_size: int, tokens: int) -> TrialConfig | None:
        """The fastest way that fits; None: none does."""
        configs = self.ways(rung, micro_batch_size)
        fits = np.flatnonzero(self._room.holds(*self._needs(configs, tokens)))
        return configs[int(fits[0])] if len(fits) else None

    def asked(self, config: TrialConfig, tokens: int) -> Question:
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
        return [self._settled(dict(zip(free, values, strict=True))) for values in itertools.product(*free.values())]

    def _settled(self, savings: dict[str, Value]) -> dict[str, Value]:
        """The savings, without compiled blocks if they are incompatible with these."""
        config = self._base.replace(savings)
        compiled = settled(config, self._context(config), self._pins).compile_blocks
        return savings if compiled == config.compile_blocks else {**savings, "compile_blocks": compiled}

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
        return Workload(global_batch_size=MICRO_BATCHES * config.micro_batch_size * replicas, sequence_length=tokens)

    def _needs(self, configs: Sequence[TrialConfig], tokens: int) -> tuple[Array, Array]:
        """Bytes per rank on its card and in main memory, for each configuration."""
        question = self._question
        workload = self._workload(configs[0], tokens)
        usage = memory(cases_of(question.model, question.cluster, workload, configs, question.engine), self._rates)
        return np.broadcast_to(usage.needed, len(configs)), np.broadcast_to(usage.host, len(configs))


def _chosen(room: Room, device_bytes: Array, host: Array) -> int:
    """Index of the first way that fits; if none does, of the first that fits the card, else of the one that needs the least."""
    for good in (room.holds(device_bytes, host), device_bytes <= room.device):
        if good.any():
            return int(np.argmax(good))
    return int(np.argmin(device_bytes))


def _lacks(needed: float, room: float, whole: int) -> float:
    """Additional bytes needed by memory of `whole` bytes, of which predictions may use `room`."""
    return max((needed / room - 1) * whole, 0.0)


def _most(fits: Callable[[int], bool], ceiling: int) -> int:
    """The largest count that fits, found by bisection; 0: not even 1."""
    low, high = 0, ceiling + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
