"""The fields of a job that users can set. A light module, for the command line's helps and for the client: types that take
time to load are those of `JobRequest`."""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from autotune.question.field import EVERY, JOB, SWEEP, Panel, redeclared, request_field
from autotune.question.question import QuestionFields
from autotune.request.component_names import DEFAULT_STRATEGY, TRACKERS, strategy_names, tracker_names
from search_spaces.knob import Value
from search_spaces.optimizers import OPTIMIZERS

RUNNERS = ("ray", "local")


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
class JobFields(QuestionFields):
    """What only a job has, beside the question: the budget, the search, its trials and labels."""

    cluster: str = redeclared(QuestionFields, "cluster", "local")
    objective: Objective = redeclared(QuestionFields, "objective", Objective.THROUGHPUT)
    global_batch_size: int = redeclared(QuestionFields, "global_batch_size", 8)
    """Resolving the request replaces a value that nobody stated, here and in the next field."""
    sequence_length: int = redeclared(QuestionFields, "sequence_length", 128)
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
        f"{', '.join(strategy_names())}.",
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
        commands=(*JOB, "challenge"),
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
        None,
        "A file or folder of text to train on.",
        Panel.TRAINING,
        "PATH",
        commands=(*SWEEP, "profile"),
        option=Path,
        service=False,
    )
    baseline: dict[str, Value] | None = request_field(
        None, "JSON of your present knobs, measured as trial 0.", Panel.SEARCH, "FILE", commands=JOB, option=Path
    )
    """Knob -> value of the user's present configuration; None: the defaults at the lowest ZeRO stage that fits."""
    failures: tuple[Any, ...] = request_field(
        (),
        "TOML file of failure-table rows that extend or replace the built-in ones.",
        Panel.TRIALS,
        "FILE",
        option=Path,
        commands=JOB,
        shown_default="the built-in rows",
    )
    """Rows of the failure table that extend or replace the built-in rows."""
    runner: str = request_field(
        "ray",
        "ray or local.",
        Panel.HARDWARE,
        "NAME",
        commands=(*EVERY, "challenge"),
        choices=lambda: RUNNERS,
        label="Runner",
        section="machine",
        helps=(("form", ""),),
    )
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
    loss_depends_on_batch: bool = request_field(
        False,
        "The loss of your module is meant to depend on micro_batch_size, as with in-batch negatives: no note about it.",
        Panel.TRIALS,
        commands=JOB,
        label="The loss depends on the micro-batch size",
        section="search",
        helps=(("form", "As with in-batch negatives; no note about it."),),
    )
    """Whether the user states that the module's loss depends on the division into micro-batches (`LossTrait`)."""
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
    environment_settings: tuple[str, ...] = request_field(
        (),
        "Environment variables (NAME=VALUE pairs) to try on the best layout; at most 4, or standard. May be repeated.",
        Panel.SEARCH,
        "SETTING",
        commands=JOB,
        label="Environments",
        section="search",
        helps=(
            ("form", "Environment variables to try on the best layout: NAME=VALUE pairs, a | between settings, or standard."),
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
        "", "Note about the job.", Panel.JOB, "TEXT", shown_default=" ", label="Note", section="labels", helps=(("form", ""),)
    )
    """The user's note about the job."""
    team: str = request_field(
        "",
        "Team that sees the job on a service.",
        Panel.JOB,
        "NAME",
        shown_default=" ",
        label="Team",
        section="labels",
        helps=(("form", "One of your teams: its members see the job."),),
    )
    """The team that sees the job, beside its submitter; empty: none."""
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
    command: Any = request_field(None, "Your own training script: everything after --.", Panel.SCRIPT, commands=())
    """The user's own training script (engine `command`); None: another engine trains `model`."""
    python_path: tuple[str, ...] = request_field(
        (), "Folders that ranks prepend to `sys.path`.", Panel.TRAINING, commands=(), service=False
    )
    """Folders that the ranks prepend to `sys.path` before they import a factory."""
    fidelity: Any = request_field(None, "Duration and precision of measurements.", Panel.TRIALS, commands=(), service=False)
    stop_at_first: bool = request_field(
        False, "End the search at the first trial that may win.", Panel.SEARCH, commands=(), service=False
    )
    """Whether the search ends at the first trial that may win."""


FIELDS: tuple[str, ...] = tuple(item.name for item in dataclasses.fields(JobFields))
"""The names of the fields that users can set, in display order."""
