"""Fused kernels in our modules: the same numbers with packages that stand in for the real ones, and how these are called.

The kernels themselves need a GPU and are not run here. What stands in for them takes what they take and overwrites what they
overwrite, by the source of liger_kernel 0.8.5 and Transformer Engine 2.
"""

import importlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from fused_ranks import STAND_INS, compare_by_stand_ins

from benchmarks.common.gang import Gang
from benchmarks.correctness.parity_cases import GLOBAL_BATCH, SEQUENCE, Case
from benchmarks.correctness.parity_rank import STEPS
from executor.dry.dry_run import dry_run
from executor.errors import EngineRefusalError
from executor.parallel.fused import LIGER_ARGUMENTS, load_operators
from executor.parallel.operators import Operators
from search_spaces.kernels import installed_kernels
from search_spaces.knob import Value
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

RANKS, LAYERS = 4, 3
HERE = torch.device("cpu")
Knobs = Mapping[str, Value]

TENSOR: Knobs = {"tensor_parallel_size": 2, "zero_stage": 1}
SEQUENCES: Knobs = {"tensor_parallel_size": 2, "sequence_parallel": True, "zero_stage": 3}
PIPELINE: Knobs = {"pipeline_parallel_size": 2, "zero_stage": 1}
LAYOUTS: tuple[Knobs, ...] = (
    *({"zero_stage": stage} for stage in range(4)), TENSOR, SEQUENCES, {**SEQUENCES, "async_tensor_parallel": True}, PIPELINE,
    {**PIPELINE, "pipeline_schedule": "gpipe", "zero_stage": 2}, {**PIPELINE, **TENSOR},
    {"context_parallel_size": 2, "zero_stage": 3}, {"activation_checkpointing": "full", "zero_stage": 2},
    {"offload_activations": True},
)  # fmt: skip
BESIDES: tuple[tuple[str, Knobs], ...] = (
    ("llama", {"lora_rank": 2, "lora_targets": "both"}), ("llama", {"prompt_length": 4}), ("experts", {"zero_stage": 2}),
    ("llama", {"random_ltd_start_tokens": 8, "random_ltd_steps": 5}), ("gpt2", {"zero_stage": 3}),
    ("llama", {"precision": "bf16"}),
)  # fmt: skip
CASES = [*itertools.product(["llama"], LAYOUTS), *BESIDES]


def case(kernels: str, knobs: Knobs, model: str = "llama") -> Case:
    values = {"precision": "fp64", "micro_batch_size": 2, "fused_kernels": kernels, **knobs}
    return Case(engine="native", ranks=RANKS, model=model, config=TrialConfig().replace(values))


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with Gang(RANKS, compare_by_stand_ins) as ranks:
        yield ranks


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The packages that stand in, for this process."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("liger_kernel", "transformer_engine")]:
        del sys.modules[name]


@pytest.mark.prove
@pytest.mark.parametrize(("model", "knobs"), sampled(CASES, every=20), ids=str)
@pytest.mark.parametrize("kernels", ["liger", "transformer_engine"])
def test_numbers_are_those_of_one_process_without_them(gang: Gang, kernels: str, model: str, knobs: Knobs) -> None:
    tried = case(kernels, knobs, model)
    for report, calls in gang.run(tried):
        assert report.off <= tried.bound
        assert calls


@pytest.mark.nightly
def test_each_kernel_runs_as_often_as_its_operator_would(gang: Gang) -> None:
    per_rank = STEPS * GLOBAL_BATCH // RANKS // 2
    for _, calls in gang.run(case("liger", {})):
        made = Counter(name for name, _ in calls)
        assert made == {"norm": 7 * per_rank, "rotate": 3 * per_rank, "gate": 3 * per_rank, "loss": per_rank}
    for _, calls in gang.run(case("transformer_engine", {}, "gpt2")):
        assert Counter(name for name, _ in calls) == {"layer_norm": 7 * per_rank}
    for _, calls in gang.run(case("liger", TENSOR)):
        assert "loss" not in {name for name, _ in calls}, "where ranks divide the vocabulary the loss is our own"


