"""Shared experts beside the all-to-all of tokens: the order of messages and products, and the same numbers to the bit."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from executor.parallel.checkpointing import selective_contexts
from executor.parallel.collectives import InFlight, ProcessGroup
from executor.parallel.experts import Experts
from executor.parallel.initialization import materialise
from executor.parallel.model import RankModel, transformer_without_memory, whole
from search_spaces.models.model import ModelSpec

RANKS, TOKENS = 2, 6
SPEC = ModelSpec(
    name="shared", family="deepseek_v3", num_layers=1, hidden_size=8, num_attention_heads=2, num_key_value_heads=2, head_dim=4,
    ffn_hidden_size=98, vocab_size=16, sequence_length=TOKENS, num_experts=4, experts_per_token=2, shared_expert_size=90,
)  # fmt: skip
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Sent(InFlight):
    def __init__(self, happened: list[str]) -> None:
        super().__init__(lambda: None)
        self._happened = happened

    def wait(self) -> None:
        self._happened.append("wait")


class Echo(ProcessGroup):
    """Two ranks with the same tokens and the same experts, in one process."""

    def __init__(self) -> None:
        super().__init__(None, RANKS, 0)
        self.happened: list[str] = []

    def all_to_all(
        self, output: Tensor, parts: Tensor, received: Sequence[int], sent: Sequence[int], returns: bool = False
    ) -> InFlight:
        own = parts.split(list(sent))
        for target, size in zip(output.split(list(received)), received, strict=True):
            target.copy_(own[self.rank][:size] if len(own[self.rank]) >= size else torch.zeros_like(target))
        self.happened.append("send")
        return Sent(self.happened)


class Products(TorchDispatchMode):
    """Records the products of the shared expert, and those of other experts, among what happens."""

    def __init__(self, happened: list[str]) -> None:
        super().__init__()
        self._happened = happened
        self.first = 0
        """Where the present pass begins."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            sizes = {size for value in args if isinstance(value, Tensor) for size in value.shape}
            kind = "shared" if SPEC.shared_expert_size in sizes else "expert" if SPEC.ffn_hidden_size in sizes else ""
            self._happened += [kind] if kind and self._happened[self.first :][-1:] != [kind] else []
        return func(*args, **(kwargs or {}))


def layer(overlaps: bool, spec: ModelSpec = SPEC) -> tuple[Experts, Echo]:
    group = Echo()
    part: RankModel = dataclasses.replace(whole(spec), expert=group, overlaps_shared_experts=overlaps)
    model, values = transformer_without_memory(spec, TOKENS, 3, torch.float64, part=part)
    materialise(model, values, torch.device("cpu"))
    return next(module for module in model.modules() if isinstance(module, Experts)), group


def run(overlaps: bool, recomputed: str = "none") -> Iterator[Any]:
    """What happens in forward, and in backward; then the result and all gradients."""
    experts, group = layer(overlaps)
    x = torch.randn(2, TOKENS, SPEC.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    contexts: dict[str, Any] = {"context_fn": lambda: selective_contexts(False)} if recomputed == "selective" else {}
    products = Products(group.happened)
    with products:
        result: Tensor = experts(x) if recomputed == "none" else checkpoint(experts, x, use_reentrant=False, **contexts)
        forward = [*group.happened]
        products.first = len(forward)
        result.square().sum().backward()
    yield forward
    yield group.happened[len(forward) :]
    yield [value.detach() for value in (result, x.grad, *(weight.grad for weight in experts.parameters())) if value is not None]


COUNTS = ["send", "wait"]
FORWARD = [*COUNTS, "send", "shared", "wait", "expert", "send", "shared", "wait"]
BACKWARD = ["send", "shared", "wait", "expert", "send", "shared", "wait"]


def test_each_half_of_the_shared_expert_computes_while_tokens_travel() -> None:
    forward, backward, _ = run(overlaps=True)
    assert forward == FORWARD
    assert backward == BACKWARD


def test_without_overlap_each_message_is_waited_for() -> None:
    forward, backward, _ = run(overlaps=False)
    assert forward == [*COUNTS, *COUNTS, "expert", *COUNTS, "shared"]
    assert backward == ["shared", *COUNTS, "expert", *COUNTS]


def test_recomputation_overlaps_too_and_waits_for_all_that_it_sends() -> None:
    forward, backward, _ = run(overlaps=True, recomputed="full")
    assert forward == FORWARD
    assert backward == [*FORWARD, *BACKWARD]


def test_selective_recomputation_sends_nothing_again() -> None:
    forward, backward, _ = run(overlaps=True, recomputed="selective")
    assert forward == FORWARD
    assert [one for one in backward if one in ("send", "wait")] == [one for one in BACKWARD if one in ("send", "wait")]


@pytest.mark.parametrize("recomputed", ["none", "selective", "full"])
def test_numbers_are_equal_to_the_bit(recomputed: str) -> None:
    waited, beside = ([*run(overlaps, recomputed)][2] for overlaps in (False, True))
    assert len(waited) == 2 + len([*layer(False)[0].parameters()])
    for one, other in zip(waited, beside, strict=True):
        assert torch.equal(one, other)


def test_one_rank_and_no_shared_expert_have_nothing_to_overlap() -> None:
    alone = dataclasses.replace(whole(SPEC), overlaps_shared_experts=True)
    model, _ = transformer_without_memory(SPEC, TOKENS, 3, torch.float64, part=alone)
    assert not next(module for module in model.modules() if isinstance(module, Experts)).overlaps
    assert not layer(True, dataclasses.replace(SPEC, shared_expert_size=0))[0].overlaps
