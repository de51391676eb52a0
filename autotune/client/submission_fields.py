"""The fields of a submission. Written by `python -m autotune.request.submission_types`; do not edit."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

KnobValue = bool | int | float | str


class SubmissionFields(TypedDict, total=False):
    """What a job may cost and how it searches. What is left out, or None, has the default of `autotune sweep`."""

    command: Mapping[str, Any] | None
    """Your own training script: everything after --."""
    cluster: str | None
    """local, ray, a preset as NAME:NODES, or a TOML file."""
    ranks: int | None
    """Ranks of a trial."""
    space: str | None
    """zero, zero-buckets, 3d, parallel, full, or a TOML file."""
    pins: Mapping[str, KnobValue | Sequence[KnobValue]] | None
    """Pin a knob to a value, or to several (KNOB=A,B). May be repeated."""
    simple: str | None
    """Search only what this framework's export says without loss: deepspeed, torchtitan, megatron, …"""
    objective: str | None
    """throughput, memory or pareto."""
    strategy: str | None
    """guided, tpe, random, grid, tpe-predicted, gp, nsga2, smac, deepspeed, paddle, expert."""
    seed: int | None
    """Of weights, data and strategy."""
    trials: int | None
    """Search trials at most."""
    max_seconds: float | None
    """Start no search trial after so many seconds."""
    device_hours: float | None
    """Start no search trial after so many hours times ranks."""
    run_device_hours: float | None
    """Device-hours of the run that is tuned for: stop when a trial costs more than it is expected to save of them."""
    stop_margin: float | None
    """Stop when it is 95 % sure that nothing untried is faster by more than this share."""
    trial_timeout: float | None
    """Seconds after which a trial is killed."""
    global_batch_size: int | None
    """Samples in an optimizer step, over all ranks."""
    sequence_length: int | None
    """Tokens in a sample."""
    training_steps: int | None
    """Optimizer steps of the run, over which schedules of the data are weighed."""
    document_lengths: Sequence[int] | None
    """Tokens of each document of a sample of your data, with commas, or a file of them."""
    lr: float | None
    """Learning rate of your run, for trials and exported files."""
    weight_decay: float | None
    """Weight decay of your run, likewise."""
    clip: float | None
    """Bound of the gradient norm, likewise; 0: none."""
    optimizer: str | None
    """adamw, sgd, lamb, muon, adamw8bit, onebit_adam; likewise."""
    memory_limit: int | str | None
    """Bytes a rank may allocate: 2000000000, 2GB or 1.5GiB."""
    headroom: float | None
    """Share of the limit that the winner leaves free."""
    baseline: Mapping[str, KnobValue] | None
    """JSON of your present knobs: becomes trial 0."""
    failures: Mapping[str, Mapping[str, Any]] | None
    """TOML of what failures mean, beside our own rows or instead of them."""
    engine: str | None
    """native, ddp, fsdp2, deepspeed, or command (after --)."""
    runner: str | None
    """ray or local."""
    confirm_repeats: int | None
    """Measure finalists again, at most 3 N times in all; 0: never."""
    control_every: int | None
    """Search trials after which the baseline is measured again; 0: never."""
    allow_unstable: bool | None
    """Let a trial win whose measurement did not settle."""
    racing: bool | None
    """End a trial as soon as it can no longer be the fastest."""
    environment_settings: Sequence[str] | None
    """NAME=VALUE pairs tried on the best layout, in processes of their own; at most 4, or standard. May be repeated."""
    name: str | None
    """What the job is called."""
    tags: Sequence[str] | None
    """A word to find the job by. May be repeated."""
    note: str | None
    """What is to be known about the job."""
    priority: int
    """Higher ones go first; between -100 and 100."""
