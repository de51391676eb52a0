"""What the native engine honours and refuses. Does not import torch, since the search reads it."""

from executor.engines.native.rules import (
    FLOAT8_COMBINATIONS,
    FUSED,
    MTP_ZERO_BUBBLE,
    OVERLAPPED,
    RANDOM_LTD_CURRICULUM,
    RANDOM_LTD_DIVIDED,
    SCHEDULE_COMPILED,
)
from executor.engines.shared_rules import (
    COMPILE_SELECTIVE,
    COMPILE_ZERO_BUBBLE,
    EXPERTS_ADAPTERS,
    EXPERTS_COMPILED,
    EXPERTS_COPIES,
    ONEBIT_DIMENSIONS,
    ONEBIT_STAGE,
    PROMPT_CONTEXT,
    VIRTUAL_TOKENS_MUON,
)
from search_spaces.capability import Capability, Combination, honoured_by
from search_spaces.models.pipeline import ZERO_BUBBLE_SCHEDULES
from search_spaces.models.stage_layout import marks_offloading, marks_recomputation, policies
from search_spaces.rules.graphs import GRAPHED
from search_spaces.trial_config import TrialConfig


def _reshards_under_zero_bubble(config: TrialConfig, _: int) -> bool:
    split = config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES
    return split and config.zero_stage == 3 and config.reshard_after_forward


def _compiles_selective_stages(config: TrialConfig, _: int) -> bool:
    return config.compile_blocks and marks_recomputation(config) and "selective" in policies(config)


def _updates_another_on_host(config: TrialConfig, _: int) -> bool:
    return config.optimizer != "adamw" and (config.offload_optimizer != "none" or marks_offloading(config))


def _offloads_what_is_recalled(config: TrialConfig, _: int) -> bool:
    selective = config.activation_checkpointing == "selective"
    return config.offload_activations and (selective or (marks_recomputation(config) and "selective" in policies(config)))


def _offloads_what_is_compiled(config: TrialConfig, _: int) -> bool:
    return config.offload_activations and config.compile_blocks


NATIVE = Capability(
    engine="native",
    keeps_copy_beside_gradients=True,
    knobs=honoured_by("native"),
    combinations=(
        COMPILE_SELECTIVE,
        Combination(
            rule="compile-selective-stages",
            reads=("compile_blocks", "pipeline_layout"),
            problem="selective recomputation of a stage intercepts single operators, and torch.compile does not compile "
            "intercepted code",
            remedy="set compile_blocks=false, or mark stages with f instead of s",
            holds=_compiles_selective_stages,
        ),
        COMPILE_ZERO_BUBBLE,
        EXPERTS_COPIES,
        EXPERTS_ADAPTERS,
        EXPERTS_COMPILED,
        PROMPT_CONTEXT,
        VIRTUAL_TOKENS_MUON,
        Combination(
            rule="zero-bubble-reshard",
            reads=("zero_stage", "reshard_after_forward", "pipeline_parallel_size", "pipeline_schedule"),
            problem="zero-bubble schedules compute weight gradients after the backward that gathers the parameters, "
            "when stage 3 has already released them",
            remedy="set reshard_after_forward=false, or use another schedule or stage",
            holds=_reshards_under_zero_bubble,
        ),
        Combination(
            rule="offload-selective",
            reads=("offload_activations", "activation_checkpointing", "pipeline_layout"),
            problem="selective checkpointing keeps its saved tensors on the device",
            remedy="set offload_activations=false, or activation_checkpointing to full or none",
            holds=_offloads_what_is_recalled,
        ),
        Combination(
            rule="offload-compiled",
            reads=("offload_activations", "compile_blocks"),
            problem="torch.compile traces the hooks that move saved tensors, and fails if a block is split into several graphs",
            remedy="set compile_blocks=false or offload_activations=false",
            holds=_offloads_what_is_compiled,
        ),
        Combination(
            rule="optimizer-on-device",
            reads=("optimizer", "offload_optimizer", "pipeline_layout"),
            problem="only AdamW is updated on the host, where torch has a kernel for it; other updates run on the device",
            remedy="set offload_optimizer=none and mark no stage with o, or set optimizer=adamw",
            holds=_updates_another_on_host,
        ),
        SCHEDULE_COMPILED,
        RANDOM_LTD_CURRICULUM,
        RANDOM_LTD_DIVIDED,
        ONEBIT_STAGE,
        ONEBIT_DIMENSIONS,
        *OVERLAPPED,
        *FUSED,
        *GRAPHED,
        *FLOAT8_COMBINATIONS,
        MTP_ZERO_BUBBLE,
    ),
)
