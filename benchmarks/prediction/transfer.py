"""Does the answer carry over? The same configurations on native, DeepSpeed and FSDP2, by one harness on a shaped link.

    python -m benchmarks.prediction.transfer [--repeats 2] [--finals 4] [--every N] [--markdown docs/results/transfer.md]

Every configuration is measured `--repeats` times, then those that decide the answer some more times: they were chosen for being
fast, and repeats differ. About 30 minutes on two idle cores. Each rank runs in its own network namespace (root and Linux are
needed; elsewhere use `--loopback` for a trial run). Every measurement is written at once to benchmarks/data/transfer.csv; a
restart continues from there. DeepSpeed must be installed: `pip install 'autotune-parallel[deepspeed]'`.
"""

import contextlib
import csv
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common.shaped_link import why_not
from benchmarks.common.shaped_network import NetworkRunner, ShapedNetwork
from benchmarks.common.written_page import give, page_parser
from benchmarks.prediction.transfer_figures import Measured, finalists, page
from executor.engines.capabilities import FSDP2, NATIVE
from executor.engines.deepspeed.capability import DEEPSPEED, installed_version, unusable
from executor.runners.local import LocalRunner
from executor.runners.runner import Runner
from search_spaces.capability import Capability
from search_spaces.knob import Value
from search_spaces.models.huggingface import resolve_model
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

RANKS, RATE_MBIT = 2, 500
MODEL = resolve_model("llama-tiny")
WORK = Workload(global_batch_size=8, sequence_length=128)
FIDELITY = Fidelity(max_warmup_steps=10, min_steps=8, max_steps=60, max_seconds=2.0)
SMALL, WHOLE = 13_000, TrialConfig().reduce_bucket_size
ENGINES: dict[str, Capability] = {engine.engine: engine for engine in (NATIVE, DEEPSPEED, FSDP2)}
DATA = Path(__file__).resolve().parents[1] / "data" / "transfer.csv"
Job = tuple[str, int, TrialConfig, int]
"""Engine, number of the configuration, the configuration in that engine's terms, repeat."""


def configurations() -> list[TrialConfig]:
    """Stage x micro-batch x bucket x checkpointing on two data ranks; with tensor or pipeline ranks ZeRO shards nothing."""
    found = []
    for micro in (1, 2, 4):
        for kept in ("none", "full"):
            both: dict[str, Value] = {"micro_batch_size": micro, "activation_checkpointing": kept}
            found += [TrialConfig().replace({**both, "zero_stage": 0})]
            found += [
                TrialConfig().replace({**both, "zero_stage": stage, "reduce_bucket_size": bucket})
                for stage in (1, 2, 3)
                for bucket in (SMALL, WHOLE)
            ]
            found += [TrialConfig().replace({**both, name: 2}) for name in ("tensor_parallel_size", "pipeline_parallel_size")]
    return found


def config_for(engine: str, config: TrialConfig) -> TrialConfig | None:
    """The configuration in the engine's terms; None: the engine cannot run it.

    FSDP2 has no stage below 2, which with one data rank equals stage 0, and gives each block its own bucket: only one of the
    bucket sizes is run on it.
    """
    if engine == "fsdp2":
        if config.zero_ranks(RANKS) == 1:
            config = config.replace({"zero_stage": 2})
        elif config.reduce_bucket_size != WHOLE:
            return None
    return None if ENGINES[engine].refusals(config, RANKS) else config


def agenda(repeats: int, every: int) -> list[Job]:
    """Every configuration on every engine that runs it, the engines in turn, `repeats` times."""
    chosen = list(enumerate(configurations()))[::every]
    jobs: list[Job] = []
    for repeat in range(repeats):
        for number, config in chosen:
            engines = list(ENGINES) if (repeat + number) % 2 else list(reversed(ENGINES))
            planned = [(engine, config_for(engine, config)) for engine in engines]
            jobs += [(engine, number, one, repeat) for engine, one in planned if one is not None]
    return jobs


