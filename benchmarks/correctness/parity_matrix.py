"""The parity matrix: the product of the capability tables, without combinations that the rules refuse."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from benchmarks.correctness.parity_cases import CAPABILITIES, Case
from benchmarks.correctness.parity_options import (
    activations,
    adapters,
    attention,
    balanced,
    beside_frozen,
    beside_products,
    beside_shared_experts,
    by_module,
    documents,
    experts,
    families,
    folded,
    integers,
    latent_adapters,
    near,
    optimizers,
    scheduled,
    token_prediction,
    warm_up,
)
from benchmarks.correctness.parity_sections import (
    compiled,
    copies,
    crossed,
    data_parallel,
    micro_batches,
    offloads,
    precisions,
    written,
)
from executor.engines.capabilities import version_refusals
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.knobs.computation import FP8_RECIPES
from search_spaces.optimizers import BF16_MASTERS

NOT_COMPUTED = frozenset({"expandable_segments", "environment", "gc_interval", "numa_binding", "cuda_graphs"})
"""Knobs that change no computation or communication on CPUs: growth of the CUDA allocator, environment of the processes,
garbage collection, CPU cores, and captures that exist only on CUDA."""
EVERY = 11
"""Every so many-th case on more than four ranks, where the section is large."""
NO_CASE: Mapping[str, Sequence[Value]] = {
    "attention_backend": ("flash", "efficient", "cudnn"), "fused_kernels": ("liger", "transformer_engine"),
    "precision": ("fp8",), "fp8_recipe": FP8_RECIPES[1:], "optimizer": (BF16_MASTERS,),
}  # fmt: skip
"""Values without a case: rules refuse CUDA kernels on CPUs, and `best` is flash. A test below the rules compares fp8 products
with float64 (`tests/executor/parallel/test_float8.py`). Weights that are rounded at random differ from those of other layouts;
`tests/executor/engines/native/test_stochastic_rounding.py` has their mean and their ranks."""


def matrix(ranks: int) -> list[Case]:
    """Every case on `ranks` ranks, each once, in a fixed order."""
    found: dict[Case, None] = {}
    for engine in CAPABILITIES:
        sections = [crossed(engine, ranks), copies(engine, ranks), offloads(engine, ranks)]
        if ranks <= 4:
            sections += [data_parallel(engine, ranks), precisions(engine, ranks), attention(engine, ranks)]
            sections += [documents(engine, ranks)]
        if ranks <= 4 and engine == "native":
            sections += [micro_batches(engine, ranks), written(engine, ranks), optimizers(engine, ranks)]
            sections += [experts(engine, ranks), folded(engine, ranks), activations(engine, ranks)]
            sections += [beside_products(engine, ranks), beside_shared_experts(engine, ranks)]
            sections += [balanced(engine, ranks), latent_adapters(engine, ranks)]
            sections += [by_module(engine, ranks)]
        if ranks > 4 and engine == "native":
            sections += [itertools.islice(folded(engine, ranks), 0, None, EVERY)]
        if ranks == 2:
            sections += [compiled(engine, ranks)]
        if ranks <= 4 and engine == "native":
            sections += [adapters(engine, ranks), beside_frozen(engine, ranks), scheduled(engine, ranks)]
            sections += [near(engine, ranks), integers(engine, ranks), warm_up(engine, ranks), families(engine, ranks)]
            sections += [token_prediction(engine, ranks)]
        for section in sections:
            found.update(dict.fromkeys(case for case in section if case is not None))
    return list(dict.fromkeys(_here(case) for case in found))


def _here(case: Case) -> Case:
    """The case, in fp32 if this version of torch cannot compute it in fp64."""
    if not version_refusals(torch.__version__, case.config, "cpu"):
        return case
    return replace(case, config=case.config.replace({"precision": "fp32"}))


def untested(cases: Iterable[Case]) -> list[str]:
    """Claims of the capability tables that no case exercises. Add a case for each, or remove it from the table."""
    cases = [*cases]
    found = []
    for engine, capability in CAPABILITIES.items():
        mine = [case for case in cases if case.engine == engine]
        for name, values in capability.knobs.items():
            if name in NOT_COMPUTED:
                continue
            tried = {getattr(case.config, name) for case in mine}
            for value in values or KNOBS[name].choices:
                found += [] if value in tried or value in NO_CASE.get(name, ()) else [f"{engine}: {name}={value}"]
            here = [value for value in values or KNOBS[name].choices or ".." if value not in NO_CASE.get(name, ())]
            if len(tried) < 2 and len(here) > 1:
                found.append(f"{engine}: {name} at another value than {tried}")
    return found


def some(cases: Sequence[Case], every: int) -> list[Case]:
    """Every `every`th case and, besides, the first of each schedule."""
    firsts: dict[str, Case] = {}
    for case in cases:
        firsts.setdefault(case.schedule, case)
    return [*dict.fromkeys([*cases[::every], *firsts.values()])]
