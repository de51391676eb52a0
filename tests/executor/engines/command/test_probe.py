"""What the probe in a script's processes counts, and that scripts which lie are told apart from those that do not."""

import dataclasses
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.engines.command import probe
from executor.engines.command.agreement import disagreement, work_text
from executor.engines.command.observed import ObservedWork
from executor.engines.command.result import _left_out_text, _seconds_of_all_ranks
from executor.runners.local import LocalRunner
from search_spaces.models.command import CommandModel
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

SCRIPT = str(Path(__file__).with_name("training.py"))
PATTERNS = {
    "rate": r"^rate=(?P<samples_per_second>\S+)",
    "rate_of_one_rank": r"^rate=(?P<samples_per_second>\S+)",
    "step_time": r"^seconds=(?P<step_seconds>\S+)",
    "micro_batch_time": r"^seconds=(?P<step_seconds>\S+)",
    "milliseconds": r"^milliseconds=(?P<step_milliseconds>\S+)",
    "milliseconds_as_seconds": r"^seconds=(?P<step_seconds>\S+)",
}
HONEST = (
    "silent", "reports", "reports_every_3", "rate", "step_time", "milliseconds", "per_micro_batch", "short_last", "evaluates",
    "evaluates_silently", "tokens", "time_first", "packed", "own_reduction", "two_optimizers", "adversaries", "second_order",
    "pairs", "sampler", "two_answers", "tensor_parallel", "tensor_parallel_silently", "compiled", "local_sgd",
)  # fmt: skip
LIES = {
    "one_rank": "a report has 4 samples, and the step before it had 8: it reports the samples of one rank",
    "twice": "a report has 16 samples, and the step before it had 8: it counts its ranks twice",
    "micro_batch": "a step has 16 samples, 4 times 2 on 2 ranks, not 8",
    "token_count": "a report has 128 samples, and the step before it had 8: it reports tokens as samples",
    "every_3": "a report has 8 samples, and the 3 steps before it had 24: it reports one of 3 steps",
    "skipped": "its reports have .* samples in .* steps, and the steps had .* or skipped",
    "rate_of_one_rank": "it reports .* samples/s, and its steps had .*: it counts the samples of one rank",
    "micro_batch_time": "it reports .* samples/s, and its steps had .*: it is the time of a micro-batch, not of a step",
    "milliseconds_as_seconds": "its unit is milliseconds, not seconds",
    "constant_batch": "a step has 4 samples, 2 times 1 on 2 ranks, not 8",
    "ignores_accumulation": "a step has 4 samples, 1 times 2 on 2 ranks, not 8: .* or ignores it",
    "divides_accumulation": r"divides its accumulation of 2 by the ranks \(pass it {total_gradient_accumulation_steps}\)",
    "divides_batch": "it divides the batch by the ranks",
    "alone": "each of the 2 ranks trains by itself: the script starts no process group",
    "alone_silently": "each of the 2 ranks trains by itself",
    "goes_round_its_wrapper": "DistributedDataParallel is built, but its forward is not called: parameters of ranks differ",
    "alone_in_a_group": "each of the 2 ranks trains by itself: their parameters differ after",
    "same_samples": "a step has 4 samples, 2 times 2 on 2 ranks, not 8: ranks train on the same samples",
    "same_seed": "ranks train on the same samples, without a DistributedSampler, each by itself with the same seed",
    "starts_late": "ranks train on the same samples, without a DistributedSampler, each by itself with the same seed",
    "never_steps": "no optimizer step was taken in .* micro-batches, and parameters did not change",
    "larger": "a step has 24 samples, 2 times 6 on 2 ranks, not 8: it ignores the batch size",
    "loads_more": "a step has 16 samples, 2 times 4 on 2 ranks, not 8: it ignores the batch size",
    "short_accumulation": "(a report|its reports) ha.* samples.* had .*",
}


def request(name: str) -> TrialRequest:
    words = ("python", SCRIPT, name, "{micro_batch_size}", "{gradient_accumulation_steps}")
    command = CommandModel(arguments=words, pattern=PATTERNS.get(name))
    return TrialRequest(
        attempt="a", model=command, config=TrialConfig(micro_batch_size=2),
        world_size=2, engine="command", workload=Workload(global_batch_size=8, sequence_length=16),
        fidelity=Fidelity(min_steps=12, max_steps=20, max_warmup_steps=8), timeout_seconds=120.0,
    )  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.prove(every=30)
