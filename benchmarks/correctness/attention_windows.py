"""Does sliding-window attention train as well as full attention, and is it as fast as promised? Exit code 1 if not.

    python -m benchmarks.correctness.attention_windows [--steps 60] [--markdown docs/results/attention-windows.md]

The model and the text of `loss_curves.py` in one process (every layout computes the same, docs/results/parity.md): each window
with five seeds; its loss must stay within a stated bound of full attention's. Then attention's forward and backward passes are
timed at realistic sequence lengths, a window and full causal attention in turn.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from benchmarks.common.gang import Gang
from benchmarks.common.written_page import judge, page_parser
from benchmarks.correctness.loss_curves import SHOWN, SINGLE, SPEC, TEXT, WORKLOAD, Curve, train
from benchmarks.correctness.loss_of_types import LAST, SEEDS, Ends
from executor.parallel.context import attend_local
from search_spaces.knob import Value
from search_spaces.training.windows import AttentionWindow

BOUND = 2e-2
"""Largest relative excess of the mean loss of the last steps over full attention's, averaged over the seeds."""
WINDOWS: Mapping[str, Mapping[str, Value]] = {
    "all 64 tokens": {},
    "32": {"attention_window": 32},
    "16": {"attention_window": 16},
    "16, and 4 global": {"attention_window": 16, "attention_global_tokens": 4},
    "8": {"attention_window": 8},
}
"""The first is the reference for the others."""
HEADS, KEYS, WIDTH = 8, 2, 64
TIMED = {
    2048: (AttentionWindow(256), AttentionWindow(512), AttentionWindow(512, 64)),
    4096: (AttentionWindow(256), AttentionWindow(512), AttentionWindow(512, 64), AttentionWindow(1024)),
}
ROUNDS = 7


def losses_of(steps: int) -> list[Ends]:
    """Train with every window and every seed."""
    with Gang(1, train) as gang:

        def end(knobs: Mapping[str, Value], seed: int) -> float:
            return statistics.fmean(gang.run(Curve(knobs={**SINGLE, **knobs}, steps=steps, seed=seed))[0][-LAST:])

        return [Ends(name=name, losses=tuple(end(knobs, seed) for seed in range(SEEDS))) for name, knobs in WINDOWS.items()]


def problems(found: Sequence[Ends]) -> Iterator[str]:
    """Losses beyond the bound."""
    exact, *others = found
    for other in others:
        mean = statistics.fmean(other.off(exact))
        if not mean <= BOUND:
            yield f"a window of {other.name} ends {mean:.1e} above {exact.name} on the mean of its seeds"


def attention(length: int, window: AttentionWindow) -> Callable[[], None]:
    """Forward and backward of one sample's attention with grouped queries, in fp32."""
    query = torch.randn(1, HEADS, length, WIDTH, requires_grad=True)
    key, value = (torch.randn(1, KEYS, length, WIDTH, requires_grad=True) for _ in range(2))
    gradient = torch.randn_like(query)

    def step() -> None:
        torch.autograd.grad(attend_local(query, key, value, window, grouped=True), (query, key, value), gradient)

    return step


def ratios(length: int, window: AttentionWindow) -> list[float]:
    """Seconds with the window over seconds without, from pairs of consecutive measurements."""
    cases = [attention(length, window), attention(length, AttentionWindow(0))]
    for case in cases:
        case()
    found = []
    for turn in range(ROUNDS):
        seconds = [0.0, 0.0]
        for place in (0, 1) if turn % 2 else (1, 0):
            began = time.perf_counter()
            cases[place]()
            seconds[place] = time.perf_counter() - began
        found.append(seconds[0] / seconds[1])
    return found


def page(ends: Sequence[Ends], steps: int, seconds: float) -> str:
    """Markdown of the losses."""
    exact = ends[0]
    spread = statistics.stdev(exact.losses) / statistics.fmean(exact.losses)
    about = (
        f"Written by `make parity`. A llama of {SPEC.parameter_count:,} parameters, {steps} steps of "
        f"{WORKLOAD.global_batch_size} x {WORKLOAD.sequence_length} bytes of {TEXT} in one "
        f"process: mean loss of the last {LAST} steps for {SEEDS} seeds, and its distance from full attention's with the "
        f"same seed. Bound: a mean of at most {BOUND:g} above it. Seeds have a standard deviation of {spread:.1%}. The "
        f"windows: [attention](../parallelism.md#attention). {seconds:.0f} s."
    )
    lines = [
        "# Windows of attention", "", about, "", "## Loss", "",
        "| window | " + " | ".join(f"seed {seed}" for seed in range(SEEDS)) + " | from full, mean | worst |",
        "|---" * (SEEDS + 3) + "|",
    ]  # fmt: skip
    for one in ends:
        off = one.off(exact)
        values = " | ".join(f"{loss:.4f}" for loss in one.losses)
        lines.append(f"| {one.name} | {values} | {statistics.fmean(off):+.1e} | {max(off):+.1e} |")
    return "\n".join(lines) + "\n"


def timing(measured: Mapping[tuple[int, AttentionWindow], Sequence[float]]) -> str:
    """Markdown of the time saved."""
    about = (
        f"Forward and backward of the attention of one sample ({HEADS} heads of {WIDTH}, {KEYS} of keys and values, fp32) "
        f"on a CPU with {torch.get_num_threads()} thread(s), as a share of the full causal kernel's time: median of {ROUNDS} "
        "pairs, the two in turn, and their range. Computed pairs: those in the visited blocks, as a share of all causal "
        "pairs."
    )
    lines = [
        "", "## Time", "", about, "", "| tokens | window | global | pairs computed | time | range |", "|---" * 6 + "|",
    ]  # fmt: skip
    for (length, window), found in measured.items():
        pairs = window.visited_pairs(length) / AttentionWindow(0).visible_pairs(length)
        shown = f"{pairs:.0%} | {statistics.median(found):.0%} | {min(found):.0%} to {max(found):.0%}"
        lines.append(f"| {length:,} | {window.tokens} | {window.global_tokens} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--steps", type=int, default=SHOWN[-1])
    arguments = parser.parse_args()
    began = time.monotonic()
    ends = losses_of(arguments.steps)
    measured = {(length, window): ratios(length, window) for length, windows in TIMED.items() for window in windows}
    text = page(ends, arguments.steps, time.monotonic() - began) + timing(measured)
    return judge(text, [*problems(ends)], arguments.markdown)


if __name__ == "__main__":
    sys.exit(main())
