"""What follows from values that nobody stated: the same as if they are stated, and how an answer says so."""

from pathlib import Path

import pytest

from autotune.errors import NothingFeasibleError
from autotune.prediction.planning.conditional import plan_conditions, planned, predicted
from autotune.prediction.planning.consequences import Verdict, verdict_of
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.largest import largest
from autotune.prediction.planning.plan import PlanObjective, PlanOptions
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_of
from autotune.question.assumption import Source, assumed_document, assumed_lines, assumption
from search_spaces.clusters.presets import cluster_preset_names, unstated_figures
from search_spaces.knob_values import KNOBS

NOT_OFFLOADED = {"offload_param": "none", "offload_optimizer": "none"}


def asked(model: str = "llama-3-8b", cluster: str = "dgx-h100:1", lora: int | None = None, **inputs: object) -> Question:
    return question_of(model_of(model, lora, None, None), cluster_of(cluster, None, None), **inputs)


@pytest.mark.parametrize(
    ("cluster", "pins"),
    [("dgx-h100:1", {"zero_stage": 3, "micro_batch_size": 4}), ("8xh100", {"zero_stage": 2}), ("2x24GB", {"zero_stage": 3})],
)
def test_a_consequence_is_the_prediction_with_the_value_stated(cluster: str, pins: dict[str, object], tmp_path: Path) -> None:
    pins = {name: (value,) for name, value in pins.items()}
    question = asked(cluster=cluster, pins=pins)
    answer = predicted(question)
    assert {"sequence_length", "activation_checkpointing"} <= {item.assumption.name for item in answer.conditions.results}
    for item in answer.conditions.results:
        name, value = item.assumption.name, item.value
        if name in KNOBS:
            stated = asked(cluster=cluster, pins={**pins, name: (value,)})
        elif name == "intra_node_bandwidth":
            file = tmp_path / "cluster.toml"
            spec = question.cluster
            file.write_text(
                f'devices_per_node = {spec.devices_per_node}\ndevice = "h100"\nintra_node_bandwidth = {value}\n'
                f"inter_node_bandwidth = {spec.inter_node_bandwidth}\nhost_memory_bytes = {spec.host_memory_bytes}\n"
                f"cores_per_node = {spec.cores_per_node}\n"
            )
            if spec.device.name != "h100":
                continue
            stated = asked(cluster=str(file), pins=pins)
        elif name in ("global_batch_size", "sequence_length"):
            stated = asked(cluster=cluster, pins=pins, **{name: value})
        else:
            continue
        (estimate,) = estimates(stated, [stated.config()])
        assert estimate.config == item.estimate.config
        assert item.tokens_per_second == pytest.approx(estimate.tokens_per_second)
        assert item.peak_memory_bytes == pytest.approx(estimate.fullest.needed)
        assert item.changes_verdict is (verdict_of(estimate) is not verdict_of(answer.estimate))


def test_a_verdict_that_hangs_on_an_assumption_says_so() -> None:
    pins = {"zero_stage": 3, "micro_batch_size": 4}
    doubtful = predicted(asked(pins=pins))
    assert verdict_of(doubtful.estimate) is not Verdict.FITS
    assert doubtful.condition.startswith("as assumed; fits if ")
    pins |= {"precision": "bf16", "activation_checkpointing": "full"}
    stated = predicted(asked(pins=pins, sequence_length=4096, global_batch_size=32))
    assert (stated.condition, stated.conditions.lines(), verdict_of(stated.estimate)) == ("", [], Verdict.FITS)
    hopeless = predicted(asked("llama-3-70b", cluster="1x24GB"))
    assert (hopeless.condition, verdict_of(hopeless.most_favourable)) == ("", Verdict.DOES_NOT_FIT)


def test_a_verdict_that_several_assumptions_decide_together_names_them() -> None:
    answer = predicted(asked(cluster="8x24GB", pins={"zero_stage": 3, "micro_batch_size": 2}))
    assert verdict_of(answer.estimate) is Verdict.DOES_NOT_FIT
    assert "activation_checkpointing=full" in answer.condition or "sequence_length=512" in answer.condition