def test_an_honest_script_is_measured(runner: LocalRunner, name: str) -> None:
    result = runner.run(request(name))
    assert result.outcome is Outcome.OK, result.traceback or result.message
    assert "not checked" not in result.message
    uncertain = {name: f"about {rows} rows a step, not" for name, rows in (("packed", 4), ("adversaries", 8), ("pairs", 8))}
    count = 4 if name.startswith("tensor_parallel") else 8
    words = uncertain.get(name, f"{count} samples a step in ")
    assert result.environment["observed_work"].startswith(words)
    assert "on 2 ranks that train together" in result.environment["observed_work"]
    milliseconds = float(result.environment["observed_work"].split("; ")[1].split()[0])
    observed = 8 / count * milliseconds / 1e3  # like with like: on a busy machine a mean is far from a median
    assert 0.6 < statistics.median(result.step_seconds) / observed < 1.6


@pytest.mark.parametrize("name", LIES)
@pytest.mark.prove(every=30)
def test_a_script_that_lies_is_wrong_with_both_numbers_and_the_cause(runner: LocalRunner, name: str) -> None:
    result = runner.run(request(name))
    assert result.outcome is Outcome.WRONG, result.traceback or result.message
    assert re.search(LIES[name], result.message), result.message


TRAINED_ALONE = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))
run = torch.compile(model, backend="aot_eager", fullgraph=True) if "compile" in sys.argv else model
if "in_place" in sys.argv:
    model.compile(backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=False)
data = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
for epoch in range(2):
    for x, y in DataLoader(data, 8, shuffle=True, num_workers=1):
        loss = nn.functional.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())
torch.save(model, sys.argv[1])
import pickle
pickle.dump(model, open(sys.argv[1] + ".pickle", "wb"))
"""
LOADED = """
import sys, pickle, torch
torch.load(sys.argv[1], weights_only=False)
pickle.load(open(sys.argv[1] + ".pickle", "rb"))(torch.ones(1, 8))
"""


def python(folder: Path | None, *words: str, hidden: Path | None = None) -> str:
    """Run Python, with the probe in a folder, and with another `sitecustomize` that it hides."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", probe.VARIABLE)}
    if folder is not None:
        folder.mkdir()
        shutil.copyfile(str(probe.__file__), folder / "sitecustomize.py")
        variables[probe.VARIABLE] = str(folder)
    if folder or hidden:
        variables["PYTHONPATH"] = os.pathsep.join(str(path) for path in (folder, hidden) if path)
    return subprocess.run(
        [sys.executable, *words], env=variables, capture_output=True, text=True, check=True, timeout=300
    ).stdout


@pytest.mark.prove
@pytest.mark.parametrize("how", ["eager", "compile", "in_place"])
def test_a_script_computes_the_same_to_the_bit_and_its_files_do_not_need_the_probe(tmp_path: Path, how: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINED_ALONE)
    plain = python(None, str(script), str(tmp_path / "plain"), how)
    assert python(tmp_path / "probe", str(script), str(tmp_path / "model"), how) == plain
    assert len(plain.splitlines()) == 16
    python(None, "-c", LOADED, str(tmp_path / "model"))
    work = ObservedWork(tmp_path / "probe", 8)
    assert [(step.samples, step.micro_batches) for step in work.read()[1:]] == [(8, 1)] * 15
    assert (work.timed.problem, len(work.processes), work.timed.facts["loader"]) == ("", 1, [8])


