"""The memory and time of Transformers and its libraries: terms that their source shows, written out by hand for one model."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.frameworks.trainer_checks import TRAINER
from autotune.knowledge.row_cases import cases_of_rows
from autotune.knowledge.table import CsvRecord, read_records
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.memory import Memory, memory
from autotune.prediction.equations.step import predict
from autotune.prediction.equations.transformers import Replica, added_seconds, layer_traffic
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.question import question_of
from benchmarks.prediction.finetuning import judged, page
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial_config import TrialConfig

DATA = Path(os.environ.get("AUTOTUNE_DATA", Path(__file__).parents[5] / "shared" / "data"))
L, H, A, KV, F, V, S = 32, 4096, 32, 1024, 14336, 32000, 4096
"""Layers, width, heads, width of keys, of the MLP, vocabulary and tokens of Mistral-7B."""
ADAPTERS = 16 * L * (2 * (H + H) + 2 * (H + KV))
LORA = f"LoRA r=16 on q,k,v,o; trainable={ADAPTERS:,}; adapter_dropout=true"
FULL = "full; parameter_width=2; autocast=false"
PARAMETERS = L * (H * (2 * H + 2 * KV) + 3 * H * F + 2 * H) + 2 * V * H


def of_row(notes: str, **cells: Any) -> Memory:
    """Bytes of a run with these notes and cells."""
    return memory(cases_of_rows([row(notes, **cells)]), Coefficients())


def row(notes: str, **cells: Any) -> Any:
    stated = {
        "source": "tests", "model_name": "own", "num_layers": L, "hidden": H, "heads": A, "kv_heads": KV // (H // A),
        "ffn_hidden": F, "vocab": V, "seq_len": S, "gpu_type": "A100-SXM-80GB", "num_gpus": 1, "precision": "bf16",
        "zero_stage": 0, "tp": 1, "pp": 1, "micro_batch": 4, "recompute": "full", "params_b": 7.24, "outcome": "ok",
        "framework": "Hugging Face Trainer", "mem_kind": "torch peak allocated, GB",
        "notes": f"gradient accumulation 1; tied_embeddings=False; release=4.48; {notes}", **cells,
    }  # fmt: skip
    stated.setdefault("global_batch", stated["micro_batch"] * stated["num_gpus"])
    rows, problems = read_records([CsvRecord(line=2, cells={name: str(cell) for name, cell in stated.items()})])
    assert not problems
    return rows[0]


def per_token(notes: str, **cells: Any) -> float:
    """Bytes that each further token of a micro-batch needs."""
    first, second = (float(of_row(notes, micro_batch=size, **cells).allocated[0]) for size in (4, 8))
    return (second - first) / (4 * S)


@pytest.mark.parametrize(
    ("loss", "logit_bytes"),
    [("release=4.45", 12), ("release=4.48", 14), ("release=4.57", 12), ("release=4.48; loss=kernel; norms=fused", 10)],
)
def test_a_token_keeps_the_inputs_of_layers_and_its_logits(loss: str, logit_bytes: int) -> None:
    # The last norm's input in fp32, or the layer's result as a kernel keeps it, and the normalised states.
    last = 2 * 2 if "fused" in loss else 4 + 2
    assert per_token(f"{LORA}; {loss}") == pytest.approx(L * 2 * H + logit_bytes * V + last * H, rel=1e-4)


def test_the_update_copies_a_moment_of_all_parameters() -> None:
    for words, size in (("update=foreach", 10), ("update=fused", 8)):
        peak = float(of_row(f"{FULL}; {words}", micro_batch=1, seq_len=256).allocated[0])
        assert peak == pytest.approx(size * PARAMETERS, rel=0.005), words


def test_fsdp_keeps_inputs_of_frozen_units_and_their_gradients_until_the_end() -> None:
    sharded = {"num_gpus": 2, "zero_stage": 3, "framework": "Hugging Face Trainer, FSDP1"}
    layer = per_token(f"{LORA}; loss=projection; reentrant=false", **sharded)
    assert per_token(f"{LORA}; loss=projection", **sharded) - layer == pytest.approx((L - 1) * 2 * H, rel=1e-3)


def test_fsdp_sums_whole_gradients_of_micro_batches() -> None:
    sharded = {"num_gpus": 8, "zero_stage": 3, "framework": "Hugging Face Trainer, FSDP1", "micro_batch": 1, "seq_len": 256}
    once, twice = (float(of_row(f"{FULL}; update=fused", global_batch=8 * count, **sharded).allocated[0]) for count in (1, 2))
    assert twice - once == pytest.approx(2 * PARAMETERS * (1 - 1 / 8), rel=0.1)


def test_flat_parameters_of_frozen_and_trained_matrices_have_gradients_of_both() -> None:
    sharded = {"num_gpus": 4, "zero_stage": 3, "framework": "Hugging Face Trainer, FSDP1", "global_batch": 32, "micro_batch": 4}
    words = f"{LORA}; sharding=fsdp1; adapter_width=2; reentrant=false; grad_acc=2"
    apart, mixed = (of_row(f"{words}{further}", **sharded) for further in ("", "; mixed_units=true"))
    matrices = 2 * (PARAMETERS - 2 * V * H - 2 * L * H)
    assert float((mixed.allocated - apart.allocated)[0]) == pytest.approx(matrices, rel=0.05)


def test_a_model_that_is_loaded_whole_is_beside_its_share() -> None:
    sharded = {"num_gpus": 8, "zero_stage": 3, "framework": "Hugging Face Trainer, FSDP1", "micro_batch": 1, "seq_len": 128}
    shards, whole = (of_row(f"{LORA}; sharding=fsdp1{further}", **sharded) for further in ("", "; loading=whole"))
    assert float(shards.allocated[0]) < PARAMETERS
    assert float(whole.allocated[0]) == pytest.approx(2 * PARAMETERS * (1 + 1 / 8), rel=0.02)
    long = [of_row(f"{LORA}; sharding=fsdp1{words}", **{**sharded, "seq_len": 65536}) for words in ("", "; loading=whole")]
    assert float(long[0].allocated[0]) == float(long[1].allocated[0])


def test_quantised_matrices_have_constants_that_nothing_divides() -> None:
    matrices = L * (H * (2 * H + 2 * KV) + 3 * H * F)
    double = of_row(f"{LORA}; double_quantised=true", precision="bf16+bnb.nf4")
    single = of_row(f"{LORA}; double_quantised=false", precision="bf16+bnb.nf4")
    saved = 4 / 64 - 1 / 64 - 4 / (64 * 256)
    assert float((single.allocated - double.allocated)[0]) == pytest.approx(saved * matrices, rel=1e-3)
    whole = of_row(f"{LORA}; whole_tables=false; whole_norms=false", precision="bf16+bnb.nf4")
    # Tables in fp32; the copy of the output projection that products get exists as the loss is computed only.
    gained = float((single.by_tag["parameters"] - whole.by_tag["parameters"])[0])
    assert gained == pytest.approx(2 * 2 * V * H, rel=0.06)


@pytest.mark.parametrize(("framework", "prepares"), [("", True), ("FSDP1", False)])
def test_quantised_models_that_are_divided_stay_in_16_bits(framework: str, prepares: bool) -> None:
    cells = {"framework": f"Hugging Face Trainer, {framework}", "num_gpus": 2, "zero_stage": 3} if framework else {}
    unstated, half = (
        per_token(f"{LORA}{words}", precision="bf16+bnb.nf4", **cells)
        for words in ("", "; whole_norms=false; whole_tables=false")
    )
    assert unstated - half >= 2 * H * L if prepares else unstated == half


def test_other_software_with_the_same_bits_keeps_its_own_equations() -> None:
    for framework in ("LitGPT", "Megatron-DeepSpeed"):
        cases = cases_of_rows([row(LORA, framework=framework, precision="bf16+bnb.nf4")])
        assert cases.transformers.states[0] == 0


def test_blocks_of_one_length_do_not_serve_the_next() -> None:
    fixed, varying = (of_row(f"{LORA}; varying_lengths={flag}") for flag in ("false", "true"))
    assert float(varying.allocated[0]) == float(fixed.allocated[0]) and float(varying.needed[0]) == float(fixed.needed[0])
    assert varying.by_tag["reserved"][0] > 5 * fixed.by_tag["reserved"][0]


def test_adapters_and_eager_norms_move_bytes() -> None:
    cases = [cases_of_rows([row(words)]) for words in (f"{LORA}; norms=fused", LORA, f"{LORA}; autocast=false")]
    moved = [sum(float(part[0]) for part in layer_traffic(case)) for case in cases]
    assert moved == sorted(moved)
    seconds = [float(predict(case, Coefficients()).seconds[0]) for case in cases]
    assert seconds == sorted(seconds)
    assert float(added_seconds(cases[2])[0]) > float(added_seconds(cases[1])[0]) == 0


def test_a_recipe_states_what_its_libraries_keep() -> None:
    settings = {"bf16": True, "lora_r": 16, "load_in_4bit": True, "optim": "adamw_torch", "packing": True}
    words = TRAINER.memory_arguments(settings)
    assert words is not None and words["update"] == "foreach" and words["varying_lengths"] == "False"
    assert (words["moments"], words["paged"]) == ("torch", "False")
    paged = TRAINER.memory_arguments({**settings, "optim": "paged_adamw_8bit", "cut_cross_entropy": True})
    assert paged is not None and (paged["moments"], paged["paged"], paged["loss"]) == ("bnb8", "True", "cut")
    question = question_of(resolve_model("mistral-7b"), resolve_cluster("dgx-a100:1"), global_batch_size=32, sequence_length=S)
    config = TrialConfig().replace({"micro_batch_size": 4, "activation_checkpointing": "full", "precision": "bf16",
                                    "lora_rank": 16, "lora_targets": "attention", "frozen_dtype": "nf4"})  # fmt: skip
    ours, theirs = (estimates(dataclasses.replace(question, stated_arguments=stated), [config])[0] for stated in (None, words))
    # PEFT keeps tables in fp32.
    gained = theirs.fullest.by_tag["parameters"] - ours.fullest.by_tag["parameters"]
    assert gained == pytest.approx(2 * 2 * V * H, rel=0.05)


@pytest.mark.parametrize(
    ("words", "on_device", "on_host"),
    [
        ("moments=torch", 4 * PARAMETERS, 0),
        ("moments=bnb32", 8 * PARAMETERS, 0),
        # The Trainer leaves embeddings, but not the output projection, in 32 bits.
        ("moments=bnb8", (2 + 8 / 256) * (PARAMETERS - V * H) + 8 * V * H, 0),
        ("moments=ao8", (2 + 8 / 256) * PARAMETERS, 0),
        ("moments=ao4", (1 + 8 / 256) * PARAMETERS, 0),
        ("moments=bnb32; paged=true", 0, 8 * PARAMETERS),
    ],
)
def test_moments_have_the_bytes_of_their_library(words: str, on_device: float, on_host: float) -> None:
    run = of_row(f"{FULL}; {words}")
    assert float(run.by_tag["optimizer_state"][0]) == pytest.approx(on_device, rel=1e-3)
    assert float(run.host[0]) == pytest.approx(on_host, rel=1e-3)


def test_a_knob_for_8_bit_moments_means_those_of_bitsandbytes() -> None:
    question = question_of(
        resolve_model("mistral-7b"),
        resolve_cluster("1xa100-80gb"),
        global_batch_size=8,
        sequence_length=512,
        simple="transformers",
    )
    knobs = {"precision": "bf16", "optimizer": "adamw8bit", "activation_checkpointing": "full"}
    (estimate,) = estimates(question, [TrialConfig().replace(knobs)])
    expected = (2 + 8 / 256) * (PARAMETERS - V * H) + 8 * V * H
    assert estimate.fullest.by_tag["optimizer_state"] == pytest.approx(expected, rel=1e-3)


def test_a_reference_is_a_copy_or_the_model_without_its_adapter() -> None:
    plain, copy, adapter = (of_row(f"{LORA}; reference={word}") for word in ("none", "copy", "adapter"))
    assert float((copy.allocated - plain.allocated)[0]) == pytest.approx(2 * (PARAMETERS + ADAPTERS), rel=1e-3)
    assert float(adapter.allocated[0]) == float(plain.allocated[0])
    tower = of_row(f"{LORA}; tower=4e8")
    assert float((tower.allocated - plain.allocated)[0]) == pytest.approx(2 * 4e8)
    assert per_token(f"{LORA}; sequences=2") == pytest.approx(2 * per_token(LORA), rel=1e-3)


@pytest.mark.parametrize(
    ("loss", "beside_hidden_states"),
    [
        ("cut", 2 * H),
        ("chunked", 2 * 32768 * 4096 / (4 * S) + (2 + 4 + 2) * H),  # a tile, rows and their gradients in fp32 and 16 bits
        ("compiled", 2 * 9 / 8 * V),
        ("split", (8 + 10 * 128 / S) * V),
    ],
)
def test_losses_in_pieces_have_few_logits(loss: str, beside_hidden_states: float) -> None:
    rank = Replica(cases_of_rows([row(f"{LORA}; norms=fused; loss={loss}")]))
    assert float(rank.loss()[0]) == pytest.approx(beside_hidden_states + 2 * 2 * H)


def test_fp32_weights_under_autocast_have_copies_until_forward_ends() -> None:
    short = {"micro_batch": 1, "seq_len": 256}
    assert float(of_row("full; parameter_width=4; update=fused", **short).allocated[0]) == pytest.approx(
        16 * PARAMETERS, rel=0.01
    )


def test_the_context_depends_on_the_card_and_on_its_ranks() -> None:
    contexts = [
        float(of_row(LORA, gpu_type=card, num_gpus=ranks).by_tag["context"][0])
        for card, ranks in (("RTX 4090", 1), ("RTX 4090", 2), ("A100-SXM-80GB", 1), ("A100-SXM-80GB", 8))
    ]
    assert contexts[0] == contexts[1] < contexts[2] < contexts[3] < 2.29 * 2**30


def test_an_offloaded_optimizer_takes_gradients_and_updates_from_the_device() -> None:
    question = question_of(
        resolve_model("llama-2-7b"), resolve_cluster("2x24GB"), global_batch_size=8, sequence_length=1024, simple="transformers"
    )
    knobs = {"zero_stage": 3, "activation_checkpointing": "full", "precision": "bf16"}
    configs = [TrialConfig().replace({**knobs, "offload_optimizer": place}) for place in ("none", "cpu")]
    device, host = (estimate.fullest.by_tag for estimate in estimates(question, configs))
    parameters = 6_738_415_616
    assert device["parameters"] == pytest.approx(2 * parameters / 2, rel=0.01)  # 16 bits, without copies for autocast
    assert device["gradients"] == pytest.approx(2 * parameters / 2, rel=0.01)
    assert (host["gradients"], host["optimizer_state"]) == (0, 0)
    assert host["activations"] < 2**30 < device["activations"]


@pytest.mark.skipif(not (DATA / "finetuning_visible.csv").exists(), reason="needs ../shared/data, or AUTOTUNE_DATA")
def test_published_runs_are_within_the_targets() -> None:
    runs = judged([DATA / "finetuning_visible.csv"])
    errors = np.abs([run.memory_error for run in runs])
    times = np.abs([run.time_error for run in runs])
    assert np.nanmedian(errors) <= 0.01 and np.nanquantile(errors, 0.95) <= 0.12 and np.nanmedian(times) <= 0.06
    assert sum(run.wrong for run in runs) <= 0.03 * len(runs)
    assert any("method: full" in line for line in page(runs))
