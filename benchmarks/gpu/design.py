"""The one-rank configurations that the grid on a GPU measures, and their order: a screening design.

A full factorial of the eight knobs has over a thousand points; the time allows for some dozens. Points are chosen one by one:
each covers as many pairs of values of two knobs as possible that no earlier point has, until every legal pair has been
covered; then again. So the first points already cover every pair, and more time adds points of the same kind.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import torch

from autotune.request.engines import capability_of
from benchmarks.gpu.models import LOSS_CHUNK, model_of, workload_of
from executor.detect import local_gpus
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.presets import local_cluster
from search_spaces.knob import Value
from search_spaces.space import SearchSpace
from search_spaces.spaces import device_defaults
from search_spaces.trial_config import TrialConfig

Pair = tuple[tuple[str, Value], tuple[str, Value]]

DOMAINS: dict[str, dict[str, tuple[Value, ...]]] = {
    "large": {
        "micro_batch_size": (1, 2, 4, 8),
        "activation_checkpointing": ("none", "selective", "full"),
        "attention_backend": ("flash", "cudnn", "efficient"),
        "compile_blocks": (False, True),
        "offload_optimizer": ("none", "cpu"),
        "offload_activations": (False, True),
        "optimizer": ("adamw", "adamw8bit"),
        "cuda_graphs": (False, True),
    },
    "small": {
        "micro_batch_size": (1, 2),
        "activation_checkpointing": ("none", "full"),
        "attention_backend": ("best", "math"),
        "offload_optimizer": ("none", "cpu"),
        "optimizer": ("adamw", "adamw8bit"),
    },
}
"""Size of the model -> the varied knobs. On a CPU nothing is compiled, captured or offloaded: that takes long, or CUDA."""
POINTS = {"large": 40, "small": 6}
STAND_IN = ("NVIDIA H100 80GB HBM3", 80 << 30)
"""The GPU whose configurations are predicted on a machine without one."""


def cluster_for(size: str) -> ClusterSpec:
    """One device: for the large model the local GPU, or else `STAND_IN`, so that the design is the same everywhere."""
    if size == "small":
        return local_cluster(1)
    gpus = local_gpus()
    if gpus is not None:
        return local_cluster(1, None, gpus.name, 1, gpus.memory_bytes)
    if torch.cuda.is_available():
        return local_cluster(1, None, torch.cuda.get_device_name(), 1, torch.cuda.get_device_properties(0).total_memory)
    return local_cluster(1, None, STAND_IN[0], 1, STAND_IN[1])


def base_knobs(size: str) -> dict[str, Value]:
    """Knobs that all points share: offloading needs stage 1."""
    return {"zero_stage": 1, "loss_chunk_size": LOSS_CHUNK[size]}


def space_of(size: str) -> SearchSpace:
    """The space of all candidate points, which sweeps search too."""
    cluster, capability = cluster_for(size), capability_of("native")
    return SearchSpace(
        model=model_of(size), cluster=cluster, workload=workload_of(size), world_size=1, capability=capability,
        base=device_defaults(cluster, capability).replace(base_knobs(size)), domains=DOMAINS[size], name=f"gpu-{size}",
    )  # fmt: skip


def pairs_of(config: TrialConfig, knobs: Sequence[str]) -> set[Pair]:
    """Every pair of knobs with their values."""
    return set(combinations([(knob, getattr(config, knob)) for knob in knobs], 2))


def screening(space: SearchSpace, count: int) -> list[TrialConfig]:
    """The first `count` points, or all if there are fewer."""
    knobs = tuple(space.domains)
    left = {config: pairs_of(config, knobs) for config in sorted(space.enumerate(), key=lambda config: config.hash)}
    seen = Counter[Pair]()
    chosen: list[TrialConfig] = []
    while left and len(chosen) < count:
        # Rarely covered pairs weigh most; ties are broken by the hash, which is independent of the knobs.
        best = max(left, key=lambda config: sum(4.0 ** -seen[pair] for pair in left[config]))
        seen.update(left.pop(best))
        chosen.append(best)
    return chosen


def label_of(config: TrialConfig, size: str) -> str:
    """The values of the varied knobs, abbreviated."""
    words = {"micro_batch_size": "micro {}", "activation_checkpointing": "checkpointing {}", "attention_backend": "{}"}
    flags = {"compile_blocks": "compiled", "offload_activations": "activations offloaded", "cuda_graphs": "graphs"}
    parts = []
    for knob in DOMAINS[size]:
        value = getattr(config, knob)
        if knob in words:
            parts.append(words[knob].format(value))
        elif knob in flags and value:
            parts.append(flags[knob])
        elif knob == "offload_optimizer" and value != "none":
            parts.append("optimizer offloaded")
        elif knob == "optimizer":
            parts.append(str(value))
    return ", ".join(parts)
