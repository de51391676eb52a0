"""Draws cases of the parity matrix: fills in open knobs, and checks that a case is legal."""

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from benchmarks.correctness.parity_cases import BRANCH, CAPABILITIES, GLOBAL_BATCH, MODELS, USER, Case
from search_spaces.canonical import canonical
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.rules.table import check_config
from search_spaces.trial_config import TrialConfig

Knobs = Mapping[str, Value]
USUAL_MICRO_BATCHES, MOST_MICRO_BATCHES = 4, 8
"""Preferred and absolute upper limit of a case's micro-batches (time grows with them)."""
FIXABLE = (
    "tensor-divides",
    "factory-shape",
    "pipeline-layers",
    "batch-divides",
    "pipeline-micro-batches",
    "zero-bubble-reshard",
    "experts-context",
    "experts-divide",
    "expert-slices",
    "expert-tokens",
)
"""Rules that another model, micro-batch size or reshard_after_forward may satisfy."""
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
CLIPPINGS = (0.05, 0.0)
CHECKPOINTING: tuple[Knobs, ...] = (
    {},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "full", "checkpoint_every_k": 2},
)
HUGE = 10**9
BASE: Knobs = {"precision": "fp64", "param_persistence_threshold": 100}
"""Defaults of all cases. With the usual threshold no parameter of so small a model would be sharded at stage 3."""
SETTINGS: Mapping[str, Knobs] = {
    "default": {},
    "tiny buckets": {"reduce_bucket_size": 300, "allgather_bucket_size": 300, "prefetch_bucket_size": 700},
    "overlap off": {"overlap_comm": False, "reduce_bucket_size": 1000, "prefetch_bucket_size": 2000},
    "no prefetch": {"prefetch_bucket_size": 0},
    "everything persistent": {"param_persistence_threshold": HUGE},
    "everything sharded": {"param_persistence_threshold": 0, "max_live_parameters": 1, "contiguous_gradients": False},
    "kept gathered": {"reshard_after_forward": False},
    "deferred": {"defer_gradient_reduction": True},
    "gathered beside forward": {"overlap_param_gather": True},
    "gathered beside forward in pieces": {
        "overlap_param_gather": True,
        "allgather_bucket_size": 300,
        "reduce_bucket_size": 700,
    },
    "chunked loss": {"loss_chunk_size": 20},
    "unfused attention": {"attention_backend": "math"},
}
OFFLOADS: tuple[Knobs, ...] = (
    {"offload_optimizer": "cpu"},
    {"offload_optimizer": "cpu", "offload_ratio": 0.4},
    {"offload_optimizer": "cpu", "offload_ratio": 0.0},
    {"offload_optimizer": "nvme"},
    {"offload_optimizer": "nvme", "offload_ratio": 0.4},
    {"offload_optimizer": "nvme", "offload_param": "cpu"},
    {"offload_param": "nvme"},
    {"offload_optimizer": "cpu", "offload_param": "nvme", "offload_ratio": 0.4},
    {"offload_optimizer": "nvme", "offload_param": "nvme"},
    {"offload_param": "cpu"},
    {"offload_optimizer": "cpu", "offload_param": "cpu"},
    {"offload_optimizer": "cpu", "offload_param": "cpu", "offload_ratio": 0.4},
)
FROZEN: tuple[Knobs, ...] = ({"frozen_dtype": "same"}, {"frozen_dtype": "int8"}, {"frozen_dtype": "nf4"})
SCHEDULES: tuple[Knobs, ...] = (
    {"curriculum_start_length": 8, "curriculum_steps": 2},
    {"random_ltd_start_tokens": 8, "random_ltd_steps": 2},
)
"""Each grows from 8 to 16 tokens in two steps, so that the third of three steps has whole sequences."""


