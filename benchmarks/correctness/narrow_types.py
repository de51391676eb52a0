"""Do narrow types and optimizer states train as well as float32, in the promised bytes? Exit code 1 if not.

    python -m benchmarks.correctness.narrow_types [--steps 60] [--markdown docs/results/narrow-types.md]

The model and the text of `loss_curves.py` on 4 gloo ranks at stage 2 with two micro-batches a step: every type with five
seeds. Its loss must stay within stated bounds of float32's, and what each rank holds and sends must equal the closed forms.
"""

import sys
import time

from benchmarks.common.gang import Gang
from benchmarks.common.written_page import judge, page_parser
from benchmarks.correctness import bytes_of_types, loss_of_types
from benchmarks.correctness.loss_curves import RANKS, SHOWN, TEXT, WORKLOAD

SECONDS_LIMIT = 1200.0
"""Of one task: a curve takes ten seconds on an idle machine, and minutes beside other work."""


def introduction(steps: int, seconds: float) -> str:
    """Markdown."""
    return (
        "# Narrow types and optimizer states\n\n"
        f"Written by `make parity`. A llama of {loss_of_types.MODEL.parameter_count:,} parameters, {steps} steps of "
        f"{WORKLOAD.global_batch_size} x {WORKLOAD.sequence_length} bytes of {TEXT}, on {RANKS} data-parallel gloo ranks "
        f"(native engine) at stage 2 with two micro-batches a step, at a learning rate of {loss_of_types.LEARNING_RATE:g}, "
        "where training does not amplify rounding; AdamW by default. CPUs have no products of mxfp8: they are taken in fp32 of "
        "the numbers that the rounded blocks represent. "
        f"The types: [types and optimizers](../numerics.md#types-and-optimizers). {seconds:.0f} s.\n"
    )


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--steps", type=int, default=SHOWN[-1])
    arguments = parser.parse_args()
    began = time.monotonic()
    with Gang(RANKS, bytes_of_types.weigh, SECONDS_LIMIT) as gang:
        measured = {name: gang.run(knobs) for name, knobs in bytes_of_types.HELD.items()}
    with Gang(RANKS, loss_of_types.train, SECONDS_LIMIT) as gang:
        types = {**loss_of_types.TYPES, **loss_of_types.SLICED}
        types = {name: {**loss_of_types.LAYOUT, **knobs} for name, knobs in types.items()}
        ends = loss_of_types.ends(gang, arguments.steps, types, model=loss_of_types.MODEL)
    page = introduction(arguments.steps, time.monotonic() - began)
    text = page + loss_of_types.section(ends) + bytes_of_types.section(measured)
    problems = [*loss_of_types.problems(ends), *bytes_of_types.differing(measured)]
    return judge(text, problems, arguments.markdown)


if __name__ == "__main__":
    sys.exit(main())
