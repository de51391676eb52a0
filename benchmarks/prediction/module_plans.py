"""Predictions for users' modules against real ranks: parameters, FLOPs, peak memory, and the order of step times.

    python -m benchmarks.prediction.module_plans [--markdown docs/results/module-plans.md]

Modules are described without data (`executor.dry.module_profile`) and predicted by the equations; the same configurations then
run on two ranks. Exit code 1 if a count differs, a peak is off by more than the bound, or the orders disagree. Needs the extra
`transformers`, and for the order of times root, `ip` and `tc`; takes about 10 minutes on two cores.
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import Coefficients, rates_for
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.step import seconds_of
from autotune.prediction.fitting.calibration import coefficients_from_benchmark
from autotune.prediction.planning.depth import spearman
from benchmarks.common.shaped_link import why_not
from benchmarks.common.shaped_network import NetworkRunner, ShapedNetwork
from benchmarks.common.written_page import table
from executor.batches import FactoryData
from executor.measurement.flop_counter import FlopCounter
from executor.runners.local import LocalRunner
from executor.runners.one_process import describe_factory
from executor.user_module.factory import load_factory
from executor.user_module.survey import loss_of
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.microbenchmark import MicrobenchmarkRequest
from search_spaces.clusters.presets import local_cluster
from search_spaces.models.model import FactoryModel
from search_spaces.models.module_profile import at
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig
from storage.store import open_store

ROOT = Path(__file__).resolve().parents[2]
RANKS, BOUND, LEAST_CORRELATION = 2, 0.03, 0.9
WORKLOAD = Workload(global_batch_size=16, sequence_length=64)
QUICK = Fidelity(min_steps=1, max_steps=1, max_warmup_steps=2)
TIMED = Fidelity(min_steps=5, max_steps=8, max_warmup_steps=2)
RATE, BYTES_PER_SECOND = "300mbit", 300e6 / 8
OWN, BUILT = "benchmarks.prediction.plan_modules:", "hf:benchmarks/huggingface/"
MODULES = {
    "MLP": f"{OWN}mlp", "convolutions": f"{OWN}conv", "transformer": f"{OWN}decoder", "tied weights": f"{OWN}tied",
    "partly frozen": f"{OWN}frozen", "llama": f"{BUILT}llama", "gpt2": f"{BUILT}gpt2", "bert": f"{BUILT}bert",
    "roberta": f"{BUILT}roberta", "modernbert": f"{BUILT}modernbert", "t5": f"{BUILT}t5", "vit": f"{BUILT}vit",
    "whisper": f"{BUILT}whisper", "LoRA on llama (PEFT)": f"{BUILT}lora",
}  # fmt: skip
SAMPLES = 4
"""Of the micro-batch whose FLOPs are compared."""
SMALL = {"reduce_bucket_size": 200_000, "allgather_bucket_size": 200_000, "param_persistence_threshold": 0}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "micro-batches of 1": {"micro_batch_size": 1},
    "full checkpointing": {"activation_checkpointing": "full"},
    "selective, every second block": {"activation_checkpointing": "selective", "checkpoint_every_k": 2},
    "bf16": {"precision": "bf16"},
    "small buckets": {**SMALL, "prefetch_bucket_size": 100_000},
    "no overlap": {**SMALL, "overlap_comm": False, "prefetch_bucket_size": 0},
    "half of the optimizer offloaded": {"offload_optimizer": "cpu", "offload_ratio": 0.5},
    "activations offloaded": {"offload_activations": True},
}
"""Further configurations of one module."""
ORDERED: Sequence[Mapping[str, Any]] = (
    *({"zero_stage": stage, "micro_batch_size": size} for stage in (0, 2, 3) for size in (1, 2, 8)),
    {"zero_stage": 1, "micro_batch_size": 4},
    {"zero_stage": 0, "micro_batch_size": 8, "activation_checkpointing": "full"},
    {"zero_stage": 3, "micro_batch_size": 4, "activation_checkpointing": "full"},
)
"""The configurations whose times are compared."""

PROSE = f"""# Plans for any module

Written by `python -m benchmarks.prediction.module_plans` (`make extras`). `autotune plan`, `predict` and `fit` accept
`module:factory` and `hf:CONFIG`. The module is built without memory for its parameters and runs two micro-batches without data.
Every allocation, product and byte moved is recorded, with marks where blocks begin and end and where gradients are complete.
The equations follow the engine through these moments for any ZeRO stage, bucket size, micro-batch, checkpointing and
offloading. No configuration is run, dry or real, for a prediction.