def test_the_probe_hides_nothing(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.seen = __name__")
    words = "import sys, sitecustomize; print(getattr(sys, 'seen', ''), [p for p in sys.path if p.endswith('probe')])"
    assert python(tmp_path / "probe", "-c", words, hidden=hidden) == "sitecustomize []\n"
    shutil.rmtree(tmp_path / "probe")
    assert python(tmp_path / "probe", "-c", words) == " []\n"


LOOKS = "import importlib.util; importlib.util.find_spec('torch')"
"""As Transformers and Accelerate look for packages before they import them."""


@pytest.mark.prove(every=3)
@pytest.mark.parametrize("importer", ["import torch", LOOKS, "pth"])
def test_a_script_is_seen_whose_torch_is_imported_or_looked_for_before_it_starts(tmp_path: Path, importer: str) -> None:
    folder, script = tmp_path / "probe", tmp_path / "train.py"
    script.write_text(TRAINED_ALONE)
    if importer != "pth":
        (tmp_path / "hidden").mkdir()
        (tmp_path / "hidden" / "sitecustomize.py").write_text(importer)
        python(folder, str(script), str(tmp_path / "model"), hidden=tmp_path / "hidden")
    else:
        folder.mkdir()
        late = f"import os, sys, runpy, torch; os.environ[{probe.VARIABLE!r}] = {str(folder)!r}"
        late += f"; sys.path.insert(0, {str(Path(probe.__file__).parent)!r}); import probe; probe.start()"
        python(None, "-c", f"{late}; runpy.run_path({str(script)!r})", str(tmp_path / "model"))
    assert len(ObservedWork(folder, 8).read()) == 16


TWO_MODELS = """
import gc, weakref, torch
from torch import nn
def train(steps, rows):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        model(torch.randn(rows, 8)).square().mean().backward()
        optimizer.step()
    return weakref.ref(model)
first = train(3, 4)
gc.collect()
print(first() is None)
train(4, 16)
"""


@pytest.mark.prove
def test_a_model_that_is_built_after_another_was_trained_is_counted_and_the_first_one_is_not_kept(tmp_path: Path) -> None:
    assert python(tmp_path / "probe", "-c", TWO_MODELS) == "True\n"
    samples = [step.samples for step in ObservedWork(tmp_path / "probe", None).read()]
    assert samples == [None, 4, 4, None, 16, 16, 16]


class Training:
    """Networks whose passes and steps call a probe in this process."""

    def __init__(self, folder: Path, networks: int = 1) -> None:
        self.probe, self.folder = probe.Probe(str(folder)), folder
        self.probe.torch = torch
        self.networks = [torch.nn.Linear(8, 4) for _ in range(networks)]
        self.optimizers = [torch.optim.SGD(network.parameters(), 0.01) for network in self.networks]
        for optimizer in self.optimizers:
            optimizer.register_step_post_hook(self.probe.end_step)

    def backward(self, rows: torch.Tensor, network: int = 0) -> None:
        loss = self.networks[network](rows).square().mean()
        self.probe.begin_backward()
        loss.backward()
        self.probe.end_backward()

    def steps(self) -> list[tuple[int | None, int, bool]]:
        """Samples, micro-batches and certainty of each step whose inputs were seen."""
        self.probe.begin_checkpoint()  # no hook remains
        steps = ObservedWork(self.folder, None).read()
        return [(step.samples, step.micro_batches, step.certain) for step in steps if step.samples is not None]


@pytest.mark.parametrize(("moves", "step"), [(True, (2, 1, True)), (False, (4, 2, False))])
def test_a_second_pass_on_the_same_input_is_no_other_micro_batch_if_parameters_moved(
    tmp_path: Path, moves: bool, step: tuple[int, int, bool]
) -> None:
    training = Training(tmp_path)
    for _ in range(4):
        rows = torch.randn(2, 8)
        training.backward(rows)
        with torch.no_grad():
            for parameter in training.networks[0].parameters() if moves else ():
                parameter.add_(0.1)
        training.backward(rows)
        training.optimizers[0].step()
    assert training.steps() == [step] * 3


def test_an_input_that_was_filled_anew_is_another_micro_batch(tmp_path: Path) -> None:
    training, rows = Training(tmp_path), torch.empty(2, 8)
    for _ in range(4):
        for _ in range(2):
            training.backward(rows.normal_())
        training.optimizers[0].step()
    assert training.steps() == [(4, 2, True)] * 3


def test_of_equal_networks_the_first_optimizer_decides_until_it_takes_no_steps(tmp_path: Path) -> None:
    training = Training(tmp_path, networks=2)
    for _ in range(4):
        for network in (0, 1):
            training.backward(torch.randn(2, 8), network)
            training.optimizers[network].step()
    for _ in range(4):  # the second network is trained further
        training.backward(torch.randn(2, 8), 1)
        training.optimizers[1].step()
    assert training.steps() == [(4, 2, False)] * 3 + [(6, 3, False)] + [(2, 1, True)] * 2


def test_training_by_gradients_that_torch_returns_is_seen(tmp_path: Path) -> None:
    training = Training(tmp_path)
    for _ in range(4):
        for _ in range(2):
            torch.autograd.grad(training.networks[0](torch.randn(2, 8)).sum(), [*training.networks[0].parameters()])
        training.optimizers[0].step()
    assert training.steps() == [(2, 1, False)] * 3


def test_an_error_of_the_probe_stops_it_and_not_the_script(tmp_path: Path) -> None:
    observer = probe.Probe(str(tmp_path))
    guard = probe.Guard(observer, lambda: 1 // 0)
    guard()
    guard()
    work = ObservedWork(tmp_path, None)
    assert work.read() == []
    assert work.timed.problem == "the probe stopped: ZeroDivisionError: integer division or modulo by zero"


@pytest.mark.parametrize(
    ("micro_batches", "asked", "samples", "certain", "loaded"),
    [
        ([[1, 1, 16, ["16x128i"]]], 8, 8, True, [8]),  # two rows for each sample
        ([[1, 1, 16, ["16x128i"]]], 8, 16, True, [16]),
        ([[1, 1, 16, ["16x128i"]]], 8, 16, True, [0]),
        ([[1, 1, 16, ["16x128i"]]], None, 16, False, [8]),
        ([[1, 1, 16, ["16x128i"]]], None, 16, True, [8, 16]),
        ([[4, 1, 8, ["8x128i", "8x128i"]]], 8, 32, True, []),
        ([[1, 1, 8, ["8x128i"]], [1, 1, 3, ["3x128i"]]], 8, 11, True, []),
        ([[1, 1, 128, ["128x8i"]]], 8, 8, True, []),  # time first
        ([[1, 1, 1, ["1x1024i"]]], 8, 1, False, []),  # may be packed
        ([[1, 1, 90, ["90x4", "2x300i", "90i"]]], 8, 90, False, []),  # a graph
        ([[1, 1, 8, ["8x13", "26x8i"]]], 8, 8, True, []),
        ([[1, 1, 8, ["8x13", "26x7i"]]], None, 8, False, []),
        ([[1, 1, 2, ["#2", "3x64x80", "3x48x64", "#2", "5x4"]]], 2, 2, True, []),  # a list of images and of their targets
        ([[1, 1, 3, ["#2", "3x64x80", "3x48x64"]]], None, 3, False, []),
        ([[1, 1, 4, ["#2", "4x32", "4i"]]], None, 4, True, []),  # a list of inputs and labels
        ([[1, 2, 8, ["4x32"]]], 8, 8, True, []),  # two passes for the parts of a micro-batch
        ([[1, 2, 16, ["8x32"]]], 8, 8, False, []),  # two passes for pairs, or for two micro-batches with one backward pass
        ([[1, 2, 24, ["8x32"]]], 8, 8, True, []),  # samples, and what they are compared with
        ([[1, 1, 32, ["32x1x12x12"]]], 1, 32, True, []),  # images with one channel
        ([[1, 1, 32, ["32x1"]]], 1, 32, False, []),
        ([[1, 1, 32, ["32x8x12x12"]]], 8, 32, True, []),
        ([[1, 2, 16, ["8x32"]]], None, 8, False, []),
        ([[1, 0, 0, []], [3, 1, 8, ["8"]]], 8, None, False, []),
    ],
)
def test_samples_are_counted_where_they_are_known(
    tmp_path: Path, micro_batches: list[object], asked: int | None, samples: int | None, certain: bool, loaded: list[int]
) -> None:
    row = {"loader": loaded, "step": 1, "clock": 1.0, "alternating": False, "micro_batches": micro_batches}
    (tmp_path / "steps-1.jsonl").write_text(json.dumps(row) + "\n")
    (step,) = ObservedWork(tmp_path, asked).read()
    assert (step.samples, step.certain) == (samples, certain)


def test_exchanges_as_large_as_the_parameters_after_the_first_step_are_noted(tmp_path: Path) -> None:
    training = Training(tmp_path)
    reduce, send = training.probe._counted(lambda *_: 0, "allreduce"), training.probe._counted(lambda *_: 0, "send")
    seen: list[bool] = []
    for call in (reduce, reduce, reduce, send):
        call(None, [torch.ones(36 if len(seen) in (0, 2) else 4)], None)
        seen.append(training.probe.facts.get("exchanges", False))
        training.backward(torch.ones(2, 8))
        training.optimizers[0].step()
        if seen[-1]:
            training.probe.facts["exchanges"] = False
    training.probe.begin_checkpoint()
    assert seen == [False, False, True, True]  # the first one copies the initial parameters


def work(tmp_path: Path, rank: int, samples: list[int], reports: list[tuple[float, float]], **facts: object) -> dict[str, Any]:
    """What is observed of a rank with these samples in its steps, of one second each."""
    folder = tmp_path / str(rank)
    folder.mkdir()
    rows: list[dict[str, Any]] = [{"inputs": 1, "checksum": rank}]
    for step, rows_of_step in enumerate(samples):
        micro_batches = [[1, 1, rows_of_step, [f"{rows_of_step}x8"]]]
        rows.append({"clock": step, "alternating": False, "micro_batches": micro_batches, "group": 2, **facts})
        rows.append({"parameters": step + 1, "checksum": rank * 100 + step})
    (folder / "steps-1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    observed = ObservedWork(folder, None)
    observed.read()
    return observed.summaries(reports)[0]


def test_a_wrapper_that_is_built_and_not_called_is_named_unless_ranks_exchange_in_another_way(tmp_path: Path) -> None:
    together = {"together": ["DistributedDataParallel"]}
    works = [work(tmp_path, rank, [2] * 8, [], **together) for rank in (0, 1)]
    text = disagreement(request("silent"), works, {"works": works[:1], "reported_seconds": []})
    assert text.startswith(
        "DistributedDataParallel is built, but its forward is not called: parameters of ranks differ after 8"
    )
    timed = {"works": works[:1], "reported_seconds": []}
    assert "forward" not in disagreement(request("silent"), [{**each, "exchanges": True} for each in works], timed)


UNEVEN = [3, 9, 1, 7, 2, 8, 4, 6, 5, 5, 9, 1]


@pytest.mark.parametrize(
    ("factor", "problem"),
    [(1.0, ""), (0.5, "its reports have 58 samples in 11 steps, and the steps had 114: it reports the samples of one rank")],
)
def test_samples_of_ranks_that_differ_are_added_up(tmp_path: Path, factor: float, problem: str) -> None:
    other = UNEVEN[::-1]
    reports = [(step + 0.5, factor * (UNEVEN[step] + other[step])) for step in range(12)]
    facts = {"together": ["FSDPModule"]}
    works = [work(tmp_path, 0, UNEVEN, reports, **facts), work(tmp_path, 1, other, [], **facts)]
    own = CommandModel(arguments=("python", "t.py"))
    uneven = dataclasses.replace(request("silent"), model=own)
    text = disagreement(uneven, works, {"works": works[:1], "reported_seconds": []})
    assert problem in text and bool(problem) == bool(text), text
    assert work_text(uneven, works).startswith("10 samples a step in 1 micro-batch on 2 ranks that train together")
    timed = {"works": works[:1], "seconds": [8 / (2 * rows) for rows in UNEVEN], "timed_samples": [2 * rows for rows in UNEVEN]}
    assert _seconds_of_all_ranks(uneven, timed, works) == pytest.approx([0.8] * 12)  # the job's batch has 8 samples


def test_ranks_without_steps_do_not_count(tmp_path: Path) -> None:
    works = [work(tmp_path, 0, [2] * 8, []), work(tmp_path, 1, [], [])]
    own = dataclasses.replace(request("silent"), model=CommandModel(arguments=("python", "t.py")))
    assert work_text(own, works).startswith("2 samples a step in 1 micro-batch on 1 of 2 ranks; ")
    timed = {"works": works[:1], "seconds": [2.0] * 8, "timed_samples": [4] * 8}
    assert _seconds_of_all_ranks(own, timed, works) == [4.0] * 8


@pytest.mark.parametrize(
    ("left_out", "text"), [((1, 4, 0.36), "1 of 4 steps is left out with 36% of the time"), ((1, 99, 0.02), "")]
)
def test_time_that_is_left_out_is_named(left_out: tuple[int, int, float], text: str) -> None:
    assert _left_out_text({"left_out": left_out}).startswith(text)


def test_tokens_of_samples_with_another_length_ask_for_the_length(tmp_path: Path) -> None:
    works = [work(tmp_path, rank, [4] * 24, [], together=["FSDPModule"]) for rank in (0, 1)]
    command = CommandModel(arguments=("python", "t.py"), pattern=r"(?P<tokens_per_second>\d+) tok/s")
    text = disagreement(
        dataclasses.replace(request("silent"), model=command), works, {"works": works[:1], "reported_seconds": [5.0] * 20}
    )
    assert text.endswith("samples have other lengths than the assumed 16 tokens: state --sequence-length, or read samples")


def test_processes_that_a_script_starts_as_ranks_share_a_step(tmp_path: Path) -> None:
    for process in (1, 2):
        rows = [{"step": n, "clock": n + 0.1 * process, "alternating": False, "micro_batches": [[2, 1, 4, ["4x8"]]], "group": 2}
                for n in range(6)]  # fmt: skip
        (tmp_path / f"steps-{process}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    work = ObservedWork(tmp_path, 4)
    assert len(work.read()) == 6  # those of one process, which is timed
    assert (work.are_ranks, work.samples_of_step()) == (True, 16)
    assert [summary["processes"] for summary in work.summaries([])] == [1, 1]
    others = ObservedWork(tmp_path, 4, ranks=2)  # two ranks with a process group of two would have four of these
    others.read()
    assert (others.are_ranks, others.samples_of_step()) == (False, 8)
    assert [summary["processes"] for summary in others.summaries([])] == [2]


LOADED_MACHINE = [1.0, 1.1, 0.9, 6.0, 1.2, 0.8, 1.0, 1.3, 4.0, 1.1, 0.9, 1.0, 5.0, 1.2, 1.0, 0.9]
SLOW_START = [9.0, 8.0, *(1.0 + index % 3 / 10 for index in range(14))]


@pytest.mark.parametrize(
    ("steps", "reported", "problem"),
    [
        (LOADED_MACHINE, [2 * value for value in LOADED_MACHINE], "it counts the samples of one rank"),
        (SLOW_START, [2 * value for value in SLOW_START[:2] * 3 + SLOW_START[6:]], "it counts the samples of one rank"),
        (LOADED_MACHINE, [value / 2 for value in LOADED_MACHINE], "it is the time of a micro-batch"),
        (LOADED_MACHINE, LOADED_MACHINE, ""),
        (LOADED_MACHINE, [statistics.fmean(LOADED_MACHINE)] * 12, ""),  # with the evaluations between
        (SLOW_START, [sum(SLOW_START[:count]) / count for count in range(1, 17)], ""),  # since the start
        ([1.0] * 16, [(30 + count) / count for count in range(1, 17)], ""),  # since a start before the first step
    ],
)
def test_reported_times_are_compared_with_those_of_the_steps_however_busy_the_machine_is(
    tmp_path: Path, steps: list[float], reported: list[float], problem: str
) -> None:
    rows = (
        {"clock": clock, "alternating": False, "micro_batches": [[2, 1, 2, ["2x32"]]]}
        for clock in accumulate(steps, initial=0.0)
    )
    (tmp_path / "steps-1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    work = ObservedWork(tmp_path, 2)
    work.read()
    works = [work.summaries([])[0] | {"together": ["DistributedDataParallel"], "group": 2}] * 2
    text = disagreement(request("rate"), works, {"works": works[:1], "reported_seconds": reported})
    assert problem in text and bool(problem) == bool(text), text
