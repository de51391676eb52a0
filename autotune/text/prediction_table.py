"""The printed prediction for a configuration."""

from rich.table import Table

from autotune.prediction.planning.conditional import ConditionalEstimate
from autotune.prediction.planning.estimate import PointEstimate, RankEstimate, StepEstimate
from autotune.prediction.planning.question import Question
from autotune.text.console import Console
from autotune.text.rows import bytes_text
from search_spaces.knob_values import value_text
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.quantities import number_text
from search_spaces.trial_config import TrialConfig

BAR = 24
"""Characters of a full bar."""
SPENT_ON = {
    "compute": "forward and backward",
    "tensor": "links inside layers",
    "pipeline": "idle, boundaries",
    "data": "exposed traffic",
    "optimizer": "update on device",
    "offload": "update on host",
}


def print_estimate(question: Question, answer: ConditionalEstimate, console: Console, stages: bool) -> None:
    """Print what was assumed, the step time by activity and the memory by content, each with its band."""
    estimate = answer.estimate

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, soft_wrap=True)

    for line in answer.conditions.lines():
        say(line)
    say(asked_text(question))
    say("  " + config_text(question, estimate.config))
    step, rate = estimate.step_seconds, estimate.samples_per_second
    say(f"\nstep {seconds_text(step.mean)}   nine times in ten {seconds_text(step.low)} to {seconds_text(step.high)}", "bold")
    if estimate.doubts:
        kind = "the interval is wide until a trial narrows it" if estimate.is_modelled else "not modelled"
        say(f"  {kind}: {'; '.join(estimate.doubts)}", "" if estimate.is_modelled else "yellow")
    console.print(_time_table(estimate))
    share = "" if estimate.mfu is None else f", MFU {estimate.mfu:.1%}"
    work = (
        "FLOPs unknown" if estimate.tflops_per_device is None else f"{estimate.tflops_per_device:.3g} TFLOP/s a device{share}"
    )
    tokens = "" if estimate.tokens_per_second is None else f"{estimate.tokens_per_second:,.0f} tokens/s, "
    say(f"  {number_text(rate.mean)} samples/s [{number_text(rate.low)}, {number_text(rate.high)}], {tokens}{work}")
    peak, fullest = estimate.peak_memory_bytes, estimate.fullest
    rank_text = ""
    if len(estimate.ranks) > 1:
        rank_text = f" on pipeline rank {fullest.pipeline_rank} ({fullest.layers} layers), the fullest"
    band = f"{bytes_text(peak.low)} to {bytes_text(peak.high)}"
    say(f"\nmemory {bytes_text(peak.mean)} a rank{rank_text}   nine times in ten {band}", "bold")
    console.print(_memory_table(estimate, fullest))
    say(
        "  " + " ".join(filter(None, (fit_text(estimate), answer.condition))),
        "" if estimate.fit_probability >= 0.5 else "yellow",
    )
    for point in estimate.schedule:
        say("  " + point_text(point))
    if estimate.host_memory_bytes:
        host = question.cluster.host_memory_bytes
        say(f"  and {bytes_text(estimate.host_memory_bytes)} of the {bytes_text(host)} of a node's main memory")
    say(f"\npredicted by {question.calibration_source}", "dim")
    if stages:
        say("\nmemory of each pipeline rank", "bold")
        console.print(_stage_table(estimate))


def point_text(point: PointEstimate) -> str:
    """A point of the data schedule, in one line."""
    tokens = f"{point.kept} of {point.length}" if point.kept < point.length else f"{point.length}"
    return (
        f"{point.weight:.0%} of the run's steps as with {tokens} tokens: {seconds_text(point.step_seconds)}, "
        f"{bytes_text(point.peak_memory_bytes)}"
    )


def asked_text(question: Question) -> str:
    """The subject of the prediction, in one line."""
    model, cluster, count = question.model, question.cluster, question.cluster.world_size
    adapters = trained_text(model)
    samples = "samples as its factory makes them" if isinstance(model, FactoryModel) else f"{question.sequence_length} tokens"
    return (
        f"{model.name} ({model.parameter_count:,} parameters{adapters}) on {cluster.name}: {count} "
        f"rank{'s' if count > 1 else ''} on {cluster.device.name}, {question.engine} engine, global batch "
        f"{question.global_batch_size} of {samples}"
    )


def trained_text(model: ModelSpec | FactoryModel) -> str:
    """Which parameters are trained, if not all are."""
    if isinstance(model, FactoryModel):
        frozen = model.frozen_parameter_count
        return f", {model.parameter_count - frozen:,} of them trained" if frozen else ""
    return f", LoRA of rank {model.lora_rank}" if model.lora_rank else ""


def config_text(question: Question, config: TrialConfig) -> str:
    """The knobs that are not defaults, always `zero_stage` and `micro_batch_size`, and the quantities derived from them."""
    defaults, world = TrialConfig().every_value(), question.cluster.world_size
    shown = [
        f"{name}={value_text(value)}"
        for name, value in config.values().items()
        if name in ("zero_stage", "micro_batch_size") or value != defaults[name]
    ]
    data, batches = config.data_parallel_size(world), config.gradient_accumulation_steps(question.global_batch_size, world)
    return f"{' '.join(shown)}  ({data} data-parallel, {batches} micro-batch{'es' if batches > 1 else ''} a step)"


def seconds_text(seconds: float) -> str:
    """`12.3 s`, `12.3 ms`."""
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    if not seconds:
        return "-"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def bar_text(share: float, width: int = BAR) -> str:
    """A bar of blocks, with a resolution of an eighth of a block."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def fit_text(estimate: StepEstimate) -> str:
    """The probability that memory suffices, in words near the limits."""
    chance = estimate.fit_probability
    limit = bytes_text(estimate.memory_limit_bytes)
    probability = (
        "more than 99 %" if chance > 0.99 else "less than 1 %" if chance < 0.01 else f"{chance:.0%}".replace("%", " %")
    )
    return f"fits into {limit} with a probability of {probability}"


def _time_table(estimate: StepEstimate) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, min_width=11)
    table.add_column(justify="right", no_wrap=True, min_width=8)
    table.add_column(justify="right", no_wrap=True, min_width=6)
    table.add_column(no_wrap=True, max_width=BAR, overflow="crop")
    table.add_column(style="dim")
    whole = estimate.step_seconds.mean
    for name, seconds in estimate.breakdown_seconds.items():
        share = seconds / whole
        if seconds:
            table.add_row(f"  {name}", seconds_text(seconds), f"{share:.1%}", bar_text(share), SPENT_ON.get(name, ""))
    return table


def _memory_table(estimate: StepEstimate, fullest: RankEstimate) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, max_width=BAR, overflow="crop")
    limit = estimate.memory_limit_bytes
    for tag, size in fullest.by_tag.items():
        if size:
            table.add_row(f"  {tag}", bytes_text(size), f"{size / limit:.1%}", bar_text(size / limit))
    free = limit - fullest.total
    table.add_row("  free" if free >= 0 else "  too much", bytes_text(abs(free)), f"{abs(free) / limit:.1%}", "", style="dim")
    return table


def _stage_table(estimate: StepEstimate) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("  rank", "layers", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, max_width=BAR, overflow="crop")
    for rank in estimate.ranks:
        share = rank.total / estimate.memory_limit_bytes
        table.add_row(str(rank.pipeline_rank), str(rank.layers), bytes_text(rank.total), bar_text(share))
    return table
