"""Uneven stages by an integer program: solution time, gain over even stages, and its layouts as real trials.

    python -m benchmarks.engines.pipeline_program [--without-trials] [--markdown docs/results/pipeline-program.md]

Half a minute, and a minute of trials on four CPU ranks. Exit status 1 if a program takes more than `BOUND` seconds, is worse
than even stages, or a trial's losses differ from those of even stages.
"""

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.memory_fit import PROBABILITY, MemoryLimits, memory_limits_of
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_of
from autotune.prediction.planning.stage_program import Menu, solved
from benchmarks.common.written_page import give, page_parser, table
from executor.runners.local import LocalRunner
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, TrialResult
from search_spaces.trial_config import TrialConfig

BOUND = 10.0
"""Seconds that a program may take."""
LOSS_BOUND = 2.0**-20
"""Relative, of fp32 losses after three updates, as in the parity matrix."""
RANKS = 4
TRIED = ModelSpec(
    name="llama of 10 layers", family="llama", num_layers=10, hidden_size=128, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, ffn_hidden_size=344, vocab_size=2048, sequence_length=128,
)  # fmt: skip
QUICK = Fidelity(min_steps=1, max_steps=1, max_warmup_steps=3)
INTRODUCTION = f"""# Uneven pipeline stages by an integer program

Written by `make bench` (`benchmarks/engines/pipeline_program.py`). An integer program over the prediction (HiGHS, solved to
optimality) chooses the layers of every pipeline rank, how many of them it recomputes (selectively or in full) and, if that is
open, whether its optimizer state is offloaded, so that the predicted step is shortest and every rank fits with a probability of
{PROBABILITY:.0%}. Tests compare it with the enumeration of all layouts of small pipelines
(`tests/autotune/prediction/planning/test_stage_program.py`). **Predicted, not measured**, except for the trials at the end.

*Even*: the best of `pipeline_split` even and balanced with every `activation_checkpointing` and `checkpoint_every_k` 1, 2 and 4
that fits; a dash: none does. *Gain*: predicted samples/s over that. A layout lists the layers of each stage: `f3` three of
them recomputed in full, `s` all of them selectively, `o` its optimizer state offloaded; empty: even stages are best, with the
options of the next column. *Seconds*: time of the program, with the construction of its columns; bound {BOUND:g}."""


TRIALS = (
    f"{TRIED.name}, fp32, on {RANKS} CPU ranks whose stated memory is slightly too small for even stages without "
    "recomputation. *Off*: the largest relative difference of a loss from even stages without recomputation, bound "
    f"{LOSS_BOUND:.1g}; peaks in MiB, rank by rank."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A pipeline whose layout is optimised."""

    model: str
    cluster: str
    batch: int
    sequence: int
    config: TrialConfig
    menu: Menu = Menu()  # noqa: RUF009 - Menu is frozen
    """Choices open to the program."""

    def question(self) -> Question:
        return question_of(
            model_of(self.model, None, None, None), cluster_of(self.cluster, None, None), global_batch_size=self.batch,
            sequence_length=self.sequence,
        )  # fmt: skip

    @property
    def name(self) -> str:
        config = self.config
        parts = [f"pp{config.pipeline_parallel_size}"]
        parts += [f"tp{config.tensor_parallel_size}"] if config.tensor_parallel_size > 1 else []
        parts += [f"{config.pipeline_schedule}", *([f"x{config.virtual_stages}"] if config.virtual_stages > 1 else [])]
        return f"{self.model} on {self.cluster}, {' '.join(parts)}{', offload open' if self.menu.offloads else ''}"


def pipeline(ranks: int, tensor: int = 1, schedule: str = "1f1b", virtual: int = 1, zero_stage: int = 1) -> TrialConfig:
    """A pipeline in bf16."""
    return TrialConfig(
        precision="bf16", pipeline_parallel_size=ranks, tensor_parallel_size=tensor, sequence_parallel=tensor > 1,
        pipeline_schedule=schedule, virtual_stages=virtual, zero_stage=zero_stage,
    )  # fmt: skip


SETTINGS = (
    Setting(model="llama-3-8b", cluster="dgx-h100", batch=64, sequence=8192, config=pipeline(4)),
    Setting(model="llama-3-8b", cluster="dgx-h100", batch=64, sequence=8192, config=pipeline(8)),
    Setting(model="llama-3-8b", cluster="dgx-a100", batch=64, sequence=4096, config=pipeline(8)),
    Setting(model="llama-3-8b", cluster="8x40GB", batch=64, sequence=4096, config=pipeline(8), menu=Menu(offloads=True)),
    Setting(model="gpt2-xl", cluster="8x24GB", batch=64, sequence=1024, config=pipeline(8)),
    Setting(model="llama-2-13b", cluster="dgx-a100", batch=64, sequence=4096, config=pipeline(4, 2)),
    Setting(model="llama-3-70b", cluster="dgx-h100:8", batch=128, sequence=8192, config=pipeline(8, 8)),
    Setting(model="llama-3-70b", cluster="dgx-h100:8", batch=128, sequence=8192, config=pipeline(8, 8, "interleaved_1f1b", 2)),
    Setting(model="llama-3-70b", cluster="dgx-h100:16", batch=128, sequence=8192, config=pipeline(16, 4)),
    Setting(
        model="llama-3-70b", cluster="dgx-h100:16", batch=128, sequence=8192, config=pipeline(16, 4), menu=Menu(offloads=True)
    ),
    Setting(model="llama-3-70b", cluster="dgx-a100:16", batch=512, sequence=8192, config=pipeline(16, 8)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Result of a setting."""

    setting: Setting
    seconds: float
    answer: StepEstimate | None
    even: StepEstimate | None

    @property
    def gain(self) -> float | None:
        """Relative gain of predicted samples/s over even stages; None: one of them does not fit."""
        if self.answer is None or self.even is None:
            return None
        return self.even.step_seconds.mean / self.answer.step_seconds.mean - 1

    @property
    def right(self) -> bool:
        """Whether the program was fast enough and is not worse than even stages."""
        loses = self.even is not None and (self.answer is None or (self.gain or 0.0) < -1e-9)
        return self.seconds <= BOUND and not loses


def even_configs(config: TrialConfig) -> Iterator[TrialConfig]:
    """Even stages with every recomputation."""
    policies = [("none", 1), *itertools.product(("selective", "full"), (1, 2, 4))]
    for split, (policy, every) in itertools.product(("even", "balanced"), policies):
        yield config.replace({"pipeline_split": split, "activation_checkpointing": policy, "checkpoint_every_k": every})


def best_even(question: Question, config: TrialConfig, limits: MemoryLimits) -> StepEstimate | None:
    """The fastest even stages that fit."""
    predictions = estimates(question, list(even_configs(config)))
    fitting = [item for item in predictions if max(rank.needed for rank in item.ranks) <= limits.device]
    return min(fitting, key=lambda item: item.step_seconds.mean, default=None)


def solve_setting(setting: Setting) -> Outcomes:
    """Solve one setting."""
    question = setting.question()
    limits = memory_limits_of(question)
    began = time.monotonic()
    answer = solved(question, setting.config, limits, setting.menu)
    took = time.monotonic() - began
    prediction = None if answer is None else estimates(question, [answer])[0]
    return Outcomes(setting=setting, seconds=took, answer=prediction, even=best_even(question, setting.config, limits))


def row(found: Outcomes) -> list[str]:
    """Cells of the table of programs."""
    config = found.answer.config if found.answer else None
    recomputation = "" if config is None or config.activation_checkpointing == "none" else config.activation_checkpointing
    split = "" if config is None or config.pipeline_layout else f"{config.pipeline_split} stages"
    return [
        found.setting.name,
        "–" if found.even is None else f"{found.even.samples_per_second.mean:.2f}",
        "–" if found.answer is None else f"{found.answer.samples_per_second.mean:.2f}",
        "–" if found.gain is None else f"{found.gain:+.1%}",
        f"`{config.pipeline_layout}`" if config and config.pipeline_layout else "",
        ", ".join(filter(None, (split, recomputation))),
        f"{found.seconds:.2f}",
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The program's layout and even stages, each a real trial."""

    name: str
    configs: tuple[TrialConfig, TrialConfig]
    """Solved, even."""
    results: tuple[TrialResult, TrialResult]

    @property
    def off(self) -> float:
        """The largest relative difference of a loss."""
        ours, theirs = (result.losses for result in self.results)
        return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))


