"""What exporters read of a best-config document."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import BestConfigError
from autotune.exports.best_config_file import request_of
from autotune.request.request import JobRequest
from search_spaces.command import CommandModel
from search_spaces.model import Model, ModelSpec
from search_spaces.placeholders import FILES, words_of
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """Hyperparameters that the user gave, or that the user's own configuration file has. None: not stated, so that no exported
    file may have one."""

    lr: float | None = None
    weight_decay: float | None = None
    clip: float | None = None
    """Bound of the global gradient norm; 0: no clipping."""
    optimizer: str | None = None

    def values(self) -> dict[str, float | str]:
        """Those that are stated, by the names of a request's fields."""
        every = ((item.name, getattr(self, item.name)) for item in dataclasses.fields(self))
        return {name: value for name, value in every if value is not None}

    def missing(self, *names: str) -> tuple[str, ...]:
        """Those of the names that are not stated."""
        return tuple(name for name in names if getattr(self, name) is None)


def stated_of(request: JobRequest, config: TrialConfig) -> Stated:
    """What a request states. Pins and the baseline may name the optimizer too, and so may the space where it is not the
    default."""
    optimizer = request.optimizer
    named = "optimizer" in request.pins or "optimizer" in (request.baseline or {})
    if optimizer is None and (named or config.optimizer != TrialConfig().optimizer):
        optimizer = config.optimizer
    return Stated(lr=request.lr, weight_decay=request.weight_decay, clip=request.clip, optimizer=optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """The best configuration, what it trains, where, and what stood before it."""

    job: str
    """The job's id; empty: not told."""
    config: TrialConfig
    baseline: TrialConfig | None
    """None: no baseline was measured."""
    model: Model
    workload: Workload
    """Its hyperparameters are those of trials: exporters write `stated`."""
    stated: Stated
    engine: str
    """What measured it."""
    world_size: int
    ranks_per_node: int
    on_gpus: bool
    verified: str
    """target or native-only: see docs/best-config.md."""
    env: Mapping[str, str]
    """Environment variables of the launch."""
    script: tuple[str, ...]
    """The words of the user's own script with the best configuration's values, files by their names; empty: there is none."""
    launch: str
    """The line that starts it."""
    answer_for: str | None
    """The larger cluster that the answer was extrapolated to, as NODESxDEVICES; None: there is none."""

    @property
    def shape(self) -> ModelSpec | None:
        """The model's shape; None: it is a factory's, and not known."""
        return self.model if isinstance(self.model, ModelSpec) else None

    @property
    def nodes(self) -> int:
        """Nodes that the ranks fill."""
        return -(-self.world_size // self.ranks_per_node)

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model."""
        return self.config.data_parallel_size(self.world_size)

    @property
    def zero_ranks(self) -> int:
        """Ranks that divide the states among them: data x context."""
        return self.config.zero_ranks(self.world_size)

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of sharded parameters, out of `zero_ranks`."""
        chosen = self.config.hsdp_shard_size if self.config.zero_stage == 3 else 0
        return chosen or self.zero_ranks

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of each replica in one optimizer step."""
        return self.config.gradient_accumulation_steps(self.workload.global_batch_size, self.world_size)


def winner_of(document: Mapping[str, Any]) -> Winner:
    """Read a best-config document.

    Raises:
        BestConfigError: its request cannot be read, or does not say which model and cluster it resolved to.
    """
    request, launch = request_of(dict(document)), document["launch"]
    model, cluster, baseline = request.resolved_model, request.resolved_cluster, document.get("baseline")
    if model is None or cluster is None:
        raise BestConfigError("job.request", "names no model and cluster", "write the file again with `autotune export`")
    config = TrialConfig().replace(document["best"]["config"])
    stated = stated_of(request, config)
    if stated.optimizer is not None:
        config = config.replace({"optimizer": stated.optimizer})  # of a script, whose trials have no such knob
    return Winner(
        job=document["job"].get("id", ""),
        config=config,
        baseline=TrialConfig().replace(baseline["config"]) if baseline else None,
        model=model,
        workload=request.workload,
        stated=stated,
        engine=request.engine,
        world_size=launch["world_size"],
        ranks_per_node=min(cluster.devices_per_node, launch["world_size"]),
        on_gpus=cluster.device.kind == "cuda",
        verified=document.get("verified", "native-only"),
        env=launch.get("env", {}),
        script=words_of(model, config, request.workload, launch["world_size"], FILES)
        if isinstance(model, CommandModel)
        else (),
        launch=launch.get("command", ""),
        answer_for=request.answer_for,
    )
