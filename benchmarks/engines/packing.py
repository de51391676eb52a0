"""What does packing documents into rows save? Prints a table; exit code 1 where packed and padded training differ.

    python -m benchmarks.engines.packing [--rounds 12] [--markdown docs/results/packing-benchmark.md]

A llama in float32 on 2 data-parallel ranks trains on documents whose lengths are skewed like those of instructions: many
short ones, few long ones. First, one pass over the same documents, packed and padded, must have the same loss and gradient
norm. Then both sessions take steps in turn, in an order that changes with every round; a round is a pair of times. Useful
tokens a second are compared, because a step's packed rows hold more of them.
"""

import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.common.gang import Gang
from benchmarks.common.written_page import judge, page_parser
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.session import ParallelSession
from executor.measurement.timing import student_t_975
from search_spaces.models.model import ModelSpec
from search_spaces.training.data_schedule import packed_rows, useful_share
from search_spaces.trial import Interval, Workload
from search_spaces.trial_config import TrialConfig

RANKS = 2
ROUNDS = 12
WARM_UP = 2
SEQUENCE = 512
ROWS = 4
"""Rows of a timed step."""
DOCUMENTS = 240
BOUND = 2.0**-20
"""Largest relative difference of losses and gradient norms in float32."""
MEDIANS = (32, 96, 256)
"""Medians of the log-normal lengths of the timed documents, in tokens."""
DEVIATION = 0.9
"""Standard deviation of the logarithm of a length."""
SPEC = ModelSpec(
    name="packing", family="llama", num_layers=4, hidden_size=128, num_attention_heads=8, num_key_value_heads=4, head_dim=16,
    ffn_hidden_size=352, vocab_size=256, sequence_length=SEQUENCE,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of the ranks."""

    lengths: tuple[int, ...]
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The ranks' measurements for one distribution of lengths."""

    median: int
    lengths: tuple[int, ...]
    off: float
    """Largest relative difference of a loss or a gradient norm between packed and padded."""
    seconds: tuple[tuple[float, float], ...]
    """Seconds of a step, packed and padded, by round, on the slowest rank."""

    @property
    def shares(self) -> tuple[float, float]:
        """Share of useful tokens in a step's rows, packed and padded."""
        work = workload(self.lengths, ROWS)
        packed, padded = (useful_share(TrialConfig(pack_sequences=packs), work) for packs in (True, False))
        return packed, padded

    def rates(self) -> tuple[float, float]:
        """Useful tokens/s of the mean step, packed and padded."""
        packed, padded = (
            share * ROWS * SEQUENCE / statistics.fmean(column)
            for share, column in zip(self.shares, zip(*self.seconds, strict=True), strict=True)
        )
        return packed, padded

    def gain(self) -> Interval:
        """Useful tokens/s packed over padded: geometric mean of the rounds with its 95 % interval."""
        packed, padded = self.shares
        logs = [math.log(packed / padded * other / own) for own, other in self.seconds]
        mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
        half = student_t_975(len(logs) - 1) * error
        return Interval(mean=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half))


def skewed(median: int) -> tuple[int, ...]:
    """Lengths of `DOCUMENTS` documents, truncated to a row."""
    draw = random.Random(f"packing {median}")
    return tuple(min(max(round(draw.lognormvariate(math.log(median), DEVIATION)), 1), SEQUENCE) for _ in range(DOCUMENTS))


def workload(lengths: tuple[int, ...], rows: int) -> Workload:
    return Workload(global_batch_size=rows, sequence_length=SEQUENCE, document_lengths=lengths)


def measure(rank: int, task: Task) -> tuple[float, list[tuple[float, float]]]:
    """The difference between the passes, and the seconds of steps in turn. Every rank must call it."""
    torch.set_num_threads(1)
    packed, padded = (_pass(rank, task.lengths, packs) for packs in (True, False))
    off = max(abs(one - other) / other for one, other in zip(packed, padded, strict=True))
    sessions = [_session(rank, task.lengths, ROWS, packs) for packs in (True, False)]
    try:
        for step in range(WARM_UP):
            for session in sessions:
                _seconds(session, step)
        return off, [_round(sessions, WARM_UP + turn) for turn in range(task.rounds)]
    finally:
        for session in sessions:
            session.close()


