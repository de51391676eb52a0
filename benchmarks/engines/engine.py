"""The native engine against torch DDP, FSDP2 and DeepSpeed, stage by stage, on two ranks with a slow link between them.

    python -m benchmarks.engines.engine [--settings small …] [--contests "stage 0" …] [--rounds 8] [--rate 500mbit]
                                [--markdown docs/results/engine-benchmark.md]

About 90 minutes on two idle cores, half of it for the large setting.

Each rank runs in its own network namespace; the link between the two is shaped (root, Linux). One process per rank builds
every engine of a stage and runs them in turns, so that a busy moment of the machine affects all of them. If the link cannot
be created, `--rate none` runs over loopback; speed is then not judged. DeepSpeed takes part if it is installed
(`pip install --no-deps deepspeed==0.19.8 einops hjson ninja py-cpuinfo` changes no other package).
"""

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.shaped_link import ADDRESSES, INTERFACE, ShapedLink, why_not
from benchmarks.engines.engine_contestants import BYTES
from executor.measurement.timing import student_t_975
from search_spaces.models.model import ModelSpec
from search_spaces.plain import to_plain
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

RANKS = 2
LOSS_BOUND = 1e-4
"""Largest relative difference of two engines' losses on the first steps, in fp32; beyond it they do not train the same."""
LOSS_STEPS = 5
TRAFFIC_BOUND = 1.01
"""Bytes on the link up to this multiple of the best's count as equal: headers and acknowledgements vary."""
PEAK_BOUND = 1.001
"""A peak up to this multiple of the leanest's counts as equal: engines hold some scalars."""
TIE_BOUND = 0.1
"""Half-width of the ratio's interval beyond which speed is not judged."""
SECONDS_LIMIT = 7200
"""Time limit of one setting, in seconds."""