def test_the_most_consequential_assumption_is_first_and_each_names_its_option() -> None:
    answer = predicted(asked(pins={"zero_stage": 3}))
    title, *lines = answer.conditions.lines()
    assert title.startswith("assumed")
    assert lines[0].startswith("  micro_batch_size=1 (--pin micro_batch_size): with micro_batch_size=")
    weights = [
        max((item.weight for item in answer.conditions.results if item.assumption.name == entry["name"]), default=0.0)
        for entry in answer.conditions.document()
    ]
    assert weights == sorted(weights, reverse=True)
    assert all(entry["stated_by"].startswith("--") and entry["text"] for entry in answer.conditions.document())


def test_origins_of_stated_derived_and_assumed_values() -> None:
    question = asked(cluster="8xh100", pins={"zero_stage": 3}, sequence_length=2048)
    assert question.origins["sequence_length"].source is Source.STATED
    assert question.origins["sequence_length"].by == "--sequence-length"
    assert question.origins["zero_stage"].source is Source.STATED
    assert question.origins["global_batch_size"].source is Source.ASSUMED
    assert question.origins["intra_node_bandwidth"].source is Source.ASSUMED
    assert {item.name for item in question.assumed} == {
        "global_batch_size", "intra_node_bandwidth", "host_memory_bytes", "cores_per_node"
    }  # fmt: skip


def test_a_default_batch_has_whole_micro_batches_on_every_rank() -> None:
    assert asked(pins={"micro_batch_size": "4,8"}).global_batch_size == 64
    assert asked(cluster="3x24GB").global_batch_size == 9
    assert asked(cluster="dgx-h100:4").global_batch_size == 32


def test_a_plan_without_a_length_is_for_one_that_fits() -> None:
    question = asked(cluster="1x24GB", lora=16, pins=NOT_OFFLOADED)
    shorter, plans = planned(question, PlanOptions(top=2))
    assert (question.sequence_length, shorter.sequence_length) == (4096, 1024)
    document = plan_conditions(shorter, plans, PlanOptions(top=2)).document()
    (length,) = (item for item in document if item["name"] == "sequence_length")
    assert {item["value"]: item["verdict"] for item in length["alternatives"]}[4096] != "fits"


def test_a_plan_that_does_not_exist_names_what_was_assumed_and_what_would_fit() -> None:
    with pytest.raises(NothingFeasibleError, match=r"with the assumed 4,096 tokens a sample, and nothing fits with 512 either"):
        planned(asked(cluster="1x16GB", pins=NOT_OFFLOADED, space="zero"), PlanOptions())
    says = r"more than the 71 GiB of main memory of a machine, .*; something fits with host_memory_bytes=142 GiB \(--cluster"
    with pytest.raises(NothingFeasibleError, match=says):
        planned(asked("mixtral-8x7b", cluster="1x24GB", lora=8, pins={"offload_param": "cpu"}), PlanOptions())


def test_a_plan_names_what_is_best_at_an_alternative() -> None:
    question = asked(space="zero")
    options = PlanOptions(top=5)
    _, plans = planned(question, options)
    results = {(item.assumption.name, item.value): item for item in plan_conditions(question, plans, options).results}
    changed = [item for item in results.values() if item.choice]
    assert changed
    for item in changed:
        assert item.assumption.name in ("sequence_length", "global_batch_size")
        pins = dict(word.split("=") for word in item.choice.split())
        stated = asked(**{item.assumption.name: item.value}, pins={**NOT_OFFLOADED, **pins})
        rival = predicted(stated).estimate
        assert verdict_of(rival) is Verdict.FITS
        assert item.verdict != "fits" or rival.tokens_per_second > item.tokens_per_second


