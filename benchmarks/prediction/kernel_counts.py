"""Costs of a step of our model in counts: matrix products, operators, and host reads of device values.

    python -m benchmarks.prediction.kernel_counts [--repeats N] [--markdown docs/results/kernel-counts.md]

Each line compares the engine before and now, in the same program: the old implementations still exist for special cases, or
are written out here. A dispatch mode counts the operators that reach the device, forward and backward. Seconds are CPU seconds
of this process, interleaved, so that other programs disturb both equally; ratios are medians.
"""

import argparse
import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from executor.measurement.flop_counter import FlopCounter
from executor.parallel import experts as experts_module
from executor.parallel.checkpointing import checkpoint_blocks
from executor.parallel.collectives import rows_of
from executor.parallel.experts import Experts
from executor.parallel.model import Transformer, build_transformer, whole
from search_spaces.models.model import ModelSpec
from search_spaces.trial_config import TrialConfig

aten = torch.ops.aten
SHAPES = frozenset(
    {
        aten.view,
        aten._unsafe_view,
        aten.t,
        aten.transpose,
        aten.slice,
        aten.split,
        aten.detach,
        aten.expand,
        aten.unsqueeze,
        aten.squeeze,
        aten.select,
        aten.unbind,
        aten.as_strided,
        aten.permute,
        aten.alias,
        aten.split_with_sizes,
        aten.empty_like,
        aten.empty,
        aten.new_empty,
    }
)
"""Operators that start no kernel."""
PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten._grouped_mm})
READS = frozenset({aten.nonzero, aten._local_scalar_dense, aten.equal, aten.masked_select})
"""Operators whose result the host waits for: its shape or value depends on device results."""
CHUNKS = 8
DENSE = ModelSpec(
    name="dense", family="llama", num_layers=4, hidden_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
    ffn_hidden_size=512, vocab_size=16_384, sequence_length=512,
)  # fmt: skip
ROUTED = ModelSpec(
    name="routed", family="mixtral", num_layers=2, hidden_size=128, num_attention_heads=4, num_key_value_heads=4, head_dim=32,
    ffn_hidden_size=256, vocab_size=256, sequence_length=256, num_experts=16, experts_per_token=2,
)  # fmt: skip

