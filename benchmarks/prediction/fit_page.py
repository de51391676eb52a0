"""The answers of `autotune fit` as one file that works without a server: a table of them, and a page that shows it.

    python -m benchmarks.prediction.fit_page --out site/fit.html [--processes 2] [--small]

Written by `make docs`. Every row is computed by `autotune.prediction.planning.fit` with what `autotune fit` assumes; the page
has no other equations, so it answers for the models, cards, counts and lengths of the table only, and says so.
"""

import argparse
import itertools
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from autotune.prediction.planning.fit import SetupAnswer, fit
from autotune.prediction.planning.question import cluster_of, model_of, question_about
from autotune.prediction.planning.training_setups import fine_tuning
from autotune.question.question import PlanningFields

MODELS = (
    "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b",
    "qwen2.5-14b", "qwen2.5-32b", "qwen3-4b", "qwen3-8b", "mistral-7b", "gemma-2-9b", "phi-4",
)  # fmt: skip
CARDS = ("t4", "3090", "4090", "5090", "a10g", "l4", "l40s", "a100-40gb", "a100-80gb", "h100")
COUNTS, LENGTHS = (1, 2, 4, 8), (1024, 4096)
PAGE = Path(__file__).with_name("fit_page.html")
DATA = "/* DATA */"


def rows_of(asked: tuple[str, str, int, int]) -> list[list[object]]:
    """The rows of one question: method, sharding, recomputed, fits; GiB of a card and of main memory at the batch, GiB of a
    card at micro-batch 1; batch, largest batch, longest samples; tokens/s with the ends of its interval; 2: the
    fastest, 1: the best of its method."""
    model, card, count, length = asked
    inputs = PlanningFields(model=model, cluster=f"{count}x{card}", sequence_length=length, simple="transformers")
    question = question_about(inputs, model_of(model, None, None, None), cluster_of(inputs.cluster or "", None, None))
    result = fit(fine_tuning(question, inputs, ()))
    best = {id(result.best_of(answer.setup.method.name)) for answer in result.answers}
    return [[*_row(answer), 2 if answer is result.fastest else int(id(answer) in best)] for answer in result.answers]


def _row(answer: SetupAnswer) -> list[object]:
    estimate, rate = answer.estimate, answer.estimate.token_rate
    assert rate is not None
    sizes = (estimate.fullest.needed, estimate.host_memory_bytes, answer.least.fullest.needed)
    return [
        answer.setup.method.name, answer.setup.sharding.name, int(answer.setup.recomputes), int(answer.fits),
        *(round(size / 2**30, 1) for size in sizes), estimate.config.micro_batch_size, answer.micro_batch_size,
        answer.sequence_length or 0, *(round(value) for value in (rate.mean, rate.low, rate.high)),
    ]  # fmt: skip


def main() -> None:
    """Compute the table and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="two models on two cards, for a test")
    options = parser.parse_args()
    models, cards = (MODELS[:2], CARDS[2:4]) if options.small else (MODELS, CARDS)
    asked = list(itertools.product(models, cards, COUNTS[:2] if options.small else COUNTS, LENGTHS))
    table = {}
    with ProcessPoolExecutor(options.processes) as pool:
        for number, (question, rows) in enumerate(zip(asked, pool.map(rows_of, asked, chunksize=8), strict=True), start=1):
            table["|".join(map(str, question))] = rows
            if number % 100 == 0:
                sys.stderr.write(f"{number} of {len(asked)} questions\n")
    page = PAGE.read_text("utf-8").replace(DATA, json.dumps(table, separators=(",", ":")))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page, "utf-8")
    sys.stderr.write(f"{options.out}: {len(asked)} questions, {len(page) / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
