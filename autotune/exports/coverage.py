"""What a format can say of a configuration, and what to do about the rest."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autotune.errors import ExportRefusedError
from autotune.exports.winner import Winner
from autotune.request.engines import CAPABILITIES
from executor.engines.command.capability import COMMAND
from search_spaces.stage_layout import marks_offloading, marks_recomputation
from search_spaces.trial_config import TrialConfig

ANYWHERE: Mapping[str, str] = {
    "activation_checkpointing": "switch it on in the model",
    "checkpoint_every_k": "set it in the model",
    "attention_backend": "choose it around the model, with torch.nn.attention.sdpa_kernel",
    "loss_chunk_size": "compute the loss of so many tokens at a time in the model",
    "rank_order": "give the mesh these axes",
    "expandable_segments": "set PYTORCH_ALLOC_CONF=expandable_segments:True",
    "reduce_bucket_size": "it has no bucket of so many elements",
    "allgather_bucket_size": "it gathers parameter by parameter, or module by module",
    "prefetch_bucket_size": "it prefetches whole modules",
    "param_persistence_threshold": "it shards every parameter",
    "max_live_parameters": "it frees each module after its use",
    "overlap_comm": "it always overlaps",
    "contiguous_gradients": "it lays gradients out itself",
    "defer_gradient_reduction": "it decides by itself when gradients are reduced",
    "offload_ratio": "it offloads all or nothing",
    "fused_optimizer": "choose it where the optimizer is made",
    "compile_blocks": "compile each block in the program: block.compile()",
    "lora_rank": "freeze the model and put adapters of that rank beside its matrices, alpha twice the rank",
    "lora_targets": "say it where the adapters are made",
    "adapter_size": "freeze the model and put bottlenecks of so many columns behind attention and MLP of each layer",
    "prefix_length": "freeze the model and train so many keys and values before those of the tokens in each layer",
    "prompt_length": "freeze the model and train so many embeddings before those of the tokens",
    "frozen_dtype": "quantise the frozen matrices where the model is loaded",
    "environment": "set these variables before its processes start",
    "curriculum_start_length": "cut samples to that length in the first steps, in the data loader",
    "curriculum_steps": "let the length of samples grow by 8 tokens at a time over so many steps",
    "random_ltd_start_tokens": "let layers but the first and the last see so many tokens, chosen at random, in the first steps",
    "random_ltd_steps": "let the tokens that layers see grow to all over so many steps",
    "pack_sequences": "lay documents into rows in the data loader, longest first, each in the first row with room; attention "
    "and positions begin anew with each, and losses are divided by the targets of the whole step",
    "script": "give them to your script",
    "pipeline_layout": "it lays no stages out layer by layer",
    "accumulation_dtype": "it decides by itself in which type gradients are summed",
    "optimizer": "choose it where the optimizer is made",
    "context_parallel_method": "it divides sequences in its own way",
    "attention_window": "mask the model's attention, with flex_attention and a BlockMask of this window",
    "attention_global_tokens": "add them to the mask of the window",
    "gc_interval": "call gc.disable() before the first step, and gc.collect(1) every so many steps",
    "cuda_graphs": "wrap blocks that are on the device in torch.cuda.make_graphed_callables, before anything hooks them",
    "async_tensor_parallel": "it overlaps tensor-parallel communication in its own way, or not at all",
    "fused_kernels": "put them into the model: liger_kernel.transformers patches models of Transformers, and norms of "
    "transformer_engine.pytorch take the place of torch's",
    "overlap_param_gather": "it gathers updated parameters where it always does",
    "offload_activations": "run the model's forward inside of torch.autograd.graph.save_on_cpu(pin_memory=True)",
    "numa_binding": "the launcher binds: torchrun --numa-binding=node on GPUs, else numactl --cpunodebind=N for each rank",
    "gather_dtype": "it gathers parameters in the type that they are computed with",
    "secondary_shard_size": "it keeps no second copy of sharded parameters",
    "onebit_warmup_steps": "no framework that is exported to has 1-bit Adam today",
}
"""Knobs that many formats have no place for -> what to do about them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A format, and which knobs have a place in it."""

    format: str
    """As it is asked for."""
    name: str
    """As notes call it: `a DeepSpeed configuration`."""
    expressed: frozenset[str]
    """Knobs that have a place in it, or of which the exporter tells itself."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Knobs without a place -> what to do about them, where that is not as ANYWHERE says."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Degrees without which the ranks would do something else -> formats that have a place for them."""

    def require(self, config: TrialConfig) -> None:
        """Refuse a layout that the format cannot say at all.

        Raises:
            ExportRefusedError: a degree of `refused` is not 1.
        """
        for name, others in self.refused.items():
            value = getattr(config, name)
            if value != 1:
                problem = f"{self.format} has no place for {name}={value}, without which the ranks would do something else"
                raise ExportRefusedError("format", problem, f"use {others}")

    def unexpressed(self, config: TrialConfig) -> list[str]:
        """A line for each knob that is not at its default and has no place here."""
        lines = []
        for name, value in config.differences(TrialConfig()).items():
            if name not in self.expressed:
                remedy = self.elsewhere.get(name) or ANYWHERE.get(name, "it is left out")
                lines.append(f"{name}={value}: not part of {self.name}; {remedy}")
        return lines


def unstated_note(winner: Winner, what: str, *names: str) -> list[str]:
    """A line for the hyperparameters that nobody stated, of those that a target has a place for.

    Args:
        winner: what is exported.
        what: what becomes of them there.
        names: the target's, as fields of a request.
    """
    missing = winner.stated.missing(*names)
    options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
    return [f"not stated: {', '.join(missing)}; {what} (a sweep takes {options})"] if missing else []


def unplaced_notes(winner: Winner, remedy: str, *names: str) -> list[str]:
    """A line for each stated hyperparameter, of those named, that a target has no place for. `Target.unexpressed` has the
    optimizer where it is not the knob's default."""
    told = {name for name in winner.config.differences(TrialConfig()) if name == "optimizer"}
    return [f"{name}={value}: {remedy}" for name, value in winner.stated.values().items() if name in names and name not in told]


