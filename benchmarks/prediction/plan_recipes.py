"""The first row of `autotune plan`, compared with published recipes for the same model, cluster and batch.

    python -m benchmarks.prediction.plan_recipes --markdown docs/results/plan-recipes.md

Nothing is run. Each recipe's layout is written in our knobs and predicted as by `autotune predict`; the sentences under each
table are generated from the same predictions.
"""

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import AutotuneError
from autotune.prediction.equations.step import Z90
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.prediction.planning.plan import PlanOptions, RankedPlan, RankedPlans, plan
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_of
from autotune.prediction.planning.reasons import ALIKE, PARTS
from benchmarks.common.written_page import judge, page_parser, table
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.errors import SearchSpaceError
from search_spaces.knob_values import value_text
from search_spaces.trial_config import TrialConfig

BATCH, TOKENS = 512, 8192
SLOW_NETWORK = 12.5e9
"""Bytes/s: 100 Gbit/s a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The layout of a framework's own recipe."""

    name: str
    source: str
    """Repository, path and commit."""
    states: str
    """The recipe's settings, in its own terms."""
    knobs: Mapping[str, Any]
    """The same settings as our knobs; a distributed optimizer shards like stage 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a cluster."""

    title: str
    model: str
    cluster: str
    recipes: tuple[Recipe, ...]
    inter_node_bandwidth: float | None = None
    """Bytes/s of a node; None: the preset's."""


