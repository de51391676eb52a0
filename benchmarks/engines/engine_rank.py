"""A rank of `benchmarks/engines/engine.py`: builds each stage's engines, counts memory and collectives, times turns."""

import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.engines.waited_collectives import CALLS  # isort: skip  (before what keeps torch's functions)

from benchmarks.common.shaped_link import sent_bytes
from benchmarks.engines.engine_contestants import Contestant, build, contestants
from executor.engine import RankContext
from executor.measurement.memory import MemoryAccount, account_step
from executor.measurement.trial_report import gather_numbers, gather_plain
from search_spaces.models.model import ModelSpec
from search_spaces.plain import from_plain
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

WARMUP_STEPS = 3
"""Afterwards optimizer state, DDP's final buckets and the traces of stage 3 exist."""
KINDS = ("allreduce", "allgather", "reduce_scatter", "broadcast", "reduce", "alltoall", "gather", "scatter")
"""In this order, because some names are prefixes of others."""


@dataclass(slots=True)
class Turn:
    """A built engine and its measurements."""

    name: str
    contestant: Contestant
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    """Seconds of each step on the slowest rank, by round."""
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU seconds of each step, summed over the ranks."""
    sent: list[float] = field(default_factory=list)
    """Bytes that the ranks put on the link in a step, summed."""
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)
    waited: tuple[int, int] = (0, 0)
    """Collectives of a step that are waited for at the call, and all that are called from Python."""
    memory: list[dict[str, Any]] = field(default_factory=list)

    def step(self, context: RankContext, keep: bool) -> None:
        """Train one step, timed as in the executor: from a barrier to the end of the step on the slowest rank."""
        self.contestant.prepare(self.steps)
        gather_numbers(context, [0.0])
        cpu, sent, began = time.process_time(), sent_bytes(), time.perf_counter()
        report = self.contestant.train_step()
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        assert report.loss is not None  # no engine here has a pipeline
        rows = gather_numbers(context, [seconds, cpu, report.loss])
        # After this gather none of the step's packets are left in the link's queue.
        sent_rows = gather_numbers(context, [float(sent_bytes() - sent)])
        self.steps += 1
        self.losses.append(sum(row[2] for row in rows) / len(rows))
        if keep:
            self.seconds[-1].append(max(row[0] for row in rows))
            self.cpu_seconds.append(sum(row[1] for row in rows))
            self.sent.append(sum(row[0] for row in sent_rows))


def run_contest(context: RankContext, plan: dict[str, Any], name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Measure every engine in one contest.

    1. Build them one after the other; warm each up, account for its memory, count its collectives.
    2. In each round every engine trains some steps; a different engine begins each round.
    """
    spec, workload = from_plain(ModelSpec, plan["model"]), from_plain(Workload, plan["workload"])
    config = from_plain(TrialConfig, plan["config"]).replace(changes)
    turns = []
    for engine in plan["engines"] or contestants(config, name):
        turn = Turn(engine, build(engine, context, spec, config, workload))
        for _ in range(WARMUP_STEPS):
            turn.step(context, keep=False)
        turn.memory = gather_plain(context, _memory(context, turn))
        CALLS.seen = CALLS.waited = 0
        turn.collectives = _count(turn)
        turn.waited = (CALLS.waited, CALLS.seen)
        turns.append(turn)
        peak = turn.memory[0]["peak"]
        log_line(
            context, f"{name} {engine}: {peak:,} bytes at the peak, {turn.memory[0]['at_start']:,} before, {turn.collectives}"
        )
    _take_turns(context, turns, plan)
    return {turn.name: _result(turn) for turn in turns}


def _take_turns(context: RankContext, turns: list[Turn], plan: dict[str, Any]) -> None:
    gc.collect()
    gc.freeze()
    for number in range(plan["rounds"]):
        first = number % len(turns)
        for turn in (*turns[first:], *turns[:first]):
            turn.seconds.append([])
            for _ in range(plan["steps"]):
                turn.step(context, keep=True)
    gc.unfreeze()


