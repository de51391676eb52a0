"""Megatron-LM's arguments read as knobs and as a model, and what its own parser refuses (compared with `validate_args`)."""

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import RequestError
from autotune.frameworks.framework import Surroundings
from autotune.frameworks.imported import Imported
from autotune.frameworks.megatron import layer_pattern, layout_stages
from autotune.frameworks.read import read_imported, read_written
from autotune.recipes.lint import lint
from search_spaces.errors import Effect
from search_spaces.models.huggingface import resolve_model

SIZES = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 64 --bf16"
)

FORK = "--deepspeed --deepspeed_config ds.json"


def script(folder: Path, options: str) -> Path:
    path = folder / "run.sh"
    queues = "" if "fsdp" in options else "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    path.write_text(f"{queues}torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py {SIZES} {options}\n")
    return path


def read(folder: Path, options: str) -> Imported:
    return read_written(script(folder, options))[0].imported()


def test_latent_attention_and_experts_are_those_of_the_published_model(tmp_path: Path) -> None:
    options = (
        "--num-layers 27 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 10944 --multi-latent-attention "
        "--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 64 --moe-router-topk 6 "
        "--moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816 --moe-layer-freq '([0]+[1]*26)' --swiglu "
        "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 102400"
    )
    imported = read(tmp_path, options)
    assert imported.model is not None
    assert imported.model.parameter_count == resolve_model("deepseek-v2-lite").parameter_count
    assert imported.notes == ()
    low_rank = read(tmp_path, f"{options} --q-lora-rank 1536").model
    assert low_rank is not None and low_rank.latent is not None and low_rank.latent.query_rank == 1536
    plain = read(tmp_path, "--multi-latent-attention --kv-channels 64").model
    assert plain is not None and plain.latent is not None and (plain.head_dim, plain.latent.key_value_rank) == (192, 32)


@pytest.mark.parametrize(
    ("options", "recipe", "problem"),
    [
        ("--fp8-recipe tensorwise", "tensorwise", None),
        ("--fp8-recipe mxfp8", "mxfp8", None),
        ("--fp8-recipe blockwise", "tensorwise", "--fp8-recipe is blockwise, which no knob means"),
        ("", "tensorwise", "without --fp8-recipe, it is delayed, which no knob means"),
    ],
)
def test_recipes_of_8_bits_that_no_knob_means_are_named(tmp_path: Path, options: str, recipe: str, problem: str | None) -> None:
    """Also where the script leaves it to the parser's default."""
    imported = read(tmp_path, f"--fp8-format hybrid {options}")
    assert imported.knobs["fp8_recipe"] == recipe
    assert [note.partition(";")[0] for note in imported.notes if "recipe" in note] == ([problem] if problem else [])


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        (2, [1, 0, 1, 0]),
        ("1", [1, 1, 1, 1]),
        ("([1]+[0]*1)*2", [1, 0, 1, 0]),
        ("[0]*1+[1]*3", [0, 1, 1, 1]),
        ("x", None),
        ("(([1]*1024)*1024)*1024", None),
        ("[]*999999999", []),
        (10**400, [1, 0, 0, 0]),
        (0, None),
    ],
)
def test_layers_with_experts(value: Any, pattern: list[int] | None) -> None:
    assert layer_pattern(value, 4) == pattern


def test_a_layout_of_stages() -> None:
    assert layout_stages("Et|(tt|)*2,m|L") == ["Et", "tt", "tt", "m", "L"]
    assert layout_stages("E,t*3|ttL") == ["Ettt", "ttL"]
    assert layout_stages([["embedding", "Decoder"], ["decoder", "decoder"], [], ["mtp", "loss"]]) == ["Et", "tt", "", "mL"]
    for text in ("(t|)*9999" * 20, "t*999999", [["layer"]], ["decoder"], [1]):
        with pytest.raises(RequestError, match="pipeline_model_parallel_layout"):
            layout_stages(text)


