"""The text tower of a multimodal `hf:` configuration, with a package that stands in for transformers."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.user_module.factory import load_factory
from search_spaces.trial import Workload

WORK = Workload(global_batch_size=2, sequence_length=16)
VOCABULARY, WIDTH = 64, 8


class TextConfig(SimpleNamespace):
    vocab_size = VOCABULARY
    num_attention_heads = 2
    use_cache = True


class TextModel(nn.Module):
    """Layers without a head, as Qwen2-VL's text model."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config, self.table, self.inner = config, nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tp_plan = {"inner": "colwise_gather_output"}

    def get_input_embeddings(self) -> nn.Embedding:
        return self.table

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=self.inner(self.table(input_ids)))


class CausalModel(TextModel):
    """Its own language model, as Gemma 3's."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        return super().forward(input_ids).last_hidden_state.square().mean()


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    package: Any = ModuleType("transformers")
    package.__version__ = "stand-in"
    package.config = SimpleNamespace(
        architectures=["AnyForConditionalGeneration"], text_config=TextConfig(), tie_word_embeddings=True
    )
    package.AutoConfig = SimpleNamespace(from_pretrained=lambda _, trust_remote_code: package.config)
    package.AutoModel = SimpleNamespace(from_config=TextModel)
    package.AutoModelForCausalLM = SimpleNamespace(from_config=CausalModel)
    package.MODEL_FOR_CAUSAL_LM_MAPPING = {}
    monkeypatch.setitem(sys.modules, "transformers", package)
    return package


@pytest.mark.parametrize("tied", [True, False])
def test_a_tower_without_a_head_of_its_own_gets_one(transformers: Any, tied: bool) -> None:
    transformers.config.tie_word_embeddings = tied
    user = load_factory("hf:config.json", WORK)
    batch = user.batch(2, torch.Generator().manual_seed(0))
    loss = user.module(**batch)
    loss.backward()
    assert loss.item() == pytest.approx(torch.tensor(VOCABULARY).log().item(), rel=0.5)
    assert all(parameter.grad is not None for parameter in user.module.parameters())
    assert len(list(user.module.parameters())) == (3 if tied else 4)
    assert set(user.plan.tensor) == {"model.inner", "lm_head"}


def test_a_tower_with_a_language_model_of_its_own_is_that(transformers: Any) -> None:
    transformers.MODEL_FOR_CAUSAL_LM_MAPPING = {TextConfig: CausalModel}
    user = load_factory("hf:config.json", WORK)
    assert type(user.module) is CausalModel
    assert user.module.config.use_cache is False