NEMO, BRIDGE, TITAN = "NVIDIA/NeMo", "NVIDIA-NeMo/Megatron-Bridge", "pytorch/torchtitan"
EIGHT_BILLION = Recipe(
    name="Megatron-Bridge and NeMo, llama3_8b",
    source=f"{BRIDGE} `src/megatron/bridge/recipes/llama/llama3_8b.py` at 1c6b292f; {NEMO} "
    "`nemo/collections/llm/recipes/llama3_8b.py` at 00617962 (1 node of 8, 512 x 8192)",
    states="TP 1, PP 1, CP 2, micro-batch 1, distributed optimizer",
    knobs={"zero_stage": 1, "context_parallel_size": 2},
)
EIGHT_BILLION_TITAN = Recipe(
    name="torchtitan, llama3_8b",
    source=f"{TITAN} `torchtitan/models/llama3/train_configs/llama3_8b.toml` at 01424cb2 (written for 64 A100)",
    states="data_parallel_shard_degree -1, TP 1, PP 1, CP 1, batch 1, selective activation checkpointing",
    knobs={"zero_stage": 3, "activation_checkpointing": "selective"},
)
CASES = (
    Case(
        title="llama-3-8b on 8 H100", model="llama-3-8b", cluster="dgx-h100:1", recipes=(EIGHT_BILLION, EIGHT_BILLION_TITAN)
    ),
    Case(
        title="llama-3-70b on 16 nodes of 8 H100", model="llama-3-70b", cluster="dgx-h100:16",
        recipes=(
            Recipe(
                name="Megatron-Bridge and NeMo, llama3_70b",
                source=f"{BRIDGE} `src/megatron/bridge/recipes/llama/llama3_70b.py` at 203599bf; {NEMO} "
                "`nemo/collections/llm/recipes/llama3_70b.py` at 0189a3b3 (at least 4 nodes of 8, 512 x 8192)",
                states="TP 4 with sequence parallelism, PP 4, 5 virtual stages, CP 2, micro-batch 1, distributed optimizer",
                knobs={
                    "zero_stage": 1, "tensor_parallel_size": 4, "sequence_parallel": True, "pipeline_parallel_size": 4,
                    "virtual_stages": 5, "pipeline_schedule": "interleaved_1f1b", "context_parallel_size": 2,
                },
            ),
            Recipe(
                name="torchtitan, llama3_70b",
                source=f"{TITAN} `torchtitan/models/llama3/train_configs/llama3_70b.toml` at 038d5fd1 (written for 64 A100)",
                states="data_parallel_shard_degree -1, TP 8, PP 1, CP 1, local batch 8, full activation checkpointing",
                knobs={
                    "zero_stage": 3, "tensor_parallel_size": 8, "sequence_parallel": True, "micro_batch_size": 8,
                    "activation_checkpointing": "full",
                },
            ),
        ),
    ),
    Case(
        title="Mixtral 8x7B on 8 nodes of 8 H100", model="mixtral-8x7b", cluster="dgx-h100:8",
        recipes=(
            Recipe(
                name="NeMo, mixtral_8x7b",
                source=f"{NEMO} `nemo/collections/llm/recipes/mixtral_8x7b.py` at 0067c7b5 (8 nodes of 8, 512 x 8192)",
                states="TP 1, PP 4, 8 virtual stages, EP 8, micro-batch 1, distributed optimizer",
                knobs={
                    "zero_stage": 1, "pipeline_parallel_size": 4, "virtual_stages": 8, "pipeline_schedule": "interleaved_1f1b",
                    "expert_parallel_size": 8,
                },
            ),
        ),
    ),
    Case(
        title="llama-3-8b on 4 nodes of 8 A100-40GB, 100 Gbit/s a node", model="llama-3-8b", cluster="dgx-a100-40gb:4",
        inter_node_bandwidth=SLOW_NETWORK, recipes=(EIGHT_BILLION, EIGHT_BILLION_TITAN),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Predictions for a case."""

    case: Case
    question: Question
    plans: RankedPlans
    recipes: tuple[tuple[Recipe, StepEstimate | str], ...]
    """Recipe and prediction, or the reason why the native engine does not support the layout."""

    @property
    def first(self) -> RankedPlan:
        """The first row of the plan."""
        return self.plans.plans[0]


def question_of_case(case: Case) -> Question:
    """The question of `autotune plan`, without a database."""
    cluster: ClusterSpec = cluster_of(case.cluster, None, None)
    if case.inter_node_bandwidth is not None:
        cluster = dataclasses.replace(cluster, inter_node_bandwidth=case.inter_node_bandwidth)
    model = model_of(case.model, None, None, None)
    return question_of(model, cluster, global_batch_size=BATCH, sequence_length=TOKENS)


def look(case: Case) -> Found:
    """Plan the case, and predict its recipes."""
    question = question_of_case(case)
    recipes: list[tuple[Recipe, StepEstimate | str]] = []
    for recipe in case.recipes:
        pinned = dataclasses.replace(question, pins=recipe.knobs)
        try:
            recipes.append((recipe, estimates(question, [pinned.config()])[0]))
        except (AutotuneError, SearchSpaceError) as error:
            recipes.append((recipe, str(error)))
    return Found(case=case, question=question, plans=plan(question, PlanOptions(top=5)), recipes=tuple(recipes))


def problems_of(found: Found) -> list[str]:
    """Problem: another value of a knob is faster than the first row's."""
    faster = [
        reason.knob
        for reason in found.first.reasons
        if any(item.change is not None and item.change < -ALIKE for item in reason.alternatives)
    ]
    return [f"{found.case.title}: other values of {', '.join(faster)} are faster than the first row's"] if faster else []


def section(found: Found) -> list[str]:
    """Lines of markdown for a case."""
    first, plans = found.first, found.plans
    rows = [_row("`plan`, first row", first.estimate, first.base)]
    rows += [_row(recipe.name, item, first.base) for recipe, item in found.recipes if isinstance(item, StepEstimate)]
    lines = [f"## {found.case.title}", ""]
    lines += table(["", "layout", "samples/s [90 %]", "step", "memory a rank", "probably fits"], rows)
    lines += ["", f"{plans.configurations:,} configurations; {first.tied} more tie with the first row.", ""]
    lines += [f"- {recipe.name}: {recipe.states}. Source: {recipe.source}." for recipe, _ in found.recipes]
    lines += ["", "Why the first row, from `plan`:", ""]
    lines += [f"- {reason.text(first.goal, 3)}" for reason in first.reasons if reason.cause and reason.cause.text(reason.knob)]
    for recipe, prediction in found.recipes:
        lines += ["", _difference(recipe, prediction, found)]
    return [*lines, ""]


def _row(name: str, prediction: StepEstimate, base: TrialConfig) -> list[str]:
    rate = prediction.samples_per_second
    knobs = {"zero_stage": prediction.config.zero_stage, "micro_batch_size": prediction.config.micro_batch_size}
    knobs |= {name: value for name, value in prediction.config.differences(base).items() if not name.endswith("bucket_size")}
    return [
        name, " ".join(f"{knob}={value_text(value)}" for knob, value in knobs.items()),
        f"{rate.mean:.4g} [{rate.low:.3g}, {rate.high:.3g}]", f"{prediction.step_seconds.mean:.3g} s",
        f"{prediction.peak_memory_bytes.mean / 2**30:.3g} of {prediction.memory_limit_bytes / 2**30:.3g} GiB",
        f"{100 * prediction.fit_probability:.0f} %",
    ]  # fmt: skip


def _difference(recipe: Recipe, prediction: StepEstimate | str, found: Found) -> str:
    """Compare a recipe with the first row, by their predictions."""
    if isinstance(prediction, str):
        return f"**{recipe.name}**: the native engine does not support this layout here: {prediction}"
    first, own = found.first.estimate, prediction
    ratio = own.step_seconds.mean / first.step_seconds.mean - 1
    differences = {name: own.breakdown_seconds[name] - first.breakdown_seconds[name] for name in PARTS}
    worth = 0.005 * first.step_seconds.mean
    more = [f"{seconds:.3g} s more {PARTS[name]}" for name, seconds in differences.items() if seconds > worth]
    less = [f"{-seconds:.3g} s less {PARTS[name]}" for name, seconds in differences.items() if seconds < -worth]
    verdict = "is the first row" if own.config.hash == first.config.hash else _verdict(ratio, found)
    text = f"**{recipe.name}** {verdict}"
    if more or less:
        text += f": {', '.join([*more, *less])}"
    room = own.memory_limit_bytes / 2**30
    if own.fit_probability < PROBABILITY:
        text += (
            f". It is predicted to need {own.peak_memory_bytes.mean / 2**30:.3g} of {room:.3g} GiB and to fit with "
            f"{100 * own.fit_probability:.0f} %, so that `plan` leaves it out"
        )
    return text + "."


def _verdict(ratio: float, found: Found) -> str:
    tie, spread = found.plans.resolution, found.question.rates.time_spread
    size = f"{100 * abs(ratio):.1f} % {'slower' if ratio > 0 else 'faster'}"
    if abs(ratio) <= tie:
        return f"ties with the first row (it is predicted to be {size}; ties reach to {100 * tie:.1f} %)"
    certain = 100 * (math.exp(Z90 * spread) - 1)
    far = "beyond" if 100 * abs(ratio) > certain else "within"
    return f"is predicted to be {size}, {far} what predictions for one machine are off by ({certain:.0f} %)"


def page(all_found: list[Found]) -> str:
    """The page as markdown."""
    written = (
        "Written by `python -m benchmarks.prediction.plan_recipes --markdown docs/results/plan-recipes.md`. Nothing was run: "
        "all figures are predictions by the shipped coefficients, with 90 % intervals. The global batch is "
        f"{BATCH} samples of {TOKENS:,} tokens, the space is `parallel`, the engine is `native`."
    )
    compared = (
        "A recipe is tuned for its own framework. Only layouts are compared: the recipe's knobs, predicted for our engine, "
        "and the first row of `autotune plan`. Megatron's fused kernels save about 37 bytes a token and hidden unit for "
        "backward, our modules 52 to 56 on models with grouped queries, so layouts that fit there without recomputation do not "
        "always fit here. Configurations whose predicted difference is below the predictions' resolution are tied; the "
        "fastest is the first row ([how](../prediction.md#plans))."
    )
    lines = ["# Plans and published recipes", "", written, "", compared, ""]
    for found in all_found:
        lines += section(found)
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the page; return 1 if a first row is not the fastest."""
    options = page_parser(__doc__).parse_args()
    found = [look(case) for case in CASES]
    return judge(page(found), [problem for each in found for problem in problems_of(each)], options.markdown)


if __name__ == "__main__":
    sys.exit(main())
