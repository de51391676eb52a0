"""Modules of many kinds are described without data: copied, stored and read again, recurrent, of several types; or refused."""

import copy
import io
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.dry.module_profile import profile_module
from executor.errors import FactoryError
from executor.measurement.flop_counter import FlopCounter
from executor.measurement.memory import account_step
from search_spaces.models.model import FactoryModel
from search_spaces.models.module_profile import ModuleProfile
from search_spaces.trial import Workload

WORKLOAD = Workload(global_batch_size=4, sequence_length=1)
Batch = Callable[[int, torch.Generator], Mapping[str, Any]]


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x[:, None].expand(-1, 4, -1)).square().mean()  # type: ignore[no-any-return]


def batch(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 32, generator=generator)}


def made() -> tuple[nn.Module, Batch]:
    return Stack([nn.Linear(32, 32) for _ in range(3)]), batch


def copied() -> tuple[nn.Module, Batch]:
    layer = nn.Linear(32, 32)
    return Stack([copy.deepcopy(layer) for _ in range(3)]), batch


def encoder() -> tuple[nn.Module, Batch]:
    return Encoder(), batch


@pytest.mark.prove
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_copied_layers_are_described_as_those_that_were_made(precision: str) -> None:
    own, other = (profile_module(f"{__name__}:{name}", WORKLOAD, (precision,)) for name in ("made", "copied"))
    assert own.profile is not None and other.profile is not None
    assert other.profile.trained == own.profile.trained
    assert other.flops_per_sample == own.flops_per_sample
    one, two = own.profile.traces[precision], other.profile.traces[precision]
    assert (two.outer, two.blocks, two.again) == (one.outer, one.blocks, one.again)
    assert other.parameter_count == own.parameter_count == 3 * (32 * 32 + 32)


@pytest.mark.prove
def test_the_encoder_of_torch_which_copies_its_layer_is_described() -> None:
    described = profile_module(f"{__name__}:encoder", WORKLOAD, ("fp32",))
    assert described.parameter_count == sum(parameter.numel() for parameter in Encoder().parameters())
    assert described.flops_per_sample


class Loss(nn.Module):
    """The mean square of what a module returns first."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        result = self.module(x)
        return (result[0] if isinstance(result, tuple) else result).float().square().mean()  # type: ignore[no-any-return]


class Tables(nn.Module):
    """Equal tables side by side, which are no chain."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum", sparse=sparse) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.abs().long().clamp(max=49)
        return torch.stack([table(rows[:, index : index + 3]) for index, table in enumerate(self.tables)], 1)


class Grouped(nn.Module):
    """Experts as one product by group."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight, offs=torch.tensor([1, len(x)], dtype=torch.int32))


class Gated(nn.Module):
    """Reads a value in an inner module."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.mean().item() > 0 else -x


