"""A tuning request: the same fields on the command line, in Python, in a TOML file and over HTTP."""

import dataclasses
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Union, get_args, get_origin

from autotune.errors import RequestError
from autotune.goodput.choice import parse_terms
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
from autotune.request.component_names import DEFAULT_STRATEGY, PREDICTING, STRATEGIES, TRACKERS, strategy_names, tracker_names
from autotune.request.earlier_trial import EarlierTrial
from autotune.request.field import FORM, JOB, SERVICE, SWEEP, Panel, RequestField, request_field
from autotune.request.field_forms import parse_shape, require_loads
from autotune.request.sizes import parse_size
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.failure import FailureRow
from search_spaces.knob import Value
from search_spaces.models.command import CommandModel
from search_spaces.models.model import Model
from search_spaces.optimizers import OPTIMIZERS
from search_spaces.training.data_schedule import documents_problem
from search_spaces.trial import Fidelity, Workload
from search_spaces.trial_config import TrialConfig

SIMPLE_TARGETS = (
    "deepspeed", "accelerate-fsdp", "accelerate-deepspeed", "transformers", "torchtitan", "megatron", "lightning", "torch",
)  # fmt: skip
"""Frameworks to whose exports a search can be restricted."""
RUNNERS = ("ray", "local")
PREDICTION_FIELDS = ("run_device_hours", "stop_margin")
"""Fields that require a strategy that predicts the gain of further trials."""


