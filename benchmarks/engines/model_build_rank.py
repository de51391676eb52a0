"""One rank's build on a process group that sends nothing, or trials on two real ranks, with the code on PYTHONPATH.

It also runs with the earlier code, some of whose modules had other names. The answer is one line of JSON.

python -m benchmarks.engines.model_build_rank '{"model": "llama-3-8b", "world": 8, "knobs": {"zero_stage": 3}}'
"""

import dataclasses
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.engine import EngineSession, RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.native.zero import ShardedModel
from executor.measurement.memory import account_step, peak_resident_set, reset_peak_resident_set
from executor.runners.local import LocalRunner
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, Progress, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig


def _moved(before: str, now: str, attribute: str) -> Any:
    """The module with the attribute. The earlier name first: an editable installation finds the present modules in any case."""
    try:
        module = importlib.import_module(before)
    except ModuleNotFoundError:
        return importlib.import_module(now)
    return module if hasattr(module, attribute) else importlib.import_module(now)


trial_run = _moved("executor.trial", "executor.trial.run", "run_trial")
trial_state = _moved("executor.trial_state", "executor.measurement.trial_report", "time")
model_module = _moved("executor.engines.native.model", "executor.parallel.model", "nn")
resolve_model = _moved("search_spaces.huggingface", "search_spaces.models.huggingface", "resolve_model").resolve_model
ModelSpec = _moved("search_spaces.model", "search_spaces.models.model", "ModelSpec").ModelSpec

