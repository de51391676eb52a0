"""Effect of `prefetch_bucket_size` at stage 3, below and above the size of a block, compared with DeepSpeed.

    python -m benchmarks.engines.prefetch [--engines native deepspeed] [--markdown docs/results/prefetch.md]

About 2 minutes on two cores. Only counts, no times: any machine gives the same. DeepSpeed 0.19.8 takes part if it is installed
(`pip install 'autotune-parallel[deepspeed]'`); without it, only our engine is measured.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.written_page import give, page_parser, table
from benchmarks.engines.prefetch_rank import Counts, counts_of
from executor.engines.deepspeed.capability import installed_version, unusable
from executor.runners.local import LocalRunner
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

RANKS = 2
BLOCKS = (0.0, 0.25, 0.5, 0.9999, 1.0, 2.0, 4.0)
"""`prefetch_bucket_size`, in blocks."""
MODEL = ModelSpec(
    name="eight-blocks", family="llama", num_layers=8, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, ffn_hidden_size=176, vocab_size=512, sequence_length=32,
)  # fmt: skip
WORK = Workload(global_batch_size=4, sequence_length=32)
QUICK = Fidelity(max_warmup_steps=3, min_steps=3, max_steps=3)
BLOCK = MODEL.layer_parameters
BYTES = 4
"""Bytes of an element."""
LARGEST = MODEL.vocab_size * MODEL.hidden_size
"""Elements of the largest parameter."""
TITLE = {"native": "Our engine", "deepspeed": "DeepSpeed"}
DEEPSPEED_NOTE = (
    "DeepSpeed's uses are single modules: norms and linear layers. Each use gathers up to `stage3_prefetch_bucket_size` "
    "more elements, regardless of those already ahead, so that only `stage3_max_live_parameters` bounds the elements ahead. "
    "Its configuration is written by `autotune export --format deepspeed`."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine at one size."""

    blocks: float
    counts: Counts
    losses: tuple[float, ...]
    held: int
    """Peak bytes of whole parameters and of the rank's share of them."""


def config_of(blocks: float) -> TrialConfig:
    """Stage 3 where nothing persists, with a prefetch bucket of so many blocks."""
    return TrialConfig(
        zero_stage=3, micro_batch_size=2, param_persistence_threshold=0, prefetch_bucket_size=int(blocks * BLOCK)
    )  # fmt: skip


def ranks() -> LocalRunner:
    """Two ranks that count their gathers."""
    environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    return LocalRunner(
        RANKS, device="cpu", environment=environment, trial_function="benchmarks.engines.prefetch_rank:run_trial"
    )


def measure(runner: LocalRunner, engine: str) -> list[Row]:
    """Measure every size.

    Raises:
        SystemExit: a trial failed.
    """
    rows = []
    for blocks in BLOCKS:
        result = runner.run(TrialRequest(
            attempt=f"{engine}-{blocks}", model=MODEL, config=config_of(blocks), workload=WORK, world_size=RANKS, engine=engine,
            fidelity=QUICK, timeout_seconds=300,
        ))  # fmt: skip
        if result.outcome is not Outcome.OK:
            raise SystemExit(f"{engine} at {blocks:g} blocks ended {result.outcome}: {result.message}\n{result.traceback}")
        rows.append(Row(blocks=blocks, counts=counts_of(result), losses=tuple(result.losses), held=_held(result)))
        print(f"{engine} {blocks:g}: {rows[-1].counts}", file=sys.stderr, flush=True)
    return rows


def _held(result: TrialResult) -> int:
    return max(rank.tag_peak_bytes["parameters"] for rank in result.ranks)


