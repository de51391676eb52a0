"""`hf:CONFIG` where it cannot be built: one line with what to do."""

import json
from pathlib import Path

import pytest

from executor.errors import DataError, ExecutorError, FactoryError
from executor.user_module.factory import load_factory
from search_spaces.trial import Workload

pytest.importorskip("transformers", reason="needs the extra transformers")
WORK = Workload(global_batch_size=2, sequence_length=16)
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
    config = json.dumps({**LLAMA, "architectures": ["LlamaForSequenceClassification"]})
    assert "is not a …ForCausalLM or …ForMaskedLM" in str(said(tmp_path, config))


def test_text_that_is_shorter_than_a_sample(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    error = said(tmp_path, json.dumps(LLAMA), Workload(global_batch_size=2, sequence_length=16, data_path=str(text)))
    assert isinstance(error, DataError)
    assert "9 bytes of text are fewer than one sample of 16 tokens" in str(error)