CPU = torch.device("cpu")
ONE_BILLION = ModelSpec(
    name="one-billion", family="llama", num_layers=16, hidden_size=2048, num_attention_heads=32, num_key_value_heads=8,
    head_dim=64, ffn_hidden_size=8192, vocab_size=32_000, sequence_length=16,
)  # fmt: skip
PHASES = ("build", "warmup", "memory", "measure")
FEW_STEPS = Fidelity(min_steps=1, max_steps=1, max_warmup_steps=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Cost of a rank's build, in bytes, elements and seconds."""

    drawn: int
    """Initial values drawn."""
    kept: int
    """Elements of parameters that the rank holds, each counted once, whatever the number of copies."""
    kept_bytes: int
    """Bytes of the tensors that stay."""
    tensor_peak: int
    """Peak bytes of tensors; 0: not tracked."""
    resident_peak: int
    """Peak growth of the resident set, in bytes."""
    seconds: float
    """CPU seconds."""


def build(model: Any, world: int, knobs: Mapping[str, Any], rank: int = 0, follow: bool = False) -> Built:
    """Build one rank of the native engine as a trial does. `follow`: track every allocation, which takes time."""
    config = TrialConfig().replace(dict(knobs))
    workload = Workload(
        # A pipeline needs as many micro-batches as it has stages.
        global_batch_size=config.micro_batch_size * config.data_parallel_size(world) * config.pipeline_parallel_size,
        sequence_length=model.sequence_length,
    )
    context = RankContext(rank=rank, world_size=world, device=CPU)
    sessions: list[EngineSession] = []
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with _Counted() as counted:
            gc.collect()
            reset_peak_resident_set()
            before, began = peak_resident_set(), time.process_time()
            peak = 0
            if follow:
                made = account_step(
                    lambda: sessions.append(NativeEngine().build(context, model, config, workload)), lambda: (), CPU
                )
                peak = made.peak
            else:
                sessions.append(NativeEngine().build(context, model, config, workload))
            seconds, resident = time.process_time() - began, peak_resident_set() - before
        session = sessions.pop()
        storages = {value.untyped_storage().data_ptr(): value.untyped_storage() for _, value in session.tagged_storages()}
        kept_bytes = sum(storage.size() for storage in storages.values())
        kept = sum(_kept(replica, config.zero_stage) for replica in session.replicas)  # type: ignore[attr-defined]
        session.close()
    finally:
        dist.destroy_process_group()
    return Built(
        drawn=counted.elements, kept=kept, kept_bytes=kept_bytes, tensor_peak=peak, resident_peak=resident, seconds=seconds
    )


class _Counted:
    """Counts drawn initial values inside the context, in the present or the earlier code."""

    def __init__(self) -> None:
        self.elements = 0

    def __enter__(self) -> "_Counted":
        owner, name = (model_module, "initialize") if hasattr(model_module, "initialize") else (model_module.Drawn, "fill")
        original = getattr(owner, name)

        def fill(drawn: Any, out: torch.Tensor, start: int = 0) -> None:
            self.elements += out.numel()
            original(drawn, out, start)

        def initialize(name: str, parameter: torch.Tensor, seed: int, split: int | None, slices: int, place: int) -> None:
            # A matrix was drawn whole, even if the rank holds only a slice.
            whole = slices if split is not None and parameter.dim() > 1 else 1
            self.elements += parameter.numel() * whole
            original(name, parameter, seed, split, slices, place)

        self._restore = owner, name, original
        setattr(owner, name, initialize if owner is model_module else fill)
        return self

    def __exit__(self, *_: object) -> None:
        owner, name, original = self._restore
        setattr(owner, name, original)


def _kept(replica: Any, stage: int) -> int:
    if not isinstance(replica, ShardedModel):  # experts, besides the parameters that all ranks have
        return sum(_kept(shards, stage) for shards in replica._both)
    slots = replica.layout.slots
    if stage < 3:
        return sum(slot.elements for slot in slots)
    # The last ranks' shares are padded with zeros.
    return sum(min(max(slot.elements - replica.own_row * slot.shard_elements, 0), slot.shard_elements) for slot in slots)


def run_trial(context: RankContext, request: TrialRequest, progress: Callable[[Progress], None]) -> TrialResult:
    """A trial whose phases are CPU seconds of this rank, independent of other load on the machine.

    `setup`: since the last trial ended, or the process began; `close`: time outside all phases.
    """
    global _ended
    trial_state.time = SimpleNamespace(monotonic=time.process_time)
    setup = time.process_time() - _ended
    result = trial_run.run_trial(context, request, progress)
    _ended, before = time.process_time(), _ended
    phases = {name: seconds for name, seconds in result.phase_seconds.items() if name in PHASES}
    close = _ended - before - setup - sum(phases.values())
    return dataclasses.replace(
        result, environment={**result.environment, "cpu": json.dumps({**phases, "own": setup, "close": close})}
    )


_ended = 0.0


def trials(knobs: Mapping[str, Any], number: int) -> list[dict[str, float]]:
    """CPU seconds of rank 0 in each phase of trials of `ONE_BILLION` on two ranks, the first cold, the others warm."""
    found = []
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with LocalRunner(
        2, device="cpu", environment=environment, trial_function="benchmarks.engines.model_build_rank:run_trial"
    ) as runner:
        for index in range(number):
            request = TrialRequest(
                attempt=f"trial-{index}",
                model=ONE_BILLION,
                config=TrialConfig().replace(dict(knobs)),
                workload=Workload(global_batch_size=2, sequence_length=16),
                world_size=2,
                fidelity=FEW_STEPS,
                timeout_seconds=3000,
            )
            result = runner.run(request)
            if result.outcome is not Outcome.OK:
                raise SystemExit(f"{result.outcome}: {result.message}\n{result.traceback}")
            found.append(json.loads(result.environment["cpu"]))
            print(found[-1], file=sys.stderr, flush=True)
    return found


def main() -> None:
    task = json.loads(sys.argv[1])
    if "trials" in task:
        print(json.dumps(trials(task["knobs"], task["trials"])))
        return
    torch.set_num_threads(1)
    model = resolve_model(task["model"])
    assert isinstance(model, ModelSpec)
    model = dataclasses.replace(model, num_layers=task.get("layers", model.num_layers))
    print(json.dumps(dataclasses.asdict(build(model, task["world"], task["knobs"], follow=task.get("follow", False)))))


if __name__ == "__main__":
    main()
