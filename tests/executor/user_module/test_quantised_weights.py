"""Weights of bitsandbytes' 4-bit modules, and of `hf:` models whose config.json names a quantisation, in every engine."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from executor.engine import RankContext
from executor.engines.sources import load_user_module
from executor.errors import EngineRefusalError, FactoryError
from executor.parallel.initialization import is_plain
from executor.trial.run import ENGINES
from executor.user_module.description import describe
from executor.user_module.factory import load_factory
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

WORK = Workload(global_batch_size=2, sequence_length=16)
CONTEXT = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 32, "dtype": "bfloat16",
}  # fmt: skip
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}


class Quantised(nn.Module):
    """4-bit matrices as bitsandbytes makes them: quantised when they are first moved."""

    def __init__(self) -> None:
        super().__init__()
        bitsandbytes: Any = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
        self.blocks = nn.ModuleList(
            bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4") for _ in range(2)
        )
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x).square().mean()


def quantised() -> tuple[nn.Module, Any]:
    def batch(size: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        return {"x": torch.randn(size, 64, generator=generator)}

    return Quantised(), batch


def moved() -> tuple[nn.Module, Any]:
    """Quantised by the factory."""
    module, batch = quantised()
    return module.to("cpu"), batch


@pytest.mark.parametrize("factory", ["quantised", "moved"])
@pytest.mark.parametrize(("engine", "stage"), [("native", 0), ("native", 2), ("native", 3), ("ddp", 0)])
def test_engines_train_beside_weights_that_keep_their_state(factory: str, engine: str, stage: int) -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    model = describe(f"{__name__}:{factory}", WORK)
    config = TrialConfig(precision="fp32", zero_stage=stage, micro_batch_size=2)
    plain = load_user_module(model, config, WORK)
    expected = plain.user.module.to("cpu").eval()(**plain.data.micro_batch(0, 0, 2))
    session = ENGINES[engine].build(CONTEXT, model, config, WORK)
    session.prepare(0)
    weights = [value for value in session.parts[0].module.parameters() if not value.requires_grad]  # type: ignore[attr-defined]
    assert [(type(value).__name__, value.quant_state is not None) for value in weights] == [("Params4bit", True)] * 2  # type: ignore[attr-defined]
    assert session.train_step().loss == pytest.approx(float(expected), rel=1e-6)
    session.close()


def test_parameters_of_a_dry_run_are_plain() -> None:
    """Where they were not, frozen ones stood outside of the peak."""
    with FakeTensorMode():
        assert all(map(is_plain, nn.Linear(4, 4).parameters()))


def test_engines_that_divide_parameters_refuse_them_by_name() -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    model = describe(f"{__name__}:moved", WORK)
    with pytest.raises(EngineRefusalError, match="fsdp2 engine divides plain parameters, and the module has Params4bit; use"):
        ENGINES["fsdp2"].build(CONTEXT, model, TrialConfig(precision="fp32", zero_stage=3, micro_batch_size=2), WORK)


def written(folder: Path, quantisation: Mapping[str, object], **changes: object) -> str:
    (folder / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": quantisation, **changes}))
    return f"hf:{folder}"


@pytest.mark.filterwarnings("ignore")  # of bitsandbytes and accelerate
def test_a_config_that_names_a_quantisation_has_it(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    pytest.importorskip("transformers", reason="needs the extra transformers")
    torch.manual_seed(3)
    user = load_factory(written(tmp_path, NF4), WORK)
    matrices = {name: value for name, value in user.module.named_parameters() if type(value).__name__ == "Params4bit"}
    assert len(matrices) == 14 and all(value.device.type == "cpu" for value in matrices.values())
    assert user.module.training and not any(module._forward_hooks for module in user.module.modules())
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    torch.manual_seed(3)
    whole = load_factory(f"hf:{tmp_path}", WORK).module
    assert torch.equal(whole.model.embed_tokens.weight, user.module.model.embed_tokens.weight)  # type: ignore[union-attr, arg-type]
    name, value = next(iter(matrices.items()))
    functional: Any = __import__("bitsandbytes").functional
    back = functional.dequantize_4bit(value.data, value.quant_state)  # type: ignore[attr-defined]
    assert torch.nn.functional.cosine_similarity(back.flatten().float(), whole.get_parameter(name).flatten().float(), 0) > 0.99
    model = describe(written(tmp_path, NF4), WORK)
    session = ENGINES["native"].build(CONTEXT, model, TrialConfig(precision="bf16", zero_stage=2, micro_batch_size=2), WORK)
    losses = []
    for step in range(3):
        session.prepare(step)
        losses.append(session.train_step().loss or 0.0)
    session.close()
    assert losses[2] < losses[0]


@pytest.mark.parametrize("method", ["gptq", "awq", "nonsense"])
def test_a_quantisation_that_cannot_be_applied_is_named_with_the_remedy(tmp_path: Path, method: str) -> None:
    pytest.importorskip("transformers", reason="needs the extra transformers")
    with pytest.raises(FactoryError) as raised:
        load_factory(written(tmp_path, {"quant_method": method, "bits": 4}), WORK)
    text = str(raised.value)
    assert f"quantization_config ({method}) of its config.json cannot be applied to random weights here" in text
    assert text.endswith("; install what it asks for, or remove quantization_config to train without it")
    assert "\n" not in text
