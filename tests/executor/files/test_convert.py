"""Files of weights, from one framework to another and back."""

from pathlib import Path

import pytest
import torch

from executor.errors import WeightsError
from executor.files.convert import convert_weights, read_weights, write_weights
from executor.files.frameworks import Framework
from executor.files.huggingface_weights import checkpoint_names
from search_spaces.models.huggingface import resolve_model
from tests.executor.files.framework_models import CONFIGS, SHAPE, spec_of, weights_of

HUGGINGFACE, TORCHTITAN, MEGATRON = Framework.HUGGINGFACE, Framework.TORCHTITAN, Framework.MEGATRON


@pytest.mark.prove
@pytest.mark.parametrize("name", ["llama, tied", "qwen3_moe", "deepseek_v3"])
def test_a_round_through_all_frameworks_changes_nothing(tmp_path: Path, name: str) -> None:
    spec = spec_of(name, 1 if name == "deepseek_v3" else 0)
    state = checkpoint_names(spec).theirs(spec, weights_of(spec))
    files = [tmp_path / part for part in ("first.pt", "megatron.pt", "titan", "last.pt")]
    write_weights(files[0], state)
    steps = (HUGGINGFACE, MEGATRON, TORCHTITAN, HUGGINGFACE)
    for place in range(3):
        count = convert_weights(spec, files[place], files[place + 1], steps[place], steps[place + 1])
        assert count == len(read_weights(files[place + 1]))
    last = read_weights(files[3])
    assert last.keys() == state.keys() and all(torch.equal(value, last[key]) for key, value in state.items())
    assert (tmp_path / "titan" / ".metadata").exists()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    spec = spec_of("llama")
    state = checkpoint_names(spec).theirs(spec, weights_of(spec))
    write_weights(tmp_path / "whole.pt", {**state, "model.layers.0.self_attn.q_proj.weight_scale_inv": torch.ones(1)})
    with pytest.raises(WeightsError, match="weight_scale_inv is not one of its weights"):
        convert_weights(spec, tmp_path / "whole.pt", tmp_path / "made.pt", HUGGINGFACE, MEGATRON)
    torch.save({"model": state}, tmp_path / "nested.pt")
    with pytest.raises(WeightsError, match="more than tensors by name"):
        read_weights(tmp_path / "nested.pt")
    for path, problem in (("absent.pt", "holds no weights"), ("", "holds no weights"), ("text.txt", "unknown suffix")):
        (tmp_path / "text.txt").write_text("")
        with pytest.raises(WeightsError, match=problem):
            read_weights(tmp_path / path)
    with pytest.raises(WeightsError, match="exists already"):
        write_weights(tmp_path / "whole.pt", state)
    with pytest.raises(WeightsError, match="unknown suffix"):
        write_weights(tmp_path / "made.txt", state)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "mixtral"])
def test_files_are_those_that_transformers_writes(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra transformers")
    pytest.importorskip("safetensors", reason="needs the extra transformers")
    config = {**SHAPE, **CONFIGS.get(name, {"model_type": "mixtral", "num_local_experts": 4}), "pad_token_id": 0}
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    theirs.save_pretrained(tmp_path / "hub")
    spec = resolve_model(str(tmp_path / "hub"))
    written = read_weights(tmp_path / "hub")
    ours = checkpoint_names(spec).ours(spec, written)
    assert ours.keys() == weights_of(spec).keys()
    again = checkpoint_names(spec).theirs(spec, ours)
    assert again.keys() == written.keys() and all(torch.equal(value, written[key]) for key, value in again.items())
    write_weights(tmp_path / "made.safetensors", {key: value.contiguous() for key, value in again.items()})
    assert read_weights(tmp_path / "made.safetensors").keys() == written.keys()
