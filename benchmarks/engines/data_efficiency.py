"""Do data schedules reach the same loss sooner? Prints a table; exit code 1 if random-LTD ends beyond its bound.

    python -m benchmarks.engines.data_efficiency [--steps 200] [--markdown docs/results/data-efficiency-benchmark.md]

A small llama in float32 trains on the default text (the sources of the Python standard library, as bytes) in one process,
exactly and with each schedule, from the same weights and on the same samples, for several seeds. The compared loss is
that of held-out samples of full length, which no step trains on. The exact run sets the target: its held-out loss after all of
its steps. A schedule continues until it reaches that loss. Time is the process's CPU seconds in training steps, of one thread.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.gang import Gang
from benchmarks.correctness.loss_curves import TEXT
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.session import ParallelSession
from executor.measurement.timing import student_t_975
from executor.parallel.model import Transformer
from search_spaces.knob import Value
from search_spaces.models.model import ModelSpec
from search_spaces.training.data_schedule import length_at, useful_share
from search_spaces.trial import Interval, Workload
from search_spaces.trial_config import TrialConfig

SEEDS = 5
STEPS = 200
MOST = 2.0
"""A schedule is abandoned after this multiple of the exact run's steps."""
EVERY = 10
"""Steps between two evaluations of the held-out loss."""
HELD_OUT = 4
"""Batches of held-out samples."""
FAR = 10**6
"""First step of the held-out samples, beyond every run's steps."""
LTD_BOUND = 0.05
"""Largest relative excess of random-LTD's held-out loss over the exact run's after as many steps, for every seed."""
SPEC = ModelSpec(
    name="data-efficiency", family="llama", num_layers=6, hidden_size=64, num_attention_heads=4, num_key_value_heads=4,
    head_dim=16, ffn_hidden_size=176, vocab_size=256, sequence_length=128,
)  # fmt: skip
BATCH = 8
LEARNING_RATE = 1e-3
"""At 3e-3 the exact run ends 5% higher, which would be too weak a reference for the schedules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run of a rank."""

    knobs: tuple[tuple[str, Value], ...]
    seed: int
    steps: int
    """Steps of the exact run; schedules are relative to them."""
    target: float | None = None
    """Held-out loss at which the run ends; None: after its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The held-out losses of a run, and its cost up to each of them."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    tokens: tuple[float, ...]
    """Tokens that counted toward the loss."""

    def at_loss(self, target: float) -> tuple[float, float] | None:
        """Seconds and tokens at which the loss reached the target, linearly interpolated; None: it did not."""
        for place, loss in enumerate(self.losses):
            if loss > target:
                continue
            if place == 0:
                return self.seconds[0], self.tokens[0]
            share = (self.losses[place - 1] - target) / (self.losses[place - 1] - loss)
            return self._between(self.seconds, place, share), self._between(self.tokens, place, share)
        return None

    @staticmethod
    def _between(values: Sequence[float], place: int, share: float) -> float:
        return values[place - 1] + share * (values[place] - values[place - 1])


def schedules(steps: int) -> Mapping[str, Mapping[str, Value]]:
    """Knobs by name; the exact run first."""
    return {
        "exact": {},
        "curriculum from 32 tokens": {"curriculum_start_length": 32, "curriculum_steps": steps // 2},
        "random-LTD from 64 tokens": {"random_ltd_start_tokens": 64, "random_ltd_steps": steps // 2},
    }


def train(_: int, run: Run) -> Curve:
    """Train on one rank."""
    torch.set_num_threads(1)
    workload = Workload(
        global_batch_size=BATCH,
        sequence_length=SPEC.sequence_length,
        seed=run.seed,
        learning_rate=LEARNING_RATE,
        training_steps=run.steps,
    )
    config = TrialConfig(micro_batch_size=BATCH).replace(dict(run.knobs))
    context = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
    session = NativeEngine().build(context, SPEC, config, workload)
    losses, seconds, tokens = [], [], []
    spent = trained = 0.0
    try:
        for step in range(round(run.steps * (MOST if run.target is not None else 1.0))):
            session.prepare(step)
            began = time.process_time()
            session.train_step()
            spent += time.process_time() - began
            trained += BATCH * length_at(config, workload, step)
            if (step + 1) % EVERY == 0:
                losses.append(held_out(session))
                seconds.append(spent)
                tokens.append(trained)
                if run.target is not None and step + 1 >= run.steps and losses[-1] <= run.target:
                    break
    finally:
        session.close()
    return Curve(losses=tuple(losses), seconds=tuple(seconds), tokens=tuple(tokens))


@torch.no_grad()
def held_out(session: ParallelSession) -> float:
    """Mean loss on full-length held-out samples, with every layer on every token."""
    (part,) = session.parts
    module = part.module
    assert isinstance(module, Transformer)
    length, kept = module.sequence_length, module.kept
    module.set_length(SPEC.sequence_length)
    module.kept = {}
    loss = statistics.fmean(float(module(**session.data.global_batch(FAR + batch))) for batch in range(HELD_OUT))
    module.set_length(length)
    module.kept = kept
    return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A schedule with one seed, beside the exact run."""

    name: str
    seed: int
    steps: int
    exact: Curve
    own: Curve

    @property
    def target(self) -> float:
        return self.exact.losses[-1]

    @property
    def off(self) -> float:
        """Relative difference of the held-out loss after as many steps as the exact run."""
        return self.own.losses[self.steps // EVERY - 1] / self.target - 1

    def shares(self) -> tuple[float, float] | None:
        """Seconds and tokens to the target, as shares of the exact run's; None: target not reached."""
        found = self.own.at_loss(self.target)
        return None if found is None else (found[0] / self.exact.seconds[-1], found[1] / self.exact.tokens[-1])


def rows(gang: Gang, steps: int, seeds: int) -> Iterator[Row]:
    """Every schedule with every seed."""
    (_, exact), *others = schedules(steps).items()
    for seed in range(seeds):
        (known,) = gang.run(Run(knobs=tuple(exact.items()), seed=seed, steps=steps))
        for name, knobs in others:
            (own,) = gang.run(Run(knobs=tuple(knobs.items()), seed=seed, steps=steps, target=known.losses[-1]))
            yield Row(name=name, seed=seed, steps=steps, exact=known, own=own)


def problems(found: Sequence[Row]) -> Iterator[str]:
    """Losses beyond the bound."""
    for row in found:
        if row.name.startswith("random-LTD") and not row.off <= LTD_BOUND:
            yield f"{row.name}, seed {row.seed}: held-out loss {row.off:+.1%} off the exact run's, bound {LTD_BOUND:.0%}"


def summary(found: Sequence[Row], steps: int) -> str:
    """Markdown."""
    return "\n".join([_about(steps), "", *_table(found), "", *_means(found, steps)]) + "\n"


def _about(steps: int) -> str:
    return f"""# Data schedules at equal loss

Written by `make bench`. A llama of {SPEC.parameter_count:,} parameters in float32, AdamW, {steps} steps of {BATCH} x
{SPEC.sequence_length} bytes of {TEXT}, one process on one thread. Every run of a seed starts
from the same weights and has the same samples. The target is the exact run's held-out loss after its {steps} steps; a schedule
trains until it has that loss, for {MOST:g} times as many steps at most. Seconds (CPU seconds in training steps) and tokens that
count toward the loss are those until the target, as shares of the exact run's: below 1 the schedule is better. The last column
is the held-out loss after {steps} steps against the exact run's, which random-LTD may exceed by {LTD_BOUND:.0%} at most."""


def _table(found: Sequence[Row]) -> Iterator[str]:
    head = ("schedule", "seed", "target loss", "seconds to it", "tokens to it", "useful tokens/s, exact", "with the schedule")
    yield f"| {' | '.join((*head, 'loss after all steps'))} |"
    yield "|---" * (len(head) + 1) + "|"
    for row in found:
        shares = row.shares()
        cells = ("not reached", "not reached") if shares is None else tuple(f"{share:.2f}" for share in shares)
        last = row.steps // EVERY - 1
        speeds = " | ".join(f"{curve.tokens[last] / curve.seconds[last]:,.0f}" for curve in (row.exact, row.own))
        yield f"| {row.name} | {row.seed} | {row.target:.4f} | {' | '.join(cells)} | {speeds} | {row.off:+.2%} |"


def _means(found: Sequence[Row], steps: int) -> Iterator[str]:
    workload = Workload(global_batch_size=BATCH, sequence_length=SPEC.sequence_length, training_steps=steps)
    for name, knobs in schedules(steps).items():
        mine = [row for row in found if row.name == name]
        reached = [shares for row in mine if (shares := row.shares()) is not None]
        if not reached:
            if mine:
                yield f"- **{name}** does not reach the loss with any seed."
            continue
        seconds, tokens = (_mean_ratio(column) for column in zip(*reached, strict=True))
        off = statistics.fmean(row.off for row in mine)
        trained = useful_share(TrialConfig().replace(knobs), workload)
        yield (
            f"- **{name}**, {len(reached)} of {len(mine)} seeds at the loss: {_text(seconds)} of the exact run's seconds, "
            f"{_text(tokens)} of its tokens: {_verdict(seconds)}. In {steps} steps it trains on {trained:.0%} of tokens, "
            f"and its final loss differs by {off:+.2%}."
        )


def _mean_ratio(shares: Sequence[float]) -> Interval:
    """Geometric mean of shares and its 95 % interval over the seeds."""
    logs = [math.log(share) for share in shares]
    mean = statistics.fmean(logs)
    half = student_t_975(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return Interval(mean=math.exp(mean), low=math.exp(mean - half), high=math.exp(min(mean + half, 700.0)))


def _text(share: Interval) -> str:
    return f"{share.mean:.2f} [{share.low:.2f}, {share.high:.2f}]"


def _verdict(share: Interval) -> str:
    """Conclusion from the seconds' interval over the seeds."""
    if share.low > 1:
        return "it takes longer to reach the same loss"
    return "it reaches the same loss sooner" if share.high < 1 else "the seeds differ by more than the schedule's effect"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    with Gang(1, train) as gang:
        found = [*rows(gang, arguments.steps, arguments.seeds)]
    text = summary(found, arguments.steps)
    print(text)
    wrong = [*problems(found)]
    print("\n".join(wrong) or "every loss is within its bound")
    if arguments.markdown and not wrong:
        arguments.markdown.write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