def run_sweep(context: RankContext, plan: dict[str, Any], variants: list[dict[str, Any]]) -> dict[str, Any]:
    """Time every variant alone, of engines with one that was not `swept` before; then the `finalists` fastest of each engine in
    turns.

    Returns the swept seconds by variant (the fastest step; the error, where the engine refuses its settings) and the
    finalists' measurements.
    """
    spec, workload = from_plain(ModelSpec, plan["model"]), from_plain(Workload, plan["workload"])

    def built(variant: dict[str, Any]) -> Turn:
        config = from_plain(TrialConfig, plan["config"]).replace(variant["knobs"])
        turn = Turn(variant["name"], build(variant["engine"], context, spec, config, workload, **variant["settings"]))
        for _ in range(WARMUP_STEPS):
            turn.step(context, keep=False)
        return turn

    changed = {variant["engine"] for variant in variants if variant["name"] not in plan["swept"]}
    swept: dict[str, float | str] = {}
    for variant in variants:
        if variant["engine"] not in changed:
            swept[variant["name"]] = plan["swept"][variant["name"]]
            continue
        try:
            turn = built(variant)
        except Exception as error:  # both ranks fail alike, before or after the same collectives
            swept[variant["name"]] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
        else:
            turn.seconds.append([])
            for _ in range(plan["swept_steps"]):
                turn.step(context, keep=True)
            swept[variant["name"]] = min(turn.seconds[0])
            turn.contestant.close()
            del turn
        gc.collect()
        log_line(context, f"{variant['name']}: {swept[variant['name']]}")
    turns = []
    for engine in dict.fromkeys(variant["engine"] for variant in variants):
        timed = [one for one in variants if one["engine"] == engine and isinstance(swept[one["name"]], float)]
        turns += [built(one) for one in sorted(timed, key=lambda one: swept[one["name"]])[: plan["finalists"]]]
    _take_turns(context, turns, plan)
    return {"swept": swept, "final": {turn.name: {"losses": turn.losses, "seconds": turn.seconds} for turn in turns}}


def _result(turn: Turn) -> dict[str, Any]:
    turn.contestant.close()
    return {
        "losses": turn.losses,
        "seconds": turn.seconds,
        "cpu_seconds": turn.cpu_seconds,
        "sent": turn.sent,
        "collectives": turn.collectives,
        "waited": turn.waited,
        "memory": turn.memory,
    }


def _memory(context: RankContext, turn: Turn) -> dict[str, Any]:
    turn.contestant.prepare(turn.steps)
    turn.steps += 1
    account: MemoryAccount = account_step(turn.contestant.train_step, turn.contestant.tagged_storages, context.device)
    return {"peak": account.peak, "by_tag": account.by_tag, "at_start": sum(account.at_start.values())}


def _count(turn: Turn) -> dict[str, tuple[int, int]]:
    """Operation -> (count, bytes of the full messages) of one step, as every engine's calls arrive at the backend."""
    turn.contestant.prepare(turn.steps)
    turn.steps += 1
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as recorder:
        turn.contestant.train_step()
    counts, sizes = Counter[str](), Counter[str]()
    for node in _nodes(recorder):
        if node.tag == _EventType.TorchOp and node.name.startswith("c10d::"):
            call = node.name.removeprefix("c10d::").removeprefix("_")
            kind = next((kind for kind in KINDS if call.startswith(kind)), call)
            counts[kind] += 1
            sizes[kind] += _message_bytes(node.extra_fields.inputs)
    return {kind: (counts[kind], sizes[kind]) for kind in counts}


def _nodes(recorder: Any) -> Iterator[Any]:
    stack = list(recorder.profiler.kineto_results.experimental_event_tree())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children)


def _message_bytes(inputs: list[Any]) -> int:
    """The largest argument: of a gather its output, of a scatter its input, otherwise the tensors themselves."""
    return max((_bytes(argument) for argument in inputs), default=0)


def _bytes(argument: Any) -> int:
    if isinstance(argument, list | tuple):
        return sum(_bytes(part) for part in argument)
    if not hasattr(argument, "sizes"):
        return 0
    elements = 1
    for size in argument.sizes:
        elements *= size
    return elements * torch.empty((), dtype=argument.dtype).element_size()


def log_line(context: RankContext, line: str) -> None:
    if context.rank == 0:
        print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def join(rank: int, ranks: int, address: str, port: int) -> RankContext:
    """Join the process group, with one thread for each rank: the ranks share the machine."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    store = dist.TCPStore(address, port, ranks, is_master=rank == 0)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    control = dist.new_group(backend="gloo")
    return RankContext(rank=rank, world_size=ranks, device=torch.device("cpu"), control_group=control)


def main() -> None:
    rank, plan_path, result_path = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    plan = json.loads(plan_path.read_text())
    context = join(rank, plan["ranks"], plan["address"], plan["port"])
    if "sweeps" in plan:
        results = {name: run_sweep(context, plan, variants) for name, variants in plan["sweeps"].items()}
    else:
        results = {name: run_contest(context, plan, name, changes) for name, changes in plan["contests"].items()}
    if rank == 0:
        result_path.write_text(json.dumps(results))
    gather_numbers(context, [0.0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
