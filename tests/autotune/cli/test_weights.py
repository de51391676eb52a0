"""`autotune weights`: what it writes and what it refuses."""

import json
from pathlib import Path

import torch
from called import Command

from executor.files.huggingface_weights import checkpoint_names
from executor.parallel.model import build_transformer
from search_spaces.models.huggingface import resolve_model

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def test_weights_are_converted_and_others_refused(tmp_path: Path, command: Command) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(CONFIG))
    spec = resolve_model(str(model))
    state = build_transformer(spec, 16, seed=0, dtype=torch.float32).state_dict()
    source, target = tmp_path / "hub.pt", tmp_path / "megatron.pt"
    torch.save(checkpoint_names(spec).theirs(spec, state), source)
    answer = command("weights", str(model), str(source), str(target), "--to", "megatron")
    assert (answer.status, answer.err) == (0, "")
    assert "15 tensors" in answer.out
    made = torch.load(target, weights_only=True)
    assert made["decoder.layers.1.self_attention.linear_qkv.weight"].shape == (64, 32)
    assert made["decoder.layers.1.mlp.linear_fc1.weight"].shape == (96, 32)
    again = command("weights", str(model), str(source), str(target), "--to", "megatron")
    assert (again.status, again.out) == (2, "") and "exists already" in again.err
    wrong = command("weights", str(model), str(target), str(tmp_path / "other.pt"), "--to", "torchtitan")
    assert wrong.status == 2 and "is missing" in wrong.err
    without = command("weights", "gpt2", str(source), str(tmp_path / "other.pt"), "--to", "torchtitan")
    assert without.status == 2 and "is missing" in without.err
