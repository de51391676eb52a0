"""Best-config documents: as files, and the part of them that exporters read."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import BestConfigError
from autotune.request.request import JobRequest
from autotune.request.rows import request_from_row
from search_spaces.file_kinds import BEST_CONFIG, mistaken
from search_spaces.models.command import CommandModel
from search_spaces.models.model import Model, ModelSpec
from search_spaces.placeholders import launch_paths, words_of
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

SCHEMA_VERSION = 1
SCHEMA_PATH = Path(__file__).parents[1] / "schemas" / "best-config.schema.json"


def best_config_text(document: dict[str, Any]) -> str:
    """The file's text: keys in their order, an indent of two spaces, a final line end."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def read_best_config(path: Path) -> dict[str, Any]:
    """Return the document in the file.

    Raises:
        BestConfigError: the file cannot be read, is not a best-config, or has another schema version.
    """
    give = "give a best-config.json: a sweep writes one (--out), and so does `autotune export JOB`"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BestConfigError(str(path), f"cannot be read ({error.strerror})", give) from error
    except ValueError as error:
        problem = mistaken(path, BEST_CONFIG) or f"is not JSON ({error})"
        raise BestConfigError(str(path), problem, give) from error
    if not isinstance(document, dict) or document.get("schema_version") is None:
        raise BestConfigError(str(path), mistaken(path, BEST_CONFIG) or f"is not {BEST_CONFIG}", give)
    require_schema_version(document, str(path))
    for key in ("job", "best"):
        if not isinstance(document.get(key), dict):
            raise BestConfigError(str(path), f"lacks {key}", "write it again with `autotune export`")
    return dict(document)


def require_schema_version(document: Mapping[str, Any], source: str) -> None:
    """Check that the document has this version's schema.

    Raises:
        BestConfigError: it has another one.
    """
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        problem = f"has schema version {version}, not {SCHEMA_VERSION}"
        raise BestConfigError(source, problem, "write it again with `autotune export`")


def request_of(document: Mapping[str, Any]) -> JobRequest:
    """The resolved request of the document's job: enough to run its best configuration again without a database.

    Raises:
        BestConfigError: this version cannot read it.
    """
    require_schema_version(document, "best-config")
    try:
        return request_from_row(document["job"]["request"])
    except (KeyError, RuntimeError, ValueError) as error:
        raise BestConfigError("job.request", str(error), "write the file again with `autotune export`") from error


def require_measured(document: dict[str, Any], source: str) -> None:
    """Check that the best configuration is measured.

    Raises:
        BestConfigError: it was carried to another cluster, so that its rates are predicted.
    """
    if document["best"].get("measured") is None:
        problem = "nothing is measured: the file was carried to this cluster by predictions"
        raise BestConfigError(source, problem, "run `autotune sweep` there, with --from and this file")


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
    """target or native-only: see docs/best-config.md; predicted: nothing was measured."""
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
        verified=document.get("verified", "native-only") if document["best"].get("measured") is not None else "predicted",
        env=launch.get("env", {}),
        script=words_of(model, config, request.workload, launch["world_size"], launch_paths(model))
        if isinstance(model, CommandModel)
        else (),
        launch=launch.get("command", ""),
        answer_for=request.answer_for,
    )
