"""`autotune plan`: the predicted best configurations of a space, and why."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from autotune.cli.fields import read_fields
from autotune.cli.predict import asked_question, print_export, question_document
from autotune.cli.status import Status, write_document
from autotune.goodput.choice import RunChoice
from autotune.goodput.terms import parse_terms
from autotune.prediction.planning.buckets import TRAFFIC, has_traffic
from autotune.prediction.planning.conditional import plan_conditions, planned
from autotune.prediction.planning.largest import Dimension, Largest, largest
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.prediction.planning.plan import SHARE, PlanObjective, PlanOptions, RankedPlan, RankedPlans
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.ties import PLAIN, certain_gain
from autotune.question.question import PlanningFields
from autotune.text.console import Console
from autotune.text.prediction_table import asked_text, bar_text, seconds_text
from autotune.text.rows import bytes_text
from search_spaces.knob_values import value_text
from search_spaces.models.model import ModelSpec
from search_spaces.quantities import number_text
from search_spaces.trial_config import TrialConfig


def plan_command(
    options: Mapping[str, Any], database: str | None, *, ties: bool, json: bool, export: str | None = None
) -> Status:
    """Resolve the question, rank the configurations and print them; with `ties` also those that tie with each plan.

    `export`: print the first plan in this format instead.
    """
    asked = PlanningFields(**read_fields(options))
    plan_options = PlanOptions(
        objective=asked.objective,  # type: ignore[arg-type]  # PlanOptions checks the name
        top=asked.top,
        fit_probability=PROBABILITY if asked.fit_probability is None else asked.fit_probability,
        share=asked.share,
        price=asked.price,
        rate=asked.rate,
        goodput=parse_terms(asked.goodput) if asked.goodput else None,
    )
    question = asked_question(asked, database)
    biggest = largest(question, asked.max, plan_options.fit_probability) if asked.max else None
    question = biggest.question if biggest else question
    asked_length = question.sequence_length
    question, plans = planned(question, plan_options)
    conditions = plan_conditions(question, plans, plan_options)
    if export is not None:
        return print_export({**question_document(question, conditions), **plans.document()}, export)
    if json:
        document: dict[str, Any] = {
            **question_document(question, conditions),
            "space": question.space,
            "objective": plan_options.objective.value,
        }
        if biggest:
            document["max"] = {"dimension": biggest.dimension.value, "value": biggest.value, "next": biggest.next}
        write_document(document | plans.document())
        return Status.OK
    console = Console()
    if biggest:
        print_largest(biggest, console)
    if question.sequence_length != asked_length:
        console.print(
            f"nothing fits with samples of {asked_length:,} tokens, which nobody stated: planned for the longest shorter "
            f"alternative that fits, {question.sequence_length:,} (--sequence-length)",
            style="bold", highlight=False, soft_wrap=True,
        )  # fmt: skip
    for line in conditions.lines():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    print_plans(question, plans, plan_options, console, ties)
    return Status.OK


TIME_BAR, MEMORY_BAR = 24, 12
"""Width of the bars in characters."""
LETTERS = {
    "compute": ("c", "green"), "tensor": ("t", "blue"), "pipeline": ("p", "yellow"), "data": ("d", "magenta"),
    "optimizer": ("o", "cyan"), "offload": ("h", "red"),
}  # fmt: skip
"""Part of a step -> its letter in a bar."""


def print_plans(question: Question, plans: RankedPlans, options: PlanOptions, console: Console, ties: bool = False) -> None:
    """Print all plans, with `ties` also the configurations that tie with each, and the reasons for the first."""

    def print_line(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, soft_wrap=True)

    print_line(asked_text(question))
    print_line(
        f"space {question.space}: {plans.configurations:,} configurations and {plans.bucket_settings:,} bucket settings "
        f"in {plans.seconds:.1f} s; at least {plans.fitting:,} fit with a probability of {_percent(options.fit_probability)} "
        f"or more"
    )
    if len(plans.world_sizes) > 1:
        print_line(f"on {', '.join(map(str, plans.world_sizes))} devices")
    print_line(f"ranked by {_ranked_by(options)}")
    if plans.resolution:
        print_line(
            f"configurations whose predictions differ by at most {_percent(round(plans.resolution, 3))} tie, because smaller "
            f"differences are not reliable; the fastest and the simplest are shown{'' if ties else ' (--ties: show all)'}"
        )
    if options.objective is PlanObjective.THROUGHPUT and (note := _unusual_note(plans, question)):
        print_line(note)
    print_line("")
    # Maximum alternatives printed per knob.
    alternatives = 4
    for number, ranked in enumerate(plans.plans, 1):
        console.print(_figures(number, ranked, question), soft_wrap=not console.is_terminal)
        print_line("    " + _config_text(ranked, ranked.estimate.config, question), "dim" if number > 1 else "")
        for position, choice in enumerate(ranked.goodput[: alternatives if number == 1 else 1]):
            print_line(f"    {'' if position == 0 else 'or '}{goodput_text(choice)}", "dim" if number > 1 or position else "")
        if (simplest := ranked.simplest) is not None:
            rate = question.global_batch_size / simplest.seconds
            slower = simplest.seconds / ranked.estimate.step_seconds.mean - 1
            print_line(
                f"    simplest tie, {slower:.1%} slower: {number_text(rate)} samples/s  "
                f"{_config_text(ranked, simplest.config, question)}"
            )
        for tie in ranked.ties if ties else ():
            rate = question.global_batch_size / tie.seconds
            print_line(f"      = {number_text(rate)} samples/s  {_config_text(ranked, tie.config, question)}", "dim")
        if ties and ranked.tied > len(ranked.ties):
            print_line(f"      and {ranked.tied - len(ranked.ties):,} more", "dim")
    print_line(
        "  time: " + ", ".join(f"{letter} {name}" for name, (letter, _) in LETTERS.items()) + "; brackets: 90 % intervals",
        "dim",
    )
    best = plans.plans[0]
    if best.reasons:
        print_line(
            "\nreasons for the first plan: effect of each value, and best plan with another value (other knobs re-optimised)",
            "bold",
        )
        for reason in best.reasons:
            print_line("  " + reason.text(best.goal, alternatives))


def _unusual_note(plans: RankedPlans, question: Question) -> str:
    """The gain of values that published recipes rarely use, if predictions for one machine may be off by as much."""
    first, *other_plans = plans.plans
    names = [name for name, plain in PLAIN.items() if getattr(first.estimate.config, name) not in plain]
    if not names:
        return ""
    rivals = [
        (f"plan {number}", plan.estimate.config, plan.estimate.step_seconds.mean) for number, plan in enumerate(other_plans, 2)
    ]
    if first.simplest is not None:
        rivals.insert(0, ("the simplest that ties with it", first.simplest.config, first.simplest.seconds))
    for title, config, seconds in rivals:
        slower = seconds / first.estimate.step_seconds.mean - 1
        plain = all(getattr(config, name) in PLAIN[name] for name in names)
        if plain and slower <= certain_gain(question.rates.time_spread):
            return (
                f"the first plan has values that published recipes rarely use ({', '.join(names)}); {title} has none of "
                f"them and is {_percent(round(slower, 3))} slower, within the error of predictions for one machine"
            )
    return ""


def print_largest(result: Largest, console: Console) -> None:
    """Print the largest size that fits."""
    model = result.question.model
    titles = {
        Dimension.SEQUENCE_LENGTH: f"longest sequence: {result.value:,} tokens",
        Dimension.MICRO_BATCH_SIZE: f"largest micro-batch: {result.value:,} samples",
    }
    if isinstance(model, ModelSpec):
        titles[Dimension.MODEL] = (
            f"largest model: {result.value / 1e9:,.4g} billion parameters ({model.num_layers} layers, hidden "
            f"{model.hidden_size}, {model.num_attention_heads} heads, MLP {model.ffn_hidden_size})"
        )
    size = (
        f"{result.next / 1e9:,.4g} billion" if result.next and result.dimension is Dimension.MODEL else f"{result.next or 0:,}"
    )
    console.print(
        f"{titles[result.dimension]}{f'; {size} does not fit' if result.next else ''}",
        style="bold",
        highlight=False,
        soft_wrap=True,
    )


def goodput_text(choice: RunChoice) -> str:
    """How a layout is run on nodes that fail, in one line."""
    end, course = choice.end, choice.end.course
    low, high = (end.quantile(share) / 86400 for share in (0.05, 0.95))
    steps = choice.interval_steps
    saved = "no checkpoints" if steps is None else f"{choice.run.checkpoint.kind} checkpoint every {steps:,} steps"
    cost = "" if choice.price is None else f", {choice.price * end.mean / 3600 * choice.devices:,.4g} in all"
    return (
        f"{choice.run.recovery}, {saved} ({seconds_text(course.interval)}), {choice.run.spares} spares: "
        f"{course.effective:.2%} effective, {choice.tokens_kept_per_second:,.4g} tokens kept/s, "
        f"{course.interruptions_per_second * end.mean:,.0f} interruptions until {choice.tokens:.3g} tokens in "
        f"{end.mean / 86400:.3g} days [{low:.3g}, {high:.3g}]{cost}"
    )


def time_bar(breakdown: dict[str, float], width: int = TIME_BAR) -> Text:
    """A bar of letters for the parts of a step; shares are rounded so that the width is exact."""
    whole, bar, done, drawn = sum(breakdown.values()), Text(), 0.0, 0
    for name, seconds in breakdown.items():
        letter, style = LETTERS.get(name, ("?", ""))
        done += seconds
        end = round(done / whole * width)
        bar.append(letter * (end - drawn), style=style)
        drawn = end
    return bar


def _figures(number: int, plan: RankedPlan, question: Question) -> Text:
    estimate = plan.estimate
    rate, peak = estimate.samples_per_second, estimate.peak_memory_bytes.mean
    step = seconds_text(estimate.step_seconds.mean)
    line = Text(
        f"{number:>2}  {number_text(rate.mean)} samples/s [{number_text(rate.low)}, {number_text(rate.high)}]  {step}  "
    )
    line.append_text(time_bar(estimate.breakdown_seconds))
    share = peak / estimate.memory_limit_bytes
    line.append(f"  {bytes_text(peak):>8} {bar_text(share, MEMORY_BAR):<{MEMORY_BAR}} {share:.0%}")
    if estimate.mfu is not None:
        line.append(f"  MFU {estimate.mfu:.1%}")
    if plan.cluster.world_size != question.cluster.world_size:
        line.append(f"  {plan.cluster.world_size} device{'s' if plan.cluster.world_size > 1 else ''}")
    if plan.cost_per_million_tokens is not None:
        line.append(f"  {plan.cost_per_million_tokens:.3g} per million tokens")
    if plan.tied:
        line.append(f"  ties with {plan.tied:,}", style="dim")
    if number == 1:
        line.stylize("bold")
    return line


def _config_text(plan: RankedPlan, config: TrialConfig, question: Question) -> str:
    """All knobs that differ from the device's defaults."""
    changed = config.differences(plan.base)
    world = plan.cluster.world_size
    always = ("zero_stage", "micro_batch_size") if config.zero_ranks(world) > 1 else ("micro_batch_size",)
    names = (name for name in dict.fromkeys((*always, *changed)) if name not in TRAFFIC or has_traffic(config, world))
    shown = [f"{name}={value_text(getattr(config, name))}" for name in names]
    data, count = config.data_parallel_size(world), config.gradient_accumulation_steps(question.global_batch_size, world)
    return f"{' '.join(shown)}  ({data} data-parallel, {count} micro-batch{'es' if count > 1 else ''})"


def _ranked_by(options: PlanOptions) -> str:
    reached = "" if options.rate is None else f" among those that reach {options.rate:g} samples/s"
    match options.objective:
        case PlanObjective.THROUGHPUT:
            return f"samples/s{reached}"
        case PlanObjective.MEMORY:
            share = SHARE if options.share is None else options.share
            return f"peak memory, lowest first, among those with {_percent(share)} of the best rate or more{reached}"
        case PlanObjective.COST:
            return f"price per token{reached}; a device costs {options.price:g} an hour"
        case PlanObjective.DEVICES:
            return f"devices, fewest first, then samples/s{reached}"
        case PlanObjective.GOODPUT:
            return f"tokens kept per device-hour on nodes that fail{reached}; spares count as devices"


def _percent(share: float) -> str:
    return f"{share * 100:g} %"
