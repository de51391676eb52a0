"""`autotune weights`: what it writes and what it refuses."""

import json
from pathlib import Path

import torch
from called import Command

from executor.files.convert import read_weights
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
    source, target, other = tmp_path / "hub.pt", tmp_path / "shards", tmp_path / "other.pt"
    torch.save(checkpoint_names(spec).theirs(spec, state), source)
    answer = command("weights", str(model), str(source), str(target))
    assert (answer.status, answer.err) == (0, "")
    assert "21 tensors" in answer.out
    assert read_weights(target).keys() == torch.load(source, weights_only=True).keys()
    again = command("weights", str(model), str(source), str(target))
    assert (again.status, again.out) == (2, "") and "exists already" in again.err
    torch.save(state, tmp_path / "ours.pt")
    wrong = command("weights", str(model), str(tmp_path / "ours.pt"), str(other))
    assert wrong.status == 2 and "is missing" in wrong.err
    without = command("weights", "gpt2", str(source), str(other))
    assert without.status == 2 and "is missing" in without.err
