"""Questions: what is assumed of a model's file stands beside every answer."""

import json
from pathlib import Path

import pytest

from autotune.prediction.planning.question import model_of, question_of
from autotune.request.rows import request_from_fields
from autotune.session.resolve import resolve
from search_spaces.clusters.presets import resolve_cluster

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "vocab_size": 100, "max_position_embeddings": 32, "quantization_config": {"load_in_4bit": True},
}  # fmt: skip


def test_quantised_weights_are_frozen_weights_unless_an_option_says_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert [model_of(str(file), 4, None, bits).frozen_bits for bits in (None, 8, 16)] == [4, 8, 16]


def test_what_a_model_s_file_leaves_out_is_assumed_on_every_cluster(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    text = {"model_type": "gemma3_text", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256}
    file.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    model = model_of(str(file), None, None, None)
    for cluster in ("dgx-h100:1", "2x24GB", "local"):
        assumed = question_of(model, resolve_cluster(cluster, 2 if cluster == "local" else None)).assumed
        left_out, sizes = (item.text for item in assumed if item.name == "model")
        assert left_out == "the text model alone, without vision_config"
        assert all(size in sizes for size in ("max_position_embeddings 131,072", "num_attention_heads 8", "vocab_size 262,208"))


@pytest.mark.parametrize(
    ("words", "open_names", "batch"),
    [
        ("-b {micro_batch_size}", {"global_batch_size"}, 8),
        ("-b {micro_batch_size} --seq {sequence_length}", {"global_batch_size", "sequence_length"}, 8),
        ("-b {micro_batch_size} --global-batch-size 64", set(), 64),
    ],
)
def test_a_script_leaves_open_what_its_command_does_not_state(words: str, open_names: set[str], batch: int) -> None:
    session = resolve(request_from_fields({"command": f"python train.py {words}", "ranks": 2, "strategy": "random"}))
    assert {item.name for item in session.request.resolved_assumed} == open_names
    assert session.request.global_batch_size == batch