def test_a_layout_of_megatron_bridge_is_a_list_of_parts(tmp_path: Path) -> None:
    layout = [["embedding", "decoder"], ["decoder", "decoder", "decoder", "loss"]]
    sizes = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "pipeline_model_parallel_size": 2}
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps({"model": {**sizes, "pipeline_model_parallel_layout": layout}}))
    imported = read_imported(path)
    assert (imported.knobs["pipeline_layout"], imported.knobs["virtual_stages"]) == ("1-3", 1)
    path.write_text(json.dumps({"model": {**sizes, "num_layers": 10**9}}))
    with pytest.raises(RequestError, match="more than 100,000 layers"):
        read_imported(path)


@pytest.mark.parametrize(
    ("options", "knobs"),
    [
        ("--pipeline-model-parallel-layout 'Et*7|(t*9|)*2t*7L'", {"pipeline_layout": "7-9-9-7"}),
        ("--decoder-first-pipeline-num-layers 8", {"pipeline_layout": "8-8-8-8"}),
        ("--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 5", {"pipeline_layout": "7-10-10-5"}),
        (
            (
                "--num-layers 30 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
                "--num-layers-per-virtual-pipeline-stage 4"
            ),
            {"pipeline_layout": "3-4-4-4-4-4-4-3", "virtual_stages": 2, "pipeline_schedule": "interleaved_1f1b"},
        ),
        ("--num-virtual-stages-per-pipeline-rank 2", {"virtual_stages": 2, "pipeline_split": "even"}),
        # Megatron-DeepSpeed, and versions before core.
        (f"--num-layers 30 {FORK} --pp-partition-method 'type:transformer|embedding'", {"pipeline_layout": "7-8-8-7"}),
        (f"{FORK} --zero-stage 2", {"zero_stage": 2}),
        (f"{FORK} --zero-stage 0", {"zero_stage": 1}),  # states of bf16 are divided in any case
        (f"{FORK} --ds-sequence-parallel-size 2", {"context_parallel_size": 2, "context_parallel_method": "ulysses"}),
        (f"{FORK} --num-experts 8 --moe-expert-parallel-size 4", {"expert_parallel_size": 4}),
        (f"{FORK} --checkpoint-activations --checkpoint-num-layers 2", {"activation_checkpointing": "full"}),
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 4",
            {"activation_checkpointing": "full", "checkpoint_every_k": 2},
        ),
    ],
)
def test_knobs(options: str, knobs: dict[str, object], tmp_path: Path) -> None:
    imported = read(tmp_path, f"--pipeline-model-parallel-size 4 {options}")
    assert {name: imported.knobs.get(name) for name in knobs} == knobs


