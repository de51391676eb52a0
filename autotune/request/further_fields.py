"""More fields of `autotune.tune`. Written by `python -m autotune.request.generated`; do not edit."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class FurtherFields(TypedDict, total=False):
    """Settings of a sweep beside the parameters of `autotune.tune`. Fields that are omitted or None have their defaults."""

    command: Mapping[str, Any] | None
    """Your own training script: everything after --."""
    simple: str | None
    """Search only what this framework's export expresses without loss: deepspeed, torchtitan, megatron, …"""
    goodput: Sequence[str] | None
    """Objective goodput: failures=llama3, spares=0,2, tokens=1e12, … May be repeated."""
    checkpoint_path: str | None
    """Objective goodput: a folder where each trial saves and loads its states once, timed."""
    device_hours: float | None
    """Hours times ranks after which no search trial starts."""
    run_device_hours: float | None
    """Device-hours of your run: stop when a trial costs more than it is expected to save in the run."""
    stop_margin: float | None
    """Stop when, with 95 % confidence, no untried configuration is faster by more than this share."""
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
    headroom: float | None
    """Share of the memory limit that the winner must leave free."""
    nvme_path: str | None
    """Folder on a fast local disk for states offloaded to files (nvme)."""
    engine: str | None
    """native, ddp, fsdp2, deepspeed, or command (after --)."""
    confirm_repeats: int | None
    """Repeat the measurement of finalists, at most 3 N times in total; 0: never."""
    control_every: int | None
    """Search trials between repeated measurements of the baseline; 0: never."""
    fidelity: Mapping[str, Any] | None
    """Duration and precision of measurements."""
    allow_unstable: bool | None
    """Allow trials with unstable measurements to win."""
    racing: bool | None
    """Stop a trial as soon as it can no longer be the fastest."""
    stop_at_first: bool | None
    """End the search at the first trial that may win."""
    environment_settings: Sequence[str] | None
    """Environment variables (NAME=VALUE pairs) to try on the best layout; at most 4, or standard. May be repeated."""
    tune_on: str | None
    """Run trials on N nodes with M devices of the cluster. Requires --answer-for."""
    answer_for: str | None
    """Extrapolate the answer to N nodes with M devices by predictions."""
    trackers: Sequence[str] | None
    """Experiment tracker that gets a run for each trial: wandb, mlflow, tensorboard. May be repeated."""
