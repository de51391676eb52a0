"""Does the native engine train exactly as one process does? Prints a table; exit code 1 where a case does not.

    python benchmarks/parity.py [--ranks 2 4] [--every N] [--markdown docs/parity.md]

Each case trains three AdamW steps in float64 on `--ranks` gloo processes and compares every loss and weight with plain
PyTorch in one process on the whole batch; bf16 cases compare losses with the same within a stated bound.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from executor.data import micro_batches
from executor.engines.native.checkpointing import checkpoint_blocks
from executor.engines.native.collectives import Group
from executor.engines.native.model import build_transformer
from executor.engines.native.prefetch import repeated_blocks
from executor.engines.native.zero import ShardedModel
from search_spaces.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

STEPS = 3
FLOAT64_BOUND = 1e-10
BF16_LOSS_BOUND = 2.0**-9
"""Relative. bf16 rounds to 8 bits of mantissa, so one rounding is off by at most 2^-9 of the value."""
GLOBAL_BATCH = 8
SEQUENCE = 16
HUGE = 10**9
SPEC = ModelSpec(
    name="parity", family="llama", num_layers=3, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    ffn_hidden_size=24, vocab_size=61, sequence_length=SEQUENCE,
)  # fmt: skip
BUCKETS: dict[str, dict[str, Any]] = {
    "default": {},
    "tiny buckets": {"reduce_bucket_size": 300, "allgather_bucket_size": 300, "prefetch_bucket_size": 700},
    "overlap off": {"overlap_comm": False, "reduce_bucket_size": 1000, "prefetch_bucket_size": 2000},
    "no prefetch": {"prefetch_bucket_size": 0},
    "everything persistent": {"param_persistence_threshold": HUGE},
    "everything sharded": {"param_persistence_threshold": 0, "max_live_parameters": 1, "contiguous_gradients": False},
}
HEADER = (
    "Written by `make parity`. Three AdamW steps; float64 cells show the largest difference of any loss or weight (bound "
    f"{FLOAT64_BOUND:g}), bf16 cells the largest relative difference of a loss from float64 (bound 2^-9). Each cell is the "
    "worst over accumulation 1 and 2, clipping on and off, checkpointing none and full (stage 2 also with deferred reduction)."
)
MODELS = ("plain", "tied weights", "branch on one rank")


class BranchBlock(nn.Module):
    """A layer with a branch that only flagged samples take: on most ranks its parameters have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, flagged: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.trunk(x))
        rows = torch.where(flagged)[0]
        return out.index_add(0, rows, self.branch(out[rows])) if rows.numel() else out


class BranchModel(nn.Module):
    """A user's module: repeated blocks, a root parameter, a dict of tensors in, an object with `.loss` out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(61, 16)
        self.blocks = nn.ModuleList(BranchBlock() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(16))
        self.out = nn.Linear(16, 61)

    def forward(self, tokens: Tensor, labels: Tensor, flagged: Tensor) -> dict[str, Tensor]:
        x = self.table(tokens) * self.scale
        for block in self.blocks:
            x = block(x, flagged)
        return {"loss": nn.functional.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell of the matrix."""

    ranks: int
    model: str
    stage: int
    buckets: str
    accumulation: int
    clipping: float
    checkpointing: str
    precision: str = "fp64"
    deferred: bool = False

    def config(self) -> TrialConfig:
        values = {
            "zero_stage": self.stage,
            "micro_batch_size": GLOBAL_BATCH // self.ranks // self.accumulation,
            "activation_checkpointing": self.checkpointing,
            "precision": self.precision,
            "defer_gradient_reduction": self.deferred,
            "param_persistence_threshold": 100,
            **BUCKETS[self.buckets],
        }
        return TrialConfig().replace(values)

    def workload(self) -> Workload:
        return Workload(
            global_batch_size=GLOBAL_BATCH, sequence_length=SEQUENCE, learning_rate=1e-2, gradient_clipping=self.clipping
        )

    def label(self) -> str:
        extra = " deferred" if self.deferred else ""
        return (
            f"{self.ranks} ranks, {self.model}, stage {self.stage}{extra}, {self.buckets}, accumulation {self.accumulation}, "
            f"clipping {self.clipping}, checkpointing {self.checkpointing}, {self.precision}"
        )


def cases(ranks: int) -> Iterator[Case]:
    """The whole matrix for a number of ranks."""
    for model, stage, buckets, accumulation, clipping, checkpointing in itertools.product(
        MODELS, range(4), BUCKETS, (1, 2), (0.0, 0.05), ("none", "full")
    ):
        yield Case(
            ranks=ranks, model=model, stage=stage, buckets=buckets, accumulation=accumulation, clipping=clipping,
            checkpointing=checkpointing,
        )  # fmt: skip
    for model, buckets in itertools.product(MODELS, BUCKETS):
        yield Case(
            ranks=ranks, model=model, stage=2, buckets=buckets, accumulation=2, clipping=0.05, checkpointing="none",
            deferred=True,
        )  # fmt: skip
    for stage, buckets, accumulation in itertools.product(range(4), BUCKETS, (1, 2)):
        yield Case(
            ranks=ranks, model="plain", stage=stage, buckets=buckets, accumulation=accumulation, clipping=1.0,
            checkpointing="none", precision="bf16",
        )  # fmt: skip


