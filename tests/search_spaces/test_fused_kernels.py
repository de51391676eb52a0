"""Where fused kernels run, what of a model they take the place of, and what a space makes of that."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from search_spaces.canonical import canonical
from search_spaces.capability import SpaceContext
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.presets import local_cluster, read_cluster_file, resolve_cluster
from search_spaces.errors import ClusterFormatError
from search_spaces.kernels import PACKAGES, package_problem, replaced
from search_spaces.models.huggingface import resolve_model
from search_spaces.plain import from_plain, to_plain
from search_spaces.rules.table import check_config
from search_spaces.spaces import resolve_space
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

LLAMA, GPT2 = resolve_model("llama-tiny"), resolve_model("gpt2-medium")
WORK = Workload(global_batch_size=32, sequence_length=128)
BOTH = {"liger_kernel": "0.8.5", "transformer_engine": "2.8.0+abc"}
Make = Callable[..., SpaceContext]


def gpus(packages: dict[str, str] | None) -> ClusterSpec:
    return dataclasses.replace(resolve_cluster("dgx-a100:1"), kernel_packages=packages)


@pytest.mark.parametrize(
    ("name", "version", "known"),
    [
        ("liger", "0.8.0", True), ("liger", "0.8.5.post1", True), ("liger", "0.7.0", False), ("liger", "0.9.0", False),
        ("transformer_engine", "2.21.0.dev0+ab", True), ("transformer_engine", "1.13.0", False),
        ("transformer_engine", "3.0", False), ("transformer_engine", "unknown", False),
    ],
)  # fmt: skip
def test_releases_whose_source_was_read_are_known(name: str, version: str, known: bool) -> None:
    problem = package_problem(name, {PACKAGES[name].module: version})
    assert (problem is None) is known
    assert known or f"{version} is not a supported release (pip install '{PACKAGES[name].requirement}')" in str(problem)


def test_what_is_not_installed_says_how_to_have_it() -> None:
    assert package_problem("liger", {}) == "liger-kernel is not installed (pip install 'liger-kernel>=0.8,<0.9')"
    assert package_problem("liger", None) is None, "of a cluster of which nothing is known its ranks tell"
    assert package_problem("none", {}) is None


@pytest.mark.parametrize(
    ("packages", "searched"),
    [
        (None, ("none",)),
        ({}, ("none",)),
        ({"liger_kernel": "0.8.5"}, ("none", "liger")),
        ({"liger_kernel": "0.9.0", "transformer_engine": "2.8.0"}, ("none", "transformer_engine")),
        (BOTH, ("none", "liger", "transformer_engine")),
    ],
)
def test_a_space_searches_kernels_that_are_known_to_run(packages: Any, searched: tuple[str, ...]) -> None:
    assert resolve_space("full", LLAMA, gpus(packages), WORK).domains["fused_kernels"] == searched


def test_on_cpus_none_is_searched() -> None:
    assert resolve_space("full", LLAMA, resolve_cluster("local", ranks=2), WORK).domains["fused_kernels"] == ("none",)


def test_what_is_asked_for_is_searched_where_nothing_is_known() -> None:
    space = resolve_space("zero", LLAMA, gpus(None), WORK, pins={"fused_kernels": "none,liger"})
    assert space.domains["fused_kernels"] == ("none", "liger")


@pytest.mark.parametrize(
    ("kernels", "model", "tensor", "pieces"),
    [
        ("none", LLAMA, 1, 0), ("liger", LLAMA, 1, 4), ("liger", LLAMA, 2, 3), ("liger", GPT2, 1, 1), ("liger", GPT2, 2, 0),
        ("transformer_engine", GPT2, 2, 1), ("liger", dataclasses.replace(LLAMA, rotary_fraction=0.5, activation="gelu"), 2, 1),
    ],
)  # fmt: skip
def test_kernels_take_the_place_of_what_the_model_has(kernels: str, model: Any, tensor: int, pieces: int) -> None:
    assert len(replaced(kernels, model, tensor)) == pieces


def test_kernels_that_replace_nothing_are_none(make_context: Make) -> None:
    divided = TrialConfig(fused_kernels="liger", tensor_parallel_size=2)
    assert canonical(divided, make_context(model=GPT2)).fused_kernels == "none"
    assert canonical(divided, make_context(model=LLAMA)) == divided


def test_where_a_kernel_makes_the_loss_tokens_at_once_are_its_own_affair(make_context: Make) -> None:
    chunked = TrialConfig(fused_kernels="liger", loss_chunk_size=64)
    assert canonical(chunked, make_context(model=LLAMA)).loss_chunk_size == 0
    for others in ({"fused_kernels": "transformer_engine"}, {"fused_kernels": "none"}, {"tensor_parallel_size": 2}):
        assert canonical(chunked.replace(others), make_context(model=LLAMA)).loss_chunk_size == 64


def test_precisions_that_kernels_do_not_compute_in(make_context: Make) -> None:
    place = make_context(cluster=gpus(BOTH))

    def refused(kernels: str, precision: str) -> list[str]:
        return [refusal.rule for refusal in check_config(TrialConfig(fused_kernels=kernels, precision=precision), place)]

    for precision in ("fp32", "bf16"):
        assert refused("liger", precision) == refused("transformer_engine", precision) == []
    assert refused("liger", "fp16") == refused("liger", "fp64") == ["fused-kernels-precision"]
    assert refused("transformer_engine", "fp16") == []


def test_a_cluster_file_says_what_its_nodes_have(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    text = (
        'device = "a100-80gb"\ndevices_per_node = 8\nintra_node_bandwidth = 3e11\ninter_node_bandwidth = 2e11\n'
        "host_memory_bytes = 1000000000000\ncores_per_node = 64\n"
    )
    file.write_text(text, encoding="utf-8")
    unsaid = read_cluster_file(file)
    file.write_text(f'{text}kernel_packages = {{ liger_kernel = "0.8.5" }}\n', encoding="utf-8")
    said = read_cluster_file(file)
    assert (unsaid.kernel_packages, said.kernel_packages) == (None, {"liger_kernel": "0.8.5"})
    assert from_plain(ClusterSpec, to_plain(said)) == said
    file.write_text(f'{text}kernel_packages = {{ flash_attn = "2" }}\n', encoding="utf-8")
    with pytest.raises(
        ClusterFormatError, match=r"kernel_packages: .*flash_attn.* with any of liger_kernel, transformer_engine"
    ):
        read_cluster_file(file)


def test_this_machine_is_asked_where_it_has_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("search_spaces.clusters.presets.installed_kernels", lambda: BOTH)
    assert local_cluster(1).kernel_packages is None
    assert local_cluster(1, None, "NVIDIA H100 80GB HBM3", 1, 80 * 2**30).kernel_packages == BOTH


def test_what_is_installed_tells_spaces_apart(make_space: Callable[..., Any]) -> None:
    hashes = {make_space({}, cluster=gpus(packages)).hash for packages in (None, {}, {"liger_kernel": "0.8.5"}, BOTH)}
    assert len(hashes) == 4
