"""The procedure of DeepSpeed's autotuner."""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import product

from autotune.strategies.strategy import Candidates
from benchmarks.search.baselines.replay import Procedure, ReplayedResult, ReplayStrategy, context_of, start_of
from search_spaces.capability import SpaceContext
from search_spaces.knob import Value
from search_spaces.trial_config import TrialConfig

GAIN = 0.05
"""Minimum relative increase of a rate; less is a plateau (`METRIC_PERCENT_DIFF_CONST`)."""
MICRO_BATCHES = 3
"""Number of micro-batch sizes compared between the least and the largest (`num_tuning_micro_batch_sizes`)."""
BUCKETS: tuple[Value, ...] = (50_000_000, 500_000_000, 1_000_000_000)
_SIZES = {"reduce_bucket_size": BUCKETS, "allgather_bucket_size": BUCKETS}
_COPIES: dict[str, tuple[Value, ...]] = {
    "overlap_comm": (True, False),
    **_SIZES,
    "contiguous_gradients": (False, True),
}
TUNING_SPACES: dict[int, dict[str, tuple[Value, ...]]] = {1: dict(_SIZES), 2: _COPIES, 3: _COPIES}
"""Stage -> the knobs of its tuner that exist here, in the order of variation, the last one fastest."""

Running = Generator[TrialConfig, ReplayedResult, float]


class DeepSpeedStrategy(ReplayStrategy):
    """Replays `deepspeed/autotuning/autotuner.py` of DeepSpeed 0.19.8 (docs: deepspeed.ai/tutorials/autotuning).

    1. Model-info profile: stage 3, or the highest available, with the smallest micro-batch. If it does not run, nothing is
       tuned. It measures the memory of activations (`model_info_profile_run`).
    2. Stages 0, 1, 2, 3 in this order, each only if parameters, gradients and Adam's state of 8 bytes per parameter (16 in
       half precision) and those activations fit into the device (`get_instantiation_memory_required_per_gpu`), and if this
       leaves memory for as large a micro-batch as in the previous stages (`tune_space`).
    3. In a stage, the largest micro-batch that runs: 1.05, 1 and 0.95 of the computed one, then bisection until it does not
       run or gains less than 5 % (`get_min_max_micro_batch_size`); then up to three sizes from half of it upwards, and
       smaller ones than the best while they gain 5 % (`run_tuning_micro_batch_sizes`).
    4. If the stage's best micro-batch is larger than that of the previous stages, and not slower: a grid over its template's
       buckets, overlap and copies, stopped five experiments after its best one (`tuner/base_tuner.py`). `fast` skips
       this, which is DeepSpeed's default.

    Knobs that it never tunes (tensor and pipeline parallelism, offloading, checkpointing) keep the user's setting: see
    `start_of`. The global batch is the user's `max_train_batch_size`. Sizes outside a domain become the next lower
    micro-batch, and the nearest bucket. If the candidates have no model and device, the estimate skips no stage. The original
    shuffles its grid by a Python set; here it keeps the template's order.
    """

    fast = False

    def procedure(self, candidates: Candidates) -> Procedure:
        yield from _Tuning(candidates, self.fast).tune()


@dataclass(slots=True)
class _BestStage:
    """The best of the stages so far, which a further stage must beat."""

    largest: int = 0
    """Largest micro-batch size that runs."""
    micro_batch: int = 0
    """The fastest micro-batch size."""
    rate: float = 0.0


@dataclass(slots=True)
class _TriedStage:
    """Tried micro-batch sizes of a stage, in order, and the rate of each; 0: it does not run."""

    stage: int
    rates: list[tuple[int, float]] = field(default_factory=list)

    @property
    def running(self) -> set[int]:
        return {size for size, rate in self.rates if rate > 0}

    def best(self) -> tuple[int, float]:
        return max(self.rates, key=lambda record: record[1], default=(0, 0.0))