Step = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure, before and now."""

    what: str
    figure: str
    before: float
    now: float

    def cells(self) -> str:
        ratio = f"{self.now / self.before:.2f}" if self.before else "-"
        return f"| {self.what} | {self.figure} | {_number(self.before)} | {_number(self.now)} | {ratio} |"


class Counts(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.of[func._overloadpacket] += 1
        return func(*args, **(kwargs or {}))

    def total(self, among: frozenset[Any] | None = None) -> int:
        """Number of operators of the given kinds, or of all that start a kernel."""
        return sum(count for name, count in self.of.items() if (name in among if among else name not in SHAPES))


def counted(step: Step) -> Counts:
    """The operators of the second step: the first one creates state that later ones reuse."""
    step()
    counts = Counts()
    with counts:
        step()
    return counts


def flops(step: Step) -> float:
    with FlopCounter() as counter:
        step()
    return float(counter.total or 0)


def cpu_ratio(before: Step, now: Step, repeats: int) -> float:
    """CPU seconds of `now` over those of `before`: the median over interleaved pairs."""
    ratios = []
    for _ in range(repeats):
        spent = []
        for step in (before, now):
            began = time.process_time()
            step()
            spent.append(time.process_time() - began)
        ratios.append(spent[1] / spent[0])
    return statistics.median(ratios)


def step_of(model: nn.Module, spec: ModelSpec) -> Step:
    tokens = torch.randint(spec.vocab_size, (1, spec.sequence_length), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens, tokens).backward()

    return step


def chunked_loss(repeats: int) -> Iterator[Row]:
    """A chunked loss; formerly backward recomputed the logits."""

    def built(losses_wait: bool) -> Transformer:
        part = dataclasses.replace(whole(DENSE), losses_wait=losses_wait)
        return build_transformer(DENSE, DENSE.sequence_length, 0, torch.float32, DENSE.sequence_length // CHUNKS, part)

    head = [step_of(model, DENSE) for model in (built(True), built(False))]
    what = f"loss in {CHUNKS} chunks"
    counts = [counted(step) for step in head]
    yield Row(what=what, figure="products in a step", before=counts[0].total(PRODUCTS), now=counts[1].total(PRODUCTS))
    yield Row(what=what, figure="kernels in a step", before=counts[0].total(), now=counts[1].total())
    yield Row(what=what, figure="GFLOPs of a step", before=flops(head[0]) / 1e9, now=flops(head[1]) / 1e9)
    yield Row(what=what, figure="CPU seconds of a step", before=1.0, now=cpu_ratio(head[0], head[1], repeats))


def random_states() -> Iterator[Row]:
    """Checkpointed blocks that draw no random numbers."""
    reads = []
    state = torch.get_rng_state

    def read() -> Tensor:
        reads.append(1)
        return state()

    found = []
    for draws in (True, False):
        model = build_transformer(DENSE, DENSE.sequence_length, 0, torch.float32)
        checkpoint_blocks(model.layers(), TrialConfig(activation_checkpointing="full"), draws=draws)
        reads.clear()
        with patch.object(torch, "get_rng_state", read):
            step_of(model, DENSE)()
        found.append(float(len(reads)))
    yield Row(
        what=f"full checkpointing of {DENSE.num_layers} blocks", figure="reads of generators in a step",
        before=found[0], now=found[1],
    )  # fmt: skip


def loop(self: Experts, x: Tensor) -> Tensor:
    """The former forward of a layer of experts: a loop in which the host waits for the rows of each expert."""
    scores, chosen = self.router(x).topk(self.spec.experts_per_token, dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(x.dtype).flatten(0, -2)
    tokens, chosen = x.flatten(0, -2), chosen.flatten(0, -2)
    mixed = torch.zeros_like(tokens)
    for index, expert in enumerate(self.experts.values()):
        rows, place = torch.where(chosen == index)
        mixed = mixed.index_add(0, rows, expert(tokens[rows]) * weights[rows, place, None])
    return mixed.view_as(x)


@contextmanager
def reads_of_rows() -> Iterator[list[int]]:
    """Records how often experts read numbers of rows by `tolist`, which a dispatch mode cannot see."""
    reads: list[int] = []
    read = rows_of

    def seen(counts: Tensor, total: int) -> list[int]:
        reads.append(total)
        return read(counts, total)

    with patch.object(experts_module, "rows_of", seen):
        yield reads


def routed_experts(repeats: int) -> Iterator[Row]:
    """Experts of one rank in bf16, with grouped products, and in fp32, where the host reads the numbers of rows once."""
    for dtype, name in ((torch.bfloat16, "bf16, grouped"), (torch.float32, "fp32, one by one")):
        model = build_transformer(ROUTED, ROUTED.sequence_length, 0, dtype)
        now = step_of(model, ROUTED)

        def before(step: Step = now) -> None:
            with patch.object(Experts, "forward", loop):
                step()

        what = f"{ROUTED.num_layers} layers of {ROUTED.num_experts} experts, {name}"
        with reads_of_rows() as reads:
            counts = [counted(step) for step in (before, now)]
            waits = [float(counts[0].total(READS)), counts[1].total(READS) + len(reads) / 2]  # `counted` runs two steps
        yield Row(what=what, figure="waits of the host in a step", before=waits[0], now=waits[1])
        yield Row(what=what, figure="products in a step", before=counts[0].total(PRODUCTS), now=counts[1].total(PRODUCTS))
        yield Row(what=what, figure="kernels in a step", before=counts[0].total(), now=counts[1].total())
        yield Row(what=what, figure="CPU seconds of a step", before=1.0, now=cpu_ratio(before, now, repeats))


def layers_of_experts() -> Iterator[Row]:
    """What experts add to a layer, from models of two and three layers."""

    def layer(spec: ModelSpec, dtype: torch.dtype) -> int:
        models = (dataclasses.replace(spec, num_layers=layers) for layers in (3, 2))
        more, fewer = (
            counted(step_of(build_transformer(model, model.sequence_length, 0, dtype), model)).total() for model in models
        )
        return more - fewer

    for dtype, name in ((torch.bfloat16, "bf16, grouped"), (torch.float32, "fp32, one by one")):
        for experts in (8, 16):
            routed = dataclasses.replace(DENSE, num_experts=experts, experts_per_token=2)
            what = f"a layer of {experts} experts beside a dense one, {name}"
            yield Row(what=what, figure="kernels of forward and backward", before=layer(DENSE, dtype), now=layer(routed, dtype))


def joint_products(repeats: int) -> Iterator[Row]:
    """Queries, keys and values in one product, and gate and up: the gain if joining the weights were free, and if not."""
    hidden, keys, ffn, tokens = 1024, 256, 2816, 512
    for what, widths in (("query, key and value", [hidden, keys, keys]), ("gate and up", [ffn, ffn])):
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        separate_weights = [torch.randn(width, hidden, dtype=torch.bfloat16, requires_grad=True) for width in widths]
        joint = torch.cat(separate_weights).detach().requires_grad_()

        def separate(x: Tensor = x, weights: list[Tensor] = separate_weights) -> None:
            torch.autograd.backward([functional.linear(x, weight).sum() for weight in weights])

        def together(x: Tensor = x, weight: Tensor = joint, widths: list[int] = widths) -> None:
            parts = torch.split(functional.linear(x, weight), widths, dim=-1)
            torch.autograd.backward([part.sum() for part in parts])

        def concatenated(x: Tensor = x, weights: list[Tensor] = separate_weights, widths: list[int] = widths) -> None:
            parts = torch.split(functional.linear(x, torch.cat(weights)), widths, dim=-1)
            torch.autograd.backward([part.sum() for part in parts])

        for how, step in (("one weight", together), ("weights concatenated each time", concatenated)):
            counts = [counted(one) for one in (separate, step)]
            label = f"{what}: {how} (not implemented)"
            yield Row(what=label, figure="products", before=counts[0].total(PRODUCTS), now=counts[1].total(PRODUCTS))
            yield Row(what=label, figure="kernels", before=counts[0].total(), now=counts[1].total())
            yield Row(what=label, figure="CPU seconds", before=1.0, now=cpu_ratio(separate, step, repeats))


def rows_of_page(repeats: int) -> list[Row]:
    return [
        *chunked_loss(repeats),
        *random_states(),
        *routed_experts(repeats),
        *layers_of_experts(),
        *joint_products(repeats),
    ]


def page(rows: Sequence[Row], repeats: int) -> str:
    lines = "\n".join(row.cells() for row in rows)
    return PAGE.format(rows=lines, repeats=repeats, torch=torch.__version__)


def _number(value: float) -> str:
    return f"{value:,.2f}" if value != int(value) else f"{int(value):,}"


PAGE = """\
# Counts of a step's kernels

