"""Copies of a module that a rank built once: the bits of a new build whatever a trial did, or a reason why it is built anew."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.frameworks import kinds_of_modules
from benchmarks.frameworks.same_step import WORKLOAD, model_of
from executor.engine import RankContext
from executor.engines.sources import load_user_module
from executor.trial.run import ENGINES
from executor.user_module import originals
from executor.user_module.originals import build_seeded, checksum_of, copy_or_build, problem_of_copying
from executor.user_module.plan import ParallelPlan, UserModule
from search_spaces.trial_config import TrialConfig

KINDS = tuple(factory.__name__ for factory in kinds_of_modules.WRITTEN if factory.__name__ != "nested")


def batch(size: int, generator: torch.Generator) -> Mapping[str, Tensor]:
    return {"x": torch.randn(size, 4, generator=generator)}


def problem(make: Callable[[], tuple[nn.Module, Any]]) -> str:
    checksum = checksum_of(make()[0])
    module, draw = make()
    return problem_of_copying(UserModule(reference="m:f", module=module, batch=draw, plan=ParallelPlan()), checksum)


@pytest.mark.parametrize("name", KINDS)
def test_a_copy_has_the_bits_and_the_generator_of_a_build(name: str) -> None:
    reference = f"{kinds_of_modules.__name__}:{name}"
    built = build_seeded(reference, WORKLOAD)
    state, checksum = torch.get_rng_state(), checksum_of(built.module)
    copied = [copy_or_build(reference, WORKLOAD, checksum) for _ in range(2)]
    assert originals._original(reference, WORKLOAD, checksum) is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert [checksum_of(user.module) for user in copied] == [checksum, checksum]
    assert copied[0].module is not copied[1].module


@pytest.mark.parametrize(
    ("engine", "knobs"),
    [
        ("native", {"zero_stage": 3, "activation_checkpointing": "full"}),
        ("native", {"zero_stage": 2, "precision": "bf16"}),
        ("ddp", {}),
    ],
)
def test_what_a_trial_leaves_does_not_reach_the_next(engine: str, knobs: dict[str, Any]) -> None:
    model, config = model_of("called"), TrialConfig(precision="fp32", micro_batch_size=2).replace(knobs)
    before = load_user_module(model, TrialConfig(precision="fp32"), WORKLOAD).user.module
    session = ENGINES[engine].build(RankContext(rank=0, world_size=1, device=torch.device("cpu")), model, config, WORKLOAD)
    session.prepare(0)
    session.train_step()
    session.close()
    after = load_user_module(model, TrialConfig(precision="fp32"), WORKLOAD).user.module
    assert checksum_of(after) == checksum_of(before) == checksum_of(build_seeded(model.reference, WORKLOAD).module)
    for first, second in zip(before.modules(), after.modules(), strict=True):
        assert type(first) is type(second) and vars(first).keys() == vars(second).keys()
        assert len(first._forward_hooks) == len(second._forward_hooks)


def test_modules_that_copies_would_not_replace_are_built_anew() -> None:
    counter = [0.0]

    def differing() -> tuple[nn.Module, Any]:
        counter[0] += 1
        module = nn.Linear(4, 4)
        nn.init.constant_(module.weight, counter[0])
        nn.init.zeros_(module.bias)
        return module, batch

    def in_a_closure() -> tuple[nn.Module, Any]:
        steps: list[int] = []
        module = zeros()
        module.register_forward_hook(lambda *_: steps.append(1))
        return module, batch

    def in_its_class() -> tuple[nn.Module, Any]:
        class Counts(nn.Linear):
            seen: list[int] = []  # noqa: RUF012

        return zeros(Counts), batch

    def referring() -> tuple[nn.Module, Any]:
        module = zeros()
        module.parent = weakref.ref(module)
        return module, batch

    def by_address() -> tuple[nn.Module, Any]:
        module = zeros()
        module.places = {id(module.weight): 0}  # type: ignore[assignment]
        return module, batch

    def with_lock() -> tuple[nn.Module, Any]:
        module = zeros()
        module.waiting = (number for number in range(3))  # type: ignore[assignment]
        return module, batch

    def with_its_batch() -> tuple[nn.Module, Any]:
        module = zeros()
        return module, lambda size, generator: {"x": module.weight[:size]}

    assert problem(lambda: (zeros(), batch)) == ""
    assert problem(differing) == "two builds from one seed differ"
    assert problem(in_a_closure) == problem(in_its_class) == "its copies share a list"
    assert problem(referring) == "its copies share a Linear"
    assert problem(by_address) == "it stores addresses of its parts"
    assert problem(with_lock) == "it cannot be copied (TypeError)"
    assert problem(with_its_batch) == "its batches are made with parts of it"


def zeros(kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    module = kind(4, 4, bias=False)
    nn.init.zeros_(module.weight)
    return module


def test_large_modules_are_built_anew(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(originals, "host_memory_bytes", lambda: 1000)
    reference = f"{kinds_of_modules.__name__}:encoder"
    checksum = checksum_of(build_seeded(reference, WORKLOAD).module)
    originals._original.cache_clear()
    assert checksum_of(copy_or_build(reference, WORKLOAD, checksum).module) == checksum
    assert f"{reference} is built anew for each trial: host memory has no room" in caplog.text
    originals._original.cache_clear()


def test_modules_without_data_are_not_copied() -> None:
    with torch.device("meta"):
        module = nn.Linear(4, 4)
    assert checksum_of(module) is None