class _Tuning:
    def __init__(self, candidates: Candidates, fast: bool) -> None:
        self._fast = fast
        self._domains = candidates.domains
        self._start = start_of(candidates)
        self._memory = _Memory(context_of(candidates), self._start)
        whole = candidates.domains.get("micro_batch_size", (self._start.micro_batch_size,))
        self._sizes = sorted(int(size) for size in whole)

    def tune(self) -> Procedure:
        """Tune every stage that may run."""
        stages = sorted(int(stage) for stage in self._domains.get("zero_stage", (self._start.zero_stage,)))
        answer = yield self._config(stages[-1], self._sizes[0])
        if not answer.ran and answer.result is not None:
            return
        self._memory.profiled(answer, stages[-1])
        best = _BestStage()
        for stage in stages:
            if self._memory.most_samples(stage, 1) > 0:  # the states and one sample's activations fit
                stage_best = yield from self._tune_stage(stage, best)
                best = stage_best if stage_best.micro_batch > best.micro_batch else best

    def _config(self, stage: int, size: int) -> TrialConfig:
        return self._start.replace({"zero_stage": stage, "micro_batch_size": size})

    def _tune_stage(self, stage: int, previous: _BestStage) -> Generator[TrialConfig, ReplayedResult, _BestStage]:
        most = self._memory.most_samples(stage, self._sizes[-1])
        if most < previous.largest:
            return _BestStage()
        records = _TriedStage(stage)
        least, largest = yield from self._range(records, previous.largest, self._down(most))
        if largest <= 0 or largest < previous.largest:
            return _BestStage()
        sizes = yield from self._compare(records, self._between(least, largest))
        micro_batch, rate = records.best()
        stage_best = _BestStage(largest=largest, micro_batch=micro_batch, rate=rate)
        if self._fast or stage == 0 or micro_batch <= previous.micro_batch or rate < previous.rate:
            return stage_best
        size, tuned = yield from self._grid(stage, sizes)
        return _BestStage(largest=largest, micro_batch=size, rate=tuned) if tuned > rate else stage_best

    def _try(self, records: _TriedStage, size: int) -> Running:
        answer = yield self._config(records.stage, size)
        records.rates.append((size, answer.rate))
        return answer.rate

    def _range(self, records: _TriedStage, least: int, most: int) -> Generator[TrialConfig, ReplayedResult, tuple[int, int]]:
        """The least and the largest micro-batch size that run; (-1, -1): none."""
        least = max(least, self._sizes[0])
        if most < least or not (yield from self._try(records, least)):
            return -1, -1
        for share in (math.ceil(1.05 * most), most, int(0.95 * most)):
            size = self._down(share)
            if size in records.running or (yield from self._try(records, size)):
                return least, size
        return least, (yield from self._bisect(records, least, most))

    def _bisect(self, records: _TriedStage, least: int, most: int) -> Generator[TrialConfig, ReplayedResult, int]:
        before = min(records.rates, key=lambda record: abs(record[0] - least))[1]
        low, high = self._sizes.index(least), self._sizes.index(most)
        while low <= high:
            middle = (low + high) // 2
            if self._sizes[middle] in records.running:
                low = middle + 1
                continue
            rate = yield from self._try(records, self._sizes[middle])
            if not rate:
                high = middle - 1
                continue
            low = middle + 1
            if before and rate / before - 1 < GAIN:
                break
            before = rate
        return self._sizes[low - 1] if low else 0

    def _between(self, least: int, largest: int) -> list[int]:
        """Sizes in even steps from half of the largest, which need more micro-batches per step than the largest."""
        least = max(least, largest // 2)
        step = max((largest - least) // MICRO_BATCHES, 1)
        smaller = {self._down(size) for size in range(least, largest, step)}
        return [*sorted(size for size in smaller if size < largest), largest]

    def _compare(self, records: _TriedStage, sizes: Sequence[int]) -> Generator[TrialConfig, ReplayedResult, list[int]]:
        """Try all; then sizes smaller than the largest while they gain: it may be slow because its memory is almost full."""
        for size in sizes:
            if size not in records.running:
                yield from self._try(records, size)
        best, best_rate = sizes[-1], dict(records.rates)[sizes[-1]]
        beyond = sizes[-2] + 1 if len(sizes) > 1 else min(records.running, default=best)
        step = max((best - beyond) // 3, 1)
        for number in reversed(range(beyond, best, step)):
            size = self._down(number)
            if size < beyond:
                break
            rate = yield from self._try(records, size)
            if rate <= best_rate * (1 + GAIN):
                break
            best, best_rate = size, rate
        return [*sizes[:-1], best]

    def _grid(self, stage: int, sizes: Sequence[int]) -> Generator[TrialConfig, ReplayedResult, tuple[int, float]]:
        """The fastest micro-batch size and its rate, over the template of the stage."""
        space = {name: values for name, values in TUNING_SPACES.get(stage, {}).items() if len(self._domains.get(name, ())) > 1}
        best, best_at = (0, 0.0), 0
        for number, (values, size) in enumerate(product(product(*space.values()), sizes)):
            if number >= min(best_at + 5, 50):  # `tuner_early_stopping`, which counts the best one, and `tuner_num_trials`
                break
            answer = yield self._config(stage, size).replace(self._template(stage) | dict(zip(space, values, strict=True)))
            if answer.rate > best[1]:
                best, best_at = (size, answer.rate), number
        return best

    def _template(self, stage: int) -> dict[str, Value]:
        """Values that the template for stage 3 sets without tuning, for knobs that are searched."""
        hidden = self._memory.hidden_size
        if stage != 3 or not hidden:
            return {}
        filled = {"prefetch_bucket_size": int(0.9 * hidden * hidden), "param_persistence_threshold": 10 * hidden}
        return {name: value for name, value in filled.items() if len(self._domains.get(name, ())) > 1}

    def _down(self, size: float) -> int:
        """The next lower micro-batch size of the domain; at least the smallest."""
        return max((micro_batch for micro_batch in self._sizes if micro_batch <= size), default=self._sizes[0])


class _Memory:
    """DeepSpeed's estimate of a rank's memory; without data, everything may run."""

    def __init__(self, context: SpaceContext | None, start: TrialConfig) -> None:
        self._context = context
        self._start = start
        self._activations: float | None = None
        self.hidden_size: int = getattr(context.model, "hidden_size", 0) if context else 0

    def profiled(self, answer: ReplayedResult, stage: int) -> None:
        """Derive the activations of one micro-batch from the profile, which ran at that stage."""
        result = answer.result
        if result is None or self._context is None:
            return
        tagged = [rank.memory_by_tag.get("activations", 0) for rank in result.ranks]
        activations = (result.peak_memory_bytes or 0) - self._states(stage)
        self._activations = float(max(tagged, default=0) or max(activations, 0)) or None

    def most_samples(self, stage: int, otherwise: int) -> int:
        """The computed largest micro-batch size; `otherwise` if the activations are unknown."""
        if self._context is None or self._activations is None:
            return otherwise
        free_bytes = self._context.cluster.device.memory_bytes - self._states(stage)
        return max(int(free_bytes / self._activations), 0)

    def _states(self, stage: int) -> float:
        """Bytes of parameters, gradients and optimizer state per rank, by DeepSpeed's formula."""
        assert self._context is not None
        half, ranks = self._start.precision in ("fp16", "bf16"), self._context.world_size
        parameters, gradients, optimizer = (2.0, 2.0, 16.0) if half else (4.0, 4.0, 8.0)
        per_parameter = (
            parameters / (ranks if stage >= 3 else 1)
            + gradients / (ranks if stage >= 2 else 1)
            + optimizer / (ranks if stage >= 1 else 1)
        )
        return self._context.model.parameter_count * per_parameter / self._start.model_parallel_size
