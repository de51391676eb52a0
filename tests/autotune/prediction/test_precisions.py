"""What the prediction makes of optimizers, of the type in which gradients are summed, and of 8-bit products."""

from typing import Any

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import rates_for
from autotune.prediction.equations.kernels import product_speed
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.step import predict
from autotune.prediction.planning.estimate import WIDENS
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.knobs.computation import FP8_RECIPES
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import ModelSpec
from search_spaces.optimizers import OPTIMIZERS
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

WORKLOAD = Workload(global_batch_size=64, sequence_length=2048)
MODEL = resolve_model("llama-2-7b")
assert isinstance(MODEL, ModelSpec)
RANKS = 8
TABLES = 2 * MODEL.vocab_size * MODEL.hidden_size


def predicted(*changes: dict[str, Any], cluster: str = "dgx-h100:1") -> Any:
    """The prediction of each of the changes, in one call: they must have one precision."""
    place = resolve_cluster(cluster)
    configs = [TrialConfig(precision="bf16", micro_batch_size=1).replace(change) for change in changes]
    cases = cases_of(MODEL, place, WORKLOAD, configs, "native")
    return predict(cases, rates_for(place, "native"))


@pytest.mark.parametrize("stage", [1, 3])
def test_optimizer_state_follows_the_closed_form(stage: int) -> None:
    found = predicted(*({"optimizer": name, "zero_stage": stage} for name in OPTIMIZERS)).memory
    state = dict(zip(OPTIMIZERS, found.by_tag["optimizer_state"] * RANKS, strict=True))
    trained = state["adamw"] / 12
    wanted = {
        "sgd": 8 * trained, "lamb": 12 * trained, "muon": 8 * trained + 4 * TABLES, "adamw8bit": (6 + 8 / 256) * trained,
        "adamw_bf16": (10 if stage < 3 else 8) * trained,
    }  # fmt: skip
    assert {name: state[name] for name in wanted} == pytest.approx(wanted)
    assert trained == pytest.approx(MODEL.parameter_count, rel=1e-2)


def test_without_sharding_the_same_states_are_whole() -> None:
    one, other = predicted({"optimizer": "sgd"}, {"optimizer": "adamw"}).memory.by_tag["optimizer_state"]
    assert other - one == pytest.approx(4 * MODEL.parameter_count, rel=1e-2)


def test_an_update_takes_as_long_as_what_it_moves_and_muon_computes_besides() -> None:
    seconds = dict(zip(OPTIMIZERS, predicted(*({"optimizer": name} for name in OPTIMIZERS)).parts["optimizer"], strict=True))
    assert seconds["adamw8bit"] < seconds["sgd"] < seconds["adamw"] < seconds["lamb"]
    # By operators of torch on CPUs: five times what AdamW moves, by a kernel two thirds.
    on_cpus = predicted({}, {"optimizer": "adamw8bit"}, cluster="local").parts["optimizer"]
    assert on_cpus[1] / on_cpus[0] == pytest.approx(200 / 38)
    assert seconds["adamw8bit"] / seconds["adamw"] == pytest.approx(26 / 38)
    assert seconds["adamw"] < seconds["adamw_bf16"] < seconds["lamb"]
    assert seconds["muon"] > seconds["adamw"] * 62 / 38
    (whole, shared) = predicted({"optimizer": "muon"}, {"optimizer": "muon", "zero_stage": 1}).parts["optimizer"]
    (plain, divided) = predicted({}, {"zero_stage": 1}).parts["optimizer"]
    # Ranks that share the matrices deal them out.
    assert 0 < shared - divided * 62 / 38 < (whole - plain * 62 / 38) / 4


def test_sums_in_the_precision_save_half_of_the_gradients_while_activations_are_there() -> None:
    for stage, saved in ((0, 0), (1, 2 * MODEL.parameter_count), (2, 0)):
        wide, narrow = predicted(
            *({"zero_stage": stage, "accumulation_dtype": kind} for kind in ("fp32", "bf16"))
        ).memory.by_tag["gradients"]
        assert wide - narrow == pytest.approx(saved, rel=1e-2)
    for stage in range(4):
        peaks = predicted(*({"zero_stage": stage, "accumulation_dtype": kind} for kind in ("fp32", "bf16"))).memory.total
        assert peaks[0] >= peaks[1]


def test_without_accumulation_the_type_of_sums_changes_nothing() -> None:
    ones = [{"micro_batch_size": 8, "zero_stage": 2, "accumulation_dtype": kind} for kind in ("fp32", "bf16")]
    assert np.ptp(predicted(*ones).memory.total) == 0.0


def test_compiled_float8_is_faster_than_bf16_by_less_than_its_peak() -> None:
    knobs: dict[str, Any] = {"compile_blocks": True}
    compute = {name: float(predicted({"precision": name, **knobs}).parts["compute"][0]) for name in ("bf16", "fp8", "fp16")}
    assert compute["fp16"] == compute["bf16"]
    assert 1.0 < compute["bf16"] / compute["fp8"] < 1.6
    recipes = {
        name: float(predicted({"precision": "fp8", "fp8_recipe": name, **knobs}, cluster="dgx-b200:1").parts["compute"][0])
        for name in FP8_RECIPES
    }
    # Blocks cost as much to round as matrices; rows cost more, and one product of three in bf16 more still.
    assert recipes["mxfp8"] == pytest.approx(recipes["tensorwise"], rel=0.02)
    assert recipes["tensorwise"] < recipes["rowwise"] < recipes["rowwise_with_gw_hp"]


TENSOR_RANKS = {
    "activation_checkpointing": "full",
    "tensor_parallel_size": 8,
    "sequence_parallel": True,
    "micro_batch_size": 16,
}


