"""A tuning request: the same fields on the command line, in Python, in a TOML file and over HTTP."""

import dataclasses
import difflib
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Union, get_args, get_origin

from autotune.errors import JobNotResumableError, RequestError
from autotune.request.cluster_shape import parse_shape
from autotune.request.command_field import with_command
from autotune.request.earlier_trial import EarlierTrial
from autotune.request.failures_field import with_failures
from autotune.request.field import JOB, SWEEP, Panel, RequestField, request_field
from autotune.request.field_names import OLD_OPTION_NAMES, with_present_names
from autotune.request.labels import require_labels
from autotune.request.sizes import parse_size
from autotune.request.strategy_names import FORESEEING, STRATEGIES, strategy_names
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.environment import MOST_SETTINGS, STANDARD, environment_text
from search_spaces.errors import KnobValueError, SearchSpaceError
from search_spaces.failure import FailureRow
from search_spaces.knob import Value
from search_spaces.models.command import CommandModel
from search_spaces.models.model import Model
from search_spaces.optimizers import OPTIMIZERS
from search_spaces.plain import from_plain, to_plain
from search_spaces.training.documents import documents_problem
from search_spaces.training.fewer import FEWEST
from search_spaces.trial import Fidelity, Workload
from search_spaces.trial_config import TrialConfig
from storage.records import JobRecord

