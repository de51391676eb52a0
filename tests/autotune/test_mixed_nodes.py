"""A job on nodes that differ: what its trials ask for, and what its answer says of each rank."""

import json
from pathlib import Path

import exported

from autotune.request.rows import request_from_row, request_to_row
from autotune.session.placement import launch_of
from autotune.session.trial_requests import trial_request
from search_spaces.trial_config import TrialConfig

MIXED = """
name = "mixed"
devices_per_node = 4
intra_node_bandwidth = 3e11
inter_node_bandwidth = 5e10
host_memory_bytes = 1e12
cores_per_node = 64
[[nodes]]
count = 1
device = "h100"
ray_resource = "accelerator_type:H100"
[[nodes]]
count = 1
device = "a100-40gb"
ray_resource = "accelerator_type:A100-40G"
"""
CONFIG = TrialConfig(precision="bf16", pipeline_parallel_size=2, tensor_parallel_size=4, pipeline_layout="24-8")


def test_trials_and_answers_know_what_each_rank_runs_on(tmp_path: Path) -> None:
    (tmp_path / "mixed.toml").write_text(MIXED)
    session = exported.large(cluster=str(tmp_path / "mixed.toml"))
    asked = trial_request(session, "attempt", CONFIG, ())
    assert asked.node_kinds == (("accelerator_type:H100", 4), ("accelerator_type:A100-40G", 4))
    ranks = launch_of(CONFIG, session)["placement"]["ranks"]
    assert [rank["device"] for rank in ranks] == ["h100"] * 4 + ["a100-40gb"] * 4
    assert [len(rank["stages"][0]["layers"]) for rank in ranks] == [24] * 4 + [8] * 4
    stored = json.loads(json.dumps(request_to_row(session.request)))
    assert request_from_row(stored).resolved_cluster == session.cluster


def test_nodes_that_are_alike_say_nothing_of_devices() -> None:
    session = exported.large()
    assert trial_request(session, "attempt", CONFIG, ()).node_kinds == ()
    assert all("device" not in rank for rank in launch_of(CONFIG, session)["placement"]["ranks"])
