"""Modules as people write them: every ZeRO stage, with and without checkpointing, against the module in a plain loop of torch.

    python -m benchmarks.frameworks.same_step [--only NAME ...] [--repeats 1] [--markdown docs/results/same-step.md]

Each module trains three steps on two ranks, under each configuration and micro-batch size, and its losses are compared with
those of `plain_steps` in one process. Exit code 1 if one is off or a rank dies. Modules of packages that are not installed are
left out. Takes about 5 minutes on two cores.
"""

import argparse
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.gang import Gang, TaskError
from benchmarks.common.written_page import table
from benchmarks.frameworks import kinds_of_modules
from benchmarks.prediction import library_modules
from executor.batches import FactoryData, forward_seed, map_tensors, seed_generators
from executor.engine import GroupKey, RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.torch_engines import DdpEngine, Fsdp2Engine
from executor.errors import EngineRefusalError, FactoryError
from executor.trial.reference import plain_losses
from executor.user_module.description import describe
from executor.user_module.factory import load_factory
from executor.user_module.survey import loss_from
from search_spaces.models.model import FactoryModel
from search_spaces.models.module_profile import LossTrait
from search_spaces.trial import TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

RANKS, STEPS = 2, 3
WORKLOAD = Workload(global_batch_size=8, sequence_length=16)
MODULES = {
    **{factory.__name__: ("torch", f"{kinds_of_modules.__name__}:{factory.__name__}") for factory in kinds_of_modules.WRITTEN},
    **{
        f"{name} of {library}": (library, f"{library_modules.__name__}:{name}")
        for name, (library, *_) in library_modules.ZOO.items()
    },
}
"""Name -> package and factory."""
BOUND = {"fp32": 2e-5, "bf16": 2e-2}
"""Largest relative difference of a loss that rounding explains, by the precision of the module."""
ENGINES = {engine.capability.engine: engine for engine in (NativeEngine, DdpEngine, Fsdp2Engine)}
INTRODUCTION = f"""# The same training step

Written by `make extras` (`benchmarks/frameworks/same_step.py`). Small modules as people write them, and of other packages,
train {STEPS} steps of AdamW with clipped gradients on {RANKS} ranks of a CPU with the native engine, in each ZeRO stage, with
micro-batches of 2 and 4 samples, and with `activation_checkpointing=full` (refused: no repeated module is called, or it
does not run again in the same way). The figures are the largest relative difference of a loss from that of plain torch, on the
same micro-batches with the same seeds. Bounds: {BOUND["fp32"]:g} in fp32, {BOUND["bf16"]:g} in bf16.
*Reference*: the losses that trials are compared with, computed by the ranks together (`executor.trial.reference`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A module under one configuration."""

    model: FactoryModel
    config: TrialConfig
    engine: str = "native"


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Losses of the first steps."""

    engine: tuple[float, ...] = ()
    reference: tuple[float, ...] = ()
    plain: tuple[float, ...] = ()
    refusal: str = ""
    """The rule that refuses the configuration, and its message."""

    @property
    def off(self) -> float:
        """Largest relative difference of the engine from the plain loop."""
        return _difference(self.engine, self.plain)

    @property
    def reference_off(self) -> float:
        """The same of the reference."""
        return _difference(self.reference, self.plain)


def _difference(losses: Sequence[float], plain: Sequence[float]) -> float:
    if len(losses) != len(plain) or not plain:
        return float("inf")
    pairs = zip(losses, plain, strict=True)
    return max((abs(a - b) / max(abs(b), 1e-6) if a == a else float("inf")) for a, b in pairs)


@functools.cache
def _control_group() -> dist.ProcessGroup | None:
    return dist.new_group(backend="gloo")


@functools.cache
def _groups() -> dict[GroupKey, dist.ProcessGroup | None]:
    """Process groups for all cases of a rank."""
    return {}


def compare(rank: int, case: Case) -> Losses:
    """Train the case on this rank. Every rank must call it."""
    context = RankContext(
        rank=rank, world_size=RANKS, device=torch.device("cpu"), control_group=_control_group(), reusable_groups=_groups()
    )
    request = TrialRequest(
        attempt="one", model=case.model, config=case.config, workload=WORKLOAD, world_size=RANKS, plain_steps=STEPS
    )
    reference = plain_losses(context, request)
    # What changes in forward changes on each rank by its own micro-batches, so that one process is no comparison.
    plain = reference if LossTrait.STATE in case.model.loss_traits else plain_steps(case.model, case.config)
    try:
        session = ENGINES[case.engine]().build(context, case.model, case.config, WORKLOAD)
    except EngineRefusalError as error:
        return Losses(refusal=f"{error.rule}: {error}")
    totals = torch.zeros(STEPS, dtype=torch.float64)
    try:
        for step in range(STEPS):
            session.prepare(step)
            totals[step] = session.train_step().loss or 0.0
    finally:
        session.close()
    dist.all_reduce(totals)
    return Losses(engine=tuple((totals / RANKS).tolist()), reference=reference, plain=plain)


@functools.lru_cache(maxsize=4)
def plain_steps(model: FactoryModel, config: TrialConfig) -> tuple[float, ...]:
    """The mean losses of three steps of the plain module in this process, on the whole global batch in micro-batches."""
    torch.manual_seed(WORKLOAD.seed)
    user = load_factory(model.reference, WORKLOAD)
    module, data = user.module, FactoryData(batch=user.batch, seed=WORKLOAD.seed)
    if config.precision != model.precision:
        module.to({"fp32": torch.float32, "bf16": torch.bfloat16}[config.precision])
    if LossTrait.TRAINS_ONLY not in model.loss_traits:
        module.eval()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=WORKLOAD.learning_rate, weight_decay=WORKLOAD.weight_decay)
    size, losses = config.micro_batch_size, []
    count = WORKLOAD.global_batch_size // size
    for step in range(STEPS):
        total = 0.0
        for index in range(count):
            batch = data.micro_batch(step, index, size)
            if config.precision != model.precision:
                batch = map_tensors(batch, lambda value: value.to(trained[0].dtype) if value.is_floating_point() else value)
            seed_generators(forward_seed(WORKLOAD.seed, step, index))
            loss = loss_from(module(**batch))
            (loss / count).backward()  # type: ignore[no-untyped-call]
            total += float(loss)
        nn.utils.clip_grad_norm_(trained, WORKLOAD.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / count)
    return tuple(losses)


def configurations(model: FactoryModel) -> list[TrialConfig]:
    """Every stage, and stage 3 with micro-batches of 4 samples; with checkpointing too unless it is refused."""
    base = TrialConfig(precision=model.precision or "fp32", param_persistence_threshold=10)
    kinds = ("none", "full") if "activation_checkpointing" not in dict(model.refused_knobs) else ("none",)
    return [
        dataclasses.replace(base, zero_stage=stage, micro_batch_size=size, activation_checkpointing=kind)
        for kind in kinds
        for stage, size in ((0, 2), (1, 2), (2, 2), (3, 2), (3, 4))
    ]


def model_of(name: str) -> FactoryModel:
    """The module as `autotune sweep` describes it."""
    return describe(MODULES[name][1], WORKLOAD)


def compared(gang: Gang, model: FactoryModel, config: TrialConfig, engine: str = "native") -> Losses:
    """Both ranks' losses under one configuration, which are the same."""
    losses: Losses = gang.run(Case(model=model, config=config, engine=engine))[0]
    return losses