SIMPLE_TARGETS = (
    "deepspeed", "accelerate-fsdp", "accelerate-deepspeed", "transformers", "torchtitan", "megatron", "lightning", "torch",
)  # fmt: skip
"""Frameworks whose exports a search can be restricted to."""
RUNNERS = ("ray", "local")
ENVIRONMENT_SETTINGS = "environment_settings"
FORESEEN_FIELDS = ("run_device_hours", "stop_margin")
"""Fields that need a strategy which predicts the gain of further trials."""
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

    model: str = field(
        metadata={
            "request": RequestField(
                help="A preset, a Hugging Face config.json, hf:CONFIG, or module:factory.", panel=Panel.BASIC, unit="MODEL"
            )
        }
    )
    """A preset's name, the path of a Hugging Face config.json, `module:factory`, or the name of what `command` runs."""
    command: CommandModel | None = request_field(
        None, "Your own training script: everything after --.", Panel.SCRIPT, commands=()
    )
    """The user's own training script (engine `command`); None: an engine of ours trains `model`."""
    cluster: str = request_field("local", "local, ray, a preset as NAME:NODES, or a TOML file.", Panel.BASIC, "NAME")
    ranks: int | None = request_field(
        None,
        "Ranks of a trial.",
        Panel.BASIC,
        "N",
        least=1,
        most=2**20,
        commands=JOB,
        shown_default="every GPU; on CPUs 2",
        helps=(
            ("form", "Left out: every device of the cluster."),
            ("sweep", "Ranks of a trial; several for a series."),
        ),
        label="Ranks",
        section="machine",
    )
    """Ranks of a trial; None: every device of the cluster (`local` without GPUs: 2, or 1 on one core)."""
    space: str = request_field("zero", "zero, zero-buckets, 3d, parallel, full, or a TOML file.", Panel.BASIC, "NAME")
    """A preset's name or the path of a TOML file."""
    pins: dict[str, Any] = request_field(
        dict, "Pin a knob to a value, or to several (KNOB=A,B). May be repeated.", Panel.BASIC, "KNOB=VALUE"
    )
    """Knob -> the only value, or the values, that are tried; text is read as on the command line."""
    simple: str | None = request_field(
        None,
        "Search only what this framework's export says without loss: deepspeed, torchtitan, megatron, …",
        Panel.SEARCH,
        "TARGET",
        choices=lambda: SIMPLE_TARGETS,
    )
    """One of `SIMPLE_TARGETS`: only what its export says without loss is searched; None: all of the space."""
    objective: Objective = request_field(
        Objective.THROUGHPUT,
        "throughput, memory or pareto.",
        Panel.SEARCH,
        "NAME",
        commands=JOB,
        helps=(
            ("form", ""),
            ("sweep", "throughput, memory, pareto; of a series cost, devices, sequence, scale."),
        ),
        label="Objective",
        section="goal",
    )
    strategy: str = request_field(
        STRATEGIES[0],
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
        "Of weights, data and strategy.",
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
        "Search trials at most.",
        Panel.BASIC,
        "N",
        least=1,
        most=1_000_000,
        label="Trials",
        section="goal",
        helps=(("form", "Search trials that may start on a device."),),
    )
    """Search trials that may start on a device; refused candidates, retries, confirmations and controls are not."""
    max_seconds: float | None = request_field(
        None,
        "Start no search trial after so many seconds.",
        Panel.BUDGET,
        "SECONDS",
        above=0,
        most=1e9,
        commands=JOB,
        label="Time",
        section="goal",
        measure="seconds",
        helps=(("form", "After that no search trial starts. Left out: no such budget."),),
    )
    """Seconds of active time after which no search trial starts; None: no such budget."""
    device_hours: float | None = request_field(
        None,
        "Start no search trial after so many hours times ranks.",
        Panel.BUDGET,
        "HOURS",
        above=0,
        most=1e9,
        commands=JOB,
        label="Device-hours",
        section="goal",
        measure="hours",
        helps=(("form", "Time times ranks. Left out: no such budget."),),
    )
    """Active hours times ranks after which no search trial starts; None: no such budget."""
    run_device_hours: float | None = request_field(
        None,
        "Device-hours of the run that is tuned for: stop when a trial costs more than it is expected to save of them.",
        Panel.BUDGET,
        "HOURS",
        above=0,
        most=1e9,
        commands=JOB,
        label="Run that is tuned for",
        section="goal",
        measure="device-hours",
        helps=(("form", "Ends when a trial costs more than it is expected to save of them."),),
    )
    """Device-hours of the run that is tuned for: the search ends when the next trial is expected to save less of them than it
    costs; None: it does not matter. Only with a strategy that predicts."""
    stop_margin: float | None = request_field(
        None,
        "Stop when it is 95 % sure that nothing untried is faster by more than this share.",
        Panel.BUDGET,
        "SHARE",
        above=0,
        most=10,
        commands=JOB,
        label="Stop when sure",
        section="goal",
        helps=(("form", "Ends when it is 95 % sure that nothing untried is faster by more than this."),),
    )
    """The search ends when it is 95 % sure that nothing untried is faster than the best by more than this share; None: it goes
    on. Only with a strategy that predicts."""
    trial_timeout: float = request_field(
        300.0,
        "Seconds after which a trial is killed.",
        Panel.TRIALS,
        "SECONDS",
        above=0,
        most=1e9,
        commands=JOB,
        label="Longest trial",
        section="search",
        measure="seconds",
        helps=(("form", ""),),
    )
    """Seconds from start of build to end of measurement of one trial."""
    global_batch_size: int = request_field(
        8,
        "Samples in an optimizer step, over all ranks.",
        Panel.BASIC,
        "N",
        least=1,
        most=2**32,
        label="Global batch size",
        section="workload",
        measure="samples",
        helps=(("form", "In one optimizer step, over all ranks."),),
    )
    """Samples in one optimizer step, over all ranks."""
    sequence_length: int = request_field(
        128,
        "Tokens in a sample.",
        Panel.BASIC,
        "N",
        least=1,
        most=2**32,
        label="Sequence length",
        section="workload",
        measure="tokens",
        helps=(("form", ""),),
    )
    """Tokens in a sample."""
    training_steps: int | None = request_field(
        None,
        "Optimizer steps of the run, over which schedules of the data are weighed.",
        Panel.TRAINING,
        "N",
        least=1,
        most=2**53,
        commands=JOB,
    )
    """Optimizer steps of the run that is tuned for, over which schedules of the data are weighed; None: nothing can be
    scheduled."""
    document_lengths: tuple[int, ...] = request_field(
        (),
        "Tokens of each document of a sample of your data, with commas, or a file of them.",
        Panel.TRAINING,
        "LENGTHS",
        commands=JOB,
        shown_default="samples are whole",
    )
    """Tokens of each document of a sample of the user's data, at most 1,000 and none longer than `sequence_length`; empty:
    every sample is whole."""
    lr: float | None = request_field(
        None,
        "Learning rate of your run, for trials and exported files.",
        Panel.TRAINING,
        "RATE",
        above=0,
        most=1e9,
        label="Learning rate",
        section="workload",
        helps=(("form", "Of your run: trials train with it, and exported files state it."),),
    )
    """Learning rate of the user's run. This field and the next three: trials train with what is stated, and exported files
    state it. None: trials take the default of `Workload`, and exported files state none."""
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
        "Bound of the gradient norm, for trials and exported files; 0: none.",
        Panel.TRAINING,
        "NORM",
        least=0,
        most=1e9,
        label="Gradient clipping",
        section="workload",
        helps=(("form", "Bound of the norm; 0: none."),),
    )
    """Bound of the global gradient norm; 0: no clipping."""
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
    """One of `search_spaces.optimizers.OPTIMIZERS`: the knob's only value. Of a script, which makes its own, it is exported."""
    memory_limit: int | None = request_field(
        None,
        "Bytes a rank may allocate: 2000000000, 2GB or 1.5GiB.",
        Panel.BASIC,
        "BYTES",
        least=1,
        most=2**53,
        label="Memory limit",
        section="machine",
        helps=(("form", "Of a rank. Left out: what the device has."),),
    )
    """Allocator bytes per rank beyond which a trial is INFEASIBLE, or text with a unit (40GB); None: what the device has."""
    headroom: float = request_field(
        0.05,
        "Share of the limit that the winner leaves free.",
        Panel.SEARCH,
        "SHARE",
        least=0,
        below=1,
        commands=JOB,
        label="Headroom",
        section="machine",
        helps=(("form", "Of the limit: what the winner leaves free."),),
    )
    """Share of the memory limit that the winner leaves free."""
    data_path: str | None = request_field(
        None, "A file or folder of text to train on.", Panel.TRAINING, "PATH", commands=SWEEP, service=False
    )
    nvme_path: str | None = request_field(
        None,
        "A folder on a fast local disk, for states offloaded to files (nvme).",
        Panel.HARDWARE,
        "PATH",
        commands=SWEEP,
        service=False,
    )
    """A folder on a fast local file system of every node, for states that are offloaded to files; None: no configuration
    offloads to files."""
    baseline: dict[str, Value] | None = request_field(
        None, "JSON of your present knobs: becomes trial 0.", Panel.SEARCH, "FILE", commands=JOB
    )
    """Knob -> value of the user's present configuration; None: the defaults at the lowest ZeRO stage that fits."""
    failures: tuple[FailureRow, ...] = request_field(
        (),
        "TOML of what failures mean, beside our own rows or instead of them.",
        Panel.TRIALS,
        "FILE",
        commands=JOB,
        shown_default="our own rows",
    )
    """Rows of the failure table: beside those that come with the package, or in their places."""
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
        "Ray to run on, HOST:PORT or auto. Default: AUTOTUNE_RAY_ADDRESS, RAY_ADDRESS, else one is started here.",
        Panel.HARDWARE,
        "ADDRESS",
        service=False,
        helps=(("submit", "Ray that it is to run on, HOST:PORT. [default: the worker's own]"),),
    )
    """The Ray cluster that trials run on: HOST:PORT, or `auto` for the one that this machine belongs to; None: a Ray on this
    machine, which is started for the job, or, where `cluster` is `ray`, `auto`."""
    confirm_repeats: int = request_field(
        3,
        "Measure finalists again, at most 3 N times in all; 0: never.",
        Panel.TRIALS,
        "N",
        least=0,
        most=1000,
        label="Confirmation",
        section="search",
        measure="rounds of 3",
        helps=(("form", "Measurements of the finalists, at most."),),
    )
    """A third of the measurements that the confirmation may take; 0: the search's own measurements decide."""
    control_every: int = request_field(
        10,
        "Search trials after which the baseline is measured again; 0: never.",
        Panel.TRIALS,
        "N",
        least=0,
        most=1_000_000,
        commands=JOB,
        label="Control after",
        section="search",
        measure="trials",
        helps=(("form", "The baseline is measured again, to see whether the machine drifts; 0: never."),),
    )
    """Search trials after which the baseline is measured again, to see whether the machine drifts; 0: never."""
    python_path: tuple[str, ...] = request_field(
        (), "Folders that ranks put first on `sys.path`.", Panel.TRAINING, commands=(), service=False
    )
    """Folders that the ranks put first on `sys.path` before they import a factory."""
    fidelity: Fidelity = request_field(
        Fidelity, "How long and how exactly trials are measured.", Panel.TRIALS, commands=(), service=False
    )
    allow_unstable: bool = request_field(
        False,
        "Let a trial win whose measurement did not settle.",
        Panel.TRIALS,
        commands=JOB,
        label="Let trials win that did not settle",
        section="search",
        helps=(("form", ""),),
    )
    """Whether a trial whose measurement did not settle may win."""
    racing: bool = request_field(
        True,
        "End a trial as soon as it can no longer be the fastest.",
        Panel.TRIALS,
        commands=JOB,
        shown_default="racing",
        label="End trials early that cannot win",
        section="search",
        helps=(("form", ""),),
    )
    """Whether a search trial ends as soon as it can no longer reach the best samples/s so far (PRUNED). With the
    objectives memory and pareto none does: a slower configuration may win, or be on the front."""
    stop_at_first: bool = request_field(
        False, "End the search at the first trial that may win.", Panel.SEARCH, commands=(), service=False
    )
    """Whether the search ends at the first trial that may win."""
    environment_settings: tuple[str, ...] = request_field(
        (),
        "NAME=VALUE pairs tried on the best layout, in processes of their own; at most 4, or standard. May be repeated.",
        Panel.SEARCH,
        "SETTING",
        commands=JOB,
        label="Environments",
        section="search",
        helps=(
            (
                "form",
                "Variables of the ranks' processes, tried on the best layout at last: NAME=VALUE pairs, a | between settings, or standard.",
            ),
        ),
    )
    """Variables of the ranks' processes, as NAME=VALUE pairs, that are tried on the layout which the search ends with: at most
    4, in processes started for each, out of `trials`; `standard` alone: those that fit the devices and nodes."""
    tune_on: str | None = request_field(
        None,
        "Trials take N nodes of M devices of the cluster. Belongs to --answer-for.",
        Panel.HARDWARE,
        "NxM",
        commands=SWEEP,
        service=False,
    )
    """NODESxDEVICES of `cluster` that a trial takes; None: all of it. Belongs to `answer_for`."""
    answer_for: str | None = request_field(
        None,
        "Answer for N nodes of M devices, extrapolated by predictions.",
        Panel.HARDWARE,
        "NxM",
        commands=SWEEP,
        service=False,
    )
    """NODESxDEVICES of `cluster` that the answer is for, extrapolated by predictions; None: what trials run on."""
    name: str = request_field(
        "",
        "What the job is called.",
        Panel.JOB,
        "TEXT",
        shown_default=" ",
        label="Name",
        section="labels",
        helps=(("form", "What the job is called."),),
    )
    """What the job is called; empty: it has no name beside its id."""
    tags: tuple[str, ...] = request_field(
        (),
        "A word to find the job by. May be repeated.",
        Panel.JOB,
        "WORD",
        label="Tags",
        section="labels",
        helps=(("form", "Words to find it by."),),
    )
    """Words to find the job by."""
    note: str = request_field(
        "",
        "What is to be known about the job.",
        Panel.JOB,
        "TEXT",
        shown_default=" ",
        label="Note",
        section="labels",
        helps=(("form", ""),),
    )
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
        self._require_text("model", "cluster", "space", "engine")
        if isinstance(self.objective, str) and self.objective in list(Objective):
            object.__setattr__(self, "objective", Objective(self.objective))
        self._require_choice("objective", tuple(Objective))
        limit: Any = self.memory_limit
        if isinstance(limit, str):
            object.__setattr__(self, "memory_limit", parse_size("memory_limit", limit))
        self._require_declared()
        self._require_reached()
        if self.nvme_path is not None:
            self._require_text("nvme_path")
        self._require_documents()
        self._require_prediction(*FORESEEN_FIELDS)
        self._require_fidelity()
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

    def _require_declared(self) -> None:
        """Every value that is not left out is within the bounds of its field's declaration."""
        for item in dataclasses.fields(self):
            declared: RequestField | None = item.metadata.get("request")
            value = getattr(self, item.name)
            if declared is None or (value is None and item.default is None):
                continue
            if declared.choices is not None:
                self._require_choice(item.name, declared.choices())
            elif item.type is bool:
                self._require(isinstance(value, bool), item.name, f"{value!r} is no switch", "give true or false")
            elif declared.above is not None:
                self._require_positive(item.name, _AMOUNTS.get(declared.unit))
            elif declared.least is not None and item.type in (int, int | None):
                self._require_whole(item.name, int(declared.least))
            elif declared.least is not None and declared.below is None:
                good = _is_number(value) and declared.least <= value < math.inf
                which = f"a number of {declared.least:g} or more"
                self._require(good, item.name, f"{value!r} is not {which}", f"give {which}")

    def _require_positive(self, name: str, what: str | None) -> None:
        value = getattr(self, name)
        remedy = "give a positive number" if what is None else f"give {what} above 0"
        good = _is_number(value) and value > 0 and (what is not None or value < math.inf)
        self._require(good, name, f"{value!r} is not a positive number", remedy)

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


_AMOUNTS = {"SECONDS": "seconds", "HOURS": "hours", "SHARE": "a share"}
"""Unit of a field -> what a remedy asks for."""
FIELDS: tuple[str, ...] = tuple(item.name for item in dataclasses.fields(JobRequest) if not item.name.startswith("resolved_"))
"""The names of the fields that people may give, in the order in which they are shown."""


def declared_fields() -> Iterator[tuple[str, RequestField, Any, Any]]:
    """Name, declaration, type and default of every field that people may give, in order; a default that is made is None."""
    for item in dataclasses.fields(JobRequest):
        if "request" in item.metadata:
            default = None if item.default is dataclasses.MISSING else item.default
            yield item.name, item.metadata["request"], item.type, default


def plain_type(kind: Any) -> type[Any]:
    """The type without None; of an enumeration text."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    return str if isinstance(kind, type) and issubclass(kind, StrEnum) else kind


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
