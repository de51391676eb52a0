"""`hf:CONFIG` where it cannot be built: one line with what to do."""

import json
from pathlib import Path

import pytest
import torch

from executor.errors import DataError, ExecutorError, FactoryError
from executor.user_module.factory import load_factory
from search_spaces.trial import Workload

pytest.importorskip("transformers", reason="needs the extra transformers")
WORK = Workload(global_batch_size=2, sequence_length=16)
CONFIGS = Path(__file__).parents[3] / "benchmarks" / "huggingface"
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 64, "max_position_embeddings": 32,
}  # fmt: skip


def said(folder: Path, config: str, work: Workload = WORK) -> ExecutorError:
    (folder / "config.json").write_text(config)
    with pytest.raises(ExecutorError) as raised:
        load_factory(f"hf:{folder}", work)
    return raised.value


def test_a_folder_without_a_config() -> None:
    with pytest.raises(FactoryError, match=r"hf:nowhere: there is no nowhere; give hf:FOLDER or hf:FOLDER/config.json"):
        load_factory("hf:nowhere", WORK)


def test_a_config_that_is_not_json(tmp_path: Path) -> None:
    error = said(tmp_path, "{")
    assert isinstance(error, FactoryError)
    assert str(error).endswith("; give a config.json that transformers can build")
    assert "\n" not in str(error)


def test_a_model_that_is_trained_otherwise(tmp_path: Path) -> None:
    config = json.dumps({**LLAMA, "architectures": ["LlamaForQuestionAnswering"]})
    assert "is not a …ForCausalLM, …LMHeadModel, …ForMaskedLM" in str(said(tmp_path, config))


def test_text_that_is_shorter_than_a_sample(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    error = said(tmp_path, json.dumps(LLAMA), Workload(global_batch_size=2, sequence_length=16, data_path=str(text)))
    assert isinstance(error, DataError)
    assert "9 bytes of text are fewer than one sample of 16 tokens" in str(error)


@pytest.mark.parametrize("name", ["t5", "vit", "whisper", "gpt2", "roberta", "modernbert"])
def test_batches_fit_the_models(name: str) -> None:
    user = load_factory(f"hf:{CONFIGS / name}", WORK)
    batch = user.batch(3, torch.Generator().manual_seed(0))
    assert {len(value) for value in batch.values()} == {3}
    assert user.module(**batch).loss.isfinite()


@pytest.mark.parametrize("head", ["LlamaForSequenceClassification", "LlamaForTokenClassification", "LlamaModel"])
def test_other_heads(tmp_path: Path, head: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": [head], "pad_token_id": 0}))
    user = load_factory(f"hf:{tmp_path}", WORK)
    assert user.module(**user.batch(2, torch.Generator().manual_seed(0))).loss.isfinite()


def test_code_that_a_config_names_is_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "modeling_theirs.py").write_text(f"open({str(ran)!r}, 'w')")
    named = {"AutoConfig": "modeling_theirs.Config", "AutoModelForCausalLM": "modeling_theirs.Model"}
    error = said(tmp_path, json.dumps({**LLAMA, "model_type": "theirs", "auto_map": named}))
    assert isinstance(error, FactoryError) and not ran.exists()
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "auto_map": named}))
    assert type(load_factory(f"hf:{tmp_path}", WORK).module).__name__ == "LlamaForCausalLM"
    assert not ran.exists()