def test_stages_without_layers_are_named(tmp_path: Path) -> None:
    notes = read(tmp_path, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*16|t*16|m|L'").notes
    assert "--pipeline-model-parallel-layout: stages of 16, 16, 0, 0 layers are predicted as equal ones" in notes


def test_recomputed_modules_leave_the_knob_open(tmp_path: Path) -> None:
    attention = read(tmp_path, "--recompute-granularity selective --recompute-modules core_attn")
    assert attention.knobs["activation_checkpointing"] == "selective"
    further = read(tmp_path, "--recompute-granularity selective --recompute-modules core_attn mlp")
    assert "activation_checkpointing" not in further.knobs and further.assumed["activation_checkpointing"] == "selective"
    assert "--recompute-modules=core_attn mlp: no knob means all of it; predictions do" in further.notes
    named = read(tmp_path, "--recompute-granularity selective --recompute-modules moe_act layernorm")
    assert named.knobs["recompute_modules"] == "norms+expert_activations"
    assert named.knobs.get("activation_checkpointing", "none") == "none"


@pytest.mark.parametrize(
    ("options", "vocabulary"),
    [
        ("--vocab-size 32001 --make-vocab-size-divisible-by 512", 32256),
        ("--padded-vocab-size 50304 --vocab-size 50257", 50304),
        ("--tokenizer-type GPT2BPETokenizer", 50257),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B", 128256),
    ],
)
def test_vocabularies(options: str, vocabulary: int, tmp_path: Path) -> None:
    imported = read(tmp_path, options)
    assert imported.model is not None and imported.model.vocab_size == vocabulary
    assert "vocab_size" not in imported.assumed


@pytest.mark.parametrize(
    ("options", "heads"),
    [
        ("--num-query-groups 8", 32),
        ("--num-query-groups 8 --group-query-attention", 8),
        (f"--num-key-value-heads 4 {FORK}", 4),
        ("--attention-head-type multiquery", 1),
        (f"--num-experts 1 {FORK}", 32),  # a dense model there
        ("--hybrid-attention-ratio 0.1", None),
        (f"--num-experts 8 8 16 {FORK}", None),
    ],
)
def test_heads_of_the_described_model(options: str, heads: int | None, tmp_path: Path) -> None:
    imported = read(tmp_path, options)
    assert (imported.model and imported.model.num_key_value_heads) == heads
    assert (heads is None) == any("other layers than a GPT's" in note for note in imported.notes)


def test_an_unstated_vocabulary_is_assumed(tmp_path: Path) -> None:
    assert read(tmp_path, "--tokenizer-model $TOKENIZER").assumed["vocab_size"] == 128_256


def test_multi_token_prediction_is_read(tmp_path: Path) -> None:
    knobs = read(tmp_path, "--mtp-num-layers 1 --position-embedding-type rope").knobs
    assert (knobs["mtp_layers"], knobs["mtp_loss_weight"]) == (1, 0.1)
    knobs = read(tmp_path, "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.2 --position-embedding-type rope").knobs
    assert (knobs["mtp_layers"], knobs["mtp_loss_weight"]) == (2, 0.2)


REFUSED = (
    ("--multi-latent-attention --group-query-attention --num-query-groups 8", "--group-query-attention"),
    ("--mtp-num-layers 1", "--mtp-num-layers"),
    ("--mtp-num-layers 1 --use-rotary-position-embeddings", "--mtp-num-layers"),
    ("--group-query-attention --num-query-groups 6 --tensor-model-parallel-size 4", "--num-query-groups"),
    ("--pipeline-model-parallel-size 4 --num-layers 30 --decoder-last-pipeline-num-layers 5", "--pipeline-model-parallel-size"),
    ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'E(t*8|)*3t*7L'", "--pipeline-model-parallel-size"),
    ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'E(t*4|)*6t*8L'", "--pipeline-model-parallel-layout"),
    (
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 8 --account-for-embedding-in-pipeline-split",
        "--decoder-first-pipeline-num-layers",
    ),
    (
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 8 --num-layers-per-virtual-pipeline-stage 2",
        "--num-layers-per-virtual-pipeline-stage",
    ),
    ("--recompute-granularity selective --recompute-modules moe_act", "--recompute-modules"),
    ("--recompute-granularity selective --recompute-modules attention", "--recompute-modules"),
    ("--recompute-granularity selective --recompute-modules mla_up_proj", "--recompute-modules"),
    ("--cpu-offloading-num-layers 4 --recompute-granularity selective", "--cpu-offloading-num-layers"),
    ("--cpu-offloading-num-layers 4 --pipeline-model-parallel-size 2", "--cpu-offloading-num-layers"),
    ("--ckpt-format torch_dcp", "--ckpt-format"),
    ("--use-torch-fsdp2 --no-gradient-accumulation-fusion", "--use-torch-fsdp2"),
    ("--save out", "--save"),
    ("--train-iters 10 --lr-decay-samples 10", "--train-iters"),
    ("--train-samples 10 --lr-warmup-iters 3", "--train-samples"),
    ("--train-iters 10 --lr-warmup-iters 3 --lr-warmup-fraction 0.1", "--lr-warmup-fraction"),
    ("--mock-data --data-path x", "--mock-data"),
    ("--context-parallel-size 4 --cp-comm-type a2a+p2p", "--hierarchical-context-parallel-sizes"),
    ("--moe-extended-tp", "--moe-extended-tp"),
    ("--lr 0.01 --min-lr 0.1", "--min-lr"),
    ("--num-experts 8 --moe-layer-freq '[0]*2+[1]*29'", "--moe-layer-freq"),
    ("--checkpoint-activations", "--checkpoint-activations"),
    ("--activations-checkpoint-method uniform", "--activations-checkpoint-method"),
)
ACCEPTED = (
    "--multi-latent-attention",
    "--mtp-num-layers 1 --position-embedding-type rope",
    "--recompute-modules attention",
    "--recompute-granularity selective --recompute-modules core_attn mlp",
    "--num-layers 30 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 6",
    (
        "--num-layers 30 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 4"
    ),
    "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'E(t*4|)*7t*4L'",
    "--train-iters 10 --lr-decay-iters 5 --lr-warmup-iters 3",
    "--save out --save-interval 5",
    "--num-experts 8 --moe-layer-freq 2",
    "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
    f"--checkpoint-activations --num-layers 30 --pipeline-model-parallel-size 4 {FORK} --log-batch-size-to-tensorboard",
)


def refusals(folder: Path, options: str) -> list[str]:
    findings = lint(read_written(script(folder, options))[0], Surroundings()).findings
    return [finding.key for finding in findings if finding.effect in (Effect.REFUSED, Effect.FAILS)]


@pytest.mark.parametrize(("options", "key"), REFUSED)
def test_what_its_parser_refuses(options: str, key: str, tmp_path: Path) -> None:
    assert key in refusals(tmp_path, options)


@pytest.mark.parametrize("options", ACCEPTED)
def test_what_its_parser_accepts(options: str, tmp_path: Path) -> None:
    assert refusals(tmp_path, options) == []


@pytest.mark.parametrize(
    ("group", "micro_batches", "refused"),
    [("", 10, True), ("", 12, False), (6, 10, False), (6, 8, True), (2, 8, True), (6, 5, True)],
)
def test_groups_of_micro_batches_of_interleaved_stages(
    group: str | int, micro_batches: int, refused: bool, tmp_path: Path
) -> None:
    size = f"--microbatch-group-size-per-virtual-pipeline-stage {group}" if group else ""
    stages = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
    options = f"{stages} --global-batch-size {4 * micro_batches} {size}"
    assert bool(refusals(tmp_path, options)) is refused


def test_a_launch_of_megatron_bridge_names_its_recipe_and_length(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "torchrun run_recipe.py --recipe llama3_8b_pretrain_config dataset.sequence_length=4096 train.micro_batch_size=2\n"
    )
    imported = read_written(tmp_path / "run.sh")[0].imported()
    assert imported.model is not None and imported.model.name == "llama-3-8b"
    assert (imported.sequence_length, imported.knobs["micro_batch_size"]) == (4096, 2)


def test_ranks_of_experts_of_their_own_are_read(tmp_path: Path) -> None:
    options = "--num-experts 8 --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4"
    assert read(tmp_path, f"{options} --expert-tensor-parallel-size 1").knobs["expert_tensor_parallel_size"] == 1
    assert "expert_tensor_parallel_size" not in read(tmp_path, f"{options} --expert-tensor-parallel-size 2").knobs


def test_a_file_without_degrees_leaves_them_to_what_launches_it(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text('MODEL_ARGS="--num-layers 8 --hidden-size 512 --num-attention-heads 8"\n')
    assert read_written(tmp_path / "model.sh")[0].open["--tensor-model-parallel-size"] == "what launches these options"
    (tmp_path / "model.sh").write_text("--num-layers 8 --tensor-model-parallel-size 2\n")
    assert read_written(tmp_path / "model.sh")[0].open == {}


@pytest.mark.parametrize(
    ("name", "text", "program"),
    [
        (
            "train.yaml",
            "trainer:\n  devices: 8\nmodel:\n  micro_batch_size: 1\n  tensor_model_parallel_size: 2\nexp_manager: {}\n",
            "NeMo 1, which is not read",
        ),
        ("train.sh", "python megatron_gpt_pretraining.py trainer.devices=8 model.tensor_model_parallel_size=2\n", "of NeMo"),
        ("train.sh", "torchrun -m verl.trainer.own trainer.nnodes=1 data.train_batch_size=8\n", "of verl, which is not read"),
        ("train.sh", "deepspeed --module openrlhf.cli.own --train.micro_batch_size 2\n", "of openrlhf, which is not read"),
        ("train.sh", "python own.py --train.micro_batch_size 2 --model.hidden 64\n", "no options of a known framework"),
    ],
)
def test_programs_that_are_not_read_are_refused_by_name(name: str, text: str, program: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=program):
        read_written(tmp_path / name)[0].imported()