def pairs() -> list[Pair]:
    """Run layouts for four ranks with slightly too little memory, and even stages beside them."""
    question = question_of(TRIED, cluster_of("local", RANKS, None), global_batch_size=16, sequence_length=128)
    found = []
    with LocalRunner(RANKS) as runner:
        for ranks, menu in ((4, Menu()), (2, Menu()), (2, Menu(offloads=True))):
            config = TrialConfig(pipeline_parallel_size=ranks, zero_stage=1, micro_batch_size=2)
            (predicted,) = estimates(question, [config])
            limits = MemoryLimits(device=predicted.fullest.needed - predicted.fullest.by_tag["activations"] / 2, host=1e15)
            answer = solved(question, config, limits, menu)
            if answer is None or not answer.pipeline_layout:
                raise SystemExit(f"pp{ranks}: the program found no uneven layout")
            configs = (answer, config.replace({"pipeline_split": "even"}))
            results = tuple(run(runner, item, question) for item in configs)
            name = (
                f"pp{ranks}" + (f" dp{RANKS // ranks}" if ranks < RANKS else "") + (", offload open" if menu.offloads else "")
            )
            found.append(Pair(name=name, configs=configs, results=(results[0], results[1])))
    return found


def run(runner: LocalRunner, config: TrialConfig, question: Question) -> TrialResult:
    """Run one trial; exit if it fails."""
    result = runner.run(
        TrialRequest(
            attempt=config.hash, model=TRIED, config=config, workload=question.workload, world_size=RANKS, fidelity=QUICK
        )
    )
    if result.outcome is not Outcome.OK:
        raise SystemExit(f"{config}: {result.outcome} {result.message}\n{result.traceback or ''}")
    return result


def pair_row(pair: Pair) -> list[str]:
    """Cells of the table of trials."""
    peaks = [" ".join(f"{rank.peak_memory_bytes / 2**20:.1f}" for rank in result.ranks) for result in pair.results]
    return [pair.name, f"`{pair.configs[0].pipeline_layout}`", f"{pair.off:.1g}", str(len(pair.results[0].losses)), *peaks]


def page(found: Sequence[Outcomes], tried: Sequence[Pair]) -> list[str]:
    """Lines of markdown."""
    headings = ["pipeline", "even", "program", "gain", "layout", "other options", "seconds"]
    lines = [*INTRODUCTION.splitlines(), "", *table(headings, [row(item) for item in found])]
    if tried:
        lines += [
            "", "## As real trials", "",
            TRIALS, "",
            *table(["pipeline", "layout", "off", "losses", "peaks", "peaks, even"], [pair_row(pair) for pair in tried]),
        ]  # fmt: skip
    return lines


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--without-trials", action="store_true")
    arguments = parser.parse_args()
    found = [solve_setting(setting) for setting in SETTINGS]
    tried = [] if arguments.without_trials else pairs()
    lines = page(found, tried)
    give(lines, arguments.markdown)
    right = all(item.right for item in found) and all(pair.off <= LOSS_BOUND for pair in tried)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