def marks_note(config: TrialConfig, target: str) -> list[str]:
    """What a target that lays out layers alone leaves out of a layout."""
    if not (marks_recomputation(config) or marks_offloading(config)):
        return []
    told = f"pipeline_layout={config.pipeline_layout}: {target} takes its layers"
    return [f"{told}, and computes again (f, s) and offloads (o) on every stage alike: nothing of it is switched on"]


def verified_note(winner: Winner, same: Collection[str]) -> str:
    """Whether the figures were measured in the framework of the export.

    Args:
        winner: what is exported.
        same: engines of ours that run this framework itself.
    """
    if winner.engine == COMMAND:
        return "verified: target, measured in your own script; measure it again in any other program"
    if winner.verified == "target" or winner.engine in same:
        return "verified: target, measured in this framework itself"
    return f"verified: native-only, measured by the engine {winner.engine}; measure it in this framework before you rely on it"


def specific_note(winner: Winner, same: Collection[str]) -> list[str]:
    """What of a configuration that another engine measured is to be tuned in the framework of the export."""
    engine = next((name for name in same if CAPABILITIES[name].specific), None)
    if engine is None or winner.verified == "target" or winner.engine in (*same, COMMAND):
        return []
    told = ", ".join(sorted(CAPABILITIES[engine].specific))
    return [f"tune {told} there: they carry over least (autotune sweep MODEL --from best-config.json --engine {engine})"]


def size_note(winner: Winner) -> list[str]:
    """Of an answer for a larger cluster: which of the two is written."""
    if winner.answer_for is None:
        return []
    return [f"written for the {winner.world_size} ranks that were measured; the answer for {winner.answer_for} is extrapolated"]
