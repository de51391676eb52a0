"""Bytes that data types and optimizers hold and send: measured on a rank, and the closed forms of docs/closed-forms.md."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.correctness.loss_curves import RANKS, WORKLOAD
from benchmarks.correctness.loss_of_types import LAYOUT, MODEL, TYPES, products_of_blocks
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.session import ParallelSession
from search_spaces.knob import Value
from search_spaces.optimizers import LEAST_QUANTISED, QUANTISED_BLOCK
from search_spaces.training.states import MASTER_BYTES, PARAMETER_BYTES
from search_spaces.trial_config import TrialConfig

HELD: Mapping[str, Mapping[str, Value]] = {
    **TYPES,
    "fp32, SGD": {"optimizer": "sgd"},
    "fp32, LAMB": {"optimizer": "lamb"},
    "fp32, Muon": {"optimizer": "muon"},
}
"""Types, and the optimizers whose updates equal torch's exactly (docs/results/parity.md), so that no loss needs a bound."""
WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}
COUNTER = 4
"""Bytes of the step counter of torch's AdamW, for each tensor it is given."""
CODEBOOKS = 2 * 4 * (256 + 255)
"""Bytes of the code tables of both quantised moments, and of the boundaries between the codes."""
HIDDEN, LAYERS = MODEL.hidden_size, MODEL.num_layers
BLOCK = [HIDDEN * HIDDEN] * 4 + [HIDDEN * MODEL.ffn_hidden_size] * 3
"""Elements of the matrices of a block: queries, keys, values, outputs; gate, up, down."""
OTHERS = [MODEL.vocab_size * HIDDEN] * 2 + [HIDDEN] * (2 * LAYERS + 1)
"""Elements of the embedding, of the output projection and of the norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes of one rank."""

    parameters: int
    optimizer_state: int
    """Including the master copy."""
    gradients: int
    """Kept from one micro-batch to the next."""
    reduced: int
    """Gradients sent in a step: the size of the full messages, before they are divided among the ranks."""

    @property
    def kept(self) -> int:
        """In memory, between micro-batches."""
        return self.parameters + self.optimizer_state + self.gradients


def closed_form(config: TrialConfig) -> Bytes:
    """Bytes of a rank at stage 2, where all shares divide evenly."""
    parameters, master = MODEL.parameter_count, MASTER_BYTES[config.precision]
    moments, counters = _moments(config.optimizer, master)
    micro_batches = config.gradient_accumulation_steps(WORKLOAD.global_batch_size, RANKS)
    return Bytes(
        parameters=PARAMETER_BYTES[config.precision] * parameters,
        optimizer_state=(master * parameters + moments) // RANKS + counters,
        gradients=WIDTH[config.accumulation_dtype] * parameters // RANKS,
        reduced=micro_batches * WIDTH[config.reduce_dtype] * parameters,
    )


def _moments(optimizer: str, full: int) -> tuple[int, int]:
    """Bytes of the moments over all ranks, and further bytes on each rank."""
    matrices, others = sum(BLOCK) * LAYERS, sum(OTHERS)
    match optimizer:
        case "sgd":
            return full * (matrices + others), 0
        case "lamb":
            return 2 * full * (matrices + others), 0
        case "muon":
            return full * matrices + 2 * full * others, COUNTER * len(OTHERS)
        case "adamw8bit":
            sizes = BLOCK * LAYERS + OTHERS
            small = [size for size in sizes if size < LEAST_QUANTISED]
            large = sum(sizes) - sum(small)
            quantised = 2 * large + 2 * 4 * large // QUANTISED_BLOCK
            return quantised + 2 * full * sum(small), COUNTER * len(small) + CODEBOOKS
        case _:
            return 2 * full * (matrices + others), COUNTER


def weigh(rank: int, knobs: Mapping[str, Value]) -> Bytes:
    """Train two steps and measure what this rank holds and has sent."""
    context = RankContext(rank=rank, world_size=dist.get_world_size(), device=torch.device("cpu"))
    session = NativeEngine().build(context, MODEL, TrialConfig().replace({**LAYOUT, **knobs}), WORKLOAD)
    with products_of_blocks():
        _accepted_step(session, 0)
        gradients = _watched_gradients(session)
        reduced = _accepted_step(session, 1)
    storages = [*session.tagged_storages()]
    session.close()
    return Bytes(
        parameters=_nbytes(value for tag, value in storages if tag == "parameters"),
        optimizer_state=_nbytes(value for tag, value in storages if tag == "optimizer_state"),
        gradients=gradients[0],
        reduced=reduced,
    )


def _accepted_step(session: ParallelSession, step: int) -> int:
    """Bytes of gradients sent by a step whose gradients do not overflow."""
    session.prepare(step)
    while True:
        before = _sent(session)
        if not session.train_step().skipped:
            return _sent(session) - before


def _sent(session: ParallelSession) -> int:
    return session.collectives().get(("reduce_scatter", "data"), (0, 0))[1]


def _watched_gradients(session: ParallelSession) -> Sequence[int]:
    """A list to which the end of each micro-batch appends the bytes of the gradients present."""
    found: list[int] = []
    (replica,) = session.replicas
    end: Callable[[], None] = replica.end_micro_batch

    def end_and_record() -> None:
        end()
        found.append(_nbytes(value for tag, value in replica.tagged_storages() if tag == "gradients"))

    replica.end_micro_batch = end_and_record  # type: ignore[method-assign]
    return found


def _nbytes(values: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once."""
    return sum({value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in values}.values())


def differing(measured: Mapping[str, Sequence[Bytes]]) -> list[str]:
    """The ranks whose bytes differ from the closed form."""
    return [
        f"{name}, rank {rank}: {held}, not {closed_form(_config(name))}"
        for name, ranks in measured.items()
        for rank, held in enumerate(ranks)
        if held != closed_form(_config(name))
    ]


def _config(name: str) -> TrialConfig:
    return TrialConfig().replace({**LAYOUT, **HELD[name]})


def section(measured: Mapping[str, Sequence[Bytes]]) -> str:
    """Markdown: bytes, and the savings against fp32."""
    about = (
        "Bytes of a rank, measured on each of the 4 after an update: equal, to the byte, to the closed forms "
        "([states](../closed-forms.md#states-parameters-gradients-optimizer_state)), and so are the savings. *Gradients*: "
        "those kept from one micro-batch to the next. *Reduced*: gradients that a step sends, before they are divided among "
        "the ranks."
    )
    heads = ("type", "parameters", "master and moments", "gradients", "kept, of fp32", "reduced a step", "of fp32")
    lines = ["", "## Bytes", "", about, "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    exact = next(iter(measured.values()))[0]
    for name, (held, *_) in measured.items():
        cells = [f"{held.parameters:,}", f"{held.optimizer_state:,}", f"{held.gradients:,}"]
        cells += [_change(held.kept, exact.kept), f"{held.reduced:,}", _change(held.reduced, exact.reduced)]
        lines.append(" | ".join(["| " + name, *cells]) + " |")
    return "\n".join(itertools.chain(lines, [""]))


def _change(size: int, other: int) -> str:
    return "–" if size == other else f"{size - other:+,} ({size / other - 1:+.1%})"