def _round(sessions: Sequence[ParallelSession], step: int) -> tuple[float, float]:
    seconds = [0.0, 0.0]
    for place in (0, 1) if step % 2 else (1, 0):
        seconds[place] = _seconds(sessions[place], step)
    return seconds[0], seconds[1]


def _seconds(session: ParallelSession, step: int) -> float:
    """Seconds of a step on the slowest rank."""
    session.prepare(step)
    dist.barrier()
    began = time.perf_counter()
    session.train_step()
    spent = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def _pass(rank: int, lengths: tuple[int, ...], packs: bool) -> tuple[float, float]:
    """Loss and gradient norm of one step on the first documents, with enough passes that every rank has packed rows."""
    few = lengths[: 8 * RANKS]
    packed = len(packed_rows(few, SEQUENCE))
    rows, passes = packed if packs else len(few), math.lcm(packed, RANKS) // packed
    session = _session(rank, few, rows * passes, packs)
    try:
        session.prepare(0)
        report = session.train_step()
        sums = torch.tensor([report.loss, report.gradient_norm], dtype=torch.float64)
        dist.all_reduce(sums)
        return float(sums[0]) / RANKS, float(sums[1]) / RANKS
    finally:
        session.close()


def _session(rank: int, lengths: tuple[int, ...], rows: int, packs: bool) -> ParallelSession:
    config = TrialConfig(zero_stage=2, micro_batch_size=max(rows // RANKS, 1), pack_sequences=packs)
    context = RankContext(rank=rank, world_size=RANKS, device=torch.device("cpu"))
    return NativeEngine().build(context, SPEC, config, workload(lengths, rows))


def found(gang: Gang, rounds: int) -> Iterator[Found]:
    """Measure every distribution of lengths."""
    for median in MEDIANS:
        lengths = skewed(median)
        (off, seconds), *_ = gang.run(Task(lengths=lengths, rounds=rounds))
        yield Found(median=median, lengths=lengths, off=off, seconds=tuple(seconds))


def problems(rows: Sequence[Found]) -> Iterator[str]:
    """Differences beyond the bound."""
    for row in rows:
        if not row.off <= BOUND:
            yield f"documents of {row.median} tokens: packed and padded differ by {row.off:.1e}, bound {BOUND:.1e}"


def page(rows: Sequence[Found], rounds: int) -> str:
    """Markdown."""
    head = (
        "median length", "mean", "useful tokens of a row, padded", "packed", "useful tokens/s, padded", "packed",
        "packed over padded", "from rows only", "loss and norm differ by",
    )  # fmt: skip
    lines = [_about(rounds), "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        (packed, padded), (fast, slow), gain = row.shares, row.rates(), row.gain()
        lines.append(
            f"| {row.median} | {statistics.fmean(row.lengths):.0f} | {padded:.1%} | {packed:.1%} | {slow:,.0f} | {fast:,.0f} | "
            f"{gain.mean:.2f} [{gain.low:.2f}, {gain.high:.2f}] | {packed / padded:.2f} | {row.off:.1e} |"
        )
    return "\n".join(lines) + "\n"


def _about(rounds: int) -> str:
    return f"""# Packed and padded documents

Written by `make bench`. A llama of {SPEC.parameter_count:,} parameters in float32 on {RANKS} data-parallel ranks of one
thread each, ZeRO stage 2, {ROWS} rows of {SEQUENCE} tokens a step. {DOCUMENTS} documents of log-normal lengths (deviation
{DEVIATION} of the logarithm), longer ones cut to a row; packed by first-fit decreasing, or one to a row with padding behind it.
Both sessions exist at once and step in turn, {rounds} rounds; the ratio is the geometric mean of the rounds' ratios with its
95 % interval. "From rows only" is the gain from fewer rows if each row took the same time: attention inside short documents
costs less than over a whole row, but a call for each document has overhead. Loss and gradient norm of the same documents,
packed and padded, may differ by {BOUND:.1e} because of rounding."""


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    with Gang(RANKS, measure) as gang:
        rows = [*found(gang, arguments.rounds)]
    return judge(page(rows, arguments.rounds), [*problems(rows)], arguments.markdown)


if __name__ == "__main__":
    sys.exit(main())
