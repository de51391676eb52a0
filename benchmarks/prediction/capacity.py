"""Which ZeRO stage, how large a micro-batch, how long a sequence: the field's questions, each answered by one command.

    python -m benchmarks.prediction.capacity [--markdown docs/results/capacity.md]

Nothing is trained: every command is `autotune capacity`, which predicts. Predicted bytes of a model's states stand beside the
bytes computed by hand. Exit status 1 if the two differ by more than `BOUND`.
"""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.cli.app import run
from autotune.cli.capacity import config_text, way_text
from autotune.prediction.planning.capacity import Remedy, Way
from autotune.prediction.planning.memory_fit import memory_limits_of
from autotune.prediction.planning.question import cluster_of, model_of, question_of
from autotune.text.rows import bytes_text
from benchmarks.common.written_page import give, page_parser, table
from search_spaces.trial_config import TrialConfig

MODELS = {"opt-1.3b": "OPT 1.3B", "llama-2-7b": "Llama 2 7B"}
MACHINES = ("2x11GB", "2x24GB", "8x40GB", "8x80GB")
RANK = 16
"""Rank of the adapters, on queries and values."""
BOUND = 0.02
"""Largest relative difference between predicted states and those computed by hand."""
VALIDATION = Path(__file__).parents[2] / "docs" / "results" / "validation.md"
INTRODUCTION = """# What fits where

Written by `make bench` (`benchmarks/prediction/capacity.py`). **Predicted, not measured**: nothing here was trained. Each
answer is one command, for full fine-tuning and for low-rank adapters (rank 16 on queries and values, all else frozen), at the
model's full sequence length ({lengths} tokens).

- **needs**: the first level of sharding at which a micro-batch of one sample fits. Levels begin with the
  options that cost the least time: ZeRO 0, 1, 2, 3; then the optimizer's state in main memory (1, 2, 3), the parameters, both.
  Only the data-parallel degree exceeds 1. Options that the level needs besides are listed with it: recomputation, logits of
  1,024 tokens at a time (*loss in chunks*), reduction buckets of 50 million elements (*small buckets*).
- **a card**: bytes that the fullest card needs, including the device's context. **main memory**: bytes of the machine.
- **micro-batch**: the largest with such samples, at any level that offloads no more than needed. **tokens**: the longest
  samples at micro-batch 1, at such a level. OPT has no positions beyond 2,048; rotary positions have no limit.
- A configuration **fits** if it does so with a predicted probability of 95 %: {free} of a card's memory stays free for the
  prediction's error. Gradients are assumed to be summed over micro-batches.
- 2x24GB is two cards of 24 GiB in one machine, whose main memory is three times that of its cards and at least 64 GiB
  (`--host-memory` sets another). Cards compute in bf16; the 11 GB cards that only have fp16 need as many bytes.
- **Known error** of predicted memory, on published measurements that the coefficients were not fitted to
  ([all figures](validation.md)):
  {errors}.
  Measure configurations that are near their bound.
- The `native` engine has fp32 gradients, so that states are 2 + 4 + 12 bytes a trained parameter (16 with bf16 gradients, as
  in DeepSpeed). Gradients stay on the card when the optimizer's state does not; DeepSpeed moves them too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question: a model on a machine."""

    model: str
    machine: str
    adapted: bool
    """Whether only adapters are trained."""

    @property
    def words(self) -> list[str]:
        """Arguments of the command, after `autotune`."""
        return ["capacity", self.model, "--cluster", self.machine, *(["--lora-rank", str(RANK)] if self.adapted else [])]

    @property
    def command(self) -> str:
        """The command as typed."""
        return " ".join(["autotune", *self.words])


CASES = [Case(model=m, machine=where, adapted=adapted) for m in MODELS for adapted in (False, True) for where in MACHINES]


def run_command(case: Case) -> dict[str, Any]:
    """Run the command; return the document that it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        sys.argv = ["autotune", *case.words, "--json"]
        status = run()
    if status not in (0, 3):
        raise SystemExit(f"{case.command} ended with {status}")
    document: dict[str, Any] = json.loads(out.getvalue())
    return document


def states_by_hand(document: dict[str, Any], level: dict[str, Any]) -> float:
    """Bytes of states on a card: parameters 2, gradients 4, Adam's state 12 if trained, 2 if frozen [Rajbhandari 2020]."""
    spec, ranks, stage = document["model"]["spec"], document["world_size"], level["zero_stage"]
    whole = document["model"]["parameter_count"]
    trained = whole
    if spec["lora_rank"]:
        keys = spec["num_key_value_heads"] * spec["head_dim"]
        queries = spec["num_attention_heads"] * spec["head_dim"]
        trained = spec["num_layers"] * spec["lora_rank"] * (2 * spec["hidden_size"] + queries + keys)
        whole += trained
    kept = 0 if level["offload_param"] else 2 * whole / (ranks if stage == 3 else 1)
    state = 0 if level["offload_optimizer"] else 12 * trained / (ranks if stage >= 1 else 1)
    return kept + 4 * trained / (ranks if stage >= 2 else 1) + state


def predicted_states(level: dict[str, Any]) -> float:
    """Bytes of states on a card by the prediction's equations."""
    tags = level["predicted"]["peak_memory_bytes"][0]["by_tag"]
    return float(sum(tags[name] for name in ("parameters", "gradients", "optimizer_state")))