Each module here is predicted and then trained on {RANKS} ranks of two CPU cores. The predicted peak is compared with the peak
of the allocator's own events on the fullest rank, with gloo. The bound is {BOUND:.0%}.
"""


def described(reference: str) -> tuple[FactoryModel, float]:
    """The module, and the seconds that describing it took, with the start of its process."""
    began = time.perf_counter()
    model = describe_factory(reference, WORKLOAD, (str(ROOT),), ("fp32", "bf16"), without_data=True)
    return model, time.perf_counter() - began


def run(runner: Any, model: FactoryModel, config: TrialConfig, fidelity: Fidelity) -> TrialResult:
    """Measure one configuration."""
    request = TrialRequest(
        attempt=config.hash, model=dataclasses.replace(model, profile=None), config=config, workload=WORKLOAD, world_size=RANKS,
        fidelity=fidelity, timeout_seconds=300,
    )  # fmt: skip
    found: TrialResult = runner.run(request)
    if found.outcome is not Outcome.OK:
        raise SystemExit(
            f"{model.name} {config.differences(TrialConfig())}: {found.outcome} {found.message}\n{found.traceback}"
        )
    return found


def predicted_bytes(model: FactoryModel, config: TrialConfig, cluster: ClusterSpec) -> float:
    """Peak bytes in the allocator of the fullest rank."""
    cases = cases_of(model, cluster, WORKLOAD, [config], "native")
    return float(memory(cases, rates_for(cluster, "native")).allocated[0])


def predicted_flops(model: FactoryModel, samples: int) -> float:
    """FLOPs of a micro-batch, without recomputation."""
    assert model.profile is not None
    trace = model.profile.traces["fp32"]
    works = [work for part in (trace.outer, *trace.blocks) for work in (part.forward, part.backward)]
    return sum(at(work.flops, samples) for work in works)


def counts_of(reference: str, samples: int) -> tuple[int, int, int | None]:
    """Trained and frozen parameters of the module itself, built with memory, and the FLOPs that a micro-batch executes."""
    user = load_factory(reference, WORKLOAD)
    parameters = dict(user.module.named_parameters()).values()
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    batch = FactoryData(batch=user.batch, seed=WORKLOAD.seed).micro_batch(0, 0, samples)
    with FlopCounter() as counter:
        loss = loss_of(user.module.train()(**batch))
        assert loss is not None
        loss.backward()  # type: ignore[no-untyped-call]
    return trained, sum(parameter.numel() for parameter in parameters) - trained, counter.total


@dataclasses.dataclass(slots=True)
class Checked:
    """The comparison."""

    errors: list[float] = dataclasses.field(default_factory=list)
    counts_differ: list[str] = dataclasses.field(default_factory=list)

    def row(self, runner: LocalRunner, model: FactoryModel, knobs: Mapping[str, Any]) -> list[float]:
        """Relative error of the peak at each stage."""
        cluster, errors = local_cluster(RANKS), []
        for stage in range(4):
            config = TrialConfig(micro_batch_size=4).replace({**knobs, "zero_stage": stage})
            if stage == 0 and config.offload_optimizer != "none":
                continue
            result = run(runner, model, config, QUICK)
            peak = max(rank.peak_memory_bytes for rank in result.ranks)
            errors.append(predicted_bytes(model, config, cluster) / peak - 1)
        self.errors += errors
        return errors


def cells(errors: Sequence[float]) -> Iterator[str]:
    """Errors by stage; a dash where the stage does not apply."""
    yield from ["-"] * (4 - len(errors))
    for error in errors:
        yield f"{error:+.2%}" if abs(error) <= BOUND else f"**{error:+.2%}**"


def memory_tables(checked: Checked) -> list[str]:
    """All modules, and all variants of one of them."""
    rows, variants = [], []
    runner = LocalRunner(RANKS, device="cpu", environment={"PYTHONPATH": str(ROOT)})
    try:
        for title, reference in MODULES.items():
            model, seconds = described(reference)
            trained = model.parameter_count - model.frozen_parameter_count
            expected = (trained, model.frozen_parameter_count, predicted_flops(model, SAMPLES))
            if counts_of(reference, SAMPLES) != expected:
                checked.counts_differ.append(title)
            errors = checked.row(runner, model, {})
            blocks = len(model.profile.block_names) if model.profile else 0
            rows.append(
                [title, f"{trained:,}", f"{model.frozen_parameter_count:,}", str(blocks), *cells(errors), f"{seconds:.1f} s"]
            )
            print(" | ".join(rows[-1]), flush=True)
        model, _ = described(MODULES["transformer"])
        for title, knobs in VARIANTS.items():
            variants.append([title, *cells(checked.row(runner, model, knobs))])
            print(" | ".join(variants[-1]), flush=True)
    finally:
        runner.close()
    stages = [f"stage {stage}" for stage in range(4)]
    return [
        "## Peak memory\n",
        *table(["module", "trained", "frozen", "blocks", *stages, "described in"], rows),
        "\n## Other configurations of the transformer\n",
        *table(["configuration", *stages], variants),
    ]


def calibrated(runner: NetworkRunner, cluster: ClusterSpec) -> Coefficients:
    """Coefficients from a micro-benchmark on the same ranks, as `autotune calibrate` measures it."""
    request = MicrobenchmarkRequest(attempt="calibration", world_size=RANKS, seconds=15, timeout_seconds=180)
    with tempfile.TemporaryDirectory() as folder, open_store(f"{folder}/calibration.db") as store:
        record = store.calibrations.save("module plans", cluster, runner.measure(request), 15)
    return coefficients_from_benchmark(record, cluster, "native", rates_for(cluster, "native"))


def order_table() -> tuple[list[str], float | None]:
    """Predicted and measured step seconds on a slow link, and their rank correlation; None: it cannot be measured here."""
    if (reason := why_not()) is not None:
        return [f"\n## Order of step times\n\nNot measured: {reason}."], None
    model, _ = described(MODULES["transformer"])
    # The micro-benchmark sees one host, whose ranks are joined by the shaped link.
    cluster = dataclasses.replace(local_cluster(RANKS), intra_node_bandwidth=BYTES_PER_SECOND)
    configs = [TrialConfig().replace(dict(knobs)) for knobs in ORDERED]
    measured: list[float] = []
    with ShapedNetwork(RANKS, RATE) as network:
        runner = NetworkRunner(network, environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
        try:
            rates = calibrated(runner, cluster)
            predicted = seconds_of(cases_of(model, cluster, WORKLOAD, configs, "native"), rates)
            for config in configs:
                steps = run(runner, model, config, TIMED).step_seconds
                measured.append(statistics.median(steps))
                print(config.differences(TrialConfig()), f"{measured[-1]:.3f}", flush=True)
        finally:
            runner.close()
    found = spearman(np.asarray(predicted), np.array(measured))
    assert found is not None
    rows = [
        [" ".join(f"{name}={value}" for name, value in knobs.items()), f"{seconds * 1e3:.0f} ms", f"{real * 1e3:.0f} ms"]
        for knobs, seconds, real in sorted(zip(ORDERED, predicted, measured, strict=True), key=lambda row: row[2])
    ]
    ratio = statistics.median(seconds / real for seconds, real in zip(predicted, measured, strict=True))
    claim = (
        f"The transformer on {RANKS} hosts joined by {RATE[:-4]} Mbit/s, with coefficients from a micro-benchmark of the same "
        f"ranks. Spearman's rank correlation of {len(rows)} configurations: {found:.2f} (bound {LEAST_CORRELATION}). The "
        f"median of predicted / measured is {ratio:.2g}; only the order is claimed.\n"
    )
    lines = [
        "\n## Order of step times\n",
        claim,
        *table(["configuration", "predicted", "measured"], rows),
    ]
    return lines, found


def main() -> int:
    """Compare and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--only", choices=("memory", "order"), help="one part, printed")
    arguments = parser.parse_args()
    checked = Checked()
    if arguments.only == "order":
        print("\n".join(order_table()[0]))
        return 0
    tables = memory_tables(checked)
    if arguments.only == "memory":
        print("\n".join(tables))
        return 0
    order, correlation = order_table()
    within = sum(abs(error) <= BOUND for error in checked.errors)
    counts = "equal in all" if not checked.counts_differ else f"**different: {'; '.join(checked.counts_differ)}**"
    summary = (
        f"{len(checked.errors)} configurations: the peak is within {BOUND:.0%} in {within}, largest error "
        f"{max(map(abs, checked.errors)):.2%}, median {statistics.median(map(abs, checked.errors)):.3%}. Trained and frozen "
        "parameters (`named_parameters`) and the FLOPs of a micro-batch (counted operator by operator, of the module itself "
        f"in training mode) are {counts}.\n"
    )
    text = "\n".join([PROSE, summary, *tables, *order]) + "\n"
    print(summary)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    good = within == len(checked.errors) and not checked.counts_differ
    return 0 if good and (correlation is None or correlation >= LEAST_CORRELATION) else 1


if __name__ == "__main__":
    sys.exit(main())