@pytest.mark.prove
@pytest.mark.parametrize("knobs", sampled([SEQUENCES, {}], every=2), ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tensors_are_dense_of_one_type_and_of_the_shapes_that_kernels_take(gang: Gang, knobs: Knobs, precision: str) -> None:
    size = int(knobs.get("tensor_parallel_size", 1))
    tried = case("liger", {**knobs, "precision": precision})
    spec, dtype = tried.model_of(), torch.float32 if precision == "fp32" else torch.bfloat16
    heads, own = spec.num_attention_heads // size, SEQUENCE // (size if knobs.get("sequence_parallel") else 1)
    tables = [(1, SEQUENCE, spec.head_dim)] * 2
    shapes: dict[str, list[tuple[int, ...]]] = {
        "norm": [(2, own, spec.hidden_size), (spec.hidden_size,)],
        "rotate": [*((2, SEQUENCE, number, spec.head_dim) for number in (heads, heads // 2)), *tables],
        "gate": [(2, SEQUENCE, spec.ffn_hidden_size // size)] * 2,
        "loss": [(2 * SEQUENCE, spec.hidden_size), (spec.vocab_size, spec.hidden_size), (2 * SEQUENCE,)],
    }
    for _, calls in gang.run(tried):
        for name, tensors in calls:
            assert [tuple(tensor.shape) for tensor in tensors] == shapes[name]
            assert all(tensor.is_contiguous() for tensor in tensors)
            types = [tensor.dtype for tensor in tensors]
            assert types == ([dtype, dtype, torch.int64] if name == "loss" else [dtype] * len(tensors))


def operators(kernels: str) -> Operators:
    tried = case(kernels, {"precision": "bf16"})
    return load_operators(tried.config, tried.model_of(), torch.device("cuda"), torch.bfloat16)


def test_without_kernels_no_package_is_looked_for(packages: None) -> None:
    assert type(operators("none")) is Operators
    assert "liger_kernel" not in sys.modules


def test_the_packages_are_found_by_what_is_installed_of_them(packages: None) -> None:
    assert installed_kernels() == {"liger_kernel": "0.8.5", "transformer_engine": "2.8.0"}
    assert type(operators("liger")).__name__ == "LigerOperators"
    assert type(operators("transformer_engine")).__name__ == "TransformerEngineOperators"


def test_a_rank_without_the_package_refuses() -> None:
    told = r"fused-kernels-package: liger-kernel is not installed .*set fused_kernels=none"
    with pytest.raises(EngineRefusalError, match=told):
        operators("liger")


@pytest.mark.parametrize(("knobs", "rule"), [({}, "fused-kernels-device"), ({"precision": "fp16"}, "fused-kernels-device")])
def test_a_rank_on_a_cpu_refuses(packages: None, knobs: Knobs, rule: str) -> None:
    tried = case("liger", {"precision": "bf16", **knobs})
    with pytest.raises(EngineRefusalError, match=f"^{rule}: kernels of Liger run only on CUDA devices, not on cpu"):
        load_operators(tried.config, tried.model_of(), HERE, torch.bfloat16)


def loaded(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize("name", LIGER_ARGUMENTS)
def test_a_function_with_other_arguments_is_refused(packages: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, other: torch.Tensor, *rest: Any) -> Any:
            raise AssertionError("it was called all the same")

    for changed in (Changed, None):
        monkeypatch.setattr(loaded("liger_kernel.ops"), name, changed)
        with pytest.raises(EngineRefusalError, match=rf"fused-kernels-package: liger_kernel\.ops\.{name} is missing, or"):
            operators("liger")


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_a_norm_with_other_arguments_is_refused(packages: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def changed(width: int, *, epsilon: float) -> None:
        raise AssertionError("it was called all the same")

    monkeypatch.setattr(loaded("transformer_engine.pytorch"), name, changed)
    with pytest.raises(EngineRefusalError, match=rf"transformer_engine\.pytorch\.{name} is missing, or does not take a width"):
        operators("transformer_engine")


def test_a_package_that_cannot_be_imported_is_refused(packages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None)
    with pytest.raises(EngineRefusalError, match=r"liger_kernel\.ops of liger-kernel cannot be imported here"):
        operators("liger")


def test_a_dry_run_has_no_device_for_them() -> None:
    tried = case("liger", {"precision": "bf16"})
    with pytest.raises(EngineRefusalError, match="dry-run-kernels: kernels of liger run only on devices; use fused_kernels="):
        dry_run(tried.model_of(), tried.config, tried.workload(), RANKS)
