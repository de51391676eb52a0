"""A recipe on more, fewer or other nodes: the target's file, the reasons, and what does not fit."""

import json
from pathlib import Path
from typing import Any

import exported
import jsonschema
import pytest
from lint_recipes import CASES, RECIPES, RecipeCase

from autotune.errors import AutotuneError, BestConfigError, NothingFeasibleError, RequestError
from autotune.frameworks.best_config import SCHEMA_PATH, best_config_text, require_measured, winner_of
from autotune.frameworks.framework import Surroundings
from autotune.frameworks.read import read_written
from autotune.recipes.candidates import LEVERS, certain_gain
from autotune.recipes.carry import BatchRule, Carried, carry, document
from autotune.recipes.lint import lint
from autotune.recipes.outlook import STOPS, fits
from autotune.recipes.recipe import Recipe, recipe_of
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from tests.sampling import sampled

GOOD = [case for case in CASES if not case.fault and case.cluster]


def no_job(name: str) -> dict[str, Any]:
    raise AssertionError(name)


def recipe(
    file: str, cluster: str = "", model: str = "", function: str = "", batch: int | None = None, tokens: int | None = None
) -> Recipe:
    around = Surroundings(
        model=resolve_model(model) if model else None,
        cluster=resolve_cluster(cluster) if cluster else None,
        global_batch_size=batch,
        sequence_length=tokens,
    )
    return recipe_of(str(RECIPES / file) + (f":{function}" if function else ""), around, no_job)


def carried(case: RecipeCase, to: str, rule: BatchRule = BatchRule.FIXED, top: int = 3) -> Carried:
    # Accelerate's files do not state the batch.
    batch = 256 if case.file.startswith("accelerate") else None
    return carry(recipe(case.file, case.cluster, case.model, case.function, batch), resolve_cluster(to), rule, None, top)


def targets(case: RecipeCase) -> list[str]:
    name, _, nodes = case.cluster.partition(":")
    count = int(nodes)
    return [f"{name}:{count * 2}", *([f"{name}:{count // 2}"] if count > 1 else []), "dgx-b200:4"]


def named(value: Any) -> str:
    return value.name if isinstance(value, RecipeCase) else str(value)


@pytest.mark.prove
@pytest.mark.parametrize(("case", "to"), sampled([(case, to) for case in GOOD for to in targets(case)], 9), ids=named)
def test_the_target_is_the_best_candidate_and_lint_has_nothing_against_it(case: RecipeCase, to: str, tmp_path: Path) -> None:
    try:
        found = carried(case, to)
    except NothingFeasibleError as error:
        assert "\n" not in str(error)
        return
    best, cluster = found.candidates[0], resolve_cluster(to)
    assert found.target.lost == ()
    path = tmp_path / found.target.name
    path.write_text(found.target.text, encoding="utf-8")
    read = read_written(path, found.recipe.case.framework.name)
    one = next((one for one in read if not case.function or one.name.endswith(case.function)), read[0])
    batch = found.batch if case.file.startswith("accelerate") else None
    again = lint(one, Surroundings(model=found.recipe.case.model, cluster=cluster, global_batch_size=batch))
    assert [str(finding) for finding in again.findings if finding.effect in STOPS] == []
    assert {name: getattr(again.case.config, name) for name in LEVERS} == {name: getattr(best.config, name) for name in LEVERS}
    assert again.case.batch == found.batch == found.batch_before
    assert not isinstance(again.outlook, str)
    assert again.outlook.samples_per_second.mean == pytest.approx(best.outlook.samples_per_second.mean)
    assert all(fits(one.outlook) for one in found.candidates if one.distance)
    assert json.loads(json.dumps(document(found), default=str))["to"]["ranks"] == cluster.world_size


def test_on_more_nodes_every_change_has_its_reason() -> None:
    found = carry(recipe("titan-llama3-70b.toml", "dgx-h100:8"), resolve_cluster("dgx-h100:16"), BatchRule.FIXED, None, 5)
    reasons = {change.name: change for change in found.changes}
    best = found.candidates[0].config
    assert best.micro_batch_size * best.data_parallel_size(128) <= 64
    micro = reasons["micro_batch_size"]
    assert micro.required and "do not divide 64 samples" in micro.reason
    assert "# " not in found.target.text and 'flavor = "70B"' in found.target.text