class Objective(StrEnum):
    """Optimization objective. The values are stored and exported: never rename one."""

    THROUGHPUT = "throughput"
    """Maximum samples/s within (1 - headroom) of the memory limit."""
    MEMORY = "memory"
    """Minimum peak memory of the fullest rank; the faster one among equals."""
    PARETO = "pareto"
    """The Pareto front of samples/s and peak memory; the winner is the same as for throughput."""
    GOODPUT = "goodput"
    """Maximum tokens kept per device-hour on nodes that fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A tuning request: the workload, the space, the objective and the budget of a job.

    Raises:
        RequestError: a field is outside its range; the message names the field and the remedy.
    """

    model: str = field(
        metadata={
            "request": RequestField(
                help="A preset, a Hugging Face config.json, hf:CONFIG, or module:factory.", panel=Panel.BASIC, unit="MODEL"
            )
        }
    )
    """A preset's name, the path of a Hugging Face config.json, `module:factory`, or the name of the program in `command`."""
    command: CommandModel | None = request_field(
        None, "Your own training script: everything after --.", Panel.SCRIPT, commands=()
    )
    """The user's own training script (engine `command`); None: another engine trains `model`."""
    cluster: str = request_field("local", "local, ray, a preset as NAME:NODES, or a TOML file.", Panel.BASIC, "NAME")
    ranks: int | None = request_field(
        None,
        "Ranks per trial.",
        Panel.BASIC,
        "N",
        least=1,
        most=2**20,
        commands=JOB,
        shown_default="every GPU; on CPUs 2",
        helps=(
            ("form", "Default: every device of the cluster."),
            ("sweep", "Ranks per trial; several values for a series."),
        ),
        label="Ranks",
        section="machine",
    )
    """Ranks per trial; None: every device of the cluster (`local` without GPUs: 2, or 1 on one core)."""
    space: str = request_field("zero", "zero, zero-buckets, 3d, parallel, full, or a TOML file.", Panel.BASIC, "NAME")
    """A preset's name or the path of a TOML file."""
    pins: dict[str, Any] = request_field(
        dict, "Pin a knob to one value, or to several (KNOB=A,B). May be repeated.", Panel.BASIC, "KNOB=VALUE"
    )
    """Knob -> the value or values that are tried; text is parsed as on the command line."""
    simple: str | None = request_field(
        None,
        "Search only what this framework's export expresses without loss: deepspeed, torchtitan, megatron, …",
        Panel.SEARCH,
        "TARGET",
        choices=lambda: SIMPLE_TARGETS,
    )
    """One of `SIMPLE_TARGETS`: only what its export expresses without loss is searched; None: the whole space."""
    objective: Objective = request_field(
        Objective.THROUGHPUT,
        "throughput, memory, pareto or goodput.",
        Panel.SEARCH,
        "NAME",
        commands=JOB,
        helps=(
            ("form", ""),
            ("sweep", "throughput, memory, pareto, goodput; for a series cost, devices, sequence, scale."),
        ),
        label="Objective",
        section="goal",
    )
    goodput: tuple[str, ...] = request_field(
        (),
        "Objective goodput: failures=llama3, spares=0,2, tokens=1e12, … May be repeated.",
        Panel.SEARCH,
        "NAME=VALUE",
        commands=JOB,
        label="Failures",
        section="goal",
        helps=(("form", "Objective goodput: NAME=VALUE, a | between them, such as failures=llama3 | tokens=1e12."),),
    )
    """Inputs of the objective goodput: `autotune.goodput.choice.GoodputTerms`, as texts NAME=VALUE."""
    checkpoint_path: str | None = request_field(
        None,
        "Objective goodput: a folder where each trial saves and loads its states once, timed.",
        Panel.SEARCH,
        "PATH",
        commands=JOB,
        service=False,
    )
    """A folder that every node has. Bytes and seconds are recorded with the measurement, and used instead of the terms'
    bandwidths if the answer is for the cluster of the trials. None: both are computed."""
    strategy: str = request_field(
        DEFAULT_STRATEGY,
        f"{', '.join(STRATEGIES)}.",
        Panel.SEARCH,
        "NAME",
        choices=strategy_names,
        label="Strategy",
        section="search",
        helps=(("form", ""),),
    )
    seed: int = request_field(
        0,
        "Random seed of weights, data and strategy.",
        Panel.SEARCH,
        "N",
        least=0,
        most=2**53,
        label="Seed",
        section="search",
        helps=(("form", ""),),
    )
    trials: int = request_field(
        20,
        "Maximum number of search trials.",
        Panel.BASIC,
        "N",
        least=1,
        most=1_000_000,
        label="Trials",
        section="goal",
        helps=(("form", "Maximum number of search trials."),),
    )
    """Maximum search trials that start on a device; refused candidates, retries, confirmations and controls do not count."""
    max_seconds: float | None = request_field(
        None,
        "Seconds after which no search trial starts.",
        Panel.BUDGET,
        "SECONDS",
        above=0,
        most=1e9,
        commands=JOB,
        label="Time",
        section="goal",
        measure="seconds",
        helps=(("form", "Afterwards no search trial starts. Default: no limit."),),
    )
    """Seconds of active time after which no search trial starts; None: no limit."""
    device_hours: float | None = request_field(
        None,
        "Hours times ranks after which no search trial starts.",
        Panel.BUDGET,
        "HOURS",
        above=0,
        most=1e9,
        commands=JOB,
        label="Device-hours",
        section="goal",
        measure="hours",
        helps=(("form", "Time times ranks. Default: no limit."),),
    )
    """Active hours times ranks after which no search trial starts; None: no limit."""
    run_device_hours: float | None = request_field(
        None,
        "Device-hours of your run: stop when a trial costs more than it is expected to save in the run.",
        Panel.BUDGET,
        "HOURS",
        above=0,
        most=1e9,
        commands=JOB,
        label="Training run",
        section="goal",
        measure="device-hours",
        helps=(("form", "Stop when a trial costs more than it is expected to save in the run."),),
    )
    """Device-hours of the run that is tuned for: the search ends when the next trial is expected to save less than it costs;
    None: no such criterion. Requires a strategy that predicts."""
    stop_margin: float | None = request_field(
        None,
        "Stop when, with 95 % confidence, no untried configuration is faster by more than this share.",
        Panel.BUDGET,
        "SHARE",
        above=0,
        most=10,
        commands=JOB,
        label="Stop when sure",
        section="goal",
        helps=(("form", "Stop when, with 95 % confidence, no untried configuration is faster by more than this."),),
    )
    """The search ends when, with 95 % confidence, no untried configuration is faster than the incumbent by more than this
    share; None: no such criterion. Requires a strategy that predicts."""
    trial_timeout: float = request_field(
        300.0,
        "Seconds after which a trial is killed.",
        Panel.TRIALS,
        "SECONDS",
        above=0,
        most=1e9,
        commands=JOB,
        label="Trial timeout",
        section="search",
        measure="seconds",
        helps=(("form", ""),),
    )
    """Time limit of one trial in seconds, from start of build to end of measurement."""
    global_batch_size: int = request_field(
        8,
        "Samples per optimizer step, over all ranks.",
        Panel.BASIC,
        "N",
        least=1,
        most=2**32,
        label="Global batch size",
        section="workload",
        measure="samples",
        shown_default="8, or one for each rank if there are more",
        helps=(("form", "Per optimizer step, over all ranks; by default 8, or one for each rank if there are more."),),
    )
    """Samples per optimizer step, over all ranks. Resolving the request replaces a value that nobody stated."""
    sequence_length: int = request_field(
        128,
        "Tokens per sample.",
        Panel.BASIC,
        "N",
        least=1,
        most=2**32,
        label="Sequence length",
        section="workload",
        measure="tokens",
        shown_default="128 on CPUs; on GPUs as many as the model takes, at most 4,096",
        helps=(("form", "By default 128 on CPUs; on GPUs as many as the model takes, at most 4,096."),),
    )
    """Tokens per sample. Resolving the request replaces a value that nobody stated."""
    training_steps: int | None = request_field(
        None,
        "Optimizer steps of your run, over which data schedules are averaged.",
        Panel.TRAINING,
        "N",
        least=1,
        most=2**53,
        commands=JOB,
    )
    """Optimizer steps of the run that is tuned for, over which data schedules are averaged; None: data schedules are not
    possible."""
    document_lengths: tuple[int, ...] = request_field(
        (),
        "Lengths in tokens of a sample of your documents, separated by commas, or a file of them.",
        Panel.TRAINING,
        "LENGTHS",
        commands=JOB,
        shown_default="all samples have the full length",
    )
    """Lengths in tokens of a sample of the user's documents, at most 1,000 and none longer than `sequence_length`; empty: every
    sample has the full length."""
    expert_loads: tuple[tuple[float, ...], ...] = request_field(
        (),
        "Relative numbers of tokens that choose each expert, separated by commas, or a file of them with a line for each layer "
        "with experts.",
        Panel.TRAINING,
        "LOADS",
        commands=JOB,
        shown_default="the router chooses, and predictions assume equal loads",
    )
    """How many tokens choose each expert, in any unit: one row for all layers with experts, or one for each of them. Trials
    draw choices that follow the loads, and predictions are of the busiest rank. Empty: not stated."""
    knowledge: dict[str, Any] | str | None = request_field(
        None,
        "Measurements to learn from: a table, a study, an MLPerf log, a job, or an address.",
        Panel.SEARCH,
        "FILE|JOB|URL",
        commands=JOB,
        helps=(
            ("submit", "Measurements to learn from: a table, an MLPerf log, a job, or an address."),
            (SERVICE, "Measurements to learn from: their settings and measurements."),
            (FORM, ""),
        ),
    )
    """Measurements by others as plain data (`autotune.knowledge.content`); text: what the user named, until it is read; None:
    only those of the database."""
    lr: float | None = request_field(
        None,
        "Learning rate of your run, for trials and exported files.",
        Panel.TRAINING,
        "RATE",
        above=0,
        most=1e9,
        label="Learning rate",
        section="workload",
        helps=(("form", "Of your run: used in trials and exported files."),),
    )
    """Learning rate of the user's run. This field and the next three: trials and exported files use the stated value. None:
    trials use the default of `Workload`, and exported files omit it."""
    weight_decay: float | None = request_field(
        None,
        "Weight decay of your run, for trials and exported files.",
        Panel.TRAINING,
        "X",
        least=0,
        most=1e9,
        label="Weight decay",
        section="workload",
        helps=(("form", ""),),
    )
    clip: float | None = request_field(
        None,
        "Maximum gradient norm, for trials and exported files; 0: no clipping.",
        Panel.TRAINING,
        "NORM",
        least=0,
        most=1e9,
        label="Gradient clipping",
        section="workload",
        helps=(("form", "Maximum norm; 0: no clipping."),),
    )
    """Maximum global gradient norm; 0: no clipping."""
    optimizer: str | None = request_field(
        None,
        f"{', '.join(OPTIMIZERS)}; for trials and exported files.",
        Panel.TRAINING,
        "NAME",
        choices=lambda: OPTIMIZERS,
        label="Optimizer",
        section="workload",
        helps=(("form", ""),),
    )
    """One of `search_spaces.optimizers.OPTIMIZERS`: the knob's only value. For a script, which creates its own optimizer, it is
    only exported."""
    memory_limit: int | None = request_field(
        None,
        "Memory limit per rank: 2000000000, 2GB or 1.5GiB.",
        Panel.BASIC,
        "BYTES",
        least=1,
        most=2**53,
        label="Memory limit",
        section="machine",
        helps=(("form", "Per rank. Default: the device's memory."),),
    )
    """Bytes per rank above which a trial is INFEASIBLE, or text with a unit (40GB); None: the device's memory."""
    headroom: float = request_field(
        0.05,
        "Share of the memory limit that the winner must leave free.",
        Panel.SEARCH,
        "SHARE",
        least=0,
        below=1,
        commands=JOB,
        label="Headroom",
        section="machine",
        helps=(("form", "Share of the limit that the winner must leave free."),),
    )
    """Share of the memory limit that the winner must leave free."""
    data_path: str | None = request_field(
        None, "A file or folder of text to train on.", Panel.TRAINING, "PATH", commands=SWEEP, service=False
    )
    nvme_path: str | None = request_field(
        None,
        "Folder on a fast local disk for states offloaded to files (nvme).",
        Panel.HARDWARE,
        "PATH",
        commands=SWEEP,
        service=False,
    )
    """Folder on a fast local file system of every node for states offloaded to files; None: no configuration offloads to
    files."""
    baseline: dict[str, Value] | None = request_field(
        None, "JSON of your present knobs, measured as trial 0.", Panel.SEARCH, "FILE", commands=JOB
    )
    """Knob -> value of the user's present configuration; None: the defaults at the lowest ZeRO stage that fits."""
    failures: tuple[FailureRow, ...] = request_field(
        (),
        "TOML file of failure-table rows that extend or replace the built-in ones.",
        Panel.TRIALS,
        "FILE",
        commands=JOB,
        shown_default="the built-in rows",
    )
    """Rows of the failure table that extend or replace the built-in rows."""
    engine: str = request_field(
        "native",
        "native, ddp, fsdp2, deepspeed, or command (after --).",
        Panel.TRIALS,
        "NAME",
        label="Engine",
        section="machine",
        helps=(("form", ""),),
    )
    runner: str = request_field(
        "ray",
        "ray or local.",
        Panel.HARDWARE,
        "NAME",
        choices=lambda: RUNNERS,
        label="Runner",
        section="machine",
        helps=(("form", ""),),
    )
    ray_address: str | None = request_field(
        None,
        "Ray cluster, HOST:PORT or auto. Default: AUTOTUNE_RAY_ADDRESS, RAY_ADDRESS, else a local Ray is started.",
        Panel.HARDWARE,
        "ADDRESS",
        service=False,
        helps=(("submit", "Ray cluster of the job, HOST:PORT. [default: that of the worker]"),),
    )
    """The Ray cluster that trials run on: HOST:PORT, or `auto` for the one that this machine belongs to; None: a local Ray that
    is started for the job or, if `cluster` is `ray`, `auto`."""
    confirm_repeats: int = request_field(
        3,
        "Repeat the measurement of finalists, at most 3 N times in total; 0: never.",
        Panel.TRIALS,
        "N",
        least=0,
        most=1000,
        label="Confirmation",
        section="search",
        measure="rounds of 3",
        helps=(("form", "Maximum number of repeated measurements of the finalists."),),
    )
    """A third of the maximum number of confirmation measurements; 0: the search's measurements decide."""
    control_every: int = request_field(
        10,
        "Search trials between repeated measurements of the baseline; 0: never.",
        Panel.TRIALS,
        "N",
        least=0,
        most=1_000_000,
        commands=JOB,
        label="Control after",
        section="search",
        measure="trials",
        helps=(("form", "The baseline is measured again to detect drift of the machine; 0: never."),),
    )
    """Search trials between repeated measurements of the baseline, which detect drift of the machine; 0: never."""
    python_path: tuple[str, ...] = request_field(
        (), "Folders that ranks prepend to `sys.path`.", Panel.TRAINING, commands=(), service=False
    )
    """Folders that the ranks prepend to `sys.path` before they import a factory."""
    fidelity: Fidelity = request_field(
        Fidelity, "Duration and precision of measurements.", Panel.TRIALS, commands=(), service=False
    )
    allow_unstable: bool = request_field(
        False,
        "Allow trials with unstable measurements to win.",
        Panel.TRIALS,
        commands=JOB,
        label="Allow unstable trials to win",
        section="search",
        helps=(("form", ""),),
    )
    """Whether a trial with an unstable measurement may win."""
    racing: bool = request_field(
        True,
        "Stop a trial as soon as it can no longer be the fastest.",
        Panel.TRIALS,
        commands=JOB,
        shown_default="racing",
        label="Stop trials early if they cannot win",
        section="search",
        helps=(("form", ""),),
    )
    """Whether a search trial ends as soon as it can no longer reach the incumbent's samples/s (PRUNED). Ignored with the
    objectives memory and pareto: a slower configuration may win, or be on the front."""
    stop_at_first: bool = request_field(
        False, "End the search at the first trial that may win.", Panel.SEARCH, commands=(), service=False
    )
    """Whether the search ends at the first trial that may win."""
    environment_settings: tuple[str, ...] = request_field(
        (),
        "Environment variables (NAME=VALUE pairs) to try on the best layout; at most 4, or standard. May be repeated.",
        Panel.SEARCH,
        "SETTING",
        commands=JOB,
        label="Environments",
        section="search",
        helps=(
            (
                "form",
                "Environment variables to try on the best layout: NAME=VALUE pairs, a | between settings, or standard.",
            ),
        ),
    )
    """Environment variables of the rank processes, as NAME=VALUE pairs, that are tried on the best layout after the search: at
    most 4 settings, each with new processes, counted in `trials`; only `standard`: those for the devices and nodes."""
    tune_on: str | None = request_field(
        None,
        "Run trials on N nodes with M devices of the cluster. Requires --answer-for.",
        Panel.HARDWARE,
        "NxM",
        commands=SWEEP,
        service=False,
    )
    """NODESxDEVICES of `cluster` that a trial uses; None: all of it. Requires `answer_for`."""
    answer_for: str | None = request_field(
        None,
        "Extrapolate the answer to N nodes with M devices by predictions.",
        Panel.HARDWARE,
        "NxM",
        commands=SWEEP,
        service=False,
    )
    """NODESxDEVICES of `cluster` to which predictions extrapolate the answer; None: the devices that trials run on."""
    name: str = request_field(
        "",
        "Name of the job.",
        Panel.JOB,
        "TEXT",
        shown_default=" ",
        label="Name",
        section="labels",
        helps=(("form", "Name of the job."),),
    )
    """Name of the job; empty: it only has its id."""
    tags: tuple[str, ...] = request_field(
        (),
        "Tag for finding the job. May be repeated.",
        Panel.JOB,
        "WORD",
        label="Tags",
        section="labels",
        helps=(("form", "Words for finding the job."),),
    )
    """Words for finding the job."""
    note: str = request_field(
        "",
        "Note about the job.",
        Panel.JOB,
        "TEXT",
        shown_default=" ",
        label="Note",
        section="labels",
        helps=(("form", ""),),
    )
    """The user's note about the job."""
    trackers: tuple[str, ...] = request_field(
        (),
        f"Experiment tracker that gets a run for each trial: {', '.join(TRACKERS)}. May be repeated.",
        Panel.JOB,
        "NAME",
        choices=tracker_names,
        commands=JOB,
        label="Trackers",
        section="labels",
        helps=(("form", f"{', '.join(TRACKERS)}: they get a run for each trial."),),
    )
    """Experiment trackers to which the process that runs the job writes, with its own environment variables."""
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
    resolved_history: tuple[EarlierTrial, ...] = ()
    """Trials from outside the database, with the same model, batch and hardware, from which predictions learn."""

    def __post_init__(self) -> None:
        require_labels(self.name, self.tags, self.note)
        for name in ("model", "cluster", "space", "engine"):
            require_text(name, getattr(self, name))
        if isinstance(self.objective, str) and self.objective in list(Objective):
            object.__setattr__(self, "objective", Objective(self.objective))
        require_choice("objective", self.objective, tuple(Objective))
        limit: Any = self.memory_limit
        if isinstance(limit, str):
            object.__setattr__(self, "memory_limit", parse_size("memory_limit", limit))
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


FIELDS: tuple[str, ...] = tuple(item.name for item in dataclasses.fields(JobRequest) if not item.name.startswith("resolved_"))
"""The names of the fields that users can set, in display order."""


def declared_fields() -> Iterator[tuple[str, RequestField, Any, Any]]:
    """Name, declaration, type and default of every field that users can set, in order; None for a default factory."""
    for item in dataclasses.fields(JobRequest):
        if "request" in item.metadata:
            default = None if item.default is dataclasses.MISSING else item.default
            yield item.name, item.metadata["request"], item.type, default


def plain_type(kind: Any) -> type[Any]:
    """The type without None; str for an enumeration."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(member for member in get_args(kind) if member is not type(None))
    return str if isinstance(kind, type) and issubclass(kind, StrEnum) else kind