def row(case: Case, document: dict[str, Any]) -> list[str]:
    """Cells of a case."""
    place = f"{case.machine}, {'LoRA' if case.adapted else 'full'}"
    needed = document["needed"]
    level = needed or document["nearest"]
    host = level["predicted"]["host_memory_bytes"]
    most, longest = document["largest_micro_batch"], document["longest_samples"]
    return [
        place,
        config_text(config_of(level)) if needed else f"**nothing fits**; nearest: {config_text(config_of(level))}",
        bytes_text(level["needed_bytes"]),
        bytes_text(host) if host else "–",
        f"{most['micro_batch_size']:,} (ZeRO {most['config']['zero_stage']})" if most else "–",
        f"{longest['sequence_length']:,} (ZeRO {longest['config']['zero_stage']})" if longest else "–",
        f"{bytes_text(states_by_hand(document, level))} / {bytes_text(predicted_states(level))}",
    ]


def config_of(level: dict[str, Any]) -> TrialConfig:
    """Configuration of a level."""
    return TrialConfig().replace(level["config"])


def lacking(case: Case, document: dict[str, Any]) -> str:
    """A line about a case in which nothing fits."""
    level = document["nearest"]
    ways = "; or ".join(way_text(Way(remedy=Remedy(way["remedy"]), value=way["value"])) for way in document["ways_out"])
    lacks = [("a card", level["lacks_card_bytes"]), ("of main memory", level["lacks_host_bytes"])]
    short = " and ".join(f"{bytes_text(count)} {what}" for what, count in lacks if count)
    return f"- `{case.command}`: the nearest lacks {short}. Predicted remedies: {ways or 'none of those tried'}."


def page(answers: list[tuple[Case, dict[str, Any]]], seconds: float) -> list[str]:
    """Lines of Markdown."""
    lengths = " and ".join(f"{length:,}" for length in sorted({found["sequence_length"] for _, found in answers}))
    lines = INTRODUCTION.format(
        lengths=lengths, errors=known_errors(), free=f"{free_share():.0%}".replace("%", " %")
    ).splitlines()
    headings = ["where", "needs", "a card", "main memory", "micro-batch", "tokens", "states by hand / predicted"]
    for model, name in MODELS.items():
        own = [(case, found) for case, found in answers if case.model == model]
        count = own[0][1]["model"]["parameter_count"]
        lines += ["", f"## {name}", "", f"{count:,} parameters.", "", *table(headings, [row(*each) for each in own])]
        if short := [lacking(case, found) for case, found in own if not found["needed"]]:
            lines += ["", *short]
        lines += ["", "```", *(case.command for case, _ in own), "```"]
    lines += ["", *known_facts(answers)]
    return [*lines, "", f"{len(answers)} answers in {seconds:.1f} s, without a trial."]


def known_facts(answers: list[tuple[Case, dict[str, Any]]]) -> list[str]:
    """Well-known facts about such models, beside the answers."""
    found = {(case.model, case.machine, case.adapted): document for case, document in answers}
    whole, adapted = found["llama-2-7b", "8x80GB", False], found["llama-2-7b", "2x24GB", True]
    count, held = whole["model"]["parameter_count"], adapted["levels"][0]["needed_bytes"]
    by_hand = f"{count / 1e9:.2f} billion, {16 * count / 1e9:.0f} GB"
    return f"""## Against what is known

- Full fine-tuning of 7 billion parameters with Adam is known to need 112 GB of states, 16 bytes each. Llama 2 7B has
  {by_hand}; with the fp32 gradients of this engine {18 * count / 1e9:.0f} GB. Predicted at ZeRO 0:
  {predicted_states(whole["levels"][0]) / 1e9:.0f} GB.
- LoRA of 7B over a bf16 base is known to fit one card of 24 GB. Predicted at ZeRO 0: {bytes_text(held)}, of which
  {bytes_text(2 * count)} are the base.""".splitlines()


def free_share() -> float:
    """Share of a card's memory that predictions must leave free."""
    question = question_of(model_of("opt-1.3b", None, None, None), cluster_of(MACHINES[0], None, None))
    return 1 - memory_limits_of(question).device / question.cluster.device.memory_bytes


def known_errors() -> str:
    """Memory errors that the validation page lists, source by source."""
    found: dict[str, dict[str, str]] = {}
    for line in VALIDATION.read_text(encoding="utf-8").splitlines():
        cells = re.match(r"\| ([^|]+): memory, (median error|95th percentile) \| leave-source-out \|[^|]+\| ([0-9.]+ %)", line)
        if cells:
            found.setdefault(cells[1], {})[cells[2]] = cells[3]
    errors = []
    for source, figures in found.items():
        tail = f", 95th percentile {figures['95th percentile']}" if "95th percentile" in figures else ""
        errors.append(f"{source} median {figures['median error']}{tail}")
    return "; ".join(errors)


def main() -> int:
    arguments = page_parser(__doc__).parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as empty:
        # Measurements of this machine must not influence the answers.
        os.environ.pop("AUTOTUNE_DB", None)
        os.environ["XDG_DATA_HOME"] = empty
        answers = [(case, run_command(case)) for case in CASES]
    lines = page(answers, time.monotonic() - began)
    give(lines, arguments.markdown)
    apart = 0
    for case, found in answers:
        level = found["needed"] or found["nearest"]
        hand, predicted = states_by_hand(found, level), predicted_states(level)
        if abs(predicted / hand - 1) > BOUND:
            apart += 1
            print(f"{case.command}: states are {predicted:,.0f} bytes predicted, {hand:,.0f} by hand")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