@torch.library.custom_op("described::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


double.register_fake(torch.empty_like)
double.register_autograd(lambda _, gradient: gradient * 2)  # type: ignore[arg-type]


class Custom(nn.Linear):
    """An operator of another library, of which only shapes are known."""

    def forward(self, x: Tensor) -> Tensor:
        return double(super().forward(x))  # type: ignore[no-any-return]


def stored_and_read() -> nn.Module:
    layer, file = nn.Linear(32, 32), io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    layer.load_state_dict(torch.load(file))
    return layer


def sized_by_values() -> nn.Module:
    widths = (torch.linspace(1, 2, 3) * 16).int().tolist()
    return nn.Sequential(nn.Linear(32, widths[0]), nn.Linear(widths[0], widths[-1]))


def adapted() -> nn.Module:
    """A frozen base in bf16, and a trained layer in fp32."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.adapter = nn.Linear(32, 16).bfloat16().requires_grad_(False), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.adapter(self.base(x.bfloat16()).float())  # type: ignore[no-any-return]

    return Adapted()


def described(monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], *precisions: str) -> FactoryModel:
    code = ModuleType("described_module")
    code.build = lambda: (Loss(make()), batch)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "described_module", code)
    return profile_module("described_module:build", WORKLOAD, precisions or ("fp32",))


def executed(make: Callable[[], nn.Module]) -> float:
    """FLOPs of a sample, with data."""
    with FlopCounter() as counter:
        Loss(make())(**batch(2, torch.Generator())).backward()
    assert counter.total is not None
    return counter.total / 2


def lstm() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (8, 4)), nn.LSTM(4, 12, num_layers=2, batch_first=True))


@pytest.mark.prove
@pytest.mark.parametrize("make", [lstm, Grouped, Tables, stored_and_read, sized_by_values, adapted])
def test_flops_without_data_are_those_that_a_step_executes(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module]
) -> None:
    assert (described(monkeypatch, make).flops_per_sample or 0) == executed(make)


def test_a_recurrent_layer_keeps_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = described(monkeypatch, lstm)
    profile = model.profile
    assert profile is not None
    assert model.notes == ("recurrent layers keep the workspace of a CPU; that of a GPU is known after a trial only",)
    end_of_forward = next(moment for moment in profile.traces["fp32"].moments["none"] if moment.mark == "loss")
    layer, x = nn.LSTM(4, 12, batch_first=True), torch.zeros(2, 8, 4)
    workspace = torch.ops.aten.mkldnn_rnn_layer(
        x.transpose(0, 1),
        *layer._flat_weights,
        torch.zeros(2, 12),
        torch.zeros(2, 12),
        False,
        [],
        2,
        12,
        1,
        True,
        False,
        False,
        True,
    )[3]
    assert end_of_forward.level[0] + 2 * end_of_forward.level[1] > 2 * workspace.nbytes


def peak_of(profile: ModuleProfile, samples: int) -> float:
    return max(moment.peak[0] + samples * moment.peak[1] for moment in profile.traces["fp32"].moments["none"])


def require_allocators_peak(monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module]) -> ModuleProfile:
    """The profile of a module, whose peaks are those of a step in plain torch."""
    profile = described(monkeypatch, make).profile
    assert profile is not None
    module = Loss(make())
    parameters = [*module.parameters()]
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda value: setattr(value, "grad", None))  # type: ignore[no-untyped-call]
    for size in (2, 3):
        x = batch(size, torch.Generator())["x"]

        def step(x: Tensor = x) -> None:
            module(x).backward()

        step()
        measured = account_step(step, lambda: [("parameters", value) for value in parameters], torch.device("cpu"))
        without_parameters = measured.peak - sum(value.nbytes for value in parameters)
        assert peak_of(profile, size) == pytest.approx(without_parameters, rel=0.01)
    return profile


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("channels", "width", "side", "kernel", "stride", "groups"),
    [(48, 48, 4, 7, 1, 48), (32, 32, 16, 3, 2, 1), (3, 24, 32, 4, 4, 1), (32, 64, 8, 2, 2, 1), (32, 32, 8, 3, 1, 4)],
)
def test_convolutions_take_the_workspace_of_their_kernels(
    monkeypatch: pytest.MonkeyPatch, memory_format: torch.memory_format,
    channels: int, width: int, side: int, kernel: int, stride: int, groups: int,
) -> None:  # fmt: skip
    class Convolved(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            images = x.mean(1)[:, None, None, None].expand(-1, channels, side, side)
            return super().forward(images.contiguous(memory_format=memory_format))

    def make() -> nn.Module:
        return Convolved(channels, width, kernel, stride, kernel // 2, groups=groups)

    profile = require_allocators_peak(monkeypatch, make)
    other = profile_module("described_module:build", WORKLOAD, ("fp32",), "cuda").profile
    assert other is not None
    assert peak_of(other, 2) <= peak_of(profile, 2)  # without the workspaces of CPUs
    assert peak_of(other, 2) < peak_of(profile, 2) or groups < channels


class Selected(nn.Linear):
    """Reads one column after another: autograd adds up the gradients in place."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        return sum((hidden[:, index] for index in range(1, x.shape[1])), hidden[:, 0])


class Gathered(nn.Linear):
    """Reads columns by their numbers, as graphs do."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        columns = torch.arange(hidden.shape[1]).flip(0)
        return hidden.index_select(1, columns) + hidden[:, columns] + hidden.gather(1, columns.expand_as(hidden))


@pytest.mark.parametrize("kind", [Selected, Gathered])
def test_gradients_add_up_in_place(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Linear]) -> None:
    require_allocators_peak(monkeypatch, lambda: kind(32, 256))


def test_an_operator_without_a_formula_makes_the_flops_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    model = described(monkeypatch, lambda: Custom(32, 32))
    assert model.flops_per_sample is None
    assert model.notes == ("the FLOPs of described.double.default are unknown: predicted times count the bytes that they move",)


def test_types_are_kept_in_the_module_s_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    model = described(monkeypatch, adapted, "bf16")
    assert model.profile is not None
    assert (model.precision, model.other_types) == ("fp32", "528 frozen in bf16")
    assert {name: trace.frozen_bytes for name, trace in model.profile.traces.items()} == {"fp32": 2 * 528, "bf16": 2 * 528}
    assert "with precision=fp32 parameters keep the factory's types (528 frozen in bf16)" in model.notes[0]
    assert described(monkeypatch, lambda: nn.Linear(32, 4)).default_precision == ""
    assert described(monkeypatch, lambda: nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 4).bfloat16().float())).notes == ()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(32, 8), Gated()), "its module module.1 (Gated) reads the value of a tensor"),
        (lambda: nn.Sequential(nn.Linear(32, 8), nn.Linear(4, 4)), "its module module.1 (Linear) does not run"),
        (lambda: nn.Sequential(nn.LazyLinear(8)), "its module module.0 (LazyLinear) has no size before its first call"),
        (lambda: Tables(sparse=True), "its module module.tables.0 (EmbeddingBag) has sparse gradients"),
    ],
)
def test_a_refusal_names_the_inner_module_in_one_line(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises(FactoryError) as refused:
        described(monkeypatch, make)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.__cause__ is None, "whose traceback would be printed"