Written by `python -m benchmarks.prediction.kernel_counts --markdown docs/results/kernel-counts.md`, on a CPU, with torch
{torch}.

Products, kernels (operators that are not only views) and waits are counted by a dispatch mode in forward and backward of one
step: a GPU executes the same ones. A wait is an operator or a `tolist` whose result the host needs before it continues. CPU
seconds are the median of {repeats} interleaved pairs, as a share of those before.

| what | figure | before | now | now / before |
| --- | --- | --- | --- | --- |
{rows}

- **Chunked loss.** Forward computes the gradients of rows and weight while a chunk's logits exist, so that a chunk has three
  products instead of four. Backward still recomputes the logits in fp16, whose range needs the loss scale first, and in
  pipelines whose last stage holds many losses before their backward (all schedules but 1f1b and interleaved_1f1b): each would
  hold a gradient of the weight.
- **Checkpointing.** Our own blocks draw no random numbers, so that no generator state is read; on CUDA each read waits for the
  device. A user's module may draw random numbers, so its states are still saved.
- **Experts.** Rows are sorted by expert. In bf16 all experts' products are one grouped product for each of the matrices, which
  reads the row offsets on the device. Other types have no such product on every device: there, and where matrices have
  adapters or 8 bits, the host reads the numbers of rows once in each layer. Where ranks divide the experts, it reads them only
  once, for the exchange. Matrices of experts are concatenated for each product (three copies in each layer in forward, three
  in backward), unless they lie at equal distances in one storage.
- **Joint products** of queries, keys and values, and of gate and up, are not implemented. Concatenating weights for each
  product costs a copy of all of them in forward and one of their gradient in backward; the last column shows what remains. As
  one weight in memory they would have to be joined in every engine's storage: in shards of stage 3 and of FSDP2, whose gathers
  give each parameter its own storage, they are not.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = page(rows_of_page(arguments.repeats), arguments.repeats)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