def make_module(model: str, precision: str) -> nn.Module:
    dtype = torch.float64 if precision == "fp64" else torch.bfloat16
    if model == "branch on one rank":
        torch.manual_seed(0)
        return BranchModel().to(dtype)
    tied = model == "tied weights"
    spec = ModelSpec(**{**{name: getattr(SPEC, name) for name in SPEC.__slots__}, "tied_embeddings": tied})
    return build_transformer(spec, SEQUENCE, seed=0, dtype=dtype, loss_chunk_size=20 if tied else 0)


def batch(model: str, step: int) -> dict[str, Tensor]:
    drawn = torch.randint(0, 61, (GLOBAL_BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    result = {"tokens": drawn[:, :-1], "labels": drawn[:, 1:]}
    if model == "branch on one rank":
        result["flagged"] = torch.arange(GLOBAL_BATCH) == 0
    return result


def loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output


def reference(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Plain PyTorch, one process, the whole batch at once. bf16 is held against float64 losses of the same weights."""
    module, workload = make_module(case.model, case.precision).to(torch.float64), case.workload()
    optimizer = torch.optim.AdamW(module.parameters(), lr=workload.learning_rate, weight_decay=workload.weight_decay)
    losses = []
    for step in range(STEPS):
        loss = loss_of(module(**batch(case.model, step)))
        loss.backward()
        if workload.gradient_clipping:
            nn.utils.clip_grad_norm_(module.parameters(), workload.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in module.named_parameters()}


def train(case: Case, rank: int) -> tuple[list[float], dict[str, Tensor]]:
    """The native engine on this rank; losses are averaged over the ranks."""
    module, config = make_module(case.model, case.precision), case.config()
    blocks = list(module.blocks) if hasattr(module, "sharding_units") else repeated_blocks(module)
    checkpoint_blocks(blocks, config)
    model = ShardedModel(module, config, case.workload(), Group(dist.group.WORLD, case.ranks, rank), torch.device("cpu"))
    losses = []
    for step in range(STEPS):
        mine = micro_batches(
            batch(case.model, step), rank=rank, ranks=case.ranks, micro_batch_size=config.micro_batch_size,
            global_batch_size=GLOBAL_BATCH,
        )  # fmt: skip
        total = torch.zeros((), dtype=torch.float64)
        for index, micro_batch in enumerate(mine):
            model.begin_micro_batch(last=index == len(mine) - 1)
            loss = loss_of(module(**micro_batch))
            (loss / (len(mine) * case.ranks)).backward()
            model.end_micro_batch()
            total += loss.detach() / len(mine)
        model.update()
        dist.all_reduce(total)
        losses.append(total.item() / case.ranks)
    weights = model.full_parameters()
    model.close()
    return losses, weights


def difference(case: Case, rank: int, cache: dict[Any, Any]) -> float:
    """The largest difference of a loss or weight; of losses alone, relative, in bf16."""
    key = (case.model, case.clipping, case.precision)
    if key not in cache:
        cache[key] = reference(case)
    losses, weights = cache[key]
    got_losses, got_weights = train(case, rank)
    by_loss = max(abs(got - wanted) for got, wanted in zip(got_losses, losses, strict=True))
    if case.precision == "bf16":
        return by_loss / max(losses)
    return max([by_loss, *((got_weights[name] - weights[name]).abs().max().item() for name in weights)])


def run_rank(rank: int, ranks: int, every: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous{ranks}", rank=rank, world_size=ranks)
    cache: dict[Any, Any] = {}
    rows = []
    for case in itertools.islice(cases(ranks), 0, None, every):
        off = difference(case, rank, cache)
        bound = BF16_LOSS_BOUND if case.precision == "bf16" else FLOAT64_BOUND
        rows.append({"label": case.label(), "off": off, "bound": bound, "stage": case.stage, "buckets": case.buckets,
                     "model": case.model, "precision": case.precision, "ranks": ranks})  # fmt: skip
    Path(folder, f"{ranks}-{rank}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def run(ranks: int, every: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, args=(ranks, every, folder), nprocs=ranks)
        per_rank = [json.loads(Path(folder, f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]
    return [{**row, "off": max(rows[index]["off"] for rows in per_rank)} for index, row in enumerate(per_rank[0])]


def summary(rows: list[dict[str, Any]], seconds: float) -> str:
    """Markdown: the worst difference of every group of cases."""
    lines = [
        "# Parity of the native engine with one process",
        "",
        HEADER,
        "",
        f"{len(rows)} cases, {sum(row['off'] <= row['bound'] for row in rows)} within their bound, {seconds:.0f} s.",
        "",
        "| ranks | model | precision | stage | " + " | ".join(BUCKETS) + " |",
        "|---|---|---|---|" + "---|" * len(BUCKETS),
    ]
    groups = dict.fromkeys((row["ranks"], row["model"], row["precision"], row["stage"]) for row in rows)
    for group in groups:
        mine = [row for row in rows if (row["ranks"], row["model"], row["precision"], row["stage"]) == group]
        cells = [max((row["off"] for row in mine if row["buckets"] == name), default=float("nan")) for name in BUCKETS]
        lines.append(f"| {' | '.join(map(str, group))} | " + " | ".join(f"{cell:.1e}" for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--every", type=int, default=1, help="run every Nth case alone")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    began = time.monotonic()
    rows = [row for ranks in arguments.ranks for row in run(ranks, arguments.every)]
    text = summary(rows, time.monotonic() - began)
    print(text)
    wrong = [row for row in rows if not row["off"] <= row["bound"]]
    for row in wrong:
        print(f"WRONG {row['label']}: {row['off']:.2e} > {row['bound']:g}")
    if arguments.markdown and not wrong:
        arguments.markdown.write_text(text)
    print(f"{len(rows) - len(wrong)} passed, {len(wrong)} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