@pytest.mark.prove
def test_experts_on_fewer_nodes_are_refused_by_their_arithmetic() -> None:
    found = carry(recipe("megatron-mixtral.sh", "dgx-h100:4"), resolve_cluster("dgx-h100:1"), BatchRule.FIXED, None, 5)
    assert [finding.rule for finding in found.problems] == ["experts-divide"]
    assert "does not divide the 2 ranks of a stage" in found.problems[0].problem
    best = found.candidates[0].config
    assert (8 // best.model_parallel_size) % best.expert_parallel_size == 0
    assert "NUM_NODES=${NUM_NODES:-1}" in found.target.text and "PARALLEL_ARGS=(  # how" in found.target.text


def test_key_value_heads_limit_tensor_parallelism_where_the_framework_does_not_replicate_them() -> None:
    case = recipe("titan-llama3-8b.toml", "dgx-h100:1")
    found = carry(case, resolve_cluster("gb200-nvl72:1"), BatchRule.FIXED, 1152, 20)
    assert case.case.model is not None
    heads = case.case.model.num_key_value_heads
    assert all(heads % one.config.tensor_parallel_size == 0 for one in found.candidates)


@pytest.mark.prove
def test_a_layout_that_does_not_fit_fewer_nodes_says_by_how_much() -> None:
    found = carry(recipe("titan-llama3-70b.toml", "dgx-h100:8"), resolve_cluster("dgx-h100:2"), BatchRule.FIXED, None, 5)
    offload = next(change for change in found.changes if change.name == "offload_optimizer")
    assert offload.required and "GiB of 79 GiB on the fullest device" in offload.reason
    with pytest.raises(
        NothingFeasibleError, match=r"^to: no layout .* is predicted to fit 8 devices of 79 GiB; give more nodes"
    ):
        carry(recipe("titan-llama3-405b.toml", "dgx-h100:16"), resolve_cluster("dgx-h100:1"), BatchRule.FIXED, None, 5)


def test_the_batch_scales_with_the_ranks() -> None:
    found = carry(recipe("titan-llama3-70b.toml", "dgx-h100:8"), resolve_cluster("dgx-h100:16"), BatchRule.SCALED, None, 3)
    assert (found.batch_before, found.batch) == (64, 128)
    with pytest.raises(
        RequestError, match=r"^batch: 65 samples on 64 ranks are not a whole number on 24; give --target-batch-size N"
    ):
        carry(recipe("titan-llama3-70b.toml", "dgx-h100:8", batch=65), resolve_cluster("dgx-h100:3"), BatchRule.SCALED, None, 1)


def test_deepspeed_keeps_its_batch_arithmetic() -> None:
    source = recipe("deepspeed-zero2.json", "dgx-h100:1", "llama-3.2-1b", tokens=2048)
    found = carry(source, resolve_cluster("dgx-h100:2"), BatchRule.FIXED, None, 30)
    assert {one.config.tensor_parallel_size > 1 for one in found.candidates} == {False, True}
    for one in found.candidates:
        settings, tensor = one.case.imported.settings, one.config.tensor_parallel_size
        product = settings["train_micro_batch_size_per_gpu"] * settings["gradient_accumulation_steps"] * 16 // tensor
        # Beside AutoTP DeepSpeed refuses a stated global batch.
        assert (product, settings.get("train_batch_size")) == (64, 64 if tensor == 1 else None)


@pytest.mark.prove
def test_a_best_config_is_carried_as_one(tmp_path: Path) -> None:
    source = exported.document(exported.large(), zero_stage=3, precision="bf16", micro_batch_size=2, tensor_parallel_size=2)
    whole = {"schema_version": 1, "engine": "native", **source}
    path = tmp_path / "best-config.json"
    path.write_text(best_config_text(whole), encoding="utf-8")
    found = carry(recipe_of(str(path), Surroundings(), no_job), resolve_cluster("dgx-h100:4"), BatchRule.FIXED, None, 3)
    target = json.loads(found.target.text)
    entry = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    jsonschema.validate(target["best"], {**entry["$defs"]["entry"], "$defs": entry["$defs"]})
    winner = winner_of(target)
    assert (winner.world_size, winner.config, winner.workload.global_batch_size) == (32, found.candidates[0].config, 64)
    with pytest.raises(BestConfigError, match="nothing is measured"):
        require_measured(target, "best-config.json")


@pytest.mark.parametrize(
    ("file", "cluster", "model", "message"),
    [
        ("titan-llama3-8b.toml", "", "", "does not state its global batch; give --from NAME:NODES"),
        ("accelerate-zero3.yaml", "dgx-h100:1", "llama-3-8b", "does not state its global batch; give --global-batch-size"),
        ("deepspeed-zero2.json", "dgx-h100:1", "", "does not say which model it trains; give --model MODEL"),
        ("titan_4016.py", "dgx-h100:1", "", "has the recipes titan_4016.py:qwen35_122b_a10b, "),
        ("titan-older.toml", "dgx-h100:1", "", "is for a torchtitan before 0.1"),
    ],
)
def test_bad_input_is_one_line(file: str, cluster: str, model: str, message: str) -> None:
    with pytest.raises(AutotuneError) as caught:
        carry(recipe(file, cluster, model), resolve_cluster("dgx-h100:2"), BatchRule.FIXED, None, 1)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.prove
def test_a_layout_that_runs_stays_unless_another_is_certainly_faster() -> None:
    # On 40 GB it needs its recomputation.
    source, wider = recipe("titan-llama3-8b.toml", "dgx-a100-40gb:1"), resolve_cluster("dgx-a100-40gb:2")
    found = carry(source, wider, BatchRule.SCALED, None, 5)
    assert (found.candidates[0].distance, found.changes) == (0, ())
    assert found.target.text == (RECIPES / "titan-llama3-8b.toml").read_text(encoding="utf-8")
    for name, nodes in (("titan-llama3-8b.toml", 1), ("titan-llama3-70b.toml", 8)):
        wider = resolve_cluster(f"dgx-h100:{2 * nodes}")
        faster = carry(recipe(name, f"dgx-h100:{nodes}"), wider, BatchRule.SCALED, None, 5)
        assert not isinstance(faster.same_outlook, str) and faster.candidates[0].distance > 0
        before, after = faster.same_outlook.samples_per_second, faster.candidates[0].outlook.samples_per_second
        assert after.mean > before.mean * certain_gain(faster.same)


def test_what_ran_on_fewer_nodes_fits_on_more() -> None:
    """8B on one node is predicted to fit with a probability of 0.7 only; the recipe runs there, so that it fits two nodes."""
    found = carry(recipe("megatron-llama3-8b.sh", "dgx-h100:1"), resolve_cluster("dgx-h100:2"), BatchRule.FIXED, None, 5)
    assert not isinstance(found.same_outlook, str) and not fits(found.same_outlook)
    assert [change.name for change in found.changes] == ["launcher.nnodes"]


def test_stages_of_different_sizes_may_become_more_or_fewer(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --pipeline-model-parallel-size 4 --micro-batch-size 1 --bf16 "
        "--global-batch-size 64 --num-layers 14 --hidden-size 8192 --num-attention-heads 64 --seq-length 2048 "
        "--max-position-embeddings 2048 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split\n"
    )
    source = recipe_of(str(path), Surroundings(cluster=resolve_cluster("dgx-a100:2")), no_job)
    assert source.case.config.pipeline_layout == "3-4-4-3"
    found = carry(source, resolve_cluster("dgx-a100:4"), BatchRule.FIXED, None, 30)
    layouts = {1: "", 2: "7-7", 4: "3-4-4-3", 8: "1-2-2-2-2-2-2-1"}
    assert all(one.config.pipeline_layout == layouts[one.config.pipeline_parallel_size] for one in found.candidates)


def test_a_value_of_a_block_is_replaced_where_it_stands(tmp_path: Path) -> None:
    text = "deepspeed_config:\n  # of the states\n  zero3_init_flag: true\n  zero_stage: 3\ndistributed_type: DEEPSPEED\n"
    path = tmp_path / "acc.yaml"
    path.write_text(f"{text}mixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n")
    around = Surroundings(
        model=resolve_model("qwen2.5-7b"), cluster=resolve_cluster("dgx-h100:1"), global_batch_size=64, sequence_length=512
    )
    found = carry(recipe_of(str(path), around, no_job), resolve_cluster("dgx-h100:2"), BatchRule.FIXED, None, 3)
    stage = found.candidates[0].config.zero_stage
    assert stage != 3 and not found.target.anew
    assert found.target.text.startswith(text.replace("zero_stage: 3", f"zero_stage: {stage}"))
