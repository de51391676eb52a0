"""States that exceed a memory limit twice over, kept in files: does the update run at the file system's bandwidth?

    python -m benchmarks.engines.nvme_offload [--nvme PATH] [--layers N] [--markdown docs/results/nvme-benchmark.md]

One rank trains a transformer at stage 3 with its optimizer state in files and its parameters in host memory. Each
step's update is compared with a pass over a file of the same size, read and written as in the engine, without the arithmetic.
Exit status 1 if the memory limit is exceeded, if the states are less than twice the limit, or if the update is more than
`WITHIN` slower than the file system. Run it on an otherwise idle machine.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.written_page import table
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.native.file_shard import FileShare
from executor.engines.native.zero import ShardedModel
from executor.engines.session import ParallelSession
from executor.files.rank_file import FilePass
from executor.measurement.memory import MemoryAccount, account_step
from search_spaces.models.model import ModelSpec
from search_spaces.training.states import CHUNK_ELEMENTS, STATES
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

WITHIN = 0.2
"""Share of the file system's bandwidth by which an update may be slower."""
TIMES = 2.0
"""Least ratio of the states to the memory limit."""
LIMIT_SHARE = 2.5
"""The memory limit is the states' bytes divided by this."""
STATE_BYTES = 16
"""Bytes of states a parameter in fp32: parameter, gradient and two moments."""
ROUNDS = 5
INTRODUCTION = """# States in files, measured

Written by `make bench` (`benchmarks/engines/nvme_offload.py`). A transformer of {millions} million parameters on one CPU rank,
ZeRO stage 3 in fp32, optimizer state in files ([how](../performance.md#offloading-to-files)), parameters in host
memory. States are 16 bytes a parameter;
an update reads and writes 12 of them, here by {how}. Rates count both directions, medians of {rounds} updates and of as many
passes between them.
"""
WORKLOAD = {"global_batch_size": 1, "sequence_length": 16}
CONFIG = TrialConfig(
    zero_stage=3, offload_optimizer="nvme", offload_param="cpu", reduce_bucket_size=CHUNK_ELEMENTS, prefetch_bucket_size=0,
    param_persistence_threshold=0,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One update, and a pass over as many bytes directly after it."""

    moved: int
    """Bytes of the update, both directions together."""
    update_seconds: float
    bare_rate: float
    """Bytes/s of the pass."""

    @property
    def rate(self) -> float:
        """Bytes/s of the update."""
        return self.moved / self.update_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All measurements."""

    parameters: int
    limit: int
    account: MemoryAccount
    file_bytes: int
    direct: bool
    rounds: tuple[Round, ...]

    @property
    def times(self) -> float:
        """Ratio of the states to the memory limit."""
        return STATE_BYTES * self.parameters / self.limit

    @property
    def rate(self) -> float:
        """Median bytes/s of the updates."""
        return statistics.median(each.rate for each in self.rounds)

    @property
    def bare_rate(self) -> float:
        """Median bytes/s of the passes: the file system's rate."""
        return statistics.median(each.bare_rate for each in self.rounds)

    @property
    def holds(self) -> bool:
        """Whether every claim holds."""
        fast = self.rate >= (1 - WITHIN) * self.bare_rate
        return fast and self.account.peak <= self.limit and self.times >= TIMES


def model_of(layers: int) -> ModelSpec:
    """A transformer whose short step computes little and updates much."""
    return ModelSpec(
        name="wide", family="llama", num_layers=layers, hidden_size=1024, num_attention_heads=8, num_key_value_heads=8,
        head_dim=128, ffn_hidden_size=2816, vocab_size=4096, sequence_length=WORKLOAD["sequence_length"],
    )  # fmt: skip


def measure(folder: Path, layers: int) -> Findings:
    """Train `ROUNDS` steps, each followed by a pass over a separate file."""
    model = model_of(layers)
    workload = Workload(**WORKLOAD, nvme_path=str(folder))
    context = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
    limit = int(STATE_BYTES * model.parameter_count / LIMIT_SHARE)
    session = NativeEngine().build(context, model, CONFIG, workload)
    (replica,) = session.replicas
    assert isinstance(replica, ShardedModel)
    share = replica.optimizer.share
    assert isinstance(share, FileShare)
    extent = STATES * 4 * CHUNK_ELEMENTS
    passes = FilePass(folder, share.file.size // extent, extent)
    try:
        session.prepare(0)
        session.train_step()
        rounds = tuple(_round(session, replica, share, passes, step) for step in range(1, ROUNDS + 1))
        session.prepare(ROUNDS + 1)
        account = account_step(session.train_step, session.tagged_storages, context.device)
        return Findings(
            parameters=model.parameter_count, limit=limit, account=account, file_bytes=share.file.size,
            direct=share.file.direct, rounds=rounds,
        )  # fmt: skip
    finally:
        passes.file.close()
        session.close()


def _round(session: ParallelSession, replica: ShardedModel, share: FileShare, passes: FilePass, step: int) -> Round:
    """Train a step; record its update's seconds and bytes, without reads that were prefetched during backward."""
    seconds, moved = 0.0, 0
    plain = replica.update

    def timed(scale: torch.Tensor | None) -> None:
        nonlocal seconds, moved
        before, began = share.file.bytes_read + share.file.bytes_written, time.perf_counter()
        plain(scale)
        seconds = time.perf_counter() - began
        moved = share.file.bytes_read + share.file.bytes_written - before

    session.prepare(step)
    replica.update = timed  # type: ignore[method-assign]
    try:
        session.train_step()
    finally:
        replica.update = plain  # type: ignore[method-assign]
    began = time.perf_counter()
    passes.update()
    return Round(moved=moved, update_seconds=seconds, bare_rate=2 * passes.size / (time.perf_counter() - began))


def report(found: Findings) -> str:
    """The page."""
    claims = table(
        ("claim", "measured", "required"),
        [
            ("states / memory limit", f"{found.times:.2f}", f"at least {TIMES:g}"),
            ("peak of a step", f"{found.account.peak / 1e6:,.0f} MB", f"at most {found.limit / 1e6:,.0f} MB"),
            ("host memory, buffers and parameters", f"{found.account.host_peak / 1e6:,.0f} MB", ""),
            ("in the file", f"{found.file_bytes / 1e6:,.0f} MB", ""),
            ("update", f"{found.rate / 1e9:.2f} GB/s", f"at least {(1 - WITHIN) * found.bare_rate / 1e9:.2f} GB/s"),
            ("file system", f"{found.bare_rate / 1e9:.2f} GB/s", "read and written the same way, without the arithmetic"),
            ("update / file system", f"{found.rate / found.bare_rate:.0%}", f"at least {1 - WITHIN:.0%}"),
        ],
    )
    rounds = table(
        ("round", "update", "file system"),
        [(str(n), f"{each.rate / 1e9:.2f} GB/s", f"{each.bare_rate / 1e9:.2f} GB/s") for n, each in enumerate(found.rounds, 1)],
    )
    how = "direct I/O" if found.direct else "the page cache, written out and dropped (direct I/O is refused there)"
    introduction = INTRODUCTION.format(millions=f"{found.parameters / 1e6:,.0f}", how=how, rounds=ROUNDS)
    return "\n".join([introduction, *claims, "", *rounds, ""])


def main() -> int:
    """Measure, print both figures, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, help="folder of the files; default: the temporary folder")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
        found = measure(Path(folder), options.layers)
    text = report(found)
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())
