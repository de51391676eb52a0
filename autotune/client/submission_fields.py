"""The fields of a submission. Written by `python -m autotune.request.generated`; do not edit."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

KnobValue = bool | int | float | str


class SubmissionFields(TypedDict, total=False):
    """Budget and search settings of a job. Fields that are omitted or None have the default of `autotune sweep`."""

    command: Mapping[str, Any] | None
    """Your own training script: everything after --."""
    cluster: str | None
    """local, ray, a preset as NAME:NODES, or a TOML file."""
    ranks: int | None
    """Ranks per trial."""
    space: str | None
    """zero, zero-buckets, 3d, parallel, full, or a TOML file."""
    pins: Mapping[str, KnobValue | Sequence[KnobValue]] | None
    """Pin a knob to one value, or to several (KNOB=A,B). May be repeated."""
    simple: str | None
    """Search only what this framework's export expresses without loss: deepspeed, torchtitan, megatron, …"""
    objective: str | None
    """throughput, memory, pareto or goodput."""
    goodput: Sequence[str] | None
    """Objective goodput: failures=llama3, spares=0,2, tokens=1e12, … May be repeated."""
    strategy: str | None
    """guided, tpe, random, grid, gp, nsga2."""
    seed: int | None
    """Random seed of weights, data and strategy."""
    trials: int | None
    """Maximum number of search trials."""
    max_seconds: float | None
    """Seconds after which no search trial starts."""
    device_hours: float | None
    """Hours times ranks after which no search trial starts."""
    run_device_hours: float | None
    """Device-hours of your run: stop when a trial costs more than it is expected to save in the run."""
    stop_margin: float | None
    """Stop when, with 95 % confidence, no untried configuration is faster by more than this share."""
    trial_timeout: float | None
    """Seconds after which a trial is killed."""
    global_batch_size: int | None
    """Samples per optimizer step, over all ranks."""
    sequence_length: int | None
    """Tokens per sample."""
    training_steps: int | None
    """Optimizer steps of your run, over which data schedules are averaged."""
    document_lengths: Sequence[int] | None
    """Lengths in tokens of a sample of your documents, separated by commas, or a file of them."""
    expert_loads: Sequence[Sequence[float]] | None
    """Relative numbers of tokens that choose each expert, separated by commas, or a file of them with a line for each layer
    with experts."""
    knowledge: Mapping[str, Any] | str | None
    """Measurements to learn from: their settings and measurements."""
    lr: float | None
    """Learning rate of your run, for trials and exported files."""
    weight_decay: float | None
    """Weight decay of your run, for trials and exported files."""
    clip: float | None
    """Maximum gradient norm, for trials and exported files; 0: no clipping."""
    optimizer: str | None
    """adamw, sgd, lamb, muon, adamw8bit, onebit_adam; for trials and exported files."""
    memory_limit: int | str | None
    """Memory limit per rank: 2000000000, 2GB or 1.5GiB."""
    headroom: float | None
    """Share of the memory limit that the winner must leave free."""
    baseline: Mapping[str, KnobValue] | None
    """JSON of your present knobs, measured as trial 0."""
    failures: Mapping[str, Mapping[str, Any]] | None
    """TOML file of failure-table rows that extend or replace the built-in ones."""
    engine: str | None
    """native, ddp, fsdp2, deepspeed, or command (after --)."""
    runner: str | None
    """ray or local."""
    confirm_repeats: int | None
    """Repeat the measurement of finalists, at most 3 N times in total; 0: never."""
    control_every: int | None
    """Search trials between repeated measurements of the baseline; 0: never."""
    allow_unstable: bool | None
    """Allow trials with unstable measurements to win."""
    racing: bool | None
    """Stop a trial as soon as it can no longer be the fastest."""
    environment_settings: Sequence[str] | None
    """Environment variables (NAME=VALUE pairs) to try on the best layout; at most 4, or standard. May be repeated."""
    name: str | None
    """Name of the job."""
    tags: Sequence[str] | None
    """Tag for finding the job. May be repeated."""
    note: str | None
    """Note about the job."""
    trackers: Sequence[str] | None
    """Experiment tracker that gets a run for each trial: wandb, mlflow, tensorboard. May be repeated."""
    priority: int
    """Jobs with higher priority run first; between -100 and 100."""
