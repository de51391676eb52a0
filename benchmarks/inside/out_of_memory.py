"""Memory limits in the middle of a run: each makes a real allocation fail, in a chosen phase, on one rank or on all.

`python -m benchmarks.inside.out_of_memory EVENTS FIRST` on each rank. The limit is that of the address space (RLIMIT_AS), with
4 MiB left, and is lifted when the run goes on. Losses, weights and evaluations are compared with an untuned loop.
"""

import copy
import json
import os
import resource
import sys
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.inside.models import Language, full_weights, make_batches, plain_loop, rank_number, start_ranks, wrapped
from benchmarks.inside.random_changes import RandomlyTuned

PHASES = ("forward", "backward", "optimizer", "evaluation")


class Limit:
    """A memory limit that begins in a phase of a step."""

    def __init__(self, phase: str, number: int) -> None:
        self.phase, self.number = phase, number
        self.is_on = self.has_been = False

    def enter(self, phase: str) -> None:
        """Begin the limit if this is its phase."""
        if phase != self.phase or self.has_been:
            return
        self.number -= 1
        if self.number < 0:
            self.is_on = self.has_been = True
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            limit = pages * os.sysconf("SC_PAGE_SIZE") + 4 * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    def lift(self) -> None:
        """End it."""
        if self.is_on:
            self.is_on = False
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class _Fails(torch.autograd.Function):
    """Enters a phase in a backward pass."""

    limit: Limit

    @staticmethod
    def forward(_: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        _Fails.limit.enter("backward")
        return gradient


def run_event(seed: int, wrapper: str, phase: str, everywhere: bool) -> dict[str, Any]:
    """One run with one event."""
    draw = Random(seed)
    rows, per_step = 16, 2
    # A rank's own limit, in a step in which most settings are new.
    mine = everywhere or rank_number() == seed % 2
    limit = _Fails.limit = Limit(phase, draw.randrange(1, 4)) if mine else Limit("never", 0)
    batches = make_batches(5 * per_step, rows, 1000 * seed + rank_number(), ragged=True)
    evaluated = make_batches(2, 32, 5000 + seed, ragged=False)
    torch.manual_seed(seed)
    reference = Language(width=256, layers=2)
    tuned = copy.deepcopy(reference)
    losses: tuple[list[float], list[float]] = ([], [])
    reference = wrapped(reference, wrapper)
    plain_loop(reference, torch.optim.AdamW(reference.parameters(), 1e-3), batches, per_step, losses[0].append)

    model = wrapped(tuned, wrapper)
    inner = getattr(model, "module", model)
    inner.layers[1].register_forward_pre_hook(lambda module, _: limit.enter("forward" if module.training else "evaluation"))
    inner.layers[0].register_forward_hook(lambda module, _, output: _Fails.apply(output) if module.training else None)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    world = dist.get_world_size() if dist.is_initialized() else 1
    tuner = RandomlyTuned(model, optimizer, global_batch_size=rows * per_step * world)
    # Only in a proof: an update of a setting that has trained before is not undone.
    optimizer.register_step_pre_hook(lambda *_: limit.enter("optimizer" if tuner._steps.is_proof else "proven update"))
    tuner.seed = seed
    trained: list[int] = []
    attempt: list[int] = []
    evaluations: list[float] = []
    total, attempts = 0.0, 0
    for batch in tuner.batches(batches):
        limit.lift()
        if tuner.is_first_part:
            attempt, total, attempts = [], 0.0, attempts + 1
        with tuner:
            attempt += batch["ids"].tolist()
            loss = model(batch["input_ids"], batch["labels"])
            total += float(loss.detach()) * tuner.weight
            tuner.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        limit.lift()
        if tuner.step_ends and not tuner.has_failed:
            losses[1].append(total)
            trained += attempt
            if phase == "evaluation":
                model.eval()
                result, samples = 0.0, 0
                for part in tuner.evaluation(evaluated):
                    limit.lift()
                    with tuner, torch.no_grad():
                        value = inner(part["input_ids"], part["labels"])
                        result, samples = result + float(value) * len(part["ids"]), samples + len(part["ids"])
                limit.lift()
                evaluations.append(result / samples)
                model.train()
    limit.lift()
    pairs = zip(full_weights(reference), full_weights(model), strict=True)
    expected = [number for batch in batches for number in batch["ids"].tolist()]
    outcome = {
        "happened": limit.has_been, "losses": max(abs(a - b) for a, b in zip(*losses, strict=True)),
        "weights": max(float((a - b).detach().abs().max()) for a, b in pairs), "in_order": trained == expected,
        "again": attempts - len(losses[1]), "samples": 64 if phase == "evaluation" else 0,
    }  # fmt: skip
    if phase == "evaluation":
        inner.eval()
        with torch.no_grad():
            last = sum(float(inner(b["input_ids"], b["labels"])) for b in evaluated) / len(evaluated)
        outcome["losses"] = max(outcome["losses"], abs(last - evaluations[-1]))
    return outcome


if __name__ == "__main__":
    start_ranks()
    several = dist.is_initialized()
    outcomes = []
    for number in range(int(sys.argv[2]), int(sys.argv[2]) + int(sys.argv[1])):
        phase = PHASES[number % 4]
        row = run_event(number, "ddp" if several else "none", phase, everywhere=not several or number // 4 % 2 == 0)
        outcomes.append({"phase": phase, "everywhere": number // 4 % 2 == 0, **row})
        print(row, file=sys.stderr, flush=True)
    print(json.dumps(outcomes))
    if several:
        dist.destroy_process_group()
