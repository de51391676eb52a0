"""Requests to a runner and their results: plain data that crosses process boundaries."""

import math
from dataclasses import dataclass, field

from search_spaces.failure import FailureRow
from search_spaces.models.model import FactoryModel, Model
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig

COMPARABLE = "comparable"
"""Key of a result's `environment` that states how far its figures are comparable with others; absent: unknown."""

REFERENCE_STEPS = 3
"""Number of first steps whose losses are compared with the job's reference."""

TRACE_FILE = "rank-{rank}.json.gz"
"""Name of a rank's trace in `TrialRequest.trace_path`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its 95 % interval, in the unit of the field that contains it."""

    mean: float
    low: float
    high: float

    @property
    def log_deviation(self) -> float | None:
        """Standard deviation of the logarithm; None: the bounds are not positive and finite."""
        return math.log(self.high / self.low) / (2 * 1.96) if 0 < self.low <= self.high < math.inf else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The training data and hyperparameters of a job: the same samples in the same order for every configuration."""

    global_batch_size: int
    """Samples in one optimizer step, over all ranks."""
    sequence_length: int
    """Tokens in a sample."""
    seed: int = 0
    data_path: str | None = None
    """A file or folder of text; None: the sources of the installed Python standard library."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    gradient_clipping: float = 1.0
    """Bound of the global gradient norm; 0: no clipping."""
    nvme_path: str | None = None
    """Folder on a fast local file system of every node for offloading to files; None: no offloading to files."""
    training_steps: int | None = None
    """Optimizer steps of the run that is tuned for, over which data schedules are averaged; None: not stated, so schedules are
    not possible."""
    schedule_step: int | None = None
    """A fixed step of that run at which data schedules are evaluated, to measure one point of them; None: they advance with the
    steps."""
    document_lengths: tuple[int, ...] = ()
    """Lengths in tokens of a sample of the data's documents, none longer than `sequence_length`: a row of a step holds one
    document or, packed, several. Empty: every sample has the full length."""

    @property
    def packs(self) -> bool:
        """Whether any two documents fit into one row, so that packing has an effect."""
        lengths = sorted(self.document_lengths)[:2]
        return len(lengths) == 2 and sum(lengths) <= self.sequence_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Duration and precision of a trial's measurement."""

    warmup_updates: int = 2
    """Updates before step times are evaluated (at least 2)."""
    max_warmup_steps: int = 20
    """Steps after which warm-up ends even if a trend remains (the result then reports it)."""
    min_steps: int = 5
    max_steps: int = 200
    max_seconds: float = 5.0
    """Seconds of timed steps after which the measurement ends with its current interval."""
    target_relative_half_width: float = 0.02
    """The measurement ends when the half-width of the 95 % interval of the mean step time is below this share of the mean."""
    measure_memory: bool = True
    """Whether allocator events are recorded on an extra untimed step."""
    most_micro_batches: int | None = None
    """If a step has more micro-batches, steps with two smaller counts are timed, and the full step's time is extrapolated
    (`search_spaces.training.fewer`); memory, losses and FLOPs are still from full steps. None: only full steps are timed."""
    most_layers: int | None = None
    """If a model has more layers, two shallower models are run instead, and time and memory are extrapolated
    (`search_spaces.training.fewer`). None: the full model is run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """One attempt that a runner is to execute."""

    attempt: str
    """The attempt's token, which identifies its results."""
    model: Model
    config: TrialConfig
    workload: Workload
    world_size: int
    engine: str = "native"
    fidelity: Fidelity = field(default_factory=Fidelity)
    memory_limit_bytes: int | None = None
    """Bytes per rank, including memory outside torch's allocator, above which the trial is INFEASIBLE; None: the device's
    memory."""
    timeout_seconds: float = 300.0
    """Time limit in seconds from start of build to end of measurement, after which every rank is killed."""
    reference_losses: tuple[float, ...] = ()
    """Losses of the first steps on the same seed and data; empty: this trial sets them."""
    plain_steps: int = 0
    """First steps of a user's module to run without an engine before the trial, whose losses it must have; 0: none."""
    peak_flops_per_device: float | None = None
    """Dense FLOP/s of a device at the trial's precision, for MFU; None: not stated."""
    device_kind: str | None = None
    """Required device kind (`DeviceSpec.kind`: cpu or cuda): ranks without such a device fail. None: any."""
    expected_step_seconds: float | None = None
    """Predicted duration of a full optimizer step, corrected by the job's trials: distinguishes a hang from a slow step before
    the trial has completed a step. None: no prediction."""
    rate_to_beat: float | None = None
    """Samples/s of the incumbent: a trial that can no longer reach it ends as PRUNED. None: it is measured completely."""
    race_spread: float = 0.0
    """Relative standard deviation of the ratio of two equally fast configurations, beyond the trial's own error: the variation
    between repeats, and the error of `rate_to_beat`."""
    race_degrees_of_freedom: int = 5
    """Degrees of freedom of `race_spread`."""
    race_warmup_steps: int | None = 0
    """Steps before which the trial loses no race: a script's rivals may need as many as its baseline did before they are fast.
    None: it does not race."""
    command_has_reported: bool = False
    """Whether another trial of the job's command reported steps."""
    excluded_nodes: tuple[str, ...] = ()
    """Names of nodes that this attempt must not run on."""
    node_kinds: tuple[tuple[str, int], ...] = ()
    """If nodes differ: for each group in rank order, its Ray resource and its number of ranks."""
    fresh_processes: bool = False
    """Whether new rank processes are started for it, so that earlier trials cannot affect a decisive measurement."""
    failures: tuple[FailureRow, ...] = ()
    """The user's rows of the failure table, which extend or replace the built-in rows."""
    files: tuple[tuple[str, str], ...] = ()
    """Name and content of the files for a user's command, rendered from `config` (`placeholders.FILES`)."""
    checkpoint_path: str | None = None
    """A folder of every node in which the states are saved and loaded once, after the measurement; None: they are not."""
    trace_path: str | None = None
    """A folder of every node in which each rank writes the profiler's trace of one more step; None: they write none."""
    profiled_steps: int = 0
    """Steps that the profiler divides into parts (`RankMeasurement.profile`): after the timed ones, of a script before."""