@pytest.mark.parametrize(
    ("cluster", "model", "batch", "knobs", "published"),
    [
        ("dgx-h100", "llama-3-8b", 8, {}, {"tensorwise": 1.25, "rowwise": 1.10}),
        ("dgx-b200", "llama-3-8b", 8, {}, {"tensorwise": 1.254, "mxfp8": 1.20, "rowwise": 1.04}),
        ("dgx-h100:32", "llama-3-70b", 512, TENSOR_RANKS, {"tensorwise": 1.356, "rowwise": 1.004}),
        ("dgx-h100", "llama-3-8b", 4, {"tensor_parallel_size": 2, "sequence_parallel": True}, {"rowwise": 0.965}),
    ],
)  # fmt: skip
def test_gains_are_near_published_ones(
    cluster: str, model: str, batch: int, knobs: dict[str, Any], published: dict[str, float]
) -> None:
    """Of runs that the speeds of products are not taken from [docs/numerics.md]. Scales of rows gain less, which is named."""
    place, spec = resolve_cluster(cluster), resolve_model(model)
    workload = Workload(sequence_length=8192, global_batch_size=batch)
    base = TrialConfig(
        precision="bf16", micro_batch_size=1, zero_stage=3, compile_blocks=True, activation_checkpointing="selective"
    ).replace(knobs)

    def prediction(config: TrialConfig) -> Any:
        return predict(cases_of(spec, place, workload, [config], "native"), rates_for(place, "native"))

    half = prediction(base)
    for recipe, gain in published.items():
        eight = prediction(base.replace({"precision": "fp8", "fp8_recipe": recipe}))
        share = float(half.seconds[0] / eight.seconds[0]) / gain
        assert (1.0 < share < 1.16) if recipe == "rowwise" else (0.85 < share < 1.05)
        named = float(eight.doubts["published runs gain less from products with scales of rows"][0])
        assert (named >= WIDENS) == (recipe == "rowwise")


def test_speeds_of_products_are_those_of_recipe_and_device() -> None:
    def speeds(cluster: str) -> dict[str, float]:
        place, base = resolve_cluster(cluster), TrialConfig(precision="fp8")
        configs = [base.replace({"fp8_recipe": recipe}) for recipe in FP8_RECIPES]
        return dict(zip(FP8_RECIPES, product_speed(cases_of(MODEL, place, WORKLOAD, configs, "native")), strict=True))

    hopper, blackwell = speeds("dgx-h100:1"), speeds("dgx-b200:1")
    assert hopper["tensorwise"] == pytest.approx(2.0) and blackwell["tensorwise"] == blackwell["mxfp8"] == pytest.approx(1.71)
    assert hopper["rowwise"] == pytest.approx(3 / (1 / 1.96 + 2 / 2.0))
    assert blackwell["rowwise"] == pytest.approx(3 / (1 / 1.44 + 2 / 1.71))
    assert blackwell["rowwise_with_gw_hp"] == pytest.approx(3 / (1 / 1.44 + 1 / 1.71 + 1))


def test_operands_that_are_rounded_by_operators_apart_cost_what_they_move() -> None:
    layer, hidden, ffn, layers = MODEL.layer_parameters - 2 * MODEL.hidden_size, MODEL.hidden_size, 11008, MODEL.num_layers
    bandwidth = resolve_cluster("dgx-h100:1").device.memory_bandwidth
    assert bandwidth is not None
    for size in (4, 8):
        tokens, micro_batches = size * WORKLOAD.sequence_length, WORKLOAD.global_batch_size // RANKS // size
        # Compilation fuses the other operators, too, which bf16 shows alone.
        compiled, apart, plain, fused = predicted(
            *(
                {"precision": precision, "micro_batch_size": size, "compile_blocks": one}
                for precision, one in (("fp8", True), ("fp8", False), ("bf16", False), ("bf16", True))
            )
        ).parts["compute"]
        # Inputs of seven matrices and their weights twice in 13 bytes instead of 5; gradients of seven results once.
        operands = layer + tokens * (6 * hidden + ffn)
        moved = operands * 2 * (13 - 5) + tokens * (5 * hidden + 2 * ffn) * (13 - 5)
        assert apart - compiled - (plain - fused) == pytest.approx(micro_batches * layers * moved / bandwidth, rel=1e-2)


def test_float8_holds_what_bf16_does_and_the_operands_that_are_rounded() -> None:
    rows, matrix = WORKLOAD.sequence_length * 11008, 11008 * MODEL.hidden_size
    for compiled, most in ((True, rows + matrix), (False, max(5 * rows + matrix, rows + 5 * matrix))):
        # With the loss in chunks the fullest moment is one in a layer.
        plain, narrow = (
            predicted({"precision": name, "zero_stage": 3, "compile_blocks": compiled, "loss_chunk_size": 16}).memory.by_tag
            for name in ("bf16", "fp8")
        )
        assert {tag for tag in plain if narrow[tag] != plain[tag]} == {"activations", "reserved"}
        assert float((narrow["activations"] - plain["activations"])[0]) == pytest.approx(most, rel=0.1)


def test_arrays_of_optimizers_are_predicted_as_each_alone() -> None:
    together = predicted(*({"optimizer": name, "zero_stage": 2} for name in OPTIMIZERS))
    for place, name in enumerate(OPTIMIZERS):
        alone = predicted({"optimizer": name, "zero_stage": 2})
        assert float(alone.seconds[0]) == float(together.seconds[place])
        assert float(alone.memory.total[0]) == float(together.memory.total[place])
    cases = cases_of(MODEL, resolve_cluster("dgx-h100:1"), WORKLOAD, [TrialConfig(precision="bf16")], "native")
    assert memory(cases, rates_for(resolve_cluster("dgx-h100:1"), "native")).total.shape == (1,)
