"""Written recommendations of the authors of published sweeps, as an order of configurations."""

from autotune.strategies.strategy import Candidates, Score
from benchmarks.search.baselines.paddle import RECOMPUTATION
from benchmarks.search.baselines.replay import Combinations, Procedure, ReplayedResult, ReplayStrategy, context_of, place_of
from search_spaces.capability import SpaceContext
from search_spaces.trial_config import TrialConfig

KNOBS = (
    "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "zero_stage", "micro_batch_size",
    "virtual_stages", "sequence_parallel", "activation_checkpointing",
)  # fmt: skip
"""The knobs covered by the recommendations."""
NODE = 8
"""Devices per node if the candidates do not state it."""
LARGE_MODEL, LONG_SEQUENCE = 30e9, 2048
"""Parameters and tokens above which sequence parallelism is recommended."""
STAGES = (1, 0, 2, 3)
"""ZeRO stages in order of preference: stage 1 costs no more communication than none."""


class ExpertStrategy(ReplayStrategy):
    """Takes configurations in the lexicographic order of these rules.

    1. No tensor parallelism beyond a node (Narayanan 2021, arXiv 2104.04473, section 3, takeaway 1; Ultra-Scale Playbook,
       "Finding the best training configuration", steps 1 and 3), and no pipeline with fewer micro-batches than ranks
       (Narayanan, section 2.2: the bubble).
    2. No activation checkpointing: prefer more tensor and pipeline parallelism (Hagemann 2023, arXiv 2311.05610, final
       recommendations); then selective, then full.
    3. The least model parallelism that fits (Hagemann, ibid.; Narayanan, takeaway 2; Playbook, step 2: the rest is data
       parallelism).
    4. Micro-batch 1; larger ones only if model parallelism cannot be lower (Hagemann, ibid. and abstract).
    5. ZeRO stage 1, then none, then 2 and 3 (Playbook, the part on ZeRO: stage 1 is free, stage 3 gathers parameters).
    6. No context parallelism unless needed (Playbook, the part on context parallelism: for very long sequences).
    7. Pipeline rather than tensor parallelism (Hagemann, the section that compares the two). Narayanan and the Playbook fill
       the node with tensor parallelism first; at equal degree this follows the later measurements.
    8. Sequence parallelism for models above 30 billion parameters or sequences above 2048 tokens, else none (Hagemann,
       ibid.); always if the model is unknown. Then fewer virtual stages.

    An expert computes before trying: configurations that need more than the device are skipped (Playbook, the part on memory:
    2 + 2 + 12 bytes per parameter; activations by Korthikanti 2022, arXiv 2205.05198, section 4), if the candidates state
    model and device. After an out-of-memory trial, configurations that are at least as large in every respect are skipped.
    After the end of the order, `random` continues with the skipped ones. Knobs without a rule keep the candidates' order if
    there are few candidates, else the user's setting.
    """

    def __init__(self, score: Score) -> None:
        super().__init__(score)
        self._orders: dict[str, list[TrialConfig]] = {}

    def procedure(self, candidates: Candidates) -> Procedure:
        if candidates.hash not in self._orders:
            self._orders[candidates.hash] = _order(candidates, Combinations(candidates, KNOBS, self.listing))
        lost: list[TrialConfig] = []
        context = context_of(candidates)
        for config in self._orders[candidates.hash]:
            if may_fit(config, context) and not any(_needs_as_much(config, other) for other in lost):
                answer: ReplayedResult = yield config
                if answer.out_of_memory:
                    lost.append(config)


def _order(candidates: Candidates, combinations: Combinations) -> list[TrialConfig]:
    context = context_of(candidates)
    linked = context.cluster.linked_devices if context else NODE
    other_knobs = [name for name in candidates.domains if name not in KNOBS]

    def key(config: TrialConfig) -> tuple[int, ...]:
        return (
            config.tensor_parallel_size > linked or _starved(config, context),
            RECOMPUTATION.index(config.activation_checkpointing),
            config.model_parallel_size,
            config.micro_batch_size,
            STAGES.index(config.zero_stage),
            config.context_parallel_size,
            config.tensor_parallel_size,
            config.sequence_parallel != (config.tensor_parallel_size > 1 and _is_large(context)),
            config.virtual_stages,
            *(place_of(candidates.domains, name, config) for name in other_knobs),
        )

    return sorted(combinations.all(), key=key)


def may_fit(config: TrialConfig, context: SpaceContext | None) -> bool:
    """Whether states and activations fit by calculation; offloading is not considered."""
    if context is None or config.offload_optimizer != "none":
        return True
    return _states(config, context) + _activations(config, context) <= context.cluster.device.memory_bytes


def _states(config: TrialConfig, context: SpaceContext) -> float:
    """Bytes of parameters, gradients and optimizer state, sharded by ZeRO and model parallelism."""
    ranks = config.zero_ranks(context.world_size)
    divided = 12 / (ranks if config.zero_stage >= 1 else 1) + 2 / (ranks if config.zero_stage >= 2 else 1)
    per_parameter = divided + 2 / (ranks if config.zero_stage >= 3 else 1)
    parameters = context.model.parameter_count / (config.tensor_parallel_size * config.pipeline_parallel_size)
    return parameters * per_parameter


def _activations(config: TrialConfig, context: SpaceContext) -> float:
    """Bytes that the layers keep for backward in half precision, without attention scores. The first pipeline rank of 1F1B
    holds as many micro-batches as there are ranks, so that the pipeline divides nothing; 0 if the shape is unknown."""
    hidden, layers = getattr(context.model, "hidden_size", 0), getattr(context.model, "num_layers", 0)
    tensor, tokens = config.tensor_parallel_size, config.micro_batch_size * context.workload.sequence_length
    bytes_per_value = 10 / (tensor if config.sequence_parallel else 1) + 24 / tensor
    if config.activation_checkpointing == "full":
        bytes_per_value = 2.0
    return layers * hidden * tokens * bytes_per_value / config.context_parallel_size


def _starved(config: TrialConfig, context: SpaceContext | None) -> bool:
    if context is None:
        return False
    steps = config.gradient_accumulation_steps(context.workload.global_batch_size, context.world_size)
    return steps < config.pipeline_parallel_size


def _is_large(context: SpaceContext | None) -> bool:
    if context is None:
        return True
    return context.model.parameter_count > LARGE_MODEL or context.workload.sequence_length > LONG_SEQUENCE


def _needs_as_much(config: TrialConfig, lost: TrialConfig) -> bool:
    """Whether it needs at least as much as an out-of-memory one: each knob that saves memory saves no more."""
    return (
        config.micro_batch_size >= lost.micro_batch_size
        and config.tensor_parallel_size <= lost.tensor_parallel_size
        and config.pipeline_parallel_size <= lost.pipeline_parallel_size
        and config.context_parallel_size <= lost.context_parallel_size
        and config.zero_stage <= lost.zero_stage
        and config.sequence_parallel <= lost.sequence_parallel
        and config.offload_optimizer == lost.offload_optimizer
        and config.offload_param == lost.offload_param
        and RECOMPUTATION.index(config.activation_checkpointing) <= RECOMPUTATION.index(lost.activation_checkpointing)
    )