UNDIVIDED = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "compile_blocks": False}
"""Knobs on which random numbers and states of a forward depend, with the values of the module itself."""


def reference_name(model: Model, config: TrialConfig) -> str:
    """The name of a job's reference losses for a configuration. Of a user's module the samples depend on the micro-batch size,
    and the loss may; all configurations of our own model have the same samples and loss."""
    if not isinstance(model, FactoryModel):
        return ""
    layout = (
        [getattr(config, name) for name in UNDIVIDED] if any(trait.depends_on_layout for trait in model.loss_traits) else []
    )
    return " ".join(map(str, (config.micro_batch_size, config.precision, *layout)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTimes:
    """A checkpoint that a trial has saved and loaded."""

    bytes: int
    """Every state once, of all ranks together."""
    save_seconds: float
    """Until every rank had written and synchronized its part."""
    load_seconds: float
    """Until every rank had its states again. The files may still have been in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCount:
    """One type of collective in one optimizer step of one rank."""

    operation: str
    """all_gather, reduce_scatter, all_reduce, broadcast, …"""
    mesh_dimension: str
    """The group that it runs over: data, tensor, pipeline, context, or control."""
    count: int
    bytes: int
    """Bytes of the full (unsharded) message, summed over the count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """What a profiled step of a rank consists of."""

    seconds: dict[str, float]
    """Seconds by part, which sum to the step's: compute, communication that nothing overlaps, data (waiting for a loader) and
    host."""
    calls: dict[str, tuple[float, float]]
    """Part, operator or kernel or collective, and sizes of its inputs -> calls in a step, and mean seconds of a call without
    those inside of it. No host code is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurement:
    """Measurements of one rank."""

    rank: int
    host: str
    """Host name of its machine."""
    peak_memory_bytes: int
    """Highest sum of live allocations in a step, from the allocator's events."""
    memory_by_tag: dict[str, int]
    """The same peak by tag: parameters, gradients, optimizer_state, activations, buffers; sums to it exactly."""
    tag_peak_bytes: dict[str, int]
    """Highest value of each tag in the step; these do not sum to the peak."""
    rss_peak_bytes: int
    """Highest resident set of the process in the measured steps."""
    cpu_seconds_per_step: float
    """CPU seconds of the process, all threads, in one timed step."""
    collectives: tuple[CollectiveCount, ...]
    device_seconds_per_step: float | None = None
    """CUDA: seconds between events at the start and the end of a timed step."""
    reserved_bytes: int | None = None
    """CUDA: the caching allocator's peak reservation in this trial."""
    non_torch_bytes: int | None = None
    """CUDA: device memory in use outside torch's allocator after a step (NCCL's buffers, libraries, the context); None if
    ranks share a device."""
    allocation_retries: int | None = None
    """CUDA: cache flushes in the measured window; a single one makes the trial unstable."""
    throttled: bool | None = None
    """CUDA: whether the device lowered its clocks for heat or power while steps were timed."""
    sm_clock_mhz: float | None = None
    """CUDA: the mean clock while steps were timed."""
    host_memory_bytes: int | None = None
    """Peak bytes in the host pool for offloading; None: not measured."""
    node: str | None = None
    """Name of its node, as the runner reports it: several may be on one host. None: the host is the node."""
    data_wait_seconds: float | None = None
    """Seconds of a step in which a user's script waited for its next batch; None: not reported."""
    compute_seconds_per_step: float | None = None
    """Seconds of a timed step in which this rank did not wait for others; None: not measured."""
    wait_seconds_per_step: float | None = None
    """Seconds of a timed step in which it waited in collectives; None: not measured."""
    compute_relative_error: float | None = None
    """Standard error of `compute_seconds_per_step`, as a share of it; None: unknown, so it is not used."""
    profile: StepProfile | None = None
    """None: no step was profiled."""

    @property
    def needed_memory_bytes(self) -> int:
        """Required device memory: the peak plus memory outside the allocator."""
        return self.peak_memory_bytes + (self.non_torch_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """Outcome and measurements of an attempt. Without measurements, fields other than the outcome are empty."""

    attempt: str
    outcome: Outcome
    message: str = ""
    """The reason for this outcome, in one line."""
    rule: str | None = None
    """INVALID: the rule that refuses."""
    traceback: str | None = None
    """The traceback of the first rank that failed."""
    cause: str | None = None
    """Name of the row of the failure table that determined the outcome; None: no row was needed."""
    node: str | None = None
    """Name of the node of the rank that failed first."""
    losses: tuple[float, ...] = ()
    """Losses of the first steps, for the job's reference."""
    gradient_norms: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    """Wall seconds of each timed step on the slowest rank; if extrapolated, one value for each pair of timed steps."""
    samples_per_second: Interval | None = None
    """The interval covers this trial's own steps and the spread between repeats. PRUNED: `high` is the upper bound that did
    not suffice."""
    within_relative_error: float = 0.0
    """Standard error of the mean step time within this trial, as a share of it."""
    warmup_steps: int | None = None
    """Steps before the timed ones; of a script, only those up to the last slow one of its start. None: unknown, or they did not
    settle."""
    peak_memory_bytes: int | None = None
    """The highest peak of any rank."""
    ranks: tuple[RankMeasurement, ...] = ()
    tflops_per_device: float | None = None
    """Only the model's useful work, without recomputation, by `flops_convention`; None: unknown."""
    mfu: float | None = None
    """`tflops_per_device` as a share of the peak; None: one of them is unknown."""
    hardware_tflops_per_device: float | None = None
    """All executed work, including recomputation; None: not counted."""
    hfu: float | None = None
    """`hardware_tflops_per_device` as a share of the peak."""
    flops_convention: str = "palm-appendix-b"
    extrapolated: tuple[str, ...] = ()
    """Counts from which figures are extrapolated: "micro_batches" (only time) or "layers" (time and memory). Empty: everything
    was measured."""
    unstable: bool = False
    """Allocation retries in the window, or a trend that did not settle: cannot win unless allowed."""
    slow_nodes: tuple[str, ...] = ()
    """Names of nodes that slowed this trial: ranks on them computed longer than ranks with the same shapes elsewhere."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds by phase on rank 0: setup, reference (of a user's module), build, warmup (without compile), compile
    (torch.compile, if used), memory, measure, close."""
    warm: bool = False
    """Whether the ranks had run a trial before."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions and hardware as observed by the ranks."""
    checkpoint: CheckpointTimes | None = None
    """None: not requested, or the engine does not save this configuration's states."""

    @property
    def needed_memory_bytes(self) -> int:
        """Memory of the fullest rank that counts against a limit, including memory outside the allocator; 0: not measured."""
        return max((rank.needed_memory_bytes for rank in self.ranks), default=self.peak_memory_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A progress report of a running trial."""

    attempt: str
    phase: str
    step: int
    samples_per_second: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines:
    """A part of the output of a rank in a running trial; it may begin and end within a line."""

    attempt: str
    rank: int
    text: str
    left_out: int = 0
    """Bytes omitted immediately before it, because of too much output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """An event of a node that a runner observed."""

    node: str
    kind: str
    """lost, added, slow, quarantined, shut (only for this job)."""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierTrial:
    """The measured rate of a configuration with the job's model and batch."""

    config: TrialConfig
    samples_per_second: float
    noise: float
    """Standard deviation of the logarithm of the rate."""
    peak_memory_bytes: int | None = None
    """Of the fullest rank; None: not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRank:
    """The predicted optimizer step of one rank. Names and meanings are those of `RankMeasurement`."""

    rank: int
    coordinates: dict[str, int]
    """Its place along each mesh dimension."""
    stages: tuple[int, ...]
    """The pipeline stages that it holds."""
    micro_batches: int
    """Micro-batches of a step."""
    peak_memory_bytes: int
    memory_by_tag: dict[str, int]
    """The peak, split by tag; the sum is exactly the peak."""
    tag_peak_bytes: dict[str, int]
    """Each tag's own highest value in the step."""
    host_memory_bytes: int
    """Host memory that offloading uses."""
    flops_per_step: int | None
    """Executed by this rank, including recomputation; None: the formula of an operator failed."""
    collectives: tuple[CollectiveCount, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The prediction for a configuration: one rank for each pipeline position. All other ranks are copies of these."""

    ranks: tuple[DryRank, ...]
    backend: str
    """The backend whose own memory is counted: gloo or nccl."""
    seconds: float
    """Duration of the dry run."""

    @property
    def peak_memory_bytes(self) -> int:
        """The largest peak of any rank."""
        return max(rank.peak_memory_bytes for rank in self.ranks)
