"""Training scripts on two ranks whose words, reports or work are honest or not. The first argument names one."""
# ruff: noqa: T201  a script prints

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import autotune

BATCH, ACCUMULATION = int(sys.argv[2]), int(sys.argv[3])
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SAMPLES = BATCH * ACCUMULATION * RANKS
Report = Callable[[int, float], Any]


def network() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
    torch.manual_seed(RANK)
    return module


def joined(module: nn.Module | None = None) -> nn.Module:
    dist.init_process_group("gloo")
    return DistributedDataParallel(module or network())


def random_batches(rows: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield torch.randn(rows, 32), torch.randint(10, (rows,))


def quiet(step: int, seconds: float) -> None:
    """Report nothing."""


def train(
    module: nn.Module, batches: Iterator[Any] | None = None, accumulation: int = ACCUMULATION, report: Report = quiet,
    optimizer: Any = None, between: Callable[[int, nn.Module], None] = lambda *_: None,
) -> None:  # fmt: skip
    optimizer = optimizer or torch.optim.SGD(module.parameters(), 0.01)
    batches = batches or random_batches()
    for step in itertools.count():
        began = time.perf_counter()
        for _ in range(accumulation):
            x, y = next(batches)
            (cross_entropy(module(x), y) / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        report(step, time.perf_counter() - began)
        between(step, module)


def counts(samples: float) -> Report:
    return lambda step, seconds: autotune.report(samples=samples)


def prints(rate: Callable[[float], float], name: str = "rate") -> Report:
    return lambda step, seconds: print(f"{name}={rate(seconds):.6g}", flush=True)


def every(count: int, report: Report) -> Report:
    return lambda step, seconds: report(step, seconds) if step % count == count - 1 else None


def per_micro_batch(samples: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Report after each micro-batch."""
    for batch in random_batches():
        yield batch
        autotune.report(samples=samples)


def short_last(sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of an epoch, whose last ones are short."""
    for rows in itertools.cycle(sizes):
        yield next(random_batches(rows))


class Evaluation:
    """Evaluates, and writes a checkpoint, after some steps."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, step: int, module: nn.Module) -> None:
        if step % self.count == self.count - 1:
            module.eval()
            with torch.no_grad():
                for _ in range(3):
                    module(torch.randn(64, 32))
                    time.sleep(0.1)
            module.train()


class Tokens(nn.Module):
    """A model of sequences; `time_first`: its input is [time, batch]."""

    def __init__(self, time_first: bool = False) -> None:
        super().__init__()
        self.embedding, self.head, self.time_first = nn.Embedding(50, 16), nn.Linear(16, 10), time_first

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).mean(0 if self.time_first else 1))


def sequences(*shape: int, rows: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield torch.randint(50, shape), torch.randint(10, (rows,))


def averaging() -> nn.Module:
    """Combines the gradients itself."""
    dist.init_process_group("gloo")
    module = network()
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return module


def averages(step: int, module: nn.Module) -> None:
    """Local SGD: average the parameters after every eighth step."""
    if step % 8 == 7:
        for parameter in module.parameters():
            dist.all_reduce(parameter.data)
            parameter.data.div_(RANKS)


class TwoOptimizers:
    """One for matrices, one for vectors, as where a second kind has a learning rate of its own."""

    def __init__(self, module: nn.Module) -> None:
        self.parts = [
            torch.optim.SGD([p for p in module.parameters() if (p.dim() > 1) is matrices], 0.01) for matrices in (True, False)
        ]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def adversaries() -> None:
    """Two networks that train in turn."""
    dist.init_process_group("gloo")
    maker = DistributedDataParallel(nn.Linear(8, 32))
    judge = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)), broadcast_buffers=False)
    optimizers = [torch.optim.SGD(module.parameters(), 0.01) for module in (judge, maker)]
    while True:
        made = maker(torch.randn(BATCH * ACCUMULATION, 8))
        judge(torch.randn(BATCH * ACCUMULATION, 32)).mean().backward()
        (-judge(made.detach()).mean()).backward()
        optimizers[0].step()
        judge(made).mean().backward()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        time.sleep(0.01)
        autotune.report(samples=SAMPLES)


def tensor_parallel(report: Report = quiet) -> None:
    """All ranks train the same random samples with a part of each layer."""
    mesh = init_device_mesh("cpu", (RANKS,))
    module = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.manual_seed(0)
    train(module, report=report)


def second_order() -> None:
    module = joined()
    optimizer = torch.optim.LBFGS(module.parameters(), 0.01, max_iter=4)
    for x, y in random_batches(BATCH * ACCUMULATION):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(module(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        autotune.report(samples=SAMPLES)


def pairs() -> None:
    """Two passes of the same model for each micro-batch."""
    module = joined(nn.Linear(32, 16))
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    module.module.requires_grad_(True)
    while True:
        for _ in range(ACCUMULATION):
            module.require_backward_grad_sync = False
            one, other = module(torch.randn(BATCH, 32)), module(torch.randn(BATCH, 32))
            (one - other).square().mean().backward()
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        autotune.report(samples=SAMPLES)


def two_answers() -> None:
    """Each sample has two rows of the model, as an answer that is chosen and one that is rejected."""
    train(joined(), ((torch.cat([x, -x]), y.repeat(2)) for x, y in loader(True)))


def skips(step: int, seconds: float) -> None:
    """A report for each call of a loop that skips most steps."""
    for _ in range(4):
        autotune.report(samples=SAMPLES)


def loader(sampler: bool, rows: int = BATCH) -> Iterator[Any]:
    data = TensorDataset(torch.randn(4096, 32, generator=torch.Generator().manual_seed(1)), torch.zeros(4096, dtype=torch.long))
    own = torch.utils.data.DistributedSampler(data) if sampler else None
    while True:
        yield from DataLoader(data, rows, sampler=own, drop_last=True)


def same_seed(late: float = 0.0) -> None:
    dist.init_process_group("gloo")
    time.sleep(late)
    torch.manual_seed(0)
    train(nn.Linear(32, 10))


def never_steps() -> None:
    module = joined()
    for x, y in random_batches():
        cross_entropy(module(x), y).backward()
        time.sleep(0.01)
        autotune.report(samples=SAMPLES)


HONEST: dict[str, Callable[[], object]] = {
    "silent": lambda: train(joined()),
    "reports": lambda: train(joined(), report=counts(SAMPLES)),
    "reports_every_3": lambda: train(joined(), report=every(3, counts(3 * SAMPLES))),
    "rate": lambda: train(joined(), report=prints(lambda seconds: SAMPLES / seconds)),
    "step_time": lambda: train(joined(), report=prints(lambda seconds: seconds, "seconds")),
    "milliseconds": lambda: train(joined(), report=prints(lambda seconds: 1e3 * seconds, "milliseconds")),
    "per_micro_batch": lambda: train(joined(), per_micro_batch(BATCH * RANKS)),
    "short_last": lambda: train(joined(), short_last([BATCH] * 16 + [1] * 2), report=counts(SAMPLES)),
    "evaluates": lambda: train(joined(), report=counts(SAMPLES), between=Evaluation(5)),
    "evaluates_silently": lambda: train(joined(), between=Evaluation(5)),
    "tokens": lambda: train(joined(Tokens()), sequences(BATCH, 16), report=counts(SAMPLES)),
    "time_first": lambda: train(joined(Tokens(time_first=True)), sequences(16, BATCH), report=counts(SAMPLES)),
    "packed": lambda: train(joined(Tokens()), sequences(1, 16 * BATCH, rows=1), report=counts(SAMPLES)),
    "own_reduction": lambda: train(averaging(), report=counts(SAMPLES)),
    "local_sgd": lambda: (dist.init_process_group("gloo"), train(network(), report=counts(SAMPLES), between=averages)),
    "two_optimizers": lambda: train(module := joined(), optimizer=TwoOptimizers(module), report=counts(SAMPLES)),
    "adversaries": adversaries,
    "second_order": second_order,
    "pairs": pairs,
    "sampler": lambda: train(joined(), loader(True), report=counts(SAMPLES)),
    "two_answers": two_answers,
    "tensor_parallel": lambda: tensor_parallel(counts(SAMPLES / RANKS)),
    "tensor_parallel_silently": tensor_parallel,
    "compiled": lambda: train(torch.compile(joined(), backend="aot_eager"), report=counts(SAMPLES)),
}
LIES: dict[str, Callable[[], object]] = {
    "one_rank": lambda: train(joined(), report=counts(BATCH * ACCUMULATION)),
    "twice": lambda: train(joined(), report=counts(SAMPLES * RANKS)),
    "micro_batch": lambda: train(joined(), accumulation=4, report=counts(BATCH * RANKS)),
    "token_count": lambda: train(joined(Tokens()), sequences(BATCH, 16), report=counts(SAMPLES * 16)),
    "every_3": lambda: train(joined(), report=every(3, counts(SAMPLES))),
    "skipped": lambda: train(joined(), report=skips),
    "rate_of_one_rank": lambda: train(joined(), report=prints(lambda seconds: SAMPLES / RANKS / seconds)),
    "micro_batch_time": lambda: train(joined(), report=prints(lambda seconds: seconds / ACCUMULATION, "seconds")),
    "milliseconds_as_seconds": lambda: train(joined(), report=prints(lambda seconds: 1e3 * seconds, "seconds")),
    "constant_batch": lambda: train(joined(), random_batches(1), report=counts(SAMPLES)),
    "ignores_accumulation": lambda: train(joined(), accumulation=1, report=counts(SAMPLES)),
    "divides_accumulation": lambda: train(joined(), accumulation=ACCUMULATION // RANKS),
    "divides_batch": lambda: train(joined(), random_batches(BATCH // RANKS)),
    "alone": lambda: train(network(), report=counts(SAMPLES)),
    "alone_silently": lambda: train(network()),
    "goes_round_its_wrapper": lambda: (wrapper := joined(), train(wrapper.module, report=counts(SAMPLES))),
    "alone_in_a_group": lambda: (dist.init_process_group("gloo"), train(network(), report=counts(SAMPLES))),
    "same_samples": lambda: train(joined(), loader(False), report=counts(SAMPLES)),
    "same_seed": same_seed,
    "starts_late": lambda: same_seed(2.0 * RANK),
    "never_steps": never_steps,
    "larger": lambda: train(joined(), random_batches(3 * BATCH), report=counts(SAMPLES)),
    "loads_more": lambda: train(joined(), loader(True, 2 * BATCH)),
    "short_accumulation": lambda: train(joined(), short_last([BATCH] * 2 + [1] * 2), report=counts(SAMPLES)),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    {**HONEST, **LIES}[sys.argv[1]]()
