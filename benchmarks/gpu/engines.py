"""Every engine on the device against the same engine on a CPU: losses of a small model's first steps."""

import dataclasses
import importlib.util
from functools import partial

from benchmarks.gpu.models import TEXT, model_of, workload_of
from benchmarks.gpu.proof import LOSS_BOUND, Item, Proof, apart, request, why
from executor.runners.local import LocalRunner
from executor.runners.runner import Runner
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialResult

ENGINES = ("native", "ddp", "fsdp2", "deepspeed")
STAGES = {"fsdp2": 3}
"""Engine -> the ZeRO stage that it supports, if not 0."""
PRECISIONS = {"fsdp2": ("fp32",)}
"""Engine -> its precisions on one rank, if not all: it casts only what it shards."""
BRIEF = Fidelity(warmup_updates=3, max_warmup_steps=3, min_steps=2, max_steps=2)
ON_CPU = "losses on a CPU"


def items() -> list[Item]:
    """Items of the part correctness."""
    found = [Item(name=ON_CPU, show=measure_on_cpu, seconds=40.0, needs_device=False)]
    for engine in ENGINES:
        reason = "" if _is_here(engine) else f"needs the package {engine}"
        show = partial(prove_engine, engine=engine)
        found.append(Item(name=f"losses: {engine}", show=show, seconds=20.0, group="losses", skipped=reason))
    return found


def measure_on_cpu(proof: Proof) -> None:
    """Losses of every engine on a CPU; any machine can measure them."""
    with LocalRunner(1, device="cpu", environment={"OMP_NUM_THREADS": "1"}) as runner:
        for engine in filter(_is_here, ENGINES):
            for precision in PRECISIONS.get(engine, tuple(LOSS_BOUND)):
                result = _run(runner, engine, precision)
                name = f"{engine}, {precision}"
                if result.outcome is Outcome.OK:
                    proof.measured(f"{name}: {', '.join(f'{loss:.6f}' for loss in result.losses)}", **{name: result.losses})
                else:
                    proof.claim(False, f"{name} ran: {why(result)}")


def prove_engine(proof: Proof, engine: str) -> None:
    """Compare one engine's losses in its precisions."""
    for precision in PRECISIONS.get(engine, tuple(LOSS_BOUND)):
        name, bound = f"{engine}, {precision}", LOSS_BOUND[precision]
        expected = proof.needs("correctness", ON_CPU, name)
        if expected is None:
            continue
        result = _run(proof.setting.ranks(1), engine, precision)
        off = apart(result.losses, expected[name])
        text = "" if result.outcome is Outcome.OK else f"; {why(result)}"
        proof.claim(off <= bound, f"{name}: {len(result.losses)} losses {off:.1e} off a CPU's (bound {bound:.1e}){text}")


def _run(runner: Runner, engine: str, precision: str) -> TrialResult:
    knobs = {"precision": precision, "micro_batch_size": 2, "zero_stage": STAGES.get(engine, 0)}
    workload = dataclasses.replace(workload_of("small"), data_path=str(TEXT))
    trial_request = request(f"{engine}-{precision}", model_of("small"), workload, 1, BRIEF, **knobs)
    return runner.run(dataclasses.replace(trial_request, engine=engine))


def _is_here(engine: str) -> bool:
    return engine != "deepspeed" or importlib.util.find_spec("deepspeed") is not None
