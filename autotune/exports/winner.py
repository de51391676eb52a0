"""The part of a best-config document that exporters read."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import BestConfigError
from autotune.exports.best_config_file import request_of
from autotune.request.request import JobRequest
from search_spaces.models.command import CommandModel
from search_spaces.models.model import Model, ModelSpec
from search_spaces.placeholders import FILES, words_of
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """Hyperparameters that the user stated in the request or in an own configuration file. None: not stated, so exported files
    must not have a value."""

    lr: float | None = None
    weight_decay: float | None = None
    clip: float | None = None
    """Bound of the global gradient norm; 0: no clipping."""
    optimizer: str | None = None

    def values(self) -> dict[str, float | str]:
        """The stated ones, by request field name."""
        every = ((item.name, getattr(self, item.name)) for item in dataclasses.fields(self))
        return {name: value for name, value in every if value is not None}

    def missing(self, *names: str) -> tuple[str, ...]:
        """The given names that are not stated."""
        return tuple(name for name in names if getattr(self, name) is None)


def stated_of(request: JobRequest, config: TrialConfig) -> Stated:
    """Hyperparameters that a request states. Pins, the baseline, or a space with another optimizer than the default may also
    state the optimizer."""
    optimizer = request.optimizer
    optimizer_chosen = "optimizer" in request.pins or "optimizer" in (request.baseline or {})
    if optimizer is None and (optimizer_chosen or config.optimizer != TrialConfig().optimizer):
        optimizer = config.optimizer
    return Stated(lr=request.lr, weight_decay=request.weight_decay, clip=request.clip, optimizer=optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """The best configuration with its model, workload, placement and baseline."""

    job: str
    """The job's id; empty: not known."""
    config: TrialConfig
    baseline: TrialConfig | None
    """None: no baseline was measured."""
    model: Model
    workload: Workload
    """Its hyperparameters are those of trials; exporters write `hyperparameters` instead."""
    hyperparameters: Stated
    engine: str
    """The engine that measured it."""
    world_size: int
    ranks_per_node: int
    on_gpus: bool
    verified: str
    """target or native-only: see docs/best-config.md."""
    env: Mapping[str, str]
    """Environment variables of the launch."""
    script: tuple[str, ...]
    """The command words of the user's script with the best configuration's values and file names; empty: there is no script."""
    launch: str
    """The command line that starts it."""
    answer_for: str | None
    """The larger cluster that the answer was extrapolated to, as NODESxDEVICES; None: not extrapolated."""

    @property
    def shape(self) -> ModelSpec | None:
        """The model's shape; None: not known, because the model comes from a factory or a script."""
        return self.model if isinstance(self.model, ModelSpec) else None

    @property
    def nodes(self) -> int:
        """Number of nodes that the ranks fill."""
        return -(-self.world_size // self.ranks_per_node)

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of the model."""
        return self.config.data_parallel_size(self.world_size)

    @property
    def zero_ranks(self) -> int:
        """Number of ranks that the states are divided among: data x context."""
        return self.config.zero_ranks(self.world_size)

    @property
    def shard_size(self) -> int:
        """Number of ranks, out of `zero_ranks`, that one copy of sharded parameters is divided among."""
        chosen = self.config.hsdp_shard_size if self.config.zero_stage == 3 else 0
        return chosen or self.zero_ranks

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of each replica per optimizer step."""
        return self.config.gradient_accumulation_steps(self.workload.global_batch_size, self.world_size)


def winner_of(document: Mapping[str, Any]) -> Winner:
    """Read a best-config document.

    Raises:
        BestConfigError: its request cannot be read, or lacks the resolved model and cluster.
    """
    request, launch = request_of(document), document["launch"]
    model, cluster, baseline = request.resolved_model, request.resolved_cluster, document.get("baseline")
    if model is None or cluster is None:
        raise BestConfigError("job.request", "names no model and cluster", "write the file again with `autotune export`")
    config = TrialConfig().replace(document["best"]["config"])
    hyperparameters = stated_of(request, config)
    if hyperparameters.optimizer is not None:
        config = config.replace({"optimizer": hyperparameters.optimizer})  # for a script, whose trials do not have this knob
    return Winner(
        job=document["job"].get("id", ""),
        config=config,
        baseline=TrialConfig().replace(baseline["config"]) if baseline else None,
        model=model,
        workload=request.workload,
        hyperparameters=hyperparameters,
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
