"""Variables of processes: which are allowed, how they are written, where they act."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.capability import Capability
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.environment import VARIABLES, environment_problem, environment_text, merged, standard_settings, variables_of
from search_spaces.errors import KnobValueError, SearchSpaceError
from search_spaces.knob_values import check_value, parse_value
from search_spaces.models.huggingface import resolve_model
from search_spaces.space import SearchSpace, parse_domain
from search_spaces.spaces import parse_pins, resolve_space
from search_spaces.trial import Workload

GOOD = (
    "NCCL_ALGO=Ring", "NCCL_ALGO=^Tree", "NCCL_ALGO=Ring,Tree", "NCCL_ALGO=allreduce:tree;allgather:ring,pat",
    "NCCL_ALGO=^nvls",
    "NCCL_PROTO=Simple", "NCCL_PROTO=^LL128", "NCCL_PROTO=LL,Simple", "NCCL_NVLS_ENABLE=0", "NCCL_BUFFSIZE=8388608",
    "NCCL_MAX_NCHANNELS=16", "NCCL_NTHREADS=256", "CUDA_DEVICE_MAX_CONNECTIONS=1", "OMP_WAIT_POLICY=PASSIVE",
    "GOMP_SPINCOUNT=0", "MALLOC_ARENA_MAX=1", "MALLOC_TRIM_THRESHOLD_=1099511627776",
)  # fmt: skip
HOSTILE = (
    "LD_PRELOAD=/tmp/x.so", "LD_LIBRARY_PATH=/tmp", "PYTHONPATH=/tmp", "PYTHONSTARTUP=/tmp/x.py", "PATH=/tmp", "HOME=/tmp",
    "NCCL_NET_PLUGIN=/tmp/x.so", "NCCL_TUNER_PLUGIN=x", "NCCL_PROFILER_PLUGIN=x", "NCCL_CONF_FILE=/tmp/x",
    "NCCL_TOPO_DUMP_FILE=/etc/passwd", "NCCL_DEBUG_FILE=/etc/passwd", "OMP_TOOL_LIBRARIES=/tmp/x.so", "GLIBC_TUNABLES=x",
    "CUDA_VISIBLE_DEVICES=0", "OMP_NUM_THREADS=64", "CUDA_INJECTION64_PATH=/tmp/x.so", "AUTOTUNE_REPORT=/etc/passwd",
    "nccl_algo=Ring", "=Ring", "NCCL_ALGO", "NCCL_ALGO=", "NCCL_ALGO=Ring;", "NCCL_ALGO=;Ring", "NCCL_ALGO=Ring$(id)",
    "NCCL_ALGO=`id`", "NCCL_ALGO=Ring'x'", "NCCL_ALGO=Ring|sh", "NCCL_ALGO=Bogus", "NCCL_PROTO=LL128", "NCCL_PROTO=LL,LL128",
    "NCCL_BUFFSIZE=0x100000", "NCCL_BUFFSIZE=-1", "NCCL_BUFFSIZE=1", "NCCL_BUFFSIZE=99999999999999999999", "NCCL_NTHREADS=65",
    "NCCL_NVLS_ENABLE=3", "MALLOC_ARENA_MAX=01", "MALLOC_ARENA_MAX=1e3", "MALLOC_ARENA_MAX=1٣", "NCCL_PROTO=ſimple",
    "OMP_WAIT_POLICY=passive\x00",
    "OMP_WAIT_POLICY=active,passive", "MALLOC_ARENA_MAX=1 MALLOC_ARENA_MAX=2", "A" * 10_000,
)  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_what_libraries_document_is_allowed(text: str) -> None:
    assert check_value("environment", text) == text
    assert parse_domain("environment", text) == (text,)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:40].encode("unicode_escape").decode())
def test_all_else_is_refused_in_one_line(text: str) -> None:
    for read in (variables_of, lambda text: check_value("environment", text), lambda text: parse_value("environment", text)):
        with pytest.raises(KnobValueError, match=r"^environment: ") as caught:
            read(text)
        assert "; " in str(caught.value) and "\n" not in str(caught.value)
    assert environment_problem(text, "cuda") is not None


@given(st.text())
def test_no_text_reaches_a_process_but_by_the_list(text: str) -> None:
    try:
        found = variables_of(text)
    except KnobValueError:
        return
    assert set(found) <= set(VARIABLES)
    assert all(value.isascii() and value.isprintable() and " " not in value for value in found.values())


@given(st.permutations(["NCCL_ALGO=Ring", "MALLOC_ARENA_MAX=1", "NCCL_PROTO=Simple"]))
def test_one_spelling_for_any_order(words: list[str]) -> None:
    assert environment_text("  ".join(words)) == "MALLOC_ARENA_MAX=1 NCCL_ALGO=Ring NCCL_PROTO=Simple"


def test_a_setting_replaces_what_the_base_has_of_it() -> None:
    assert merged("NCCL_ALGO=Ring NCCL_PROTO=LL", "NCCL_PROTO=Simple") == "NCCL_ALGO=Ring NCCL_PROTO=Simple"
    assert merged("", "NCCL_ALGO=Ring") == "NCCL_ALGO=Ring"


@pytest.mark.parametrize(("device", "nodes"), [("cpu", 1), ("cpu", 3), ("cuda", 1), ("cuda", 4)])
def test_standard_settings_are_allowed_where_they_are_chosen_for(device: str, nodes: int) -> None:
    settings = standard_settings(device, nodes)
    assert len({environment_text(text) for text in settings}) == len(settings) <= 4
    assert [environment_problem(text, device) for text in settings] == [None] * len(settings)


WORK = Workload(global_batch_size=8, sequence_length=32)


def space(pins: dict[str, object], cluster: str = "local", capability: Capability | None = None) -> SearchSpace:
    return resolve_space("zero", resolve_model("llama-tiny"), resolve_cluster(cluster, ranks=2), WORK, capability, pins)


def test_one_value_can_be_pinned_and_several_are_not_searched() -> None:
    pins = parse_pins(["environment=OMP_WAIT_POLICY=passive MALLOC_ARENA_MAX=1"])
    pinned = space(dict(pins))
    assert pinned.domains["environment"] == ("MALLOC_ARENA_MAX=1 OMP_WAIT_POLICY=passive",)
    assert {config.environment for config in pinned.enumerate()} == set(pinned.domains["environment"])
    with pytest.raises(KnobValueError, match=r"environment: 2 values would start processes anew .*; .*environment_settings"):
        space({"environment": ["", "MALLOC_ARENA_MAX=1"]})


def test_a_variable_of_another_device_is_refused_by_its_rule() -> None:
    with pytest.raises(SearchSpaceError, match=r"environment-variables: .*NCCL_PROTO acts on cuda devices, and ranks have cpu"):
        space({"environment": "NCCL_PROTO=Simple"})
