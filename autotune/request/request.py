"""A tuning request: the same fields on the command line, in Python, in a TOML file and over HTTP."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from autotune.errors import RequestError
from autotune.goodput.terms import parse_terms
from autotune.question.assumption import Assumption
from autotune.question.field import RequestField, parse_length, parse_size, redeclared
from autotune.request.checks import (
    ENVIRONMENT_SETTINGS,
    environment_count,
    is_number,
    require,
    require_choice,
    require_declared,
    require_fidelity,
    require_labels,
    require_settings,
    require_text,
)
from autotune.request.component_names import PREDICTING
from autotune.request.field_forms import parse_shape, require_loads
from autotune.request.job_fields import JobFields, Objective
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.failure import FailureRow
from search_spaces.knob import Value
from search_spaces.models.command import CommandModel
from search_spaces.models.model import Model
from search_spaces.training.data_schedule import documents_problem
from search_spaces.trial import EarlierTrial, Fidelity, Workload
from search_spaces.trial_config import TrialConfig

PREDICTION_FIELDS = ("run_device_hours", "stop_margin")
"""Fields that require a strategy that predicts the gain of further trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest(JobFields):
    """A tuning request: the workload, the space, the objective and the budget of a job.

    Raises:
        RequestError: a field is outside its range; the message names the field and the remedy.
    """

    command: CommandModel | None = redeclared(JobFields, "command", None)
    failures: tuple[FailureRow, ...] = redeclared(JobFields, "failures", ())
    fidelity: Fidelity = redeclared(JobFields, "fidelity", Fidelity())
    resolved_defaults: tuple[str, ...] = ()
    """Fields of the workload that nobody stated: resolving the request gives them the defaults for its model and cluster."""
    resolved_model: Model | None = None
    """The model that `model` named when the job was opened, so that a resume needs no files; None: not resolved yet."""
    resolved_cluster: ClusterSpec | None = None
    """The cluster that `cluster` named when the job was opened."""
    resolved_domains: dict[str, tuple[Value, ...]] | None = None
    """The resolved `space` and `pins` when the job was opened: knob -> the values that are searched."""
    resolved_base: TrialConfig | None = None
    """The values of the knobs that are not searched."""
    resolved_environments: tuple[str, ...] = ()
    """Values of the knob `environment` in the last stage: `environment_settings` merged with the base's."""
    resolved_assumed: tuple[Assumption, ...] = ()
    """What nobody stated when the job was opened."""
    resolved_history: tuple[EarlierTrial, ...] = ()
    """Trials from outside the database, with the same model, batch and hardware, from which predictions learn."""

    def __post_init__(self) -> None:
        require_labels(self.name, self.tags, self.note, self.team)
        for name in ("model", "cluster", "space", "engine"):
            require_text(name, getattr(self, name))
        if isinstance(self.objective, str) and self.objective in list(Objective):
            object.__setattr__(self, "objective", Objective(self.objective))
        require_choice("objective", self.objective, tuple(Objective))
        for name, parse in (("memory_limit", parse_size), ("sequence_length", parse_length)):
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, parse(name, text))
        self._require_declared()
        self._require_ray()
        if self.nvme_path is not None:
            require_text("nvme_path", self.nvme_path)
        problem = documents_problem(self.document_lengths, self.sequence_length)
        if problem is not None:
            raise RequestError("document_lengths", *problem)
        require_loads(self.expert_loads)
        self._require_goodput()
        self._require_prediction(*PREDICTION_FIELDS)
        self._require_fidelity()
        self._require_shapes()
        self._require_environments()
        runs = self.command is None or self.engine == "command"
        require(runs, "engine", f"{self.engine} does not run a command", "use command, or leave the command out")
        share = is_number(self.headroom) and 0.0 <= self.headroom < 1.0
        require(share, "headroom", f"{self.headroom!r} is not in [0, 1)", "give a share such as 0.05")

    @property
    def workload(self) -> Workload:
        """The workload of every trial of the job."""
        hyperparameters: dict[str, Any] = {
            "learning_rate": self.lr,
            "weight_decay": self.weight_decay,
            "gradient_clipping": self.clip,
        }
        return Workload(
            **{name: value for name, value in hyperparameters.items() if value is not None},
            global_batch_size=self.global_batch_size,
            sequence_length=self.sequence_length,
            seed=self.seed,
            data_path=self.data_path,
            nvme_path=self.nvme_path,
            training_steps=self.training_steps,
            document_lengths=self.document_lengths,
        )

    @property
    def devices(self) -> int:
        """Devices per trial, as far as known; the factor between seconds and device-seconds."""
        return self.resolved_cluster.world_size if self.resolved_cluster is not None else self.ranks or 1

    def _require_ray(self) -> None:
        """Refuse a Ray cluster with another runner than ray."""
        if self.ray_address is not None:
            require_text("ray_address", self.ray_address)
        supported = self.runner == "ray" or (self.ray_address is None and self.cluster != "ray")
        require(supported, "runner", f"{self.runner} does not support a Ray cluster", "use ray, or leave the cluster out")

    def _require_declared(self) -> None:
        """Check every given value against the bounds in its field's declaration."""
        for item in dataclasses.fields(self):
            declared: RequestField | None = item.metadata.get("request")
            value = getattr(self, item.name)
            if declared is not None and (value is not None or item.default is not None):
                require_declared(item.name, declared, item.type, value)

    def _require_environments(self) -> None:
        count = environment_count(self.environment_settings)
        if not count:
            return
        problem = f"{count} settings leave none of {self.trials} trials for the search"
        require(count < self.trials, ENVIRONMENT_SETTINGS, problem, "raise trials, or give fewer settings")
        memory = "no variable changes what a rank allocates, which is the objective"
        require(self.objective is not Objective.MEMORY, ENVIRONMENT_SETTINGS, memory, "leave them out")
        require_settings(self.environment_settings)

    def _require_fidelity(self) -> None:
        require_fidelity(self.fidelity)
        extrapolates = self.fidelity.most_layers is not None and self.objective is not Objective.THROUGHPUT
        problem = f"extrapolates memory, which the objective {self.objective} ranks by"
        require(not extrapolates, "fidelity.most_layers", problem, "leave it out, or use the objective throughput")

    def _require_goodput(self) -> None:
        fits = not self.goodput or self.objective is Objective.GOODPUT
        require(fits, "goodput", "belongs to the objective goodput", "leave it out, or choose that objective")
        timed = self.checkpoint_path is None or self.objective is Objective.GOODPUT
        require(timed, "checkpoint_path", "belongs to the objective goodput", "leave it out, or choose that objective")
        parse_terms(self.goodput)

    def _require_shapes(self) -> None:
        for name in ("tune_on", "answer_for"):
            if getattr(self, name) is not None:
                parse_shape(name, getattr(self, name))
        missing = self.tune_on is not None and self.answer_for is None
        require(not missing, "answer_for", "is missing", "say what the answer is for (--answer-for 64x8), or leave out tune_on")
        twice = self.tune_on is not None and self.ranks is not None
        require(not twice, "ranks", "is already given by tune_on", "leave one of them out")

    def _require_prediction(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) is not None and self.strategy not in PREDICTING:
                remedy = "use --strategy guided, or leave it out"
                raise RequestError(name, f"{self.strategy} does not predict the gain of further trials", remedy)
            if getattr(self, name) is not None and self.objective in (Objective.PARETO, Objective.GOODPUT):
                problem = f"predicts the gain in samples/s or memory, which the objective {self.objective} does not rank by"
                raise RequestError(name, problem, "leave it out, or use the objective throughput or memory")
