"""`simple`: what is searched is what the framework's export says without a note."""

import pytest

from autotune.errors import RequestError
from autotune.frameworks.best_config import Stated, Winner
from autotune.frameworks.exporters import MAKERS
from autotune.prediction.planning.plan import PlanOptions, plan
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_of
from autotune.prediction.planning.question_space import space_of
from autotune.question.question import SIMPLE_TARGETS
from autotune.request.rows import request_from_fields
from autotune.session.resolve import resolve
from tests.sampling import sampled


def asked(simple: str | None, **pins: object) -> Question:
    return question_of(
        model_of("llama-3-8b", None, None, None), cluster_of("dgx-h100:1", None, None), global_batch_size=512,
        sequence_length=8192, simple=simple, pins=pins,
    )  # fmt: skip


def test_the_targets_are_the_frameworks_that_are_exported_to() -> None:
    assert set(SIMPLE_TARGETS) == set(MAKERS)
    with pytest.raises(RequestError, match="simple"):
        asked("keras")
    with pytest.raises(RequestError, match="simple"):
        request_from_fields({"model": "llama-tiny", "simple": "keras"})


@pytest.mark.prove
def test_domains_lose_what_the_export_cannot_say() -> None:
    whole, simple = space_of(asked(None)), space_of(asked("megatron"))
    assert set(whole.domains["pipeline_schedule"]) > set(simple.domains["pipeline_schedule"]) == {"1f1b", "interleaved_1f1b"}
    assert simple.domains["offload_param"] == ("none",)
    assert simple.domains["tensor_parallel_size"] == whole.domains["tensor_parallel_size"]
    assert "prefetch_bucket_size" not in simple.domains
    assert space_of(asked("torchtitan")).domains["zero_stage"] == (0, 3)
    assert space_of(asked("deepspeed")).domains["tensor_parallel_size"] == (1,)


@pytest.mark.prove(every=7)
@pytest.mark.parametrize(
    ("target", "expressed"),
    [
        ("transformers", {"zero_stage": (0, 1, 2, 3), "offload_optimizer": ("none", "cpu"), "offload_param": ("none", "cpu")}),
        ("deepspeed", {"zero_stage": (0, 1, 2, 3), "activation_checkpointing": ("none", "full")}),
        ("accelerate-deepspeed", {"activation_checkpointing": ("none", "full")}),
        ("lightning", {"activation_checkpointing": ("none", "full")}),
        ("accelerate-fsdp", {"offload_optimizer": ("none", "cpu"), "offload_param": ("none", "cpu")}),
        ("torchtitan", {"offload_optimizer": ("none", "cpu"), "virtual_stages": (1, 2, 4, 8)}),
        ("megatron", {"virtual_stages": (1, 2, 4, 8)}),
    ],
)
def test_domains_keep_what_the_framework_can_do(target: str, expressed: dict[str, tuple[object, ...]]) -> None:
    domains = space_of(asked(target)).domains
    assert {knob: domains[knob] for knob in expressed} == expressed


@pytest.mark.prove
@pytest.mark.parametrize("target", ["transformers", "deepspeed", "accelerate-fsdp"])
def test_a_model_that_fits_only_with_stage_3_offloaded_and_recomputed_has_a_plan(target: str) -> None:
    question = question_of(
        model_of("llama-2-7b", None, None, None), cluster_of("2x24GB", None, None), global_batch_size=8, sequence_length=1024,
        simple=target,
    )  # fmt: skip
    config = plan(question, PlanOptions(top=1)).plans[0].estimate.config
    # DeepSpeed sends gradients to the host, so that there the parameters may stay; the other two are predicted as our engine.
    stays = "none" if target == "transformers" else "cpu"
    assert (config.zero_stage, config.offload_optimizer, config.offload_param) == (3, "cpu", stays)
    assert config.activation_checkpointing == "full"


@pytest.mark.prove
@pytest.mark.parametrize("target", sampled(["megatron", "torchtitan"], every=2))
def test_the_exports_of_plans_have_no_note_about_a_searched_knob(target: str) -> None:
    question = asked(target)
    space = space_of(question)
    found = plan(question, PlanOptions(top=3)).plans
    for config in [row.estimate.config for row in found] + [tie.config for row in found for tie in row.ties[:3]]:
        winner = Winner(
            job="", config=config, baseline=None, model=space.model, workload=space.workload, engine="native", world_size=8,
            ranks_per_node=8, on_gpus=True, verified="native-only", env={}, answer_for=None,
            hyperparameters=Stated(), script=(), launch="",
        )  # fmt: skip
        noted = {note.partition("=")[0] for note in MAKERS[target](winner).notes if "=" in note.partition(":")[0]}
        assert not noted & set(space.domains)


def test_a_pin_that_has_no_place_there_is_refused() -> None:
    with pytest.raises(RequestError, match="torchtitan has no place for overlap_comm=false"):
        space_of(asked("torchtitan", overlap_comm=False))


def test_a_sweep_searches_the_same_part_and_goes_on_with_it() -> None:
    fields = {"model": "llama-tiny", "runner": "local", "space": "parallel"}
    whole, simple = (resolve(request_from_fields({**fields, **more})) for more in ({}, {"simple": "megatron"}))
    assert set(simple.space.domains["pipeline_schedule"]) < set(whole.space.domains["pipeline_schedule"])
    again = resolve(simple.request)
    assert again.space.domains == simple.space.domains
