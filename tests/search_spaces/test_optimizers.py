"""What optimizers keep, as the lower bound of a rank's states counts it, and knobs that came after jobs were stored."""

import dataclasses

import pytest

from search_spaces.canonical import canonical
from search_spaces.capability import Capability, SpaceContext
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.knob import Numerics
from search_spaces.knob_values import KNOBS
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.optimizers import OPTIMIZERS
from search_spaces.training.states import scales_losses, states_lower_bound_bytes
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MODEL = resolve_model("llama-tiny")
BOTH = Capability(engine="both", knobs={}, keeps_copy_beside_gradients=True)
TABLES = MODEL.input_embedding_parameters / MODEL.parameter_count
"""Share of the parameters, of which the output projection is one: llama-tiny ties them."""
MOMENTS = {"adamw": 8, "sgd": 4, "lamb": 8, "muon": 4, "adamw8bit": 2 + 8 / 256, "onebit_adam": 12, "adamw_bf16": 8}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 4), (2, 4), (3, 4)])
def test_master_gradient_and_moments_are_bounded_by_what_the_optimizer_keeps(optimizer: str, stage: int, ranks: int) -> None:
    assert isinstance(MODEL, ModelSpec)
    tables = TABLES if MODEL.tied_embeddings else 2 * TABLES
    moments = MOMENTS[optimizer] + (4 * tables if optimizer == "muon" else 0)
    master = 2 if optimizer == "adamw_bf16" else 4
    parameters = 2 if stage < 3 and not (stage == 0 and master == 2) else 0
    config = TrialConfig(precision="bf16", zero_stage=stage, optimizer=optimizer)
    bound = states_lower_bound_bytes(config, MODEL, ranks, BOTH)
    assert bound == pytest.approx(MODEL.parameter_count * (parameters + (master + 4 + moments) / ranks), abs=2)


def test_of_a_users_module_nothing_is_known_that_would_make_muon_dearer() -> None:
    model = FactoryModel(reference="m:f", parameter_count=1000)
    assert states_lower_bound_bytes(TrialConfig(optimizer="muon"), model, 1) == 1000 * (4 + 4 + 4)


@pytest.mark.parametrize("name", ["optimizer", "accumulation_dtype"])
def test_what_changes_results_is_in_no_preset_and_not_written_at_its_default(name: str) -> None:
    assert KNOBS[name].numerics is Numerics.CHANGES
    assert name not in TrialConfig().values()
    assert TrialConfig().hash != TrialConfig().replace({name: KNOBS[name].choices[1]}).hash


def _context(batch: int = 16) -> SpaceContext:
    workload = Workload(global_batch_size=batch, sequence_length=64)
    return SpaceContext(model=MODEL, cluster=resolve_cluster("local", ranks=2), workload=workload, world_size=2)


def test_the_type_of_sums_matters_where_there_is_something_to_sum() -> None:
    config = TrialConfig(precision="bf16", accumulation_dtype="bf16", micro_batch_size=4)
    assert canonical(config, _context()).accumulation_dtype == "bf16"
    assert canonical(dataclasses.replace(config, micro_batch_size=8), _context()).accumulation_dtype == "fp32"


@pytest.mark.parametrize(("optimizer", "matters"), [("adamw", True), ("sgd", True), ("lamb", False), ("muon", False)])
def test_one_kernel_for_the_update_is_asked_for_where_there_is_one(optimizer: str, matters: bool) -> None:
    config = TrialConfig(optimizer=optimizer, fused_optimizer=False)
    assert canonical(config, _context()).fused_optimizer is not matters


def test_losses_are_scaled_where_gradients_pass_through_fp16() -> None:
    assert scales_losses(TrialConfig(precision="fp16"))
    assert scales_losses(TrialConfig(precision="bf16", reduce_dtype="fp16"))
    assert not scales_losses(TrialConfig(precision="bf16", reduce_dtype="bf16"))
