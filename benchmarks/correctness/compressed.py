"""Does compressed communication train as well, and send as little as promised? Exit code 1 if not.

    python -m benchmarks.correctness.compressed [--steps 60] [--markdown docs/results/compressed-communication-benchmark.md]

The model and the text of `loss_curves.py` on 4 gloo ranks: every method with five seeds. Its loss must stay within stated
bounds of the exact run's, and what each rank sends and keeps must equal the closed forms.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.gang import Gang
from benchmarks.correctness import loss_of_types
from benchmarks.correctness.compressed_forms import FULL, Forms, Messages
from benchmarks.correctness.loss_curves import RANKS, SHOWN, SPEC, TEXT, WORKLOAD, train
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from search_spaces.knob import Value
from search_spaces.trial_config import TrialConfig

STATES, COUNTER = 3, 4
"""AdamW's state: vectors with a number for each parameter (master and moments), and bytes of torch's step counter."""
Knobs = Mapping[str, Value]
LAYOUT: Knobs = {"micro_batch_size": 4, "param_persistence_threshold": 0, "prefetch_bucket_size": 0}
"""One micro-batch in a step. Nothing is prefetched or persists, so that what stage 3 sends has a closed form."""
WARM_UP, SIGN_STEPS = 60, 120
"""Exact steps of 1-bit Adam, and all its steps. The second moment must have settled before it is frozen: gradients shrink
throughout the 60 steps of the other methods, so that no part of these is enough."""
BOUND, MEAN_BOUND = 1e-2, 5e-3
"""Relative bounds of int8: for every seed, and for the mean over the seeds, which varies less."""
SIGN_RATE = 3e-3
"""Learning rate of 1-bit Adam. It ends behind because its second moment is too large, not because of rounding: its seeds agree
to 0.5%. At 1e-3 gradients shrink for longer, and WARM_UP steps are too few."""
SIGN_BOUND, SIGN_MEAN_BOUND = 4e-2, 3e-2
"""Relative bounds of 1-bit Adam: AdamW goes on adapting its second moment to shrinking gradients."""
SHARDED: Knobs = {"zero_stage": 3}
INEXACT: Mapping[str, Knobs] = {
    "exact": {},
    "gathers in int8, stage 3": {**SHARDED, "gather_dtype": "int8"},
    "reductions in int8, stage 0": {"reduce_dtype": "int8"},
    "reductions in int8, stage 2": {"zero_stage": 2, "reduce_dtype": "int8"},
    "reductions in int8, stage 3, shards of 2": {**SHARDED, "hsdp_shard_size": 2, "reduce_dtype": "int8"},
    "both in int8, stage 3, second copy of 2": {
        **SHARDED, "gather_dtype": "int8", "reduce_dtype": "int8", "secondary_shard_size": 2,
    },
}  # fmt: skip
SIGNS: Mapping[str, Knobs] = {"exact": {}, "1-bit Adam": {"optimizer": "onebit_adam", "onebit_warmup_steps": WARM_UP}}
SENT: Mapping[str, tuple[Knobs, Knobs]] = {
    "second copy of 2, stage 3": ({**SHARDED, "secondary_shard_size": 2}, SHARDED),
    "gathers in int8, stage 3": (INEXACT["gathers in int8, stage 3"], SHARDED),
    "reductions in int8, stage 0": (INEXACT["reductions in int8, stage 0"], {}),
    "reductions in int8, stage 2": (INEXACT["reductions in int8, stage 2"], {"zero_stage": 2}),
    "reductions in int8, stage 3, shards of 2": (
        INEXACT["reductions in int8, stage 3, shards of 2"], {**SHARDED, "hsdp_shard_size": 2},
    ),
    "both in int8, stage 3, second copy of 2": (INEXACT["both in int8, stage 3, second copy of 2"], SHARDED),
    "1-bit Adam, stage 0": ({"optimizer": "onebit_adam", "onebit_warmup_steps": 1}, {}),
}  # fmt: skip
"""Method -> its knobs, and the knobs of the same run without compression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one rank sends in a step and keeps after it."""

    messages: Messages
    parameters: int
    """Bytes kept from one step to the next."""
    optimizer_state: int


def weigh(rank: int, knobs: Knobs) -> Step:
    """Train two steps; record what the second sends and keeps."""
    context = RankContext(rank=rank, world_size=dist.get_world_size(), device=torch.device("cpu"))
    session = NativeEngine().build(context, SPEC, _config(knobs), WORKLOAD)
    before: Mapping[tuple[str, str], tuple[int, int]] = {}
    for step in range(2):
        before = session.collectives()
        session.prepare(step)
        session.train_step()
    after, storages = session.collectives(), [*session.tagged_storages()]
    session.close()
    messages = {key: (after[key][0] - before.get(key, (0, 0))[0], after[key][1] - before.get(key, (0, 0))[1]) for key in after}
    return Step(
        messages={key: value for key, value in messages.items() if value[0]},
        parameters=_nbytes(value for tag, value in storages if tag == "parameters"),
        optimizer_state=_nbytes(value for tag, value in storages if tag == "optimizer_state"),
    )


def _config(knobs: Knobs) -> TrialConfig:
    return TrialConfig().replace({**LAYOUT, **knobs})


def _forms(knobs: Knobs) -> Forms:
    return Forms(SPEC, _config(knobs), RANKS)


def _nbytes(values: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once."""
    return sum({value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in values}.values())