def claims(rows: Sequence[Row]) -> list[tuple[bool, str]]:
    """(holds, claim) for our engine."""
    counts = [row.counts for row in rows]
    pairs = list(itertools.pairwise(counts))
    most = all(row.counts.most_ahead <= max(row.blocks, 1) * BLOCK for row in rows if row.blocks)
    lean = all(row.held - rows[0].held <= BYTES * row.counts.most_ahead for row in rows)
    return [
        (all(a.in_flight <= b.in_flight for a, b in pairs), "more blocks never mean fewer uses with a gather in flight"),
        (all(a.waited >= b.waited for a, b in pairs), "nor more uses that waited"),
        (all(a.gathered_on_use >= b.gathered_on_use for a, b in pairs), "nor more elements that were waited for"),
        (all(a.most_ahead <= b.most_ahead for a, b in pairs), "nor fewer elements ahead"),
        (
            most and not counts[0].most_ahead,
            "elements ahead are at most `prefetch_bucket_size`, or one block if that is more, and none at 0",
        ),
        (lean, "memory of parameters grows by no more than the elements ahead"),
        (len({row.losses for row in rows}) == 1, "losses are equal to the bit"),
    ]


def lines_of(found: dict[str, list[Row]], missing: str | None) -> list[str]:
    """The page."""
    sizes = f"{MODEL.num_layers} blocks of {BLOCK:,} elements, embedding and head of {LARGEST:,}"
    lines = [
        "# Gathering ahead at stage 3",
        "",
        f"Written by `python -m benchmarks.engines.prefetch`: {RANKS} CPU ranks, {sizes}, nothing persists.",
        "All figures are for one micro-batch, forward and backward, on a rank, once the order of uses is known.",
        "",
        "`prefetch_bucket_size` bounds the elements that are gathered ahead of their use and not yet used. Parameters are",
        "gathered in the order of use, whole units in one collective at each use, while no more elements than that are ahead.",
        "A unit that exceeds the bound is still gathered ahead, whole, while less than half of its size is ahead, so that its",
        "use waits for no second collective. The gather of the first use starts before forward, as DeepSpeed's does when the",
        "whole module is called. The grouping of gathers does not change the values, so losses do not depend on the knob.",
        "",
        "`max_live_parameters` bounds all whole parameters, as in DeepSpeed: a parameter that would exceed it is not gathered",
        "ahead. `stage3_max_reuse_distance` has no separate knob: with `reshard_after_forward` (0 in DeepSpeed), parameters",
        "that are used again within `prefetch_bucket_size` elements stay, since they would be prefetched again at once;",
        "DeepSpeed keeps parameters that its prefetch skipped for the same reason.",
        "",
        "- *uses*: modules that are about to compute with parameters. Our engine's are embedding, blocks and head.",
        "- *in flight*: uses that compute while a gather is in flight.",
        "- *waited*: uses that lacked a parameter because it was not gathered ahead.",
        "- *gathered*, *waited for*, *ahead at most*: elements, in blocks: all gathered ones, those that such uses lacked, and",
        "  the maximum of those gathered and not yet used.",
    ]
    for engine, rows in found.items():
        cells = [
            [
                f"{row.blocks:g}", f"{row.counts.uses}", f"{row.counts.in_flight}", f"{row.counts.waited}",
                *(f"{elements / BLOCK:.2f}" for elements in (
                    row.counts.gathered, row.counts.gathered_on_use, row.counts.most_ahead
                )),
            ]
            for row in rows
        ]  # fmt: skip
        heads = ["prefetch_bucket_size, blocks", "uses", "in flight", "waited", "gathered", "waited for", "ahead at most"]
        lines += ["", f"## {TITLE[engine]}", ""]
        if engine == "native":
            lines += [f"- {'holds' if holds else '**DOES NOT HOLD**'}: {claim}" for holds, claim in claims(rows)]
        else:
            lines.append(f"Version {installed_version()}. {DEEPSPEED_NOTE}")
        lines += ["", *table(heads, cells)]
    return [*lines, *(["", missing] if missing else [])]


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--engines", nargs="+", choices=tuple(TITLE), default=list(TITLE))
    arguments = parser.parse_args()
    refusal, engines = unusable(installed_version()), list(arguments.engines)
    missing = None
    if refusal is not None and "deepspeed" in engines:
        engines.remove("deepspeed")
        missing = f"DeepSpeed was not measured: {refusal.message}; {refusal.remedy}."
        print(missing, file=sys.stderr)
    with ranks() as runner:
        found = {engine: measure(runner, engine) for engine in engines}
    give(lines_of(found, missing), arguments.markdown)
    return 0 if all(holds for holds, _ in claims(found.get("native", []))) else 1


if __name__ == "__main__":
    sys.exit(main())
