"""The space: counting, listing, drawing and moving agree with brute force on small domains."""

import dataclasses
import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import search_spaces
from search_spaces.capability import Capability, Combination
from search_spaces.errors import KnobValueError, SpaceTooLargeError, UnknownNameError
from search_spaces.lattice import POSITION
from search_spaces.models.huggingface import resolve_model
from search_spaces.plain import from_plain, to_plain
from search_spaces.rules.table import check_config, rules_of
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig, stable_hash

MakeSpace = Callable[..., SearchSpace]

VALUES: dict[str, tuple[Any, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "micro_batch_size": (1, 2, 3, 4, 8),
    "tensor_parallel_size": (1, 2, 3, 4, 8),
    "pipeline_parallel_size": (1, 2, 4, 8),
    "context_parallel_size": (1, 2),
    "pipeline_schedule": ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"),
    "virtual_stages": (1, 2, 4),
    "pipeline_split": ("even", "balanced"),
    "pipeline_layout": ("", "1-3", "1f-3", "2o-2", "1-1-1f-1", "30-2"),
    "reshard_after_forward": (False, True),
    "sequence_parallel": (False, True),
    "expert_parallel_size": (1, 2, 8),
    "hsdp_shard_size": (0, 2, 4, 8),
    "offload_optimizer": ("none", "cpu"),
    "offload_ratio": (0.5, 1.0),
    "offload_param": ("none", "cpu"),
    "prefetch_bucket_size": (0, 10_000, 10**9, 2 * 10**9),
    "reduce_bucket_size": (1, 10**9, 2 * 10**9),
    "defer_gradient_reduction": (False, True),
    "activation_checkpointing": ("none", "full"),
    "checkpoint_every_k": (1, 2, 8),
    "rank_order": ("tp-cp-dp-pp", "tp-cp-pp-dp"),
    "precision": ("fp32", "bf16", "fp16"),
    "expandable_segments": (False, True),
}
# One that reads far apart, one that asks for the ranks.
COMBINATIONS = (
    Combination(
        rule="no-late-gathers",
        reads=("pipeline_parallel_size", "pipeline_schedule", "zero_stage", "reshard_after_forward"),
        problem="gathered too late",
        remedy="gather earlier",
        holds=lambda config, _: (
            config.zero_stage == 3
            and config.reshard_after_forward
            and config.pipeline_parallel_size > 1
            and config.pipeline_schedule in ("interleaved_zero_bubble", "zbv")
        ),
    ),
    Combination(
        rule="no-offload-in-groups",
        reads=("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "offload_optimizer", "precision"),
        problem="offloaded twice",
        remedy="offload once",
        holds=lambda config, world: (
            config.zero_ranks(world) > 1 and config.offload_optimizer == "cpu" and config.precision == "bf16"
        ),
    ),
)
CAPABILITIES = (
    None,
    Capability(engine="picky", knobs=dict.fromkeys(VALUES), combinations=COMBINATIONS),
    Capability(engine="all", knobs=dict.fromkeys(VALUES)),
    Capability(engine="small", knobs={"zero_stage": (0, 2, 3), "micro_batch_size": None, "reduce_bucket_size": None}),
)


@st.composite
def spaces(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of `make_space`: a few knobs with a few values each, so that brute force can follow."""
    names = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=5, unique=True))
    some = {name: st.lists(st.sampled_from(VALUES[name]), min_size=1, max_size=4, unique=True) for name in names}
    domains = {name: tuple(draw(values)) for name, values in some.items()}
    fixed = draw(st.dictionaries(st.sampled_from(sorted(set(VALUES) - {"reduce_bucket_size"})), st.integers(0, 10), max_size=3))
    base = TrialConfig().replace({name: VALUES[name][index % len(VALUES[name])] for name, index in fixed.items()})
    return {
        "domains": domains,
        "base": base,
        "model": draw(st.sampled_from(["llama-tiny", "mixtral-8x7b"])),
        "cluster": draw(st.sampled_from(["dgx-a100", "dgx-1v:2", "local"])),
        "batch": draw(st.sampled_from([8, 24, 64])),
        "capability": draw(st.sampled_from(CAPABILITIES)),
    }


def raw(space: SearchSpace) -> Iterator[TrialConfig]:
    for values in itertools.product(*space.domains.values()):
        yield space.base.replace(dict(zip(space.domains, values, strict=True)))


def first_refusal(space: SearchSpace, config: TrialConfig) -> str | None:
    """The rule that refuses first while the configuration is built: the one whose last knob comes first."""

    def completed_at(rule: str) -> int:
        if rule == "engine-honours":
            assert space.capability
            return min(POSITION[name] for name, value in config.values().items() if not space.capability.honours(name, value))
        return max(POSITION[name] for name in by_name[rule].reads)

    by_name = {rule.name: rule for rule in rules_of(space.capability)}
    rules = [refusal.rule for refusal in check_config(config, space.context)]
    order = list(by_name)
    return min(rules, key=lambda rule: (completed_at(rule), rule != "engine-honours", order.index(rule)), default=None)


@pytest.mark.prove
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keywords=spaces())
def test_counts_and_lists_as_brute_force_does(make_space: MakeSpace, keywords: dict[str, Any]) -> None:
    space = make_space(**keywords)
    is_empty = space.is_empty()  # asked first: it must not depend on what was counted before
    points = list(raw(space))
    distinct = {space.canonical(point) for point in points}
    verdicts = Counter(first_refusal(space, config) for config in distinct)
    legal = verdicts.pop(None, 0)
    listed, census = list(space.enumerate()), space.census()
    assert set(listed) == {config for config in distinct if not space.check(config)}
    assert len(listed) == legal == space.count()
    assert is_empty == (legal == 0)
    assert (census.raw, census.legal, census.merged) == (len(points), legal, len(points) - len(distinct))
    assert census.refused == dict(verdicts)
    assert census.raw == census.legal + sum(census.refused.values()) + census.merged


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keywords=spaces(), seed=st.integers(0, 1000))
def test_drawn_and_moved_configurations_are_in_the_space(make_space: MakeSpace, keywords: dict[str, Any], seed: int) -> None:
    space = make_space(**keywords)
    if not space.count():
        with pytest.raises(LookupError):
            space.sample(random.Random(seed))
        return
    config = space.sample(random.Random(seed))
    assert config == space.sample(random.Random(seed))
    assert config in space
    moves = space.neighbours(config)
    assert len(set(moves)) == len(moves)
    assert config not in moves
    assert all(move in space for move in moves)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keywords=spaces())
def test_canonical_is_idempotent(make_space: MakeSpace, keywords: dict[str, Any]) -> None:
    space = make_space(**keywords)
    for config in itertools.islice(raw(space), 20):
        assert space.canonical(space.canonical(config)) == space.canonical(config)


@pytest.mark.prove
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keywords=spaces())
def test_each_refused_rule_has_an_example(make_space: MakeSpace, keywords: dict[str, Any]) -> None:
    space = make_space(**keywords)
    for rule in space.census().refused:
        example = space.refused_example(rule)
        assert example is not None
        assert rule in {refusal.rule for refusal in space.check(example)}
    assert space.refused_example("no-such-rule") is None


def test_neighbours_lead_back_where_no_knob_loses_its_meaning(make_space: MakeSpace) -> None:
    space = make_space({"zero_stage": (0, 1, 2), "micro_batch_size": (1, 2, 4), "overlap_comm": (False, True)})
    for config in space.enumerate():
        assert all(config in space.neighbours(move) for move in space.neighbours(config))


def test_a_knob_that_comes_to_matter_takes_the_nearest_value(make_space: MakeSpace) -> None:
    space = make_space({"zero_stage": (0, 3), "prefetch_bucket_size": (0, 10_000)})
    (move,) = space.neighbours(space.canonical(TrialConfig()))
    assert (move.zero_stage, move.prefetch_bucket_size) == (3, 10_000)


def test_equal_behaviour_has_one_hash(make_space: MakeSpace) -> None:
    space = make_space({})
    count = space.model.parameter_count
    one_micro_batch = TrialConfig(zero_stage=2, micro_batch_size=4)
    same = [
        (TrialConfig(prefetch_bucket_size=0), TrialConfig()),
        (TrialConfig(reduce_bucket_size=count), TrialConfig(reduce_bucket_size=10**9)),
        (TrialConfig(sequence_parallel=True), TrialConfig()),
        (TrialConfig(zero_stage=3, hsdp_shard_size=8), TrialConfig(zero_stage=3)),
        (
            TrialConfig(zero_stage=3, hsdp_shard_size=8, context_parallel_size=4),
            TrialConfig(zero_stage=3, context_parallel_size=4),
        ),
        (TrialConfig(pipeline_parallel_size=4, pipeline_split="even"), TrialConfig(pipeline_parallel_size=4)),
        (TrialConfig(pipeline_parallel_size=4, pipeline_layout="1-1-1-1"), TrialConfig(pipeline_parallel_size=4)),
        (TrialConfig(pipeline_layout="1-3"), TrialConfig()),
        (
            TrialConfig(pipeline_parallel_size=2, pipeline_layout="1f-3", activation_checkpointing="selective"),
            TrialConfig(pipeline_parallel_size=2, pipeline_layout="1f-3", pipeline_split="even"),
        ),
        (one_micro_batch.replace({"defer_gradient_reduction": True}), one_micro_batch),
        (TrialConfig(checkpoint_every_k=2), TrialConfig()),
        (TrialConfig(zero_stage=3, secondary_shard_size=8), TrialConfig(zero_stage=3)),
        (TrialConfig(zero_stage=2, secondary_shard_size=2, gather_dtype="int8"), TrialConfig(zero_stage=2)),
        (
            TrialConfig(zero_stage=3, secondary_shard_size=2, reshard_after_forward=False),
            TrialConfig(zero_stage=3, reshard_after_forward=False),
        ),
        (
            TrialConfig(zero_stage=3, hsdp_shard_size=2, secondary_shard_size=2),
            TrialConfig(zero_stage=3, hsdp_shard_size=2),
        ),
        (TrialConfig(tensor_parallel_size=8, reduce_dtype="int8"), TrialConfig(tensor_parallel_size=8)),
        (
            TrialConfig(zero_stage=3, hsdp_shard_size=1, gather_dtype="int8"),
            TrialConfig(zero_stage=3, hsdp_shard_size=1),
        ),
        (TrialConfig(onebit_warmup_steps=7), TrialConfig()),
    ]
    for one, other in same:
        assert space.canonical(one).hash == space.canonical(other).hash
    assert space.canonical(TrialConfig(zero_stage=3, prefetch_bucket_size=0)) != space.canonical(TrialConfig(zero_stage=3))
    groups = TrialConfig(zero_stage=3, hsdp_shard_size=2, context_parallel_size=4)
    assert space.canonical(groups).hsdp_shard_size == 2


def test_on_cpus_the_flash_kernel_is_what_torch_chooses(make_space: MakeSpace) -> None:
    flash = TrialConfig(attention_backend="flash")
    assert make_space({}, cluster="local").canonical(flash) == TrialConfig()
    assert make_space({}, cluster="dgx-a100:1").canonical(flash) == flash


def test_an_engine_that_honours_no_bucket_still_trains_small_models(make_space: MakeSpace) -> None:
    space = make_space({"zero_stage": (0, 1)}, capability=Capability(engine="small", knobs={"zero_stage": None}))
    assert space.count() == 2
    assert space.canonical(TrialConfig()) == TrialConfig()


def test_sizes_are_clipped_at_the_parameter_count(make_space: MakeSpace) -> None:
    space = make_space({}, model="llama-2-7b", batch=8)
    count = space.model.parameter_count
    assert space.canonical(TrialConfig(reduce_bucket_size=count + 1)).reduce_bucket_size == count
    assert space.canonical(TrialConfig(reduce_bucket_size=count - 1)).reduce_bucket_size == count - 1


def test_counting_stops_after_the_steps_that_it_may_take(make_space: MakeSpace) -> None:
    space = dataclasses.replace(make_space(VALUES), most_steps=1000)
    assert not space.is_empty()
    with pytest.raises(SpaceTooLargeError, match="space: it takes more than 1,000 steps to count; pin some knobs"):
        space.count()
    assert space == make_space(VALUES)
    assert space.hash == make_space(VALUES).hash


def test_more_stages_than_layers_are_judged_without_a_list_of_them(make_space: MakeSpace) -> None:
    space = make_space({})
    config = TrialConfig(pipeline_parallel_size=2**53, virtual_stages=2, pipeline_split="even")
    assert "pipeline-layers" in {refusal.rule for refusal in space.check(config)}


def test_sampling_is_uniform(make_space: MakeSpace) -> None:
    space = make_space({"zero_stage": (0, 1, 2, 3), "prefetch_bucket_size": (0, 10, 100), "micro_batch_size": (1, 3)})
    rng = random.Random(0)
    drawn = Counter(space.sample(rng) for _ in range(1200))
    assert set(drawn) == set(space.enumerate())
    assert len(drawn) == 6
    assert all(140 < times < 260 for times in drawn.values())


def test_enumeration_is_lazy_and_ordered(make_space: MakeSpace) -> None:
    domains = {name: values for name, values in VALUES.items() if name != "tensor_parallel_size"}
    space = make_space(domains)
    assert space.count() > 10_000
    assert list(itertools.islice(space.enumerate(), 5)) == list(itertools.islice(make_space(domains).enumerate(), 5))


def test_membership(make_space: MakeSpace) -> None:
    space = make_space({"zero_stage": (0, 3), "micro_batch_size": (1, 3)})
    inside = space.canonical(TrialConfig(zero_stage=3))
    assert inside in space
    assert inside.replace({"zero_stage": 1}) not in space
    assert inside.replace({"micro_batch_size": 3}) not in space
    assert inside.replace({"reduce_bucket_size": 10**9}) not in space
    assert "zero_stage=3" not in space


def test_bad_domains_are_refused(make_space: MakeSpace) -> None:
    for domains in ({"zero_stage": (4,)}, {"zero_stage": ()}, {"reduce_bucket_size": (0,)}):
        with pytest.raises(KnobValueError):
            make_space(domains)
    with pytest.raises(UnknownNameError):
        make_space({"zero_stge": (1,)})


def test_hash_tells_spaces_apart_but_not_spellings(make_space: MakeSpace) -> None:
    space = make_space({"zero_stage": (0, 1), "micro_batch_size": (1, 2)})
    assert space.hash == make_space({"micro_batch_size": (1.0, 2, 2), "zero_stage": (0, 1)}).hash
    assert len({space.hash, make_space({}).hash, make_space({}, batch=64).hash, make_space({}, model="gpt2").hash}) == 4


HASHES = """
import json, random, sys
from search_spaces.spaces import resolve_space
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial import Workload
work = Workload(global_batch_size=64, sequence_length=128)
space = resolve_space("full", resolve_model("mixtral-8x7b"), resolve_cluster("dgx-h100:2"), work)
config = space.sample(random.Random(7))
print(json.dumps([space.hash, space.count(), config.hash, [move.hash for move in space.neighbours(config)]]))
"""


def test_a_field_of_models_that_came_later_leaves_the_hash_of_models_without_it(make_space: MakeSpace) -> None:
    model = resolve_model("mixtral-8x7b")
    plain, capped = make_space({}, model=model), make_space({}, model=dataclasses.replace(model, capacity_factor=1.0))
    assert plain.hash != capped.hash
    later = {
        "capacity_factor",
        "load_balance",
        "adapter_size",
        "prefix_length",
        "prompt_length",
        "mtp_layers",
        "mtp_loss_weight",
    }
    place = to_plain(dataclasses.replace(plain.context, capability=None))
    for name in ("groups", "kernel_packages", "link_domain_size"):
        del place["cluster"][name]
    place["model"] = {name: value for name, value in place["model"].items() if name not in later}
    assert plain.hash == stable_hash([place, None, to_plain(plain.domains), to_plain(plain.base)])


@pytest.mark.nightly
def test_hashes_and_draws_are_the_same_in_every_process() -> None:
    root = Path(search_spaces.__file__).parents[1]
    told = [
        subprocess.run(
            [sys.executable, "-c", HASHES], env={"PYTHONHASHSEED": seed}, cwd=root, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert json.loads(told[0])[1] > 0


def test_configurations_survive_plain_data(make_space: MakeSpace) -> None:
    space = make_space({name: VALUES[name] for name in ("zero_stage", "offload_ratio", "precision")})
    for config in space.enumerate():
        again = from_plain(TrialConfig, json.loads(json.dumps(to_plain(config))))
        assert (again, again.hash) == (config, config.hash)