def row_of(gang: Gang, name: str, repeats: int) -> tuple[list[str], bool]:
    """Cells of the table, and whether all of it is right. A module may be refused before it trains, by a line that names it."""
    try:
        model = model_of(name)
    except FactoryError as error:
        print(f"{name}: {error}", flush=True)
        return [f"`{name}`", MODULES[name][0], "refused", *["–"] * 6], str(error).startswith(MODULES[name][1])
    largest: dict[tuple[int, str], float] = {}
    reference = 0.0
    for config in configurations(model) * repeats:
        try:
            losses = compared(gang, model, config)
        except TaskError as error:
            print(f"{name} {config.differences(TrialConfig())}: {error}", flush=True)
            losses = Losses()
        if losses.refusal:
            print(f"{name}: {losses.refusal}", flush=True)
        key = (config.zero_stage, config.activation_checkpointing)
        largest[key] = max(largest.get(key, 0.0), losses.off)
        reference = max(reference, losses.reference_off)
    bound = BOUND[model.precision or "fp32"]
    stages = [f"{largest[stage, 'none']:.0e}" for stage in range(4)]
    checkpointed = [value for (_, kind), value in largest.items() if kind == "full"]
    cells = [
        f"`{name.partition(' ')[0]}`", MODULES[name][0], ", ".join(model.loss_traits) or "–",
        *stages, f"{max(checkpointed):.0e}" if checkpointed else "refused", f"{reference:.0e}",
    ]  # fmt: skip
    return cells, max(*largest.values(), reference) <= bound


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name, (package, _) in MODULES.items() if importlib.util.find_spec(package)]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    rows, right = [], True
    with Gang(RANKS, compare) as gang:
        for name in arguments.only:
            cells, is_right = row_of(gang, name, arguments.repeats)
            rows.append([*cells, "" if is_right else "**off**"])
            right = right and is_right
            print(" | ".join(rows[-1]), flush=True)
    headings = ["module", "package", "what its loss depends on", *(f"stage {stage}" for stage in range(4))]
    headings += ["checkpointed", "reference", ""]
    if arguments.markdown:
        lines = [INTRODUCTION, "", *table(headings, rows)]
        arguments.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