def llama(name: str, layers: int, hidden: int, ffn: int, vocabulary: int) -> ModelSpec:
    return ModelSpec(
        name=name, family="llama", num_layers=layers, hidden_size=hidden, num_attention_heads=8, num_key_value_heads=8,
        head_dim=hidden // 8, ffn_hidden_size=ffn, vocab_size=vocabulary, sequence_length=128,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One comparison: one model and one value of every knob, for speed and for memory."""

    name: str
    model: ModelSpec
    workload: Workload
    config: TrialConfig

    def __str__(self) -> str:
        accumulation = self.config.gradient_accumulation_steps(self.workload.global_batch_size, RANKS)
        return (
            f"{self.model.parameter_count:,} parameters ({self.model.num_layers} layers of {self.model.hidden_size}, "
            f"vocabulary {self.model.vocab_size:,}), fp32, global batch {self.workload.global_batch_size} of "
            f"{self.workload.sequence_length} tokens, micro-batch {self.config.micro_batch_size}, accumulation {accumulation}"
        )

    def knobs(self, contest: str, changes: dict[str, Any]) -> str:
        """The knobs set in a contest, as text."""
        values = (contests(self.model)[contest] | changes).items()
        return ", ".join(f"{name} {value:,}" if type(value) is int else f"{name} {value}" for name, value in values)


def contests(model: ModelSpec) -> dict[str, dict[str, Any]]:
    """The knobs that each contest sets, in every engine that has the knob.

    One rule for all: gradients are reduced, and parameters prefetched, one block at a time, which is FSDP2's unit. Nothing
    persists; where parameters are resharded, at most one block and the prefetched part are whole; and every other knob
    has its default (DeepSpeed reads no size of the gather after an update). At stage 3 parameters are gathered again
    for backward in one contest, and kept from forward in another; two more prefetch half a block and two blocks.

    At stage 0 DeepSpeed has a fixed bucket size, 5e8, which is everyone's default, so it competes in that contest. One
    bucket for the whole model leaves nothing to overlap, so that gradients stay in place until all are computed
    (`contiguous_gradients` off), as in DeepSpeed at this stage. In the other contest buckets have DDP's default size.
    """
    embedding = model.vocab_size * model.hidden_size
    block = -(-(model.parameter_count - 2 * embedding) // model.num_layers)
    shared = {"reduce_bucket_size": block}
    whole = shared | {"zero_stage": 3, "param_persistence_threshold": 0, "prefetch_bucket_size": block}

    def ahead(blocks: float) -> dict[str, Any]:
        size = int(blocks * block)
        return whole | {"prefetch_bucket_size": size, "max_live_parameters": block + size, "reshard_after_forward": True}

    return {
        "stage 0": {"zero_stage": 0, "reduce_bucket_size": 500_000_000, "contiguous_gradients": False},
        "stage 0, buckets": {"zero_stage": 0, "reduce_bucket_size": 25 * 2**20 // BYTES},
        "stage 1": shared | {"zero_stage": 1},
        "stage 2": shared | {"zero_stage": 2},
        "stage 3": ahead(1),
        "stage 3, half a block ahead": ahead(0.5),
        "stage 3, two blocks ahead": ahead(2),
        "stage 3, kept": whole | {"reshard_after_forward": False},
    }


CONTESTS = (
    "stage 0", "stage 0, buckets", "stage 1", "stage 2", "stage 3", "stage 3, half a block ahead", "stage 3, two blocks ahead",
    "stage 3, kept",
)  # fmt: skip
SMALL = llama("small", layers=8, hidden=256, ffn=704, vocabulary=2048)
LARGE = llama("large", layers=8, hidden=512, ffn=1408, vocabulary=2048)
SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(
            name="small",
            model=SMALL,
            workload=Workload(global_batch_size=8, sequence_length=128),
            config=TrialConfig(micro_batch_size=4),
        ),
        Setting(
            name="small-accumulated",
            model=SMALL,
            workload=Workload(global_batch_size=8, sequence_length=128),
            config=TrialConfig(micro_batch_size=2),
        ),
        Setting(
            name="large",
            model=LARGE,
            workload=Workload(global_batch_size=8, sequence_length=128),
            config=TrialConfig(micro_batch_size=4),
        ),
    )
}


def run(setting: Setting, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Results by contest and engine."""
    plan = {
        "model": to_plain(setting.model),
        "workload": to_plain(setting.workload),
        "config": to_plain(setting.config),
        "ranks": RANKS,
        "contests": {name: contests(setting.model)[name] | arguments.set for name in arguments.contests},
        "engines": arguments.engines,
        "rounds": arguments.rounds,
        "steps": arguments.steps,
    }
    return run_ranks(plan, arguments.rate)


def run_ranks(plan: dict[str, Any], rate: str) -> dict[str, dict[str, Any]]:
    """What rank 0 wrote for this plan. All rank processes have ended when this returns or raises."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        link = None if rate == "none" else stack.enter_context(ShapedLink(rate))
        plan |= {"address": ADDRESSES[0], "port": 29500} if link else {"address": "127.0.0.1", "port": _free_port()}
        (folder / "plan.json").write_text(json.dumps(plan))
        ranks = [stack.enter_context(_rank(rank, folder, link)) for rank in range(RANKS)]
        _wait(ranks)
        return dict(json.loads((folder / "result.json").read_text()))


@contextlib.contextmanager
def _rank(rank: int, folder: Path, link: ShapedLink | None) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(Path(__file__).with_name("engine_rank.py")), str(rank)]
    command += [str(folder / "plan.json"), str(folder / "result.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE if link else "lo"}
    environment["TORCH_EXTENSIONS_DIR"] = str(folder / f"extensions-{rank}")
    process = subprocess.Popen([*(link.command(rank) if link else []), *command], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Wait for all ranks to end; exit if one fails."""
    limit = time.monotonic() + SECONDS_LIMIT
    while any(rank.poll() is None for rank in ranks):
        failed = [number for number, rank in enumerate(ranks) if rank.poll()]
        if failed or time.monotonic() > limit:
            raise SystemExit(f"rank {failed[0]} failed" if failed else f"no result after {SECONDS_LIMIT} s")
        time.sleep(0.2)
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over the rounds with its 95 % interval."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: list[float]) -> "Estimate":
        count = len(values)
        spread = statistics.stdev(values) / math.sqrt(count) if count > 1 else math.inf
        return cls(mean=statistics.fmean(values), half_width=student_t_975(count - 1) * spread if count > 1 else math.inf)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half_width:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine's figures in one contest."""

    engine: str
    samples_per_second: Estimate
    ratio: Estimate | None
    """Native's samples/s over this engine's, round by round; None for native itself."""
    cpu_seconds: float
    """CPU seconds of a step, both ranks."""
    collectives: dict[str, tuple[int, int]]
    """Collectives of a step on one rank: operation -> (count, bytes of the full messages)."""
    waited: tuple[int, int]
    """Collectives of a step that are waited for at the call, and all that Python calls."""
    wire_bytes: float
    """Bytes of a step, both ranks, as counted by the link."""
    peak_bytes: int
    """Peak of the rank with the higher one."""

    @property
    def count(self) -> int:
        return sum(count for count, _ in self.collectives.values())

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank must send: an all-reduce is a reduce-scatter and an all-gather."""
        share = (RANKS - 1) / RANKS
        return sum(size * share * (2 if kind == "allreduce" else 1) for kind, (_, size) in self.collectives.items())


def rows(found: dict[str, Any], samples: int) -> list[Row]:
    """Raises:
    SystemExit: the engines do not train the same.
    """
    own = found["native"]
    for name, result in found.items():
        for step, (mine, theirs) in enumerate(zip(own["losses"][:LOSS_STEPS], result["losses"], strict=False)):
            if abs(mine - theirs) > LOSS_BOUND * abs(mine):
                raise SystemExit(f"step {step}: native's loss is {mine:.7g}, {name}'s {theirs:.7g}: no comparison")
    own_rounds = [statistics.fmean(part) for part in own["seconds"]]
    return [_row(name, result, own_rounds, samples) for name, result in found.items()]


def _row(name: str, result: dict[str, Any], own_rounds: list[float], samples: int) -> Row:
    rounds = [statistics.fmean(part) for part in result["seconds"]]
    return Row(
        engine=name,
        samples_per_second=Estimate.of([samples / seconds for seconds in rounds]),
        ratio=None
        if name == "native"
        else Estimate.of([theirs / ours for theirs, ours in zip(rounds, own_rounds, strict=True)]),
        cpu_seconds=statistics.fmean(result["cpu_seconds"]),
        collectives={kind: tuple(value) for kind, value in result["collectives"].items()},
        waited=tuple(result["waited"]),
        wire_bytes=statistics.fmean(result["sent"]),
        peak_bytes=max(memory["peak"] for memory in result["memory"]),
    )


def verdicts(own: Row, peers: list[Row], *, shaped: bool) -> list[tuple[bool, str]]:
    """(holds, claim) for every criterion."""
    fewest = min(peers, key=lambda row: row.count)
    least = min(peers, key=lambda row: row.sent_bytes)
    leanest = min(peers, key=lambda row: row.peak_bytes)
    found = [
        (own.count <= fewest.count, f"{own.count} collectives a step, the best ({fewest.engine}) {fewest.count}"),
        (
            own.sent_bytes <= least.sent_bytes * TRAFFIC_BOUND,
            f"{own.sent_bytes / 1e6:.2f} MB to send a step and rank, the best ({least.engine}) {least.sent_bytes / 1e6:.2f}",
        ),
        (
            own.peak_bytes <= leanest.peak_bytes * PEAK_BOUND,
            f"peak {own.peak_bytes / 1e6:.2f} MB, the leanest ({leanest.engine}) {leanest.peak_bytes / 1e6:.2f}",
        ),
    ]
    if shaped:
        wire = min(peers, key=lambda row: row.wire_bytes)
        found.append(
            (
                own.wire_bytes <= wire.wire_bytes * TRAFFIC_BOUND,
                f"{own.wire_bytes / 1e6:.2f} MB a step on the link, the best ({wire.engine}) {wire.wire_bytes / 1e6:.2f}",
            )
        )
        hardest = min((row for row in peers if row.ratio), key=lambda row: row.ratio.mean if row.ratio else math.inf)
        assert hardest.ratio is not None
        found.append(_speed(hardest.engine, hardest.ratio))
    return found


def _speed(engine: str, ratio: Estimate) -> tuple[bool, str]:
    claim = f"{ratio} times the samples/s of the best ({engine})"
    if ratio.half_width > TIE_BOUND and ratio.mean - ratio.half_width < 1:
        return False, f"{claim}: the interval is wider than {TIE_BOUND:g}; take more rounds or a quieter machine"
    if ratio.mean >= 1:
        return True, claim
    holds = ratio.mean + ratio.half_width >= 1
    return holds, f"{claim}, a tie within the interval" if holds else claim


def table(stage_rows: list[Row]) -> list[str]:
    lines = [
        (
            "| engine | samples/s | native over it | waits where called | CPU s a step | collectives a step | to send, MB "
            "| on link, MB | peak, MB |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in stage_rows:
        kinds = ", ".join(f"{count} {kind}" for kind, (count, _) in sorted(row.collectives.items()))
        cells = (
            row.engine, row.samples_per_second, row.ratio or "", _waits(row), f"{row.cpu_seconds:.2f}",
            f"{row.count}: {kinds}", f"{row.sent_bytes / 1e6:.2f}", f"{row.wire_bytes / 1e6:.2f}",
            f"{row.peak_bytes / 1e6:.2f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _waits(row: Row) -> str:
    waited, seen = row.waited
    return f"{waited} of {seen}" if seen else "–"


def report(
    setting: Setting, results: dict[str, dict[str, Any]], changes: dict[str, Any], *, shaped: bool
) -> tuple[list[str], list[str]]:
    """Lines of markdown, and the claims that do not hold."""
    lines, failed = [f"## {setting.name}", "", f"{setting}."], []
    for contest, found in results.items():
        stage_rows = rows(found, setting.workload.global_batch_size)
        lines += ["", f"### {contest.capitalize()}", "", f"{setting.knobs(contest, changes)}.", "", *table(stage_rows), ""]
        if len(stage_rows) == 1:
            continue
        for holds, claim in verdicts(stage_rows[0], stage_rows[1:], shaped=shaped):
            lines.append(f"- {'holds' if holds else '**DOES NOT HOLD**'}: {claim}")
            failed += [] if holds else [f"{setting.name}, {contest}: {claim}"]
    return lines, failed


def introduction(arguments: argparse.Namespace, *, shaped: bool) -> list[str]:
    link = f"a link shaped to {arguments.rate} between two network namespaces" if shaped else "loopback (speed is not judged)"
    versions = [f"torch {torch.__version__}"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions.append(f"DeepSpeed {importlib.metadata.version('deepspeed')}")
    return [
        "# The native engine and others",
        "",
        (f"Written by `benchmarks/engines/engine.py`: {', '.join(versions)}, {RANKS} ranks of one thread on {os.cpu_count()} "
        f"cores, gloo over {link}; {arguments.rounds} rounds of {arguments.steps} steps in turns, 95 % intervals over the "
        "rounds. Same model class, weights, data, fused AdamW and clipping at 1.0 for all; losses of the first steps agree to "
        f"{LOSS_BOUND:g}. Speed and memory come from the same processes at the same settings."),
        "",
        ("Collectives are counted where every engine's calls reach the backend; *to send*: bytes that a rank must send for "
        "their full messages (an all-reduce is a reduce-scatter and an all-gather); *on link*: bytes that the kernel counted, "
        "both ranks, with gloo's own algorithms (it reduce-scatters by an all-reduce). Peak memory is the allocator's."),
        "",
        ("*Waits where called* counts, of a step's collectives, those that a rank calls with `async_op=False`, so that "
        "nothing overlaps with them here. They are counted at torch's functions, in the step whose collectives are listed. "
        "FSDP2 calls all of its gathers and reductions this way, because CUDA streams overlap them: **gloo executes FSDP2's "
        "collectives synchronously, and a ratio over it on CPUs mostly measures that.** With `_set_unshard_async_op` "
        "(*prefetch beside*), its gathers overlap with computation, but its reductions do not. DeepSpeed calls its reductions "
        "with `async_op=False` too, but not its gathers of stage 3. DDP's calls are made in C++ and cannot be counted."),
        "",
        ("FSDP2 and DeepSpeed compete with several settings of their own, one row each, and the best counts. *Root kept*: "
        "`reshard_after_forward=False` for the root. *Prefetch*: that, `set_modules_to_forward_prefetch` and "
        "`set_modules_to_backward_prefetch`. *A rank's reduces*: `use_multi_rank_bucket_allreduce` off, a setting of "
        "stages 1 and 2."),
        "",
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--contests", nargs="+", choices=tuple(CONTESTS), default=list(CONTESTS))
    parser.add_argument("--engines", nargs="+", help="native first; default: every engine that supports the stage")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="steps of each engine in a round")
    parser.add_argument("--rate", default="500mbit", help="rate of the link, as tc writes it; none: loopback")
    parser.add_argument("--set", nargs="+", default=[], metavar="KNOB=VALUE", help="change knobs of every contest")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path, help="write the raw figures too")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.rate != "none" and (reason := why_not()):
        print(f"skipped: {reason}; --rate none runs over loopback, without a verdict on speed")
        return 0
    arguments.set = {name: json.loads(value) for name, value in (change.split("=") for change in arguments.set)}
    shaped = arguments.rate != "none"
    lines, failed, raw = introduction(arguments, shaped=shaped), list[str](), {}
    for name in arguments.settings:
        setting = SETTINGS[name]
        raw[name] = run(setting, arguments)
        more, missed = report(setting, raw[name], arguments.set, shaped=shaped)
        lines += [*more, ""]
        failed += missed
    print("\n".join(lines))
    if arguments.engines and len(arguments.engines) == 1:
        print("nothing was compared")
    else:
        print("every criterion holds" if not failed else "DOES NOT HOLD:\n" + "\n".join(failed))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines).rstrip() + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(raw))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
