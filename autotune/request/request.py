"""A tuning request: the same fields on the command line, in Python, in a TOML file and over HTTP."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from autotune.errors import JobNotResumableError, RequestError
from autotune.request.cluster_shape import parse_shape
from autotune.request.command_field import with_command
from autotune.request.earlier_trial import EarlierTrial
from autotune.request.failures_field import with_failures
from autotune.request.field_names import OLD_OPTION_NAMES, with_present_names
from autotune.request.labels import require_labels
from autotune.request.sizes import parse_size
from autotune.request.strategy_names import FORESEEING, STRATEGIES
from search_spaces.cluster import ClusterSpec
from search_spaces.command import CommandModel
from search_spaces.documents import documents_problem
from search_spaces.environment import MOST_SETTINGS, STANDARD, environment_text
from search_spaces.errors import KnobValueError, SearchSpaceError
from search_spaces.failure import FailureRow
from search_spaces.fewer import FEWEST
from search_spaces.model import Model
from search_spaces.optimizers import OPTIMIZERS
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import Fidelity, Workload
from search_spaces.trial_config import TrialConfig, Value
from storage.records import JobRecord

SIMPLE_TARGETS = (
    "deepspeed", "accelerate-fsdp", "accelerate-deepspeed", "transformers", "torchtitan", "megatron", "lightning", "torch",
)  # fmt: skip
"""Frameworks whose exports a search can be restricted to."""
RUNNERS = ("ray", "local")
ENVIRONMENT_SETTINGS = "environment_settings"
SERIES = ("cost", "devices", "sequence", "scale")
"""Objectives of `autotune.series.series`: no job has them."""


class Objective(StrEnum):
    """What the best configuration is best at. The values are stored and exported: never rename one."""

    THROUGHPUT = "throughput"
    """Most samples/s within (1 - headroom) of the memory limit."""
    MEMORY = "memory"
    """Least peak memory of any rank; the faster one among equals."""
    PARETO = "pareto"
    """The front of samples/s and peak memory; the winner is that of throughput."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What a job is to find, and what it may spend.

    Raises:
        RequestError: a field is outside its range; the line names the field and the remedy.
    """

    model: str
    """A preset's name, the path of a Hugging Face config.json, `module:factory`, or the name of what `command` runs."""
    command: CommandModel | None = None
    """The user's own training script (engine `command`); None: an engine of ours trains `model`."""
    cluster: str = "local"
    ranks: int | None = None
    """Ranks of a trial; None: every device of the cluster (`local` without GPUs: 2, or 1 on one core)."""
    space: str = "zero"
    """A preset's name or the path of a TOML file."""
    pins: dict[str, Any] = field(default_factory=dict)
    """Knob -> the only value, or the values, that are tried; text is read as on the command line."""
    simple: str | None = None
    """One of `SIMPLE_TARGETS`: only what its export says without loss is searched; None: all of the space."""
    objective: Objective = Objective.THROUGHPUT
    strategy: str = STRATEGIES[0]
    seed: int = 0
    trials: int = 20
    """Search trials that may start on a device; refused candidates, retries, confirmations and controls are not."""
    max_seconds: float | None = None
    """Seconds of active time after which no search trial starts; None: no such budget."""
    device_hours: float | None = None
    """Active hours times ranks after which no search trial starts; None: no such budget."""
    run_device_hours: float | None = None
    """Device-hours of the run that is tuned for: the search ends when the next trial is expected to save less of them than it
    costs; None: it does not matter. Only with a strategy that predicts."""
    stop_margin: float | None = None
    """The search ends when it is 95 % sure that nothing untried is faster than the best by more than this share; None: it goes
    on. Only with a strategy that predicts."""
    trial_timeout: float = 300.0
    """Seconds from start of build to end of measurement of one trial."""
    global_batch_size: int = 8
    """Samples in one optimizer step, over all ranks."""
    sequence_length: int = 128
    """Tokens in a sample."""
    training_steps: int | None = None
    """Optimizer steps of the run that is tuned for, over which schedules of the data are weighed; None: nothing can be
    scheduled."""
    document_lengths: tuple[int, ...] = ()
    """Tokens of each document of a sample of the user's data, at most 1,000 and none longer than `sequence_length`; empty:
    every sample is whole."""
    lr: float | None = None
    """Learning rate of the user's run. This field and the next three: trials train with what is stated, and exported files
    state it. None: trials take the default of `Workload`, and exported files state none."""
    weight_decay: float | None = None
    clip: float | None = None
    """Bound of the global gradient norm; 0: no clipping."""
    optimizer: str | None = None
    """One of `search_spaces.optimizers.OPTIMIZERS`: the knob's only value. Of a script, which makes its own, it is exported."""
    memory_limit: int | None = None
    """Allocator bytes per rank beyond which a trial is INFEASIBLE, or text with a unit (40GB); None: what the device has."""
    headroom: float = 0.05
    """Share of the memory limit that the winner leaves free."""
    data_path: str | None = None
    nvme_path: str | None = None
    """A folder on a fast local file system of every node, for states that are offloaded to files; None: no configuration
    offloads to files."""
    baseline: dict[str, Value] | None = None
    """Knob -> value of the user's present configuration; None: the defaults at the lowest ZeRO stage that fits."""
    failures: tuple[FailureRow, ...] = ()
    """Rows of the failure table: beside those that come with the package, or in their places."""
    engine: str = "native"
    runner: str = "ray"
    ray_address: str | None = None
    """The Ray cluster that trials run on: HOST:PORT, or `auto` for the one that this machine belongs to; None: a Ray on this
    machine, which is started for the job, or, where `cluster` is `ray`, `auto`."""
    confirm_repeats: int = 3
    """A third of the measurements that the confirmation may take; 0: the search's own measurements decide."""
    control_every: int = 10
    """Search trials after which the baseline is measured again, to see whether the machine drifts; 0: never."""
    python_path: tuple[str, ...] = ()
    """Folders that the ranks put first on `sys.path` before they import a factory."""
    fidelity: Fidelity = field(default_factory=Fidelity)
    allow_unstable: bool = False
    """Whether a trial whose measurement did not settle may win."""
    racing: bool = True
    """Whether a search trial ends as soon as it can no longer reach the best samples/s so far (PRUNED). With the
    objectives memory and pareto none does: a slower configuration may win, or be on the front."""
    stop_at_first: bool = False
    """Whether the search ends at the first trial that may win."""
    environment_settings: tuple[str, ...] = ()
    """Variables of the ranks' processes, as NAME=VALUE pairs, that are tried on the layout which the search ends with: at most
    4, in processes started for each, out of `trials`; `standard` alone: those that fit the devices and nodes."""
    tune_on: str | None = None
    """NODESxDEVICES of `cluster` that a trial takes; None: all of it. Belongs to `answer_for`."""
    answer_for: str | None = None
    """NODESxDEVICES of `cluster` that the answer is for, extrapolated by predictions; None: what trials run on."""
    name: str = ""
    """What the job is called; empty: it has no name beside its id."""
    tags: tuple[str, ...] = ()
    """Words to find the job by."""
    note: str = ""
    """What somebody wrote down about the job."""
    resolved_model: Model | None = None
    """The model that `model` named when the job was opened, so that a resume needs no file; None: not resolved yet."""
    resolved_cluster: ClusterSpec | None = None
    """The cluster that `cluster` named when the job was opened."""
    resolved_domains: dict[str, tuple[Value, ...]] | None = None
    """What `space` and `pins` named when the job was opened: knob -> the values that are searched."""
    resolved_base: TrialConfig | None = None
    """The values of the knobs that are not searched."""
    resolved_environments: tuple[str, ...] = ()
    """What the knob `environment` is in the last stage: `environment_settings` on top of the base's."""
    resolved_history: tuple[EarlierTrial, ...] = ()
    """Trials from outside of the database, of the same model, batch and hardware, that predictions learn from."""

    def __post_init__(self) -> None:
        require_labels(self.name, self.tags, self.note)
        self._require_text("model", "cluster", "space", "strategy", "engine", "runner")
        self._require_choice("objective", tuple(Objective))
        object.__setattr__(self, "objective", Objective(self.objective))
        self._require_choice("strategy", STRATEGIES)
        self._require_choice("runner", RUNNERS)
        if self.simple is not None:
            self._require_choice("simple", SIMPLE_TARGETS)
        self._require_reached()
        if self.nvme_path is not None:
            self._require_text("nvme_path")
        for name, least in (
            ("trials", 1),
            ("global_batch_size", 1),
            ("sequence_length", 1),
            ("confirm_repeats", 0),
            ("control_every", 0),
            ("seed", 0),
        ):
            self._require_whole(name, least)
        limit: Any = self.memory_limit
        if isinstance(limit, str):
            object.__setattr__(self, "memory_limit", parse_size("memory_limit", limit))
        for name in ("ranks", "training_steps", "memory_limit"):
            if getattr(self, name) is not None:
                self._require_whole(name, 1)
        self._require_documents()
        self._require_hyperparameters()
        self._require_positive("trial_timeout")
        for name, what in _BUDGETS.items():
            if getattr(self, name) is not None:
                self._require_positive(name, what)
        self._require_prediction("run_device_hours", "stop_margin")
        self._require_fidelity()
        for name in ("allow_unstable", "racing", "stop_at_first"):
            value = getattr(self, name)
            self._require(isinstance(value, bool), name, f"{value!r} is no switch", "give true or false")
        self._require_shapes()
        self._require_environments()
        runs = self.command is None or self.engine == "command"
        self._require(runs, "engine", f"{self.engine} does not run a command", "use command, or leave the command out")
        share = _is_number(self.headroom) and 0.0 <= self.headroom < 1.0
        self._require(share, "headroom", f"{self.headroom!r} is not in [0, 1)", "give a share such as 0.05")

    @property
    def workload(self) -> Workload:
        """What every trial of the job trains on."""
        stated: dict[str, Any] = {"learning_rate": self.lr, "weight_decay": self.weight_decay, "gradient_clipping": self.clip}
        return Workload(
            **{name: value for name, value in stated.items() if value is not None},
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
        """Devices that a trial takes, as far as that is known: what a job's seconds are multiplied with."""
        return self.resolved_cluster.world_size if self.resolved_cluster is not None else self.ranks or 1

    def _require_reached(self) -> None:
        """Refuse what only the runner on Ray can do, of another."""
        if self.ray_address is not None:
            self._require_text("ray_address")
        reached = self.runner == "ray" or (self.ray_address is None and self.cluster != "ray")
        self._require(reached, "runner", f"{self.runner} does not reach a Ray cluster", "use ray, or leave the cluster out")

    def _require_text(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._require(isinstance(value, str) and bool(value), name, f"{value!r} is no name", "give a name or a path")

    def _require_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        self._require(
            whole and value >= least, name, f"{value!r} is not a whole number of {least} or more", f"give at least {least}"
        )

    def _require_documents(self) -> None:
        found = documents_problem(self.document_lengths, self.sequence_length)
        if found is not None:
            raise RequestError("document_lengths", *found)

    def _require_hyperparameters(self) -> None:
        for name, least in (("lr", math.ulp(0.0)), ("weight_decay", 0.0), ("clip", 0.0)):
            value = getattr(self, name)
            good = value is None or (_is_number(value) and least <= value < math.inf)
            which = "a number of 0 or more" if least == 0 else "a positive number"
            self._require(good, name, f"{value!r} is not {which}", f"give {which}")
        if self.optimizer is not None:
            self._require_choice("optimizer", OPTIMIZERS)

    def _require_positive(self, name: str, what: str = "seconds") -> None:
        value = getattr(self, name)
        self._require(_is_number(value) and value > 0, name, f"{value!r} is not a positive number", f"give {what} above 0")

    def _require_environments(self) -> None:
        given = self.environment_settings
        texts = isinstance(given, tuple) and all(isinstance(text, str) and text.strip() for text in given)
        wrong = (ENVIRONMENT_SETTINGS, f"{given!r} is no list of settings", "list texts such as NCCL_PROTO=Simple")
        self._require(texts, *wrong)
        if not given:
            return
        count = MOST_SETTINGS if given == (STANDARD,) else len(given)
        many = f"{count} settings are more than {MOST_SETTINGS}, for processes are started anew for each"
        self._require(count <= MOST_SETTINGS, ENVIRONMENT_SETTINGS, many, f"keep {MOST_SETTINGS} of them")
        left = f"{count} settings leave none of {self.trials} trials for the search"
        self._require(count < self.trials, ENVIRONMENT_SETTINGS, left, "raise trials, or give fewer settings")
        memory = "no variable changes what a rank allocates, which is the objective"
        self._require(self.objective is not Objective.MEMORY, ENVIRONMENT_SETTINGS, memory, "leave them out")
        if given != (STANDARD,):
            self._require_settings(given)

    def _require_settings(self, given: tuple[str, ...]) -> None:
        try:
            spelled = [environment_text(text) for text in given]
        except KnobValueError as error:
            raise RequestError(ENVIRONMENT_SETTINGS, error.problem, error.remedy) from None
        twice = next((text for text in spelled if spelled.count(text) > 1), None)
        self._require(twice is None, ENVIRONMENT_SETTINGS, f"{twice} is given twice", "leave one of them out")

    def _require_fidelity(self) -> None:
        for item in dataclasses.fields(Fidelity):
            value = getattr(self.fidelity, item.name)
            if isinstance(item.default, bool):
                good = isinstance(value, bool)
            elif item.name in ("most_micro_batches", "most_layers"):
                good = value is None or (_is_number(value) and isinstance(value, int) and value > FEWEST)
            else:
                whole = not isinstance(item.default, int) or isinstance(value, int)
                good = _is_number(value) and whole and value > 0
            option = " (--trial-seconds)" if item.name == "max_seconds" else ""
            self._require(
                good,
                f"fidelity.{item.name}",
                f"{value!r} is out of range",
                f"give a value such as {item.default or 2 * FEWEST}{option}",
            )
        extrapolates = self.fidelity.most_layers is not None and self.objective is not Objective.THROUGHPUT
        problem = f"extrapolates memory, which the objective {self.objective} ranks by"
        self._require(not extrapolates, "fidelity.most_layers", problem, "leave it out, or use the objective throughput")

    def _require_shapes(self) -> None:
        for name in ("tune_on", "answer_for"):
            if getattr(self, name) is not None:
                parse_shape(name, getattr(self, name))
        missing = self.tune_on is not None and self.answer_for is None
        self._require(
            not missing, "answer_for", "is missing", "say what the answer is for (--answer-for 64x8), or leave out tune_on"
        )
        twice = self.tune_on is not None and self.ranks is not None
        self._require(not twice, "ranks", "is said by tune_on already", "leave one of them out")

    def _require_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        self._require(value in choices, name, f"{value!r} is not known", f"use one of {', '.join(choices)}")

    def _require_prediction(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) is not None and self.strategy not in FORESEEING:
                remedy = "use --strategy guided, or leave it out"
                raise RequestError(name, f"{self.strategy} does not predict what further trials bring", remedy)
            if getattr(self, name) is not None and self.objective is Objective.PARETO:
                problem = "asks whether anything is faster than the best, and the objective pareto has a front of them"
                raise RequestError(name, problem, "leave it out, or use the objective throughput or memory")

    @staticmethod
    def _require(holds: bool, name: str, problem: str, remedy: str) -> None:
        if not holds:
            raise RequestError(name, problem, remedy)


_BUDGETS = {"max_seconds": "seconds", "device_hours": "hours", "run_device_hours": "hours", "stop_margin": "a share"}
FIELDS: tuple[str, ...] = tuple(item.name for item in dataclasses.fields(JobRequest) if not item.name.startswith("resolved_"))
"""The names of the fields that people may give, in the order in which they are shown."""


def request_from_fields(fields: Mapping[str, Any]) -> JobRequest:
    """Return a request from plain values by the fields' present names, as a file or an HTTP body holds them.

    Raises:
        RequestError: a field is unknown (the line names the nearest), has a value of the wrong kind, or `model` is missing.
        ModelFormatError: a field of `command` cannot be used.
        FailureTableError: a row of `failures` has no meaning.
    """
    for name in fields:
        if name not in FIELDS:
            raise RequestError(name, "is not a field of a request", nearest_field(name))
    fields = with_failures(with_command(fields))
    for name in (ENVIRONMENT_SETTINGS, "tags"):
        if isinstance(fields.get(name), str):  # a lone one, of which a tuple would be made letter by letter
            fields = {**fields, name: (fields[name],)}
    fidelity = fields.get("fidelity", {})
    known = [item.name for item in dataclasses.fields(Fidelity)]
    if not isinstance(fidelity, Mapping) or not set(fidelity) <= set(known):
        raise RequestError("fidelity", f"{fidelity!r} is not known", f"give a table of some of {', '.join(known)}")
    if fields.get("objective") in SERIES:
        problem = f"{fields['objective']} is a series of jobs of several sizes, not one job"
        raise RequestError("objective", problem, "run it with `autotune sweep` or `autotune.tune_series`")
    if fields.get("objective", Objective.THROUGHPUT) not in list(Objective):
        raise RequestError("objective", f"{fields['objective']!r} is not known", f"use one of {', '.join(Objective)}")
    if fields.get("ray_address") is not None:
        fields = {"cluster": "ray", **fields}
    if "model" not in fields:
        raise RequestError("model", "is missing", "give a preset, a config.json or module:factory, or a command")
    try:
        return from_plain(JobRequest, fields)
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, RequestError | SearchSpaceError):
            raise
        raise RequestError("request", str(error), "give each field a value of its kind") from error


def request_from_row(row: Mapping[str, Any]) -> JobRequest:
    """Return the request that a job's row or a best-config file holds, by present or old names.

    Raises:
        JobNotResumableError: this version cannot read it.
    """
    try:
        return from_plain(JobRequest, with_present_names(row))
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        problem = f"its request cannot be read by this version ({error})"
        raise JobNotResumableError("job", problem, "resume it with the version that opened it") from error


def request_of(job: JobRecord) -> JobRequest:
    """Return the request of a job.

    Raises:
        JobNotResumableError: its row is damaged, or this version cannot read it.
    """
    if job.damage:
        problem = f"{job.id} is damaged ({job.damage})"
        raise JobNotResumableError("job", problem, "see `autotune db check`, and restore it from a backup")
    return request_from_row(job.request)


def request_to_row(request: JobRequest) -> dict[str, Any]:
    """Return the request as plain data for a job's row."""
    plain: dict[str, Any] = to_plain(request)
    return plain


def nearest_field(name: str) -> str:
    """A remedy for a field that does not exist."""
    if name in OLD_OPTION_NAMES:
        return f"did you mean {OLD_OPTION_NAMES[name]}?"
    matches = difflib.get_close_matches(name, FIELDS, n=1)
    return f"did you mean {matches[0]}?" if matches else f"the fields are {', '.join(FIELDS)}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