def test_other_cards_of_the_same_name_are_an_alternative() -> None:
    answer = predicted(asked(cluster="8xa100", pins={"zero_stage": 3, "micro_batch_size": 1}))
    (item,) = (item for item in answer.conditions.results if item.assumption.name == "device")
    (stated,) = estimates(
        other := asked(cluster="8xa100-40gb", pins={"zero_stage": 3, "micro_batch_size": 1}), [other.config()]
    )
    assert item.value == "a100-40gb"
    assert item.estimate.memory_limit_bytes == stated.memory_limit_bytes < answer.estimate.memory_limit_bytes
    assert item.tokens_per_second == pytest.approx(stated.tokens_per_second)


def test_a_length_that_is_maximised_is_not_assumed() -> None:
    longest = largest(asked(space="zero"), "sequence_length", 0.95).question
    assert longest.sequence_length != 4096
    assert [item.name for item in longest.assumed] == ["global_batch_size"]
    assert longest.origins["sequence_length"].source is Source.DERIVED


def test_predictions_take_experts_to_be_chosen_equally_often_unless_loads_are_stated() -> None:
    question = asked("mixtral-8x7b", sequence_length=4096, global_batch_size=8)
    assert [str(item) for item in question.assumed] == ["each expert is chosen equally often (--expert-loads)"]


@pytest.mark.parametrize(
    ("cluster", "names"),
    [
        ("hgx-h20:2", {"inter_node_bandwidth", "host_memory_bytes", "cores_per_node"}),
        ("hgx-h20", {"host_memory_bytes", "cores_per_node"}),
        ("mi325x-oam:2", {"inter_node_bandwidth", "host_memory_bytes", "cores_per_node"}),
        ("dgx-h100:2", set()),
        ("nc6s_v3:2", {"inter_node_bandwidth"}),
        ("nd96asr_v4:2", set()),
        ("8x80GB:2", {"device", "intra_node_bandwidth", "inter_node_bandwidth", "host_memory_bytes", "cores_per_node"}),
    ],
)
def test_figures_that_a_preset_or_a_number_of_cards_leaves_open_are_assumed(cluster: str, names: set[str]) -> None:
    question = asked(cluster=cluster, sequence_length=4096, global_batch_size=16)
    assert {item.name for item in question.assumed} == names
    for name in names - {"device"}:
        assert next(item.value for item in question.assumed if item.name == name) == getattr(question.cluster, name)


def test_the_figures_that_no_page_states_of_a_preset_are_assumed() -> None:
    presets = [name for name in cluster_preset_names() if unstated_figures(name)]
    assert len(presets) >= 15
    for preset in presets:
        assumed = asked(cluster=f"{preset}:2", sequence_length=4096, global_batch_size=16).assumed
        assert {item.name for item in assumed} == {*unstated_figures(preset)}, preset


def test_a_part_of_a_machine_has_its_share_of_what_is_assumed_of_it() -> None:
    question = asked(cluster="8xh100", space="zero")
    options = PlanOptions(objective=PlanObjective.DEVICES, top=1)
    _, plans = planned(question, options)
    assert plans.plans[0].cluster.devices_per_node == 4
    conditions = plan_conditions(question, plans, options)
    whole, share = (
        {item.name: item for item in items}["host_memory_bytes"]
        for items in (question.assumed, (*conditions.assumed, *conditions.without_effect))
    )
    assert (share.value, share.alternatives) == (whole.value // 2, tuple(value // 2 for value in whole.alternatives))
    assert "shared by its 8 devices" in share.text


def test_what_was_assumed_is_a_document_without_predictions() -> None:
    item = assumption("sequence_length", 4096, "--sequence-length", most=8192)
    assert item.alternatives == (512, 1024, 2048, 8192)
    (entry,) = assumed_document([item])
    assert (entry["text"], entry["alternatives"]) == ("sequence_length=4096", [])
    assert assumed_lines([item])[1:] == ["  sequence_length=4096 (--sequence-length)"]
    assert assumed_lines([]) == []
