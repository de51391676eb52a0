"""Megatron-LM's arguments: every name is one of a committed list, and the layout is spelled as it reads it."""

import dataclasses
import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import export_cases as cases
import exported
import pytest

from autotune.frameworks.exporters import exporter
from autotune.frameworks.megatron_script import _kinds, pipeline_layout
from search_spaces.trial_config import TrialConfig

LISTED = Path(__file__).parent / "megatron_arguments.txt"


def arguments(best: dict[str, Any]) -> dict[str, str]:
    """Name -> value, as bash hands them over; empty: a switch."""
    text = exporter("megatron")(best).text
    (array,) = re.findall(r"^ARGUMENTS=\(\n(.*?)^\)$", text, re.DOTALL | re.MULTILINE)
    words = shlex.split(array, comments=True)
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            found[word] = ""
        else:
            found[list(found)[-1]] = word
    return found


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"zero_stage": 1, "reduce_dtype": "bf16", "overlap_comm": False},
    {"zero_stage": 3, "hsdp_shard_size": 8, "offload_optimizer": "cpu", "precision": "bf16"},
    {"precision": "fp16", "optimizer": "sgd"},
    {"precision": "fp8"},
    {"tensor_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2, "attention_backend": "flash"},
    {"pipeline_parallel_size": 4, "rank_order": "tp-cp-pp-dp", "activation_checkpointing": "full", "micro_batch_size": 1},
    {"pipeline_parallel_size": 2, "virtual_stages": 4, "pipeline_schedule": "interleaved_1f1b"},
    {"context_parallel_size": 2, "context_parallel_method": "ulysses", "attention_window": 256},
]
PREDICTS: dict[str, Any] = {"mtp_layers": 2, "mtp_loss_weight": 0.3, "pipeline_parallel_size": 2}


def test_multi_token_prediction() -> None:
    made = arguments(exported.document(exported.large("llama-3-8b", sequence_length=2048), **PREDICTS))
    assert (made["--mtp-num-layers"], made["--mtp-loss-scaling-factor"]) == ("2", "0.3")
    assert made["--pipeline-model-parallel-layout"].endswith("tmmL")
    plain = arguments(exported.document(exported.large("llama-3-8b", sequence_length=2048)))
    assert not any("mtp" in name for name in plain)
    notes = exporter("deepspeed")(exported.document(exported.large("llama-3-8b", sequence_length=2048), **PREDICTS)).notes
    assert any(note.startswith("mtp_layers=2: not part of") for note in notes)


