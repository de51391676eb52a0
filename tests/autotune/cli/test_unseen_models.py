"""A config.json that was never seen before, of every family: one real trial each, all on the same warm ranks."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune import tune, tuning
from executor.runners.local import LocalRunner
from executor.runners.runner import Runner
from search_spaces.outcome import JobState
from tests.sampling import sampled

ROTARY = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 112, "vocab_size": 307,
          "max_position_embeddings": 80}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": ROTARY | {"num_key_value_heads": 3, "head_dim": 10, "attention_bias": True, "rms_norm_eps": 1e-5},
    "mistral": ROTARY | {"num_key_value_heads": 2, "sliding_window": 16},
    "qwen2": ROTARY | {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "mixtral": ROTARY | {"num_key_value_heads": 6, "num_local_experts": 3, "num_experts_per_tok": 2},
    "gpt_neox": ROTARY | {"rotary_pct": 0.5, "use_parallel_residual": False},
    "gpt2": {"n_layer": 2, "n_embd": 40, "n_head": 5, "n_positions": 64, "vocab_size": 301},
    "opt": {"num_hidden_layers": 2, "hidden_size": 40, "num_attention_heads": 5, "ffn_dim": 96, "vocab_size": 299,
            "max_position_embeddings": 64, "word_embed_proj_dim": 24, "do_layer_norm_before": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks(forked_ranks: None) -> Iterator[Runner]:
    with LocalRunner(2, device="cpu") as runner:
        yield runner


@pytest.mark.prove
@pytest.mark.parametrize("family", sampled(FAMILIES, every=20))
def test_a_model_never_seen_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Runner, family: str) -> None:
    monkeypatch.setattr(tuning, "make_runner", lambda session: contextlib.nullcontext(ranks))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, **FAMILIES[family]}))
    result = tune(
        str(path), ranks=2, trials=1, confirm_repeats=0, global_batch_size=4, sequence_length=32, runner="local",
        fidelity={"max_seconds": 0.1}, database=str(tmp_path / "jobs.db"), out=tmp_path / "best.json",
    )  # fmt: skip
    assert result.state is JobState.SUCCEEDED, result.message
    assert result.best is not None
    assert json.loads((tmp_path / "best.json").read_text())["model"]["spec"]["family"] == family