def refused_by(case: Case) -> str | None:
    """The first rule that refuses the case, or "batch-divides" if it takes too many micro-batches; None: it is legal."""
    refusals = check_config(case.config, case.context())
    if refusals:
        # Rules that another model or batch cannot satisfy come first.
        return min((refusal.rule for refusal in refusals), key=lambda rule: rule in FIXABLE)
    slow = case.config.gradient_accumulation_steps(GLOBAL_BATCH, case.ranks) > MOST_MICRO_BATCHES
    return "batch-divides" if slow else None


class Draw:
    """Fills in the open knobs of cases, deterministically for a seed."""

    def __init__(self, engine: str, ranks: int, seed: str, documents: bool = False) -> None:
        """`documents`: whether samples of all cases are documents."""
        self.capability, self.ranks, self.documents = CAPABILITIES[engine], ranks, documents
        self._random = random.Random(f"{seed} {engine} {ranks}")

    def case(self, knobs: Knobs, models: Sequence[str] = (*MODELS, BRANCH, USER)) -> Case | None:
        """A legal case with these knobs, if they matter in it; None: there is none."""
        chosen = {**self._setting(), **knobs}
        options = [*product(models, MICRO_BATCH_SIZES, (True, False))]
        self._random.shuffle(options)
        degrees = TrialConfig().replace({name: value for name, value in knobs.items() if name.endswith("_parallel_size")})
        usual = USUAL_MICRO_BATCHES * degrees.data_parallel_size(self.ranks)
        options.sort(key=lambda option: option[1] * usual < GLOBAL_BATCH)
        clipping = self._random.choice(CLIPPINGS)
        engine = self.capability.engine
        for model, size, reshard in options:
            config = TrialConfig().replace({**BASE, "micro_batch_size": size, "reshard_after_forward": reshard, **chosen})
            config = config.replace({name: getattr(TrialConfig(), name) for name in self._not_honoured(config, knobs)})
            case = Case(
                engine=engine, ranks=self.ranks, model=model, config=config, clipping=clipping, documents=self.documents
            )
            rule = refused_by(case)
            if rule is None:
                settled = dataclasses.replace(case, config=canonical(config, case.context()))
                return settled if all(_kept(settled, name, value) for name, value in knobs.items()) else None
            if rule not in FIXABLE:
                return None
        return None

    def choose(self, options: Sequence[Knobs]) -> Knobs:
        return self._random.choice(options)

    def _setting(self) -> Knobs:
        choice = self._random.choice
        setting = SETTINGS[choice([*SETTINGS])]
        return {**setting, "pipeline_split": choice(("even", "balanced")), "rank_order": choice(("tp-cp-dp-pp", "tp-cp-pp-dp"))}

    def _not_honoured(self, config: TrialConfig, requested: Knobs) -> Iterator[str]:
        """Knobs that were not requested and that the engine does not honour with their value."""
        for name, value in config.values().items():
            if name not in requested and not self.capability.honours(name, value):
                yield name


def _kept(case: Case, name: str, value: Value) -> bool:
    """Whether the knob still has the value in canonical form, or one that means the same."""
    return getattr(case.config, name) == value or KNOBS[name].is_element_size


def layouts(ranks: int) -> Iterator[Knobs]:
    """Every division of the ranks; the rules remove illegal ones."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for pipeline, tensor, context in product(sizes, repeat=3):
        degrees = {
            "tensor_parallel_size": tensor, "context_parallel_size": context, "pipeline_parallel_size": pipeline,
        }  # fmt: skip
        if ranks % (pipeline * tensor * context) == 0:
            yield from ({**degrees, "sequence_parallel": split} for split in ((False, True) if tensor > 1 else (False,)))


def pipelines(layout: Knobs) -> list[Knobs]:
    """Every schedule with one and with two stages a rank; the rules remove illegal ones."""
    if layout["pipeline_parallel_size"] == 1:
        return [{}]
    schedules = KNOBS["pipeline_schedule"].choices
    return [{"pipeline_schedule": name, "virtual_stages": stages} for name, stages in product(schedules, (1, 2))]


def stages_of(engine: str) -> tuple[Value, ...]:
    return CAPABILITIES[engine].honoured("zero_stage") or KNOBS["zero_stage"].choices