def differing(measured: Mapping[str, tuple[Sequence[Step], Sequence[Step]]]) -> list[str]:
    """The ranks whose messages or kept bytes differ from the closed forms."""
    found = []
    for name, both in measured.items():
        for knobs, steps in zip(SENT[name], both, strict=True):
            text = f"{name}, {dict(knobs)}: {{}} on rank {{}}, not {{}}"
            expected = _forms(knobs).messages()
            wrong = [(step.messages, rank) for rank, step in enumerate(steps) if step.messages != expected]
            found += [text.format(messages, rank, expected) for messages, rank in wrong]
        forms, (compressed, plain) = _forms(SENT[name][0]), both
        padding = FULL * (forms.padded() - _forms(SENT[name][1]).padded())
        for rank, (step, other) in enumerate(zip(compressed, plain, strict=True)):
            kept = step.parameters - other.parameters, step.optimizer_state - other.optimizer_state
            states = forms.momentum_errors() - (COUNTER if forms.momentum_errors() else 0) + STATES * padding // RANKS
            if kept != (forms.second_copy(), states):
                found.append(f"{name}: keeps {kept} more on rank {rank}")
    return found


def bytes_section(measured: Mapping[str, tuple[Sequence[Step], Sequence[Step]]]) -> str:
    """Markdown: messages, and the savings."""
    about = (
        "What a rank sends in a step and keeps for it, measured on each of the 4: equal, to the byte, to the closed forms "
        "([compressed communication](../closed-forms.md#compressed-communication)), and so are the savings. Messages are "
        "counted whole, before they are divided among the ranks; savings count an all-reduce twice, since it sends in both "
        "directions. `near` is the group of 2 neighbours; everything else goes "
        "to all ranks, or to copies of the shards (`replica`)."
    )
    heads = ("method", "without", "with", "saved beyond the neighbours", "kept more")
    lines = ["", "## Bytes", "", about, "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, ((way, *_), (plain, *_)) in measured.items():
        far, before = (_far(step.messages) for step in (way, plain))
        kept = way.parameters - plain.parameters + way.optimizer_state - plain.optimizer_state
        cells = [_text(plain.messages), _text(way.messages), f"{before - far:,} ({1 - far / before:.1%})", f"{kept:,}"]
        lines.append(" | ".join(["| " + name, *cells]) + " |")
    return "\n".join(itertools.chain(lines, [""]))


def _far(messages: Messages) -> int:
    """Bytes sent beyond the near group; an all-reduce counts twice, since it sends in both directions."""
    return sum(
        size * (2 if operation == "all_reduce" else 1)
        for (operation, dimension), (_, size) in messages.items()
        if dimension != "near"
    )


def _text(messages: Messages) -> str:
    return "; ".join(f"{operation} `{dimension}` {size:,}" for (operation, dimension), (_, size) in sorted(messages.items()))


def _knobs(methods: Mapping[str, Knobs]) -> Mapping[str, Knobs]:
    return {name: {**LAYOUT, **method} for name, method in methods.items()}


def introduction(steps: int, seconds: float) -> str:
    """Markdown."""
    return (
        "# Compressed communication, measured\n\n"
        f"Written by `make parity`. A llama of {SPEC.parameter_count:,} parameters in float32, {steps} steps of "
        f"{WORKLOAD.global_batch_size} x {WORKLOAD.sequence_length} bytes of {TEXT}, on {RANKS} data-parallel gloo ranks "
        f"(native engine), at a learning rate of {loss_of_types.LEARNING_RATE:g}, where training does not amplify rounding; "
        f"1-bit Adam {SIGN_STEPS} steps at {SIGN_RATE:g}, the first {WARM_UP} of them AdamW's. "
        f"The methods: [compressed communication](../numerics.md#compressed-communication). {seconds:.0f} s.\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=SHOWN[-1])
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    with Gang(RANKS, weigh) as gang:
        measured = {name: (gang.run(way), gang.run(plain)) for name, (way, plain) in SENT.items()}
    for problem in (problems := differing(measured)):
        print(f"WRONG {problem}")
    with Gang(RANKS, train) as gang:
        integers = loss_of_types.ends(gang, arguments.steps, _knobs(INEXACT))
        signs = loss_of_types.ends(gang, SIGN_STEPS, _knobs(SIGNS), SIGN_RATE)
    text = introduction(arguments.steps, time.monotonic() - began)
    text += loss_of_types.section(integers, "Loss of integers", "method", BOUND, MEAN_BOUND)
    text += loss_of_types.section(signs, "Loss of signs", "method", SIGN_BOUND, SIGN_MEAN_BOUND)
    text += bytes_section(measured)
    print(text)
    off = [*loss_of_types.problems(integers, BOUND, MEAN_BOUND), *loss_of_types.problems(signs, SIGN_BOUND, SIGN_MEAN_BOUND)]
    for problem in off:
        print(f"WRONG {problem}")
    problems += off
    if arguments.markdown and not problems:
        arguments.markdown.write_text(text)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