@pytest.mark.parametrize("model", ["llama-3-8b", "gpt2", "opt-1.3b", "gpt-neox-20b"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_name_is_listed(model: str, layout: dict[str, Any]) -> None:
    length = {"gpt2": 1024}.get(model, 2048)
    if model in ("gpt2",) and layout.get("tensor_parallel_size", 1) > 1:
        pytest.skip("its vocabulary is not divided by two ranks")
    listed = set(re.findall(r"--\S+", LISTED.read_text(encoding="utf-8")))
    made = arguments(exported.document(exported.large(model, sequence_length=length), **layout))
    assert set(made) <= listed


def test_the_layout(tmp_path: Path) -> None:
    made = arguments(cases.best("3d", tmp_path))
    sizes = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size", "--micro-batch-size")
    assert [made[name] for name in sizes] == ["4", "2", "1", "2"]
    assert {"--sequence-parallel", "--use-distributed-optimizer", "--bf16"} <= made.keys()
    assert made["--recompute-granularity"] == "selective"
    assert (made["--num-layers"], made["--num-query-groups"]) == ("32", "8")
    stages = made["--pipeline-model-parallel-layout"].split("|")
    assert (len(stages), sum(stage.count("t") for stage in stages)) == (4, 32)
    assert (stages[0][0], stages[-1][-1]) == ("E", "L")


def test_a_window_is_told_in_neighbours_and_heads_are_exchanged() -> None:
    knobs: dict[str, Any] = {"context_parallel_size": 2, "context_parallel_method": "ulysses", "attention_window": 256}
    made = arguments(exported.document(exported.large(), **knobs))
    assert (made["--window-size"], made["--cp-comm-type"]) == ("255,0", "a2a")
    assert not {"--window-size", "--cp-comm-type"} & arguments(exported.document(exported.large())).keys()


def test_a_pipeline_is_laid_out_stage_by_stage() -> None:
    shape = exported.large("gpt2", sequence_length=1024).model
    config = TrialConfig(pipeline_parallel_size=2, pipeline_split="even")
    assert pipeline_layout(shape, config, 1024) == "Etttttt|ttttttL"  # type: ignore[arg-type]


def test_written_layers_are_carried_and_their_marks_are_told() -> None:
    best = exported.document(exported.large(), pipeline_parallel_size=4, pipeline_layout="9-9f2-8-6o", zero_stage=1)
    made = exporter("megatron")(best)
    stages = arguments(best)["--pipeline-model-parallel-layout"].split("|")
    assert [stage.count("t") for stage in stages] == [9, 9, 8, 6]
    told = "pipeline_layout=9-9f2-8-6o: Megatron-LM takes its layers, and computes again (f, s) and offloads (o) on every stage"
    assert any(note.startswith(told) for note in made.notes)
    plain = exporter("megatron")(exported.document(exported.large(), pipeline_parallel_size=4, pipeline_layout="9-9-9-5"))
    assert not any(note.startswith("pipeline_layout") for note in plain.notes)


@pytest.mark.parametrize("target", ["torchtitan", "torch", "deepspeed"])
def test_no_format_drops_a_mark_in_silence(target: str) -> None:
    best = exported.document(exported.large(), pipeline_parallel_size=4, pipeline_layout="9-9f2-8-6")
    assert any(note.startswith("pipeline_layout=9-9f2-8-6: ") for note in exporter(target)(best).notes)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("llama-3-8b", []),
        ("opt-1.3b", ["the model's activation relu"]),
        ("gpt-neox-20b", ["pretrain_gpt.py's model is written without parallel residuals"]),
        ("mistral-7b", ["pretrain_gpt.py's model is written without a sliding window"]),
        (
            "llama-4-scout-17b-16e",
            ["pretrain_gpt.py's model is written without norms of queries and keys, factors of queries by position, layers"],
        ),
    ],
)
def test_what_no_argument_says_of_a_shape_is_told(model: str, told: list[str]) -> None:
    notes = exporter("megatron")(exported.document(exported.large(model, sequence_length=2048))).notes
    of_shape = [note for note in notes if note.startswith(("the model's", "pretrain_gpt.py", "only some"))]
    assert len(of_shape) == len(told)
    assert all(note.startswith(start) for note, start in zip(of_shape, told, strict=True))


def test_what_llama_4_has_besides_is_named() -> None:
    notes = exporter("megatron")(exported.document(exported.large("llama-4-scout-17b-16e", sequence_length=2048))).notes
    lacks = next(note for note in notes if note.startswith("pretrain_gpt.py"))
    assert "experts whose weights multiply their inputs, attention within chunks: add them" in lacks
    assert "a sliding window" not in lacks


def test_the_layers_of_a_model_that_is_not_known_are_left_to_its_user() -> None:
    notes = exporter("megatron")(exported.document(exported.unknown(), pipeline_parallel_size=2, pipeline_split="even")).notes
    assert any(note.startswith("virtual_stages=1, pipeline_split=even: ") for note in notes)


def test_a_schedule_that_it_has_not_is_told() -> None:
    best = exported.document(exported.large(), pipeline_parallel_size=2, virtual_stages=2, pipeline_schedule="zbv")
    made = exporter("megatron")(best)
    assert "--pipeline-model-parallel-layout" not in made.text
    assert any(note.startswith("pipeline_schedule=zbv: ") for note in made.notes)


def test_experts_are_carried_with_what_fills_and_balances_them() -> None:
    shape = dataclasses.replace(
        exported.large().model, num_experts=8, experts_per_token=2, capacity_factor=1.25, load_balance=0.01
    )
    words = " ".join(_kinds(shape)).split()
    said = dict(itertools.pairwise(words))
    assert (said["--moe-expert-capacity-factor"], said["--moe-aux-loss-coeff"]) == ("1.25", "0.01")
    assert (said["--moe-token-drop-policy"], said["--moe-router-load-balancing-type"]) == ("position", "seq_aux_loss")
    assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--\S+", LISTED.read_text(encoding="utf-8")))
