"""Recipes of programs that train with the Trainer: what is read of them, what they refuse, and what is written."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.errors import RequestError
from autotune.frameworks.check import legality
from autotune.frameworks.framework import LintCase, Surroundings
from autotune.frameworks.imported import one_file
from autotune.frameworks.read import read_imported, read_written
from autotune.frameworks.trainer_checks import fields_of
from autotune.frameworks.trainer_launch import TRAINERS, trainer_format
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.question import question_of
from autotune.recipes.lint import Linted, case_of, checked_version, document, lint
from autotune.recipes.recipe import rewritten
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial_config import TrialConfig

AXOLOTL = {
    "base_model": "Qwen/Qwen3-14B", "datasets": [{"path": "own/data"}], "adapter": "qlora", "load_in_4bit": True,
    "lora_r": 64, "lora_target_linear": True, "sequence_len": 3072, "sample_packing": True, "micro_batch_size": 3,
    "gradient_accumulation_steps": 5, "gradient_checkpointing": True, "optimizer": "adamw_torch_8bit", "learning_rate": 1e-4,
    "weight_decay": 0.0, "bf16": "auto", "flash_attention": True,
}  # fmt: skip
LLAMA_FACTORY = {
    "model_name_or_path": "meta-llama/Llama-3.2-3B-Instruct", "stage": "sft", "do_train": True, "finetuning_type": "full",
    "dataset": "own", "template": "llama3", "cutoff_len": 1536, "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 2, "learning_rate": 2e-5, "bf16": True, "deepspeed": "stage3.json", "output_dir": "out",
}  # fmt: skip
STAGE_3 = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
}  # fmt: skip
SFT = "--model_name_or_path Qwen/Qwen2.5-3B --dataset_name own/data --output_dir out"


def _file(folder: Path, content: dict[str, Any] | str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def _case(path: Path, cluster: str = "") -> LintCase:
    around = Surroundings(cluster=resolve_cluster(cluster) if cluster else None)
    return case_of(read_written(path)[0], around)


def _refusals(path: Path, cluster: str = "") -> set[str]:
    return {finding.rule for finding in legality(_case(path, cluster))}


def test_axolotl_is_read_with_its_adapter_and_its_batch(tmp_path: Path) -> None:
    case = _case(_file(tmp_path, AXOLOTL), "dgx-h100")
    expected = {
        "micro_batch_size": 3, "activation_checkpointing": "full", "precision": "bf16", "attention_backend": "flash",
        "optimizer": "adamw8bit", "lora_rank": 64, "lora_targets": "both", "frozen_dtype": "nf4", "pack_sequences": True,
        "zero_stage": 0,
    }  # fmt: skip
    assert {name: case.imported.knobs.get(name) for name in expected} == expected
    assert case.model is not None and case.model.name == "qwen3-14b"
    assert (case.tokens, case.batch) == (3072, 3 * 5 * 8)
    assert case.imported.hyperparameters.values() == {"lr": 1e-4, "weight_decay": 0.0, "optimizer": "adamw8bit"}
    assert not legality(case)


def test_its_fsdp_section_does_not_make_it_a_file_of_accelerate(tmp_path: Path) -> None:
    sharded = {
        **AXOLOTL, "fsdp_version": 2, "dp_shard_size": 4, "tensor_parallel_size": 2,
        "fsdp_config": {"reshard_after_forward": False, "offload_params": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    }  # fmt: skip
    case = _case(_file(tmp_path, sharded), "dgx-h100")
    assert case.framework.name == "axolotl"
    read = case.imported.knobs
    assert (read["zero_stage"], read["tensor_parallel_size"], read["hsdp_shard_size"]) == (3, 2, 4)
    assert read["reshard_after_forward"] is False and read["offload_optimizer"] == "cpu"
    assert case.imported.ranks == 8 and case.replicas == 4


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"load_in_4bit": False}, "qlora-without-bits"),
        ({"load_in_8bit": True}, "qlora-in-8-bits"),
        ({"adapter": None}, "bits-without-adapter"),
        ({"batch_size": 6}, "gradient-accumulation-steps-beside-batch-size"),
        ({"micro_batch_size": None}, "batch-fields"),
        ({"rl": "dpo"}, "packing-preferences"),
        ({"gradient_checkpointing": False, "activation_offloading": True}, "offloading-without-checkpointing"),
        ({"fsdp_version": 2, "fsdp_config": {"offload_params": False}, "optimizer": "adamw_bnb_8bit"}, "fsdp2-8-bit-optimizer"),
        ({"context_parallel_size": 2, "flash_attention": None}, "context-attention"),
        ({"context_parallel_size": 2}, "context-packing"),
        ({"evals_per_epoch": 2, "eval_steps": 50}, "evals-per-epoch-beside-eval-steps"),
        ({"save_strategy": "epoch", "save_steps": 50}, "save-strategy"),
        ({"attn_implementation": "flash", "flash_attention": None}, "attention-word"),
        ({"dp_shard_size": 2}, "shards-without-fsdp"),
        ({"test_datasets": [{"path": "own"}], "val_set_size": 0.1}, "test-datasets-beside-val-set-size"),
        ({"streaming": True}, "streaming-without-max-steps"),
        ({"flash_attn_rms_norm": True}, "removed-flash-attn-rms-norm"),
        ({"attn_implementation": "sdpa"}, "attn-implementation-beside-flash-attention"),
    ],
)
def test_what_axolotl_refuses_is_refused_and_the_fix_is_accepted(changes: dict[str, Any], rule: str, tmp_path: Path) -> None:
    case = _case(_file(tmp_path, {**AXOLOTL, **changes}))
    finding = next(finding for finding in legality(case) if finding.rule == rule)
    assert finding.effect == "refused" and finding.fix
    assert rule not in {after.rule for after in legality(case.changed(finding.fix))}


def test_a_number_of_zero_is_not_set(tmp_path: Path) -> None:
    recipe = {**AXOLOTL, "datasets": None, "pretraining_dataset": "own", "max_steps": 5}
    for part, refusals in ((0.0, set()), ("0", set()), (0.1, {"pretraining-dataset-beside-val-set-size"})):
        assert _refusals(_file(tmp_path, {**recipe, "val_set_size": part})) == refusals


def test_groups_of_shards_that_fill_the_ranks_several_times_are_legal(tmp_path: Path) -> None:
    sharded = {**AXOLOTL, "fsdp_version": 2, "dp_shard_size": 3, "fsdp_config": {"offload_params": False}}
    assert "degrees-product" in _refusals(_file(tmp_path, sharded), "dgx-h100")
    assert "degrees-product" not in _refusals(_file(tmp_path, {**sharded, "dp_shard_size": 4}), "dgx-h100")


def test_settings_that_axolotl_leaves_unread_are_named_unless_a_plug_in_may_have_them(tmp_path: Path) -> None:
    misspelt = {**AXOLOTL, "gradient_checkpointng": True}
    (finding,) = legality(_case(_file(tmp_path, misspelt)))
    assert finding.effect == "ignored" and finding.key == "gradient_checkpointng"
    assert not legality(_case(_file(tmp_path, {**misspelt, "plugins": ["own.Plugin"]})))


def test_llama_factory_is_read_with_the_deepspeed_file_of_a_folder_above(tmp_path: Path) -> None:
    _file(tmp_path, json.dumps(STAGE_3), "stage3.json")
    (tmp_path / "examples").mkdir()
    case = _case(_file(tmp_path / "examples", LLAMA_FACTORY), "dgx-h100:2")
    read = case.imported.knobs
    assert (read["zero_stage"], read["precision"], read["micro_batch_size"]) == (3, "bf16", 6)
    assert read["reduce_bucket_size"] == 3072**2 and read["param_persistence_threshold"] == 10 * 3072
    assert read["activation_checkpointing"] == "full", "LLaMA-Factory checkpoints unless it is switched off"
    assert (case.tokens, case.batch) == (1536, 6 * 2 * 16)
    assert not legality(case)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bf16", "perhaps"),
        ("micro_batch_size", "two"),
        ("sequence_len", 1.5),
        ("learning_rate", "fast"),
        ("micro_batch_size", 0),
        ("gradient_accumulation_steps", -3),
        ("lora_r", False),
        ("deepspeed", "{not JSON"),
    ],
)
def test_a_value_that_cannot_be_read_is_not_replaced(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=key):
        _case(_file(tmp_path, {**AXOLOTL, key: value}))


def test_a_file_that_is_not_there_leaves_no_prediction_unless_its_name_says_how_it_divides(tmp_path: Path) -> None:
    path = _file(tmp_path, {**LLAMA_FACTORY, "deepspeed": "own.json"})
    outlook = _linted(path).outlook
    assert isinstance(outlook, str) and "own.json is not beside" in outlook
    with pytest.raises(RequestError, match=r"own\.json"):
        read_imported(path)
    for name, stage in (("ds_z2_config.json", 2), ("configs/zero3_bf16_offload.json", 3), ("stage1.json", 1)):
        linted = _linted(_file(tmp_path, {**LLAMA_FACTORY, "deepspeed": name}))
        assert linted.case.assumed["zero_stage"] == stage and "zero_stage" not in linted.case.imported.knobs
        assert ("offload_optimizer" in linted.case.assumed) is ("offload" in name)
        assert any(f"deepspeed={name}: not beside" in note for note in linted.case.imported.notes)
        assert {finding.effect for finding in linted.findings} <= {"may not fit"}


def test_the_file_of_a_launch_that_is_not_there_leaves_the_precision_open_too(tmp_path: Path) -> None:
    start = f"accelerate launch --config_file fsdp.yaml train.py {SFT} --per_device_train_batch_size 2"
    assumed = _case(_file(tmp_path, f"{start}\n", "run.sh")).assumed
    assert assumed == {"zero_stage": 3, "precision": "bf16", "reduce_dtype": "bf16"}
    assert _case(_file(tmp_path, f"{start} --fp16\n", "run.sh")).imported.knobs["precision"] == "fp16"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"quantization_bit": 4}, "bits-of-a-full-model"),
        ({"finetuning_type": "loraa"}, "word-of-finetuning-type"),
        ({"stage": "dpo", "neat_packing": True}, "sft-neat-packing"),
        ({"use_dora": True}, "lora-use-dora"),
        ({"fp16": True}, "two-precisions"),
        ({"use_galore": True}, "low-rank-deepspeed"),
        ({"bf16": None, "pure_bf16": True}, "pure-bf16-stage-3"),
        ({"streaming": True}, "streaming-steps"),
        ({"do_eval": True}, "no-evaluation-data"),
        ({"optim": "adamw_trch"}, "word-of-optim"),
        ({"save_strategy": "sometimes"}, "word-of-save-strategy"),
        ({"cutof_len": 12}, "unknown-key"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, "best-model-strategies"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 300}, "best-model-steps"),
    ],
)
def test_what_llama_factory_refuses_is_refused(changes: dict[str, Any], rule: str, tmp_path: Path) -> None:
    _file(tmp_path, json.dumps(STAGE_3), "stage3.json")
    assert rule in _refusals(_file(tmp_path, {**LLAMA_FACTORY, **changes}))


def test_values_of_the_deepspeed_file_that_differ_from_the_trainers_are_refused(tmp_path: Path) -> None:
    _file(tmp_path, json.dumps({**STAGE_3, "gradient_accumulation_steps": 4}), "stage3.json")
    assert _refusals(_file(tmp_path, LLAMA_FACTORY)) == {"deepspeed-differs"}
    _file(tmp_path, json.dumps({**STAGE_3, "gradient_accumulation_steps": 2}), "stage3.json")
    assert not _refusals(_file(tmp_path, LLAMA_FACTORY))
    _file(tmp_path, json.dumps({**STAGE_3, "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}}), "stage3.json")
    assert _refusals(_file(tmp_path, LLAMA_FACTORY)) == {"deepspeed-differs"}


@pytest.mark.parametrize(
    ("start", "refusals"),
    [
        ("trl sft", set()), ("trl sft --fp16", {"deepspeed-differs"}), ("python train.py", {"deepspeed-differs"}),
        ("python train.py --bf16 1", set()), ("python train.py --bf16 $1", set()), ("python train.py --bf16_full_eval", set()),
    ],
)  # fmt: skip
def test_values_that_are_defaults_or_decided_later_differ_only_where_they_do(
    start: str, refusals: set[str], tmp_path: Path
) -> None:
    _file(tmp_path, json.dumps({**STAGE_3, "bf16": {"enabled": True}}), "stage3.json")
    script = f"{start} {SFT} --per_device_train_batch_size 2 --deepspeed stage3.json\n"
    assert _refusals(_file(tmp_path, script, "run.sh")) == refusals


@pytest.mark.parametrize(("word", "is_on"), [("1", True), ("yes", True), ("y", True), ("on", True), ("T", True), ("n", False)])
def test_words_of_switches_are_the_same_for_reading_and_for_checks(word: str, is_on: bool, tmp_path: Path) -> None:
    case = _case(_file(tmp_path, {**LLAMA_FACTORY, "deepspeed": None, "bf16": word, "fp16": word, "packing": word}))
    assert case.imported.knobs["precision"] == ("bf16" if is_on else "fp32") and case.on("packing") is is_on
    assert ("two-precisions" in {finding.rule for finding in legality(case)}) is is_on


def test_trls_bf16_yields_to_fp16(tmp_path: Path) -> None:
    case = _case(_file(tmp_path, f"trl sft {SFT} --fp16 --per_device_train_batch_size 2\n", "run.sh"))
    assert case.imported.knobs["precision"] == "fp16"


@pytest.mark.parametrize(
    ("words", "refused"),
    [("trl sft", True), ("trl sft --dataset_name own", False), ("trl sft --dataset_name $1", False), ("python sft.py", False)],
)
def test_trls_commands_without_data_are_refused(words: str, refused: bool, tmp_path: Path) -> None:
    script = f"{words} --model_name_or_path Qwen/Qwen2.5-3B --output_dir out --per_device_train_batch_size 2\n"
    assert ("no-dataset" in _refusals(_file(tmp_path, script, "run.sh"))) is refused


def test_data_that_only_earlier_programs_read_are_named(tmp_path: Path) -> None:
    recipe = {"model_name_or_path": "Qwen/Qwen2.5-3B", "use_peft": True, "per_device_train_batch_size": 2, "output_dir": "out"}
    (finding,) = legality(_case(_file(tmp_path, {**recipe, "dataset_mixer": {"own/data": 1.0}})))
    assert finding.rule == "no-dataset" and "dataset_mixer is not read" in finding.problem
    assert not _refusals(_file(tmp_path, {**recipe, "dataset_path": "own"})), "an argument of a program of one's own"


@pytest.mark.parametrize("key", ["use_cpu", "no_cuda"])
def test_a_run_on_cpus_leaves_the_clusters_gpus_idle(key: str, tmp_path: Path) -> None:
    path = _file(tmp_path, {**LLAMA_FACTORY, "deepspeed": None, key: True})
    assert _refusals(path, "dgx-h100") == {key.replace("_", "-")} and not _refusals(path)


def test_frozen_weights_have_the_bits_of_the_models_id(tmp_path: Path) -> None:
    path = _file(tmp_path, {**AXOLOTL, "adapter": "lora", "load_in_4bit": None, "base_model": "unsloth/Qwen3-14B-bnb-4bit"})
    case = _case(path)
    assert case.config.frozen_dtype == "nf4"
    around = Surroundings(model=resolve_model("qwen3-14b"))
    assert case_of(read_written(path)[0], around).config.frozen_dtype == "same", "of the model that the user names"


def test_origins_tell_what_is_stated_from_what_the_program_takes(tmp_path: Path) -> None:
    recipe = {**LLAMA_FACTORY, "cutoff_len": None, "deepspeed": None}
    for content, source in ((recipe, "framework"), ({**recipe, "cutoff_len": 512}, "stated")):
        linted = _linted(_file(tmp_path, {key: value for key, value in content.items() if value is not None}))
        origins = document(linted, checked_version(linted))["origins"]
        assert origins["sequence_length"]["source"] == source and origins["model"]["source"] == "stated"
    assert origins["model"]["by"].endswith("recipe.yaml:1 model_name_or_path")


def test_a_misspelt_setting_without_its_command_is_a_note(tmp_path: Path) -> None:
    recipe = {"model_name_or_path": "Qwen/Qwen2.5-3B", "per_device_train_batch_size": 2, "cutof_len": 12, "own": 1}
    notes = _case(_file(tmp_path, recipe)).imported.notes
    assert [note.rpartition("; ")[2] for note in notes if "no such setting" in note] == ["did you mean cutoff_len?"]


def test_llama_factorys_command_line_overrides_its_file(tmp_path: Path) -> None:
    _file(tmp_path, json.dumps(STAGE_3), "stage3.json")
    _file(tmp_path, LLAMA_FACTORY, "own.yaml")
    start = "NPROC_PER_NODE=4 NNODES=2 FORCE_TORCHRUN=1 llamafactory-cli train own.yaml per_device_train_batch_size=1\n"
    case = _case(_file(tmp_path, start, "train.sh"))
    assert (case.ranks, case.batch, case.framework.name) == (8, 2 * 8, "llama-factory")


@pytest.mark.parametrize(
    ("launch", "steps"),
    [
        ("python prepare.py other.yaml\naccelerate launch t.py own.yaml", 5), ("axolotl train own.yaml --debug other.yaml", 5),
        ("accelerate launch t.py --config own.yaml --data other.yaml", 5), ("trl sft --config=own.yaml", 5),
        (f"accelerate launch t.py {SFT} --per_device_train_batch_size 3 --data other.yaml more.json", 1),
        (f"accelerate launch t.py data=other.yaml {SFT} --per_device_train_batch_size 3", 1),
        (f"cd /home/axolotl\naccelerate launch t.py {SFT} --per_device_train_batch_size 3", 1),
    ],
)  # fmt: skip
def test_the_recipe_of_a_launch_is_its_first_word_or_its_config(launch: str, steps: int, tmp_path: Path) -> None:
    recipe = AXOLOTL if launch.startswith("axolotl") else {
        "model_name_or_path": "Qwen/Qwen2.5-3B", "output_dir": "out", "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 5,
    }  # fmt: skip
    _file(tmp_path, recipe, "own.yaml")
    _file(tmp_path, {**recipe, "gradient_accumulation_steps": 7}, "other.yaml")
    assert _case(_file(tmp_path, f"{launch}\n", "run.sh")).imported.samples_per_rank == 3 * steps


def test_a_command_line_of_the_trainer_is_read_with_what_accelerate_is_told(tmp_path: Path) -> None:
    options = (
        f"{SFT} --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_length 2048 --gradient_checkpointing"
    )
    launch = "accelerate launch --num_processes 16 --num_machines 2 --mixed_precision bf16 --use_deepspeed --zero_stage 2"
    case = _case(_file(tmp_path, f"{launch} train.py {options} --attn_implementation flash_attention_2\n", "train.sh"))
    read = case.imported.knobs
    assert (case.framework.name, case.ranks, case.batch, case.tokens) == ("trainer", 16, 2 * 8 * 16, 2048)
    assert (read["zero_stage"], read["precision"], read["activation_checkpointing"]) == (2, "bf16", "full")
    assert read["attention_backend"] == "flash" and not case.assumed


def test_a_value_that_the_script_decides_is_no_default(tmp_path: Path) -> None:
    linted = _linted(
        _file(tmp_path, f"accelerate launch --num_processes 8 t.py {SFT} --per_device_train_batch_size $1\n", "t.sh")
    )
    assert isinstance(linted.outlook, str) and "per_device_train_batch_size ($1)" in linted.outlook
    assert not any("per_device_train_batch_size=" in note for note in linted.case.imported.notes)


def test_trls_own_programs_have_the_defaults_of_its_commands(tmp_path: Path) -> None:
    case = _case(_file(tmp_path, f"python trl/scripts/sft.py {SFT} --per_device_train_batch_size 2\n", "run.sh"))
    assert (case.tokens, case.config.precision, case.config.activation_checkpointing) == (1024, "bf16", "full")


def test_fp8_is_not_lost_in_deepspeeds_automatic_values(tmp_path: Path) -> None:
    _file(tmp_path, json.dumps(STAGE_3), "stage3.json")
    assert _case(_file(tmp_path, {**LLAMA_FACTORY, "fp8": True})).imported.knobs["precision"] == "fp8"


def test_torchrun_alone_divides_nothing(tmp_path: Path) -> None:
    case = _case(_file(tmp_path, f"torchrun --nproc_per_node 4 run.py {SFT} --per_device_train_batch_size 2\n", "run.sh"))
    assert case.imported.knobs["zero_stage"] == 0 and case.ranks == 4 and not case.assumed
    assert case.imported.knobs["precision"] == "fp32", "the Trainer's default"


def test_a_launch_inside_another_one_is_found(tmp_path: Path) -> None:
    inner = f"accelerate launch --num_processes 8 tune.py {SFT} --per_device_train_batch_size 2"
    assert _case(_file(tmp_path, f"python submit.py --gpus 8 -- {inner}\n", "run.sh")).ranks == 8


def test_without_its_launch_a_yaml_file_leaves_the_division_of_states_open(tmp_path: Path) -> None:
    recipe = {"model_name_or_path": "mistralai/Mistral-7B-v0.1", "dtype": "bfloat16", "bf16": True, "max_length": 2048,
              "per_device_train_batch_size": 4, "dataset_mixture": {}, "output_dir": "out"}  # fmt: skip
    linted = _linted(_file(tmp_path, recipe))
    assert linted.case.assumed == {"zero_stage": 0}
    assert {finding.effect for finding in linted.findings} <= {"may not fit"}
    assert "gradient_checkpointing=true: default of TRL 1.16.0" in "\n".join(linted.case.imported.notes)


def _linted(path: Path) -> Linted:
    return lint(read_written(path)[0], Surroundings(cluster=resolve_cluster("dgx-h100")))


def test_trls_command_has_its_own_defaults_and_refuses_what_nobody_reads(tmp_path: Path) -> None:
    script = f"trl sft {SFT} --accelerate_config zero3 --num_processes 4 --per_device_train_batch_size 2 --max_lenght 512\n"
    case = _case(_file(tmp_path, script, "sft.sh"))
    read = case.imported.knobs
    assert (read["zero_stage"], read["precision"], read["activation_checkpointing"]) == (3, "bf16", "full")
    assert (case.tokens, case.ranks) == (1024, 4)
    (finding,) = legality(case)
    assert finding.remedy == "did you mean max_length?"


@pytest.mark.parametrize("start", ["trl dpo", "accelerate launch own_dpo.py", "python train.py --beta 0.1"])
def test_methods_with_a_second_model_are_named_and_not_predicted(start: str, tmp_path: Path) -> None:
    case = _case(_file(tmp_path, f"{start} {SFT} --per_device_train_batch_size 2\n", "run.sh"))
    assert case.imported.unreadable is not None and "dpo has a second model" in str(case.imported.unreadable)


def test_a_method_is_a_whole_word_of_the_program(tmp_path: Path) -> None:
    for program in ("export_train.py", "warmup.py", "sft_normal.py"):
        case = _case(_file(tmp_path, f"accelerate launch {program} {SFT} --per_device_train_batch_size 2\n", "run.sh"))
        assert case.imported.unreadable is None


def test_a_model_is_a_config_beside_the_recipe_or_unknown_with_a_note(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
              "intermediate_size": 128}  # fmt: skip
    (tmp_path / "own").mkdir()
    _file(tmp_path, json.dumps(config), "own/config.json")
    model = _case(_file(tmp_path, {**AXOLOTL, "base_model": "own"})).model
    assert model is not None and model.hidden_size == 64
    for name in ("/data/checkpoints/7b", "someone/unheard-of-7b", "long" * 100, "~/own"):
        imported = _case(_file(tmp_path, {**AXOLOTL, "base_model": name})).imported
        assert imported.model is None and any(note.startswith(f"base_model={name}: ") for note in imported.notes)


@pytest.mark.parametrize(
    ("optimizer", "ours", "assumed"),
    [("paged_adamw_8bit", "adamw8bit", {}), ("sgd", "sgd", {}), ("adafactor", None, {"optimizer": "adamw"})],
)
def test_an_optimizer_that_is_none_of_ours_is_assumed(
    optimizer: str, ours: str | None, assumed: dict[str, str], tmp_path: Path
) -> None:
    case = _case(_file(tmp_path, {**AXOLOTL, "optimizer": optimizer}))
    assert case.imported.knobs.get("optimizer") == ours and case.assumed == assumed
    assert any(optimizer in note for note in case.imported.notes) is (optimizer != "sgd")


@pytest.mark.parametrize(
    ("targets", "ours"),
    [(["q_proj", "v_proj"], "attention"), (["gate_proj", "down_proj"], "mlp"), (["o_proj", "up_proj"], "both"),
     ("all-linear", "both"), (r"model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj", "attention"), (None, "attention")],
)  # fmt: skip
def test_targets_of_adapters(targets: Any, ours: str, tmp_path: Path) -> None:
    recipe = {**AXOLOTL, "lora_target_linear": None, "lora_target_modules": targets}
    assert _case(_file(tmp_path, recipe)).imported.knobs["lora_targets"] == ours


@pytest.mark.parametrize(
    ("program", "options", "knobs", "assumed"),
    [
        ("own.py", "", {}, {}),
        ("own.py", "--lora_enable True --lora_r 4 --bits 4", {"lora_rank": 4, "frozen_dtype": "nf4"}, {"lora_targets"}),
        ("own.py", "--lora_enable False --lora_r 4 --bits 16", {}, {}),
        ("own.py", "--use_peft_lora 1 --use_8bit_quantization 1 --lora_target_modules up_proj",
         {"lora_targets": "mlp", "frozen_dtype": "int8"}, {"lora_rank"}),
        ("own.py", "--lora_alpha 32", {}, {"lora_rank", "lora_targets"}),
        ("own_lora.py", "--q_lora False", {}, {"lora_rank", "lora_targets"}),
        ("qlora.py", "", {}, {"lora_rank", "lora_targets", "frozen_dtype"}),
        ("flora.py", "", {}, {}),
        ("sft.py", "--lora_r 4", {}, {}),
    ],
)  # fmt: skip
def test_adapters_of_a_program_of_ones_own_are_not_lost(
    program: str, options: str, knobs: dict[str, Any], assumed: set[str], tmp_path: Path
) -> None:
    script = f"torchrun --nproc_per_node 8 {program} {SFT} --per_device_train_batch_size 2 {options}\n"
    case = _case(_file(tmp_path, script, "run.sh"))
    names = ("lora_rank", "lora_targets", "frozen_dtype")
    assert {name: case.imported.knobs[name] for name in names if name in case.imported.knobs} == knobs
    assert case.assumed.keys() & {*names} == set(assumed)
    has_note = any("predicted with adapters, although" in note for note in case.imported.notes)
    assert has_note is bool(assumed and "enable" not in options and "peft" not in options)


SWIFT = "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-3B --dataset own --max_length 2048 --gradient_accumulation_steps 2"


@pytest.mark.parametrize(
    ("start", "knobs"),
    [
        (SWIFT + " --per_device_train_batch_size 1", {"lora_rank": 8, "lora_targets": "both"}),
        (SWIFT + " --tuner_type lora --quant_bits 8", {"frozen_dtype": "int8", "lora_rank": 8}),
        (SWIFT + " --train_type full --deepspeed zero3", {}),
        (SWIFT.replace("swift sft", "torchrun swift/cli/sft.py") + " --tuner_type lora --lora_rank 4 --target_modules q_proj",
         {"lora_rank": 4, "lora_targets": "attention"}),
    ],
)  # fmt: skip
def test_ms_swift_has_its_own_defaults(start: str, knobs: dict[str, Any], tmp_path: Path) -> None:
    case = _case(_file(tmp_path, f"{start}\n", "run.sh"), "dgx-h100")
    expected = {"lora_rank": None, **knobs, "micro_batch_size": 1, "activation_checkpointing": "full", "precision": "bf16"}
    assert {name: case.imported.knobs.get(name) for name in expected} == expected
    assert (case.tokens, case.batch, case.ranks) == (2048, 2 * 8, 8)
    assert case.model is not None and case.model.name == "qwen2.5-3b"
    assert all("of ms-swift" in note for note in case.imported.notes if "default of" in note)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tuner_type": "adalora"}, "tuner_type"), ({"rlhf_type": "dpo"}, "dpo"), ({"tuner_type": "full"}, ""),
        ({"gradient_accumulation_steps": None}, "gradient_accumulation_steps"), ({"freeze_llm": True}, "freeze_llm"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"), ({"sequence_parallel_size": 1}, ""),
    ],
)  # fmt: skip
def test_what_ms_swift_does_otherwise_is_not_predicted(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    recipe = {"model": "Qwen/Qwen2.5-3B", "tuner_type": "lora", "output_dir": "out", "gradient_accumulation_steps": 2,
              "max_length": 512, "launcher.nproc_per_node": 8, **changes}  # fmt: skip
    outlook = _linted(_file(tmp_path, {key: value for key, value in recipe.items() if value is not None})).outlook
    assert reason in outlook if isinstance(outlook, str) else not reason


def test_a_projector_alone_is_not_predicted(tmp_path: Path) -> None:
    script = f"torchrun --nproc_per_node 8 own.py {SFT} --per_device_train_batch_size 2 --tune_mm_mlp_adapter True\n"
    outlook = _linted(_file(tmp_path, script, "run.sh")).outlook
    assert isinstance(outlook, str) and "tune_mm_mlp_adapter" in outlook


def test_parameters_of_16_bits_alone_need_half_of_the_states(tmp_path: Path) -> None:
    full = {**AXOLOTL, "adapter": None, "load_in_4bit": None, "optimizer": "adamw_torch_fused"}
    alone = _linted(_file(tmp_path, full)).outlook
    sharded = {**full, "fsdp_version": 2, "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    divided = _linted(_file(tmp_path, sharded)).outlook
    assert isinstance(alone, StepEstimate) and isinstance(divided, StepEstimate)
    parameters = resolve_model("qwen3-14b").parameter_count
    assert alone.fullest.by_tag["optimizer_state"] == pytest.approx(4 * parameters, rel=0.01)
    ranks = resolve_cluster("dgx-h100").world_size
    assert divided.fullest.by_tag["optimizer_state"] == pytest.approx(8 * parameters / ranks, rel=0.01)


def test_lint_predicts_what_a_question_with_the_same_values_gives(tmp_path: Path) -> None:
    outlook = _linted(_file(tmp_path, AXOLOTL)).outlook
    assert isinstance(outlook, StepEstimate)
    question = question_of(resolve_model("qwen3-14b"), resolve_cluster("dgx-h100"), global_batch_size=120, sequence_length=3072)
    recipe = _case(_file(tmp_path, AXOLOTL), "dgx-h100")
    question = dataclasses.replace(question, stated_arguments=recipe.framework.memory_arguments(recipe.imported.settings))
    config = TrialConfig().replace({
        "micro_batch_size": 3, "activation_checkpointing": "full", "precision": "bf16", "attention_backend": "flash",
        "optimizer": "adamw8bit", "lora_rank": 64, "lora_targets": "both", "frozen_dtype": "nf4", "pack_sequences": True,
    })  # fmt: skip
    assert outlook.samples_per_second.mean == pytest.approx(estimates(question, [config])[0].samples_per_second.mean, rel=1e-3)


@pytest.mark.parametrize("recipe", [AXOLOTL, {**LLAMA_FACTORY, "deepspeed": None}])
def test_other_values_are_written_in_the_recipes_own_form_and_read_back(recipe: dict[str, Any], tmp_path: Path) -> None:
    written = read_written(_file(tmp_path, recipe))[0]
    case = case_of(written, Surroundings(cluster=resolve_cluster("dgx-h100:2")))
    changes = {**case.framework.write(case, "activation_checkpointing", "none"),
               **case.sized(case.config.replace({"micro_batch_size": 2}), 128)}  # fmt: skip
    text = rewritten(written, {**case.imported.settings, **changes}, case.around.cluster, None)
    assert not text.anew and not text.lost
    again = _case(_file(tmp_path, text.text, "again.yaml"), "dgx-h100:2")
    assert again.imported.knobs["activation_checkpointing"] == "none"
    assert (again.config.micro_batch_size, again.batch) == (2, 128)


def test_a_command_line_is_edited_in_place(tmp_path: Path) -> None:
    script = f"# ours\naccelerate launch --num_processes 8 sft.py {SFT} \\\n  --per_device_train_batch_size 2 --bf16\n"
    written = read_written(_file(tmp_path, script, "sft.sh"))[0]
    case = case_of(written, Surroundings(cluster=resolve_cluster("dgx-h100:2")))
    text = rewritten(written, {**case.imported.settings, **case.sized(case.config, 128)}, case.around.cluster, None).text
    assert text.startswith("# ours") and "--num_processes 16" in text and "--gradient_accumulation_steps 4" in text


@pytest.mark.parametrize("name", ["~/own/config.json", ".", "../own", "/own", "own/../own", "own.json", "a/b/c"])
def test_a_path_is_no_model_where_no_file_may_be_opened(name: str, tmp_path: Path) -> None:
    path = _file(tmp_path, {**AXOLOTL, "base_model": name})
    with one_file():
        imported = _case(path).imported
        assert imported.model is None and any("it is a path, and no file is read here" in note for note in imported.notes)
        assert _case(_file(tmp_path, AXOLOTL)).model is not None


def test_forms_of_programs_that_are_not_read_are_refused_by_name(tmp_path: Path) -> None:
    path = _file(tmp_path, {"model": "Qwen/Qwen3-4B", "dist_config": {"name": "fsdp2"}, "micro_batch_size": 1, "bf16": True})
    with pytest.raises(RequestError, match="LLaMA-Factory's v1"):
        case_of(read_written(path)[0], Surroundings())
    path = _file(tmp_path, {"model": "Qwen/Qwen3-4B", "tuner_type": "lora", "micro_batch_size": 1, "output_dir": "out"})
    with pytest.raises(RequestError, match="of Megatron-SWIFT, which is not read"):
        case_of(read_written(path)[0], Surroundings())


def test_every_option_is_a_field_of_its_program() -> None:
    trainers = fields_of("transformers", "trl", "sft")
    known = {
        "axolotl": fields_of("axolotl"),
        "llama-factory": fields_of("transformers", "llama-factory") | {"per_gpu_train_batch_size", "torch_dtype", "dtype"},
        # Arguments of widespread programs beside TRL's.
        "trainer": trainers | {"block_size", "max_seq_len", "model_max_length", "max_source_length", "use_lora", "use_qlora",
                               "lora_rank", "zero_stage", "accelerate_config", "per_gpu_train_batch_size",
                               "use_peft_lora", "lora_enable", "apply_lora", "q_lora", "bits", "use_4bit_quantization",
                               "use_8bit_quantization", "tuner_type", "train_type", "quant_bits", "target_modules", "attn_impl",
                               "model"},
    }  # fmt: skip
    for name, framework in TRAINERS.items():
        assert {option.key for option in framework.options} <= known[name], name


def test_other_tables_are_none_of_a_trainer() -> None:
    for keys in ({"zero_optimization", "train_batch_size"}, {"distributed_type", "fsdp_config"}, {"model_type", "hidden_size"}):
        assert not trainer_format(keys)
