"""What is asked of a runner and what comes back: plain data that crosses process borders."""

from dataclasses import dataclass, field

from search_spaces.failure import FailureRow
from search_spaces.models.model import Model
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig

COMPARABLE = "comparable"
"""Key of a result's `environment` that tells how far its figures can be held against others'; absent: no bounds are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its 95 % interval; the unit is that of the field that holds it."""

    mean: float
    low: float
    high: float

    def overlaps(self, other: "Interval") -> bool:
        """Whether the two intervals have a point in common."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What every trial of a job trains on: the same samples in the same order, whatever the configuration."""

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
    """The folder, on a fast local file system of every node, for what is offloaded to files; None: nothing can be."""
    training_steps: int | None = None
    """Optimizer steps of the run that is tuned for, over which schedules of the data are weighed; None: not stated, so that
    nothing can be scheduled."""
    schedule_step: int | None = None
    """The step of that run at which schedules of the data stand throughout, as where one point of them is measured; None: they
    go on with the steps."""
    document_lengths: tuple[int, ...] = ()
    """Tokens of each document of a sample of the data, none longer than `sequence_length`: a row of a step holds one of them
    or, packed, several. Empty: every sample is whole."""

    @property
    def packs(self) -> bool:
        """Whether any two documents fit into one row, so that packing changes anything."""
        lengths = sorted(self.document_lengths)[:2]
        return len(lengths) == 2 and sum(lengths) <= self.sequence_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """How long and how exactly a trial is measured."""

    warmup_updates: int = 2
    """Updates before the step time is looked at at all (at least 2)."""
    max_warmup_steps: int = 20
    """Steps after which warm-up ends even where a trend is left (the result then says so)."""
    min_steps: int = 5
    max_steps: int = 200
    max_seconds: float = 5.0
    """Seconds of timed steps after which the measurement ends with the interval that it has."""
    target_relative_half_width: float = 0.02
    """The measurement ends when the half-width of the 95 % interval of the mean step time is below this share of it."""
    measure_memory: bool = True
    """Whether the allocator's events are recorded on an extra untimed step."""
    most_micro_batches: int | None = None
    """Where a step has more micro-batches, steps of two smaller counts are timed, and the full one's time is extrapolated
    (`search_spaces.training.fewer`); memory, losses and FLOPs are still those of full steps. None: only full steps are timed."""
    most_layers: int | None = None
    """Where a model has more layers, two shallower ones are run in its place, and its time and memory are extrapolated
    (`search_spaces.training.fewer`). None: the whole model is run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """One attempt that a runner is asked to make."""

    attempt: str
    """The attempt's token: results are accepted under it."""
    model: Model
    config: TrialConfig
    workload: Workload
    world_size: int
    engine: str = "native"
    fidelity: Fidelity = field(default_factory=Fidelity)
    memory_limit_bytes: int | None = None
    """Bytes per rank, what is outside of torch's allocator counted, beyond which the trial is INFEASIBLE; None: what the device
    has."""
    timeout_seconds: float = 300.0
    """Seconds from start of build to end of measurement after which every rank is killed."""
    reference_losses: tuple[float, ...] = ()
    """Losses of the first steps on the same seed and data; empty: this trial sets them."""
    peak_flops_per_device: float | None = None
    """Dense FLOP/s of a device at the trial's precision, for MFU; None: not stated."""
    device_kind: str | None = None
    """Kind of device that it must run on (`DeviceSpec.kind`: cpu or cuda): ranks without one fail. None: whatever there is."""
    expected_step_seconds: float | None = None
    """Of a full optimizer step, as predicted and corrected by the job's trials: what a hang is told from a slow step by before
    the trial has made a step of its own. None: nothing is predicted."""
    rate_to_beat: float | None = None
    """Samples/s of the best so far: a trial that cannot reach it any more ends as PRUNED. None: it is measured to its end."""
    race_spread: float = 0.0
    """Relative standard deviation of the ratio of two configurations that are as fast, beyond the trial's own error: what
    repeats of each differ by, and the error of `rate_to_beat`."""
    race_degrees_of_freedom: int = 5
    """How many independent differences `race_spread` rests on."""
    excluded_nodes: tuple[str, ...] = ()
    """Names of nodes that this attempt must not run on."""
    node_kinds: tuple[tuple[str, int], ...] = ()
    """Where nodes differ: the Ray resource that tells the nodes of the first ranks, and how many ranks these are; and so on."""
    fresh_processes: bool = False
    """Whether the ranks' processes are started anew for it: what decides must not rest on what earlier trials left."""
    failures: tuple[FailureRow, ...] = ()
    """A user's rows of the failure table: beside those that come with the package, or in their places."""
    files: tuple[tuple[str, str], ...] = ()
    """Name and content of the files that a user's command reads, rendered from `config` (`placeholders.FILES`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCount:
    """One kind of collective in one optimizer step of one rank."""

    operation: str
    """all_gather, reduce_scatter, all_reduce, broadcast, …"""
    mesh_dimension: str
    """The group that it runs over: data, tensor, pipeline, context, or control."""
    count: int
    bytes: int
    """Bytes of the full (unsharded) message, summed over the count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurement:
    """What one rank measured."""

    rank: int
    host: str
    """What its machine calls itself."""
    peak_memory_bytes: int
    """Highest sum of live allocations in a step, by the allocator's own events."""
    memory_by_tag: dict[str, int]
    """The same peak split: parameters, gradients, optimizer_state, activations, buffers; sums to it exactly."""
    tag_peak_bytes: dict[str, int]
    """Each tag's own highest value in the step; these do not sum to the peak."""
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
    """CUDA: device memory in use outside torch's allocator after a step (NCCL's buffers, libraries, the context); None where
    ranks share a device."""
    allocation_retries: int | None = None
    """CUDA: cache flushes in the measured window; any makes the trial unstable."""
    throttled: bool | None = None
    """CUDA: whether the device lowered its clocks for heat or power while steps were timed."""
    sm_clock_mhz: float | None = None
    """CUDA: the mean clock while steps were timed."""
    host_memory_bytes: int | None = None
    """Peak bytes in the host pool that offloading fills; None: not measured."""
    node: str | None = None
    """Name of its node, as the runner tells it: several may be on one host. None: the host is the node."""
    data_wait_seconds: float | None = None
    """Seconds of a step in which a user's script waited for its next batch; None: it does not tell."""
    compute_seconds_per_step: float | None = None
    """Seconds of a timed step in which this rank waited for no other; None: not measured."""
    wait_seconds_per_step: float | None = None
    """Seconds of a timed step in which it waited in collectives; None: not measured."""
    compute_relative_error: float | None = None
    """Standard error of `compute_seconds_per_step`, as a share of it; None: not known, so that nothing is concluded from it."""

    @property
    def needed_memory_bytes(self) -> int:
        """What its device must have: the peak, and what is outside of the allocator."""
        return self.peak_memory_bytes + (self.non_torch_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """How an attempt ended and what it measured. Fields beyond the outcome are empty where nothing was measured."""

    attempt: str
    outcome: Outcome
    message: str = ""
    """One line: why this outcome."""
    rule: str | None = None
    """INVALID: the rule that refuses."""
    traceback: str | None = None
    """The real traceback of the first rank that failed."""
    cause: str | None = None
    """Name of the row of the failure table that told the outcome; None: it needed no telling."""
    node: str | None = None
    """Name of the node of the rank that failed first."""
    losses: tuple[float, ...] = ()
    """Losses of the first steps, for the job's reference."""
    gradient_norms: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    """Each timed step, the slowest rank's wall seconds; of extrapolated ones, what each pair of timed steps gives."""
    samples_per_second: Interval | None = None
    """The interval covers this trial's own steps and the spread between repeats. PRUNED: `high` is the bound that was not
    enough."""
    within_relative_error: float = 0.0
    """Standard error of the mean step time within this trial, as a share of it."""
    peak_memory_bytes: int | None = None
    """The highest rank's peak."""
    ranks: tuple[RankMeasurement, ...] = ()
    tflops_per_device: float | None = None
    """Useful work of the model alone, what is recomputed not counted; by `flops_convention`; None: not known."""
    mfu: float | None = None
    """`tflops_per_device` as a share of the peak; None: one of them is not known."""
    hardware_tflops_per_device: float | None = None
    """All work that is really done, what checkpointing computes again included; None: not counted."""
    hfu: float | None = None
    """`hardware_tflops_per_device` as a share of the peak."""
    flops_convention: str = "palm-appendix-b"
    extrapolated: tuple[str, ...] = ()
    """What the figures are not measured in full of: "micro_batches" (time alone) or "layers" (time and memory). Empty:
    measured in full."""
    unstable: bool = False
    """Allocation retries in the window, or a trend that did not settle: cannot win unless asked."""
    slow_nodes: tuple[str, ...] = ()
    """Names of nodes that held this trial back: ranks on them computed longer than ranks with the same shapes on others."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds by phase on rank 0: setup, build, warmup (without compile), compile (torch.compile, where it was used),
    memory, measure, close."""
    warm: bool = False
    """Whether the ranks had run a trial before."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions and hardware as the ranks saw them."""

    @property
    def needed_memory_bytes(self) -> int:
        """What counts against a limit: of the fullest rank, with what is outside of the allocator; 0: not measured."""
        return max((rank.needed_memory_bytes for rank in self.ranks), default=self.peak_memory_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A sign of life from a running trial."""

    attempt: str
    phase: str
    step: int
    samples_per_second: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines:
    """A part of what a rank of a running trial printed; it may begin and end within a line."""

    attempt: str
    rank: int
    text: str
    left_out: int = 0
    """Bytes just before it that were left out: more was printed than is passed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """What a runner learnt of a node."""

    node: str
    kind: str
    """lost, added, slow, quarantined, shut (for this job alone)."""
    message: str = ""
