"""Predictions of fused kernels: logits that are not held, traffic that falls away, and what their loss holds instead."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.activations import kept_layer_bytes
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.kernels import loss_kept, loss_peak, pieces
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.step import StepPrediction, predict
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MODEL = resolve_model("llama-3-8b")
CLUSTER = resolve_cluster("dgx-h100:1")
WORKLOAD = Workload(global_batch_size=64, sequence_length=4096)
RATES = Coefficients()
TOKENS, HIDDEN, VOCABULARY = 4096, 4096, 128_256
TABLE = HIDDEN * VOCABULARY


def cases(*configs: dict[str, Any], model: Any = MODEL) -> Any:
    made = [TrialConfig(precision="bf16", zero_stage=2).replace(config) for config in configs]
    return cases_of(model, CLUSTER, WORKLOAD, made, "native")


def predicted(*configs: dict[str, Any], model: Any = MODEL) -> StepPrediction:
    return predict(cases(*configs, model=model), RATES)


LIGER = {"fused_kernels": "liger"}


def test_ligers_loss_holds_a_piece_of_the_logits_and_gradients() -> None:
    """By hand: 32 times as many logits a row as elements, so 128 of 4,096 rows at once; bf16, summed in fp32."""
    place, rows = cases(LIGER), np.array([float(TOKENS)])
    cut = pieces(place, rows)
    assert (cut.rows[0], cut.times[0]) == (128, 32)
    kept = 2 * (TOKENS * HIDDEN + TABLE)
    assert loss_kept(place, rows)[0] == kept
    assert loss_peak(place, rows)[0] == 2 * 128 * VOCABULARY + kept + 4 * TABLE


def test_a_frozen_output_projection_has_no_gradient() -> None:
    place, rows = cases({**LIGER, "lora_rank": 8}), np.array([float(TOKENS)])
    assert loss_kept(place, rows)[0] == 2 * TOKENS * HIDDEN


def test_logits_of_many_tokens_are_spared() -> None:
    batch = {"micro_batch_size": 4, "activation_checkpointing": "full"}
    ours, fused = (memory(cases({**batch, **kernels}), RATES).by_tag["activations"][0] for kernels in ({}, LIGER))
    logits = 12.0 * 4 * TOKENS * VOCABULARY
    assert 0.5 * logits < ours - fused < logits


def test_tensor_ranks_have_a_loss_of_their_own() -> None:
    """What is left of Liger are norms, rotations and gates."""
    divided = {"tensor_parallel_size": 8, "micro_batch_size": 4, "activation_checkpointing": "full"}
    ours, fused = predicted(divided), predicted({**divided, **LIGER})
    assert fused.parts["compute"][0] < ours.parts["compute"][0]
    logits = 12.0 * 4 * TOKENS * VOCABULARY / 8
    spared = (memory(cases(divided), RATES).total - memory(cases({**divided, **LIGER}), RATES).total)[0]
    assert 0 <= spared < 0.5 * logits


def test_gpipe_holds_the_gradients_of_every_micro_batch() -> None:
    pipeline = {"pipeline_parallel_size": 8, "activation_checkpointing": "full", "pipeline_split": "even", **LIGER}
    one, all_of_them = (
        memory(cases({**pipeline, "pipeline_schedule": schedule}), RATES).total[0] for schedule in ("1f1b", "gpipe")
    )
    waiting = (WORKLOAD.global_batch_size - 1) * 2 * (TOKENS * HIDDEN + TABLE)
    assert all_of_them - one > 0.9 * waiting


@pytest.mark.parametrize("kernels", ["liger", "transformer_engine"])
def test_less_is_kept_and_moved(kernels: str) -> None:
    divided = {"tensor_parallel_size": 2}  # so that the loss is our own
    ours, fused = cases(divided), cases({**divided, "fused_kernels": kernels})
    # CUDA's own RMSNorm is one kernel, too.
    assert bool(kept_layer_bytes(fused)[0] < kept_layer_bytes(ours)[0]) is (kernels == "liger")
    compute = predict(ours, RATES).parts["compute"][0]
    assert predict(fused, RATES).parts["compute"][0] < compute
    assert predict(cases({**divided, "compile_blocks": True}), RATES).parts["compute"][0] < compute


def test_few_rows_read_the_whole_table_for_each_small_piece() -> None:
    """Pieces are of as many rows as have so many logits as all rows have elements: of few rows they are small products, each of
    which is added to the whole gradient of the table.
    """
    ratios = []
    for size in (1, 8):
        ours, fused = (predicted({"micro_batch_size": size, **kernels}).parts["compute"][0] for kernels in ({}, LIGER))
        ratios.append(fused / ours)
    assert ratios[0] > 1.0 > ratios[1]


def test_what_a_model_has_not_is_not_spared() -> None:
    """Liger has no LayerNorm, no learned positions and no plain GELU; with tensor ranks nothing of it is left."""
    plain = resolve_model("opt-1.3b")
    for config in ({}, {"micro_batch_size": 2}):
        divided = {**config, "tensor_parallel_size": 2}
        ours, fused = predicted(divided, model=plain), predicted({**divided, **LIGER}, model=plain)
        assert ours.seconds[0] == fused.seconds[0]
    norms = predicted({"fused_kernels": "transformer_engine"}, model=plain)
    assert norms.parts["compute"][0] < predicted({}, model=plain).parts["compute"][0]


def test_each_row_of_many_is_what_it_is_alone() -> None:
    configs = [
        {**layout, "fused_kernels": kernels}
        for kernels in ("none", "liger", "transformer_engine")
        for layout in ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"loss_chunk_size": 1024})
    ]
    together = predicted(*configs)
    for place, config in enumerate(configs):
        alone = predicted(config)
        assert together.seconds[place] == pytest.approx(alone.seconds[0])
        assert together.memory.total[place] == pytest.approx(alone.memory.total[0])


def test_fields_of_the_layout_broadcast() -> None:
    """As a grid has them: kernels along rows, micro-batches along columns."""
    base = cases({})
    layouts = dataclasses.replace(
        base.layouts, fused_kernels=np.array([[0.0], [1.0], [2.0]]), micro_batch_size=np.array([[1.0, 2.0]]),
        accumulation=np.array([[8.0, 4.0]]),
    )  # fmt: skip
    grid = predict(dataclasses.replace(base, layouts=layouts), RATES)
    assert grid.seconds.shape == (3, 2)
    for row, kernels in enumerate(("none", "liger", "transformer_engine")):
        for column, size in enumerate((1, 2)):
            alone = predicted({"fused_kernels": kernels, "micro_batch_size": size})
            assert grid.seconds[row, column] == pytest.approx(alone.seconds[0])
            assert grid.memory.total[row, column] == pytest.approx(alone.memory.total[0])