def finals(rows: Sequence[Measured], first: int, rounds: int) -> list[Job]:
    """Further repeats, numbered from `first`, of the configurations that decide the losses."""
    jobs: list[Job] = []
    for repeat in range(first, first + rounds):
        for number in finalists(rows, configurations()):
            planned = [(engine, config_for(engine, configurations()[number])) for engine in ENGINES]
            jobs += [(engine, number, one, repeat) for engine, one in planned if one is not None]
    return jobs


def measure(jobs: Sequence[Job], runner: Runner, path: Path) -> None:
    """Run the measurements that the file does not contain yet, and append them."""
    done = {(row.engine, row.number, row.repeat) for row in read(path)}
    left = [job for job in jobs if (job[0], job[1], job[3]) not in done]
    first = runner.run(_request("native", TrialConfig(micro_batch_size=2), "reference"))
    if first.outcome is not Outcome.OK:
        raise SystemExit(f"the reference ended {first.outcome}: {first.message}\n{first.traceback}")
    for place, (engine, number, config, repeat) in enumerate(left):
        began = time.monotonic()
        result = runner.run(_request(engine, config, f"{engine} {number} {repeat}", first.losses))
        rate = result.samples_per_second.mean if result.samples_per_second else 0.0
        _add(path, [engine, number, repeat, result.outcome.value, f"{rate:.4f}", json.dumps(_changes(number)), result.message])
        text = f"{rate:.1f} samples/s" if rate else f"{result.outcome}: {result.message}"
        print(f"{place + 1}/{len(left)} {engine} {_changes(number)}: {text}, {time.monotonic() - began:.1f} s", flush=True)


def read(path: Path) -> list[Measured]:
    """Every measurement of the file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [Measured(engine=row[0], number=int(row[1]), repeat=int(row[2]), rate=float(row[4])) for row in csv.reader(file)]


def _add(path: Path, cells: list[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerow(cells)


def _changes(number: int) -> dict[str, Value]:
    return configurations()[number].differences(TrialConfig())


def _request(engine: str, config: TrialConfig, name: str, losses: tuple[float, ...] = ()) -> TrialRequest:
    return TrialRequest(
        attempt=name, model=MODEL, config=config, workload=WORK, world_size=RANKS, engine=engine, fidelity=FIDELITY,
        timeout_seconds=120.0, reference_losses=losses,
    )  # fmt: skip


@contextlib.contextmanager
def _ranks(loopback: bool) -> Iterator[Runner]:
    if loopback:
        with LocalRunner(RANKS, device="cpu") as local:
            yield local
        return
    with ShapedNetwork(RANKS, f"{RATE_MBIT}mbit") as network, NetworkRunner(network) as runner:
        yield runner


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--finals", type=int, default=4, help="further repeats of the configurations that decide the answer")
    parser.add_argument("--every", type=int, default=1, help="measure only every Nth configuration, for a trial run")
    parser.add_argument("--loopback", action="store_true", help="without the shaped link, for a trial run")
    parser.add_argument("--data", type=Path, default=DATA)
    arguments = parser.parse_args()
    refusal = unusable(installed_version())
    missing = f"{refusal.message}; {refusal.remedy}" if refusal else None if arguments.loopback else why_not()
    if missing:
        print(f"nothing is measured: {missing}")
    else:
        jobs = agenda(arguments.repeats, arguments.every)
        print(f"{len(jobs)} measurements of {len(configurations()[:: arguments.every])} configurations", flush=True)
        with _ranks(arguments.loopback) as runner:
            measure(jobs, runner, arguments.data)
            known = [row for row in read(arguments.data) if row.repeat < arguments.repeats]
            measure(finals(known, arguments.repeats, arguments.finals), runner, arguments.data)
    lines = page(read(arguments.data), configurations(), RATE_MBIT)
    give(lines, arguments.markdown if lines else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
