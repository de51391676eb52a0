"""Spaces by name, from files, with pins."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from search_spaces.capability import Capability, Combination
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.errors import IllegalConfigError, KnobValueError, SearchSpaceError, SpaceFormatError, UnknownNameError
from search_spaces.knob import Numerics
from search_spaces.knob_values import KNOBS
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import FactoryModel
from search_spaces.space import SearchSpace
from search_spaces.spaces import device_defaults, parse_pins, resolve_space, settled, space_preset_names
from search_spaces.trial import Workload

SMALL = Capability(engine="small", knobs=dict.fromkeys(("zero_stage", "micro_batch_size", "activation_checkpointing")))

COMPILES = Capability(
    engine="compiles",
    knobs=dict.fromkeys(("compile_blocks", "activation_checkpointing")),
    combinations=(
        Combination(
            rule="compiled-selective", reads=("compile_blocks", "activation_checkpointing"), problem="both", remedy="one",
            holds=lambda config, _: config.compile_blocks and config.activation_checkpointing == "selective",
        ),
    ),
)  # fmt: skip


def resolve(text: str, model: Any = "llama-tiny", cluster: str = "local", batch: int = 16, **more: Any) -> SearchSpace:
    where = resolve_cluster(cluster, ranks=2) if cluster == "local" else resolve_cluster(cluster)
    shape = resolve_model(model) if isinstance(model, str) else model
    return resolve_space(text, shape, where, Workload(global_batch_size=batch, sequence_length=128), **more)


def test_zero_on_two_ranks() -> None:
    space = resolve("zero", capability=SMALL)
    assert space.domains["micro_batch_size"] == (1, 2, 4, 8)
    assert (space.count(), space.census().refused) == (32, {})


@pytest.mark.parametrize("name", space_preset_names())
@pytest.mark.parametrize("model", ["llama-tiny", "mixtral-8x7b", "gpt2"])
def test_preset_is_not_empty_and_leaves_results_alone(name: str, model: str) -> None:
    space = resolve(name, model)
    assert space.count() > 0
    assert not any(KNOBS[knob].numerics is Numerics.CHANGES for knob in space.domains)


@pytest.mark.prove
def test_presets_grow() -> None:
    counts = {name: resolve(name, "llama-3-8b", "dgx-h100", 128).count() for name in space_preset_names()}
    assert counts["zero"] < counts["3d"] < counts["full"]
    assert counts["zero"] < counts["zero-buckets"] < counts["full"]


@pytest.mark.nightly
def test_full_on_64_devices_is_counted_in_few_steps() -> None:
    census = resolve("full", "llama-3-70b", "dgx-h100:8", 1024, most_steps=700_000).census()
    assert census.legal > 10**9
    assert census.raw == census.legal + sum(census.refused.values()) + census.merged


def test_element_sizes_separate_models_of_any_size() -> None:
    for model in ("llama-tiny", "llama-3-70b"):
        sizes = resolve("zero-buckets", model).domains["reduce_bucket_size"]
        assert len(sizes) >= 2
        assert max(sizes) <= min(resolve_model(model).parameter_count, 10**9)


def test_a_factory_model_is_not_divided() -> None:
    space = resolve("3d", FactoryModel(reference="m:f", parameter_count=1000))
    assert space.count() > 0
    assert all(config.model_parallel_size == 1 for config in space.enumerate())


def test_the_micro_batch_reaches_what_the_fewest_replicas_leave() -> None:
    assert resolve("3d", cluster="dgx-a100", batch=64).domains["micro_batch_size"][-1] == 64
    assert resolve("zero", cluster="dgx-a100", batch=64).domains["micro_batch_size"][-1] == 8


def test_defaults_follow_the_device_and_the_engine() -> None:
    gpus, old, none = resolve_cluster("dgx-a100"), resolve_cluster("dgx-1v"), Capability(engine="none", knobs={})
    assert (device_defaults(gpus).precision, device_defaults(gpus).expandable_segments) == ("bf16", True)
    assert device_defaults(gpus).compile_blocks
    assert not device_defaults(resolve_cluster("local")).compile_blocks
    assert device_defaults(old).precision == "fp32"
    assert device_defaults(resolve_cluster("local")).precision == "fp32"
    assert (device_defaults(gpus, none).precision, device_defaults(gpus, none).compile_blocks) == ("fp32", False)


def test_compiled_blocks_are_a_default_that_gives_way_to_what_excludes_them() -> None:
    base = device_defaults(resolve_cluster("dgx-a100"))
    gpus, local = resolve("3d", cluster="dgx-a100", base=base), resolve("3d", base=device_defaults(resolve_cluster("local")))
    assert (gpus.base.compile_blocks, gpus.domains["compile_blocks"]) == (True, (True, False))
    users = FactoryModel(reference="m:f", parameter_count=1000)
    assert not device_defaults(resolve_cluster("dgx-a100"), model=users).compile_blocks
    assert (local.base.compile_blocks, "compile_blocks" in local.domains) == (False, False)
    selective = gpus.base.replace({"activation_checkpointing": "selective"})
    context = dataclasses.replace(gpus.context, capability=COMPILES)
    assert settled(gpus.base, context).compile_blocks
    assert not settled(selective, context).compile_blocks
    assert settled(selective, context, {"compile_blocks"}).compile_blocks  # asked for: refused, not taken back
    pinned = resolve("3d", cluster="dgx-a100", base=base, pins={"compile_blocks": True})
    assert pinned.domains["compile_blocks"] == (True,)


def test_pins_fix_a_knob_or_give_it_a_domain() -> None:
    pins = parse_pins(["zero_stage=3", " prefetch_bucket_size = 0,1e4 ", "precision=bf16"])
    space = resolve("zero", pins=pins)
    assert space.domains["zero_stage"] == (3,)
    assert space.domains["prefetch_bucket_size"] == (0, 10_000)
    assert {config.precision for config in space.enumerate()} == {"bf16"}
    assert resolve("zero", pins={"zero_stage": 3}).count() == 8
    assert resolve("3d", pins={"micro_batch_size": "divisors"}, batch=12).domains["micro_batch_size"] == (1, 2, 3, 4, 6, 12)


@pytest.mark.parametrize(
    ("texts", "error", "said"),
    [
        (["zero_stage"], SpaceFormatError, "KNOB=VALUE"),
        (["zero_stage="], SpaceFormatError, "KNOB=VALUE"),
        (["=3"], SpaceFormatError, "KNOB=VALUE"),
        (["zero_stage=1", "zero_stage=2"], SpaceFormatError, "zero_stage=1,2"),
        (["zero_stge=1"], UnknownNameError, "zero_stage"),
        (["zero_stage=5"], KnobValueError, "0, 1, 2 or 3"),
        (["reduce_bucket_size=-1"], KnobValueError, "at least 1"),
        (["reduce_bucket_size=1.5"], KnobValueError, "a whole number of elements"),
    ],
)
def test_bad_pins(texts: list[str], error: type[SearchSpaceError], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        parse_pins(texts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pins", "rule"),
    [
        ({"tensor_parallel_size": "3"}, "tensor-divides"),
        ({"micro_batch_size": "5,7"}, "batch-divides"),
        ({"zero_stage": "2", "offload_param": "cpu"}, "offload-param-stage"),
        ({"precision": "fp8"}, "float8-device"),
    ],
)
def test_pins_that_can_never_be_legal(pins: dict[str, str], rule: str) -> None:
    with pytest.raises(IllegalConfigError) as caught:
        resolve("zero", pins=pins)
    assert caught.value.field == rule
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


def test_a_pin_that_the_engine_does_not_honour() -> None:
    with pytest.raises(IllegalConfigError, match="does not honour tensor_parallel_size=2"):
        resolve("zero", pins={"tensor_parallel_size": 2}, capability=SMALL)


def test_a_preset_leaves_out_what_the_engine_does_not_turn() -> None:
    engine = Capability(engine="bucketless", knobs={"zero_stage": (2, 3), "micro_batch_size": None})
    space = resolve("zero-buckets", "llama-3-8b", "dgx-h100", 128, capability=engine)
    assert "reduce_bucket_size" not in space.domains
    assert "overlap_comm" in space.domains  # on is honoured, and off is refused with a reason
    assert (space.base.zero_stage, space.base.precision) == (2, "fp32")
    assert space.count() == 2 * 5


def test_a_file_that_names_what_the_engine_does_not_turn_is_told_so(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('extends = ["zero-buckets"]\n[domains]\nreduce_bucket_size = [1e4]\n')
    space = resolve(str(file), "llama-3-8b", "dgx-h100", 128, capability=SMALL)
    assert space.count() == 0
    assert set(space.census().refused) == {"engine-honours"}


def test_a_pin_that_only_a_combination_refuses_is_told_its_rule() -> None:
    together = Combination(
        rule="no-full-at-3", reads=("zero_stage", "activation_checkpointing"), problem="it forgets", remedy="use none",
        holds=lambda config, _: config.zero_stage == 3 and config.activation_checkpointing == "full",
    )  # fmt: skip
    engine = Capability(engine="small", knobs=SMALL.knobs, combinations=(together,))
    with pytest.raises(IllegalConfigError, match=r"no-full-at-3: with .*, it forgets; use none"):
        resolve("zero", pins={"zero_stage": 3, "activation_checkpointing": "full"}, capability=engine)


def test_an_empty_space_is_no_error_unless_the_pins_made_it() -> None:
    space = resolve("zero", batch=1, pins={"zero_stage": 1})
    assert space.count() == 0
    assert set(space.census().refused) == {"batch-divides"}


def test_a_file_extends_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('extends = ["zero"]\n[domains]\nzero_stage = [2, 3]\nprecision = "bf16"\nreduce_bucket_size = [1e4, 1e5]\n')
    space = resolve(str(file))
    assert space.domains["zero_stage"] == (2, 3)
    assert space.domains["reduce_bucket_size"] == (10_000, 100_000)
    assert space.count() == 2 * 4 * 2 * 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[domains]\nzero_stge = [1]\n", "zero_stge"),
        ("[domains]\nzero_stage = [7]\n", "zero_stage"),
        ("[domains]\nzero_stage = []\n", "zero_stage"),
        ('[domains]\nreduce_bucket_size = "powers_of_two"\n', "reduce_bucket_size"),
        ('[domains]\nreduce_bucket_size = "huge"\n', "not an expression"),
        ('[domains]\nreduce_bucket_size = "all"\n', "cannot all be listed"),
        ('extends = ["zeros"]\n', "extends"),
        ('extends = "zero"\n', "extends"),
        ("domains = 3\n", "domains"),
        ("zero_stage = [1]\n", "is not a key"),
        ("zero_stage = \n", "not TOML"),
    ],
)
def test_a_bad_file_is_named_with_the_knob(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(content)
    with pytest.raises(SpaceFormatError, match=said) as caught:
        resolve(str(file))
    assert "mine.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_space_is_told_from_a_missing_file() -> None:
    with pytest.raises(UnknownNameError, match="zero-buckets"):
        resolve("zero-bucket")
    with pytest.raises(SpaceFormatError, match="no such file"):
        resolve("nowhere.toml")
