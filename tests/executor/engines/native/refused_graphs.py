"""What CUDA graphs are refused beside, by what stands for their capture on CPUs: each is wrong there, or fails."""

from collections.abc import Callable, Mapping
from unittest.mock import patch

import pytest
import torch
from refused_case import SCHEDULES, case, refused_alone

from benchmarks.common.gang import Gang
from benchmarks.common.static_buffers import ContractBreachError, StaticBuffers
from executor.parallel.activation_offload import LEAST_BYTES, ActivationOffload
from executor.parallel.checkpointing import checkpoint_blocks
from executor.parallel.collectives import ProcessGroup
from executor.parallel.graphs import BlockGraphs, compile_blocks, forget_compiled
from search_spaces.knob import Value
from search_spaces.trial_config import TrialConfig

GRAPHED: dict[str, Value] = {"cuda_graphs": True, "micro_batch_size": 4}


def replayed(*blocks: torch.nn.Module) -> BlockGraphs:
    """Blocks that are captured by what stands for CUDA graphs here."""
    graphs = BlockGraphs(blocks, StaticBuffers())
    passed(graphs)
    graphs.capture()
    return graphs


def passed(graphs: BlockGraphs, rows: int = 2) -> torch.Tensor:
    x = torch.ones(1, rows, 4, requires_grad=True)
    for block in graphs.blocks:
        x = block(x)
    x.sum().backward()
    return x


def graphs_read_parameters_where_they_were(_: Gang, rule: str) -> None:
    refused_alone(rule, case("native", {**GRAPHED, "zero_stage": 3}))
    graphs = replayed(block := torch.nn.Linear(4, 4))
    whole, storage = block.weight.detach().clone(), block.weight.untyped_storage()
    storage.resize_(0)  # as the gatherer releases it, and what comes meanwhile takes the place
    others = [torch.empty_like(whole) for _ in range(8)]
    storage.resize_(whole.nbytes)
    block.weight.detach().copy_(whole)
    assert len(others) == 8
    with pytest.raises(ContractBreachError, match="moved"):
        passed(graphs)


def collectives_in_graphs_are_not_counted(_: Gang, rule: str) -> None:
    for name in ("tensor_parallel_size", "context_parallel_size"):
        refused_alone(rule, case("native", {**GRAPHED, name: 2}))
    group = ProcessGroup(None, 2, 0)

    class Sums(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = super().forward(x)
            group.all_reduce(result.detach()).wait()
            return result

    with patch.object(torch.distributed, "all_reduce", return_value=None):
        graphs = replayed(Sums(4, 4))
        sent = group.sent["all_reduce"]
        passed(graphs)
    assert group.sent["all_reduce"] == sent, "replays tell what they send now: let tensor ranks replay"


def graphs_hold_one_micro_batch(_: Gang, rule: str) -> None:
    refused_alone(rule, case("native", {**GRAPHED, "pipeline_parallel_size": 2}))
    graphs = replayed(torch.nn.Linear(4, 4))
    (block,) = graphs.blocks
    waits = block(torch.ones(1, 2, 4, requires_grad=True))
    with pytest.raises(ContractBreachError, match="still needs"):
        passed(graphs)
    waits.sum().backward()


def graphs_compute_nothing_again(_: Gang, rule: str) -> None:
    refused_alone(rule, case("native", {**GRAPHED, "activation_checkpointing": "full"}))
    runs = []

    class Told(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return super().forward(x)

    block = Told(4, 4)
    checkpoint_blocks([block], TrialConfig(activation_checkpointing="full"))
    graphs = BlockGraphs([block], StaticBuffers())
    passed(graphs)
    assert len(runs) == 2
    graphs.capture()
    captured = len(runs)
    passed(graphs)
    assert len(runs) == captured, "a replay runs blocks again now: let it"


def graphs_offload_nothing(_: Gang, rule: str) -> None:
    refused_alone(rule, case("native", {**GRAPHED, "offload_activations": True}))
    block, offload = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), ActivationOffload(torch.device("cpu"))
    offload.attach([block], keeps_last=False)
    graphs = BlockGraphs([block], StaticBuffers())
    with patch.object(offload, "take", wraps=offload.take) as taken:
        passed(graphs, rows=LEAST_BYTES)
        assert taken.call_count
        graphs.capture()
        captured = taken.call_count
        passed(graphs, rows=LEAST_BYTES)
    assert taken.call_count == captured, "replays offload now: let them"


def graphs_of_compiled_blocks_fail(_: Gang, rule: str) -> None:
    refused_alone(rule, case("native", {**GRAPHED, "compile_blocks": True}))
    block = torch.nn.Linear(4, 4)
    compile_blocks([block])
    with pytest.raises(RuntimeError):
        replayed(block)
    forget_compiled()


def graphs_have_one_shape(_: Gang, rule: str) -> None:
    for schedule in SCHEDULES:
        refused_alone(rule, case("native", {**GRAPHED, **schedule}))
    graphs = replayed(torch.nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="captured for another input"):
        passed(graphs, rows=1)


GRAPH_PROOFS: Mapping[str, Callable[[Gang, str], None]] = {
    "graphs-stage-3": graphs_read_parameters_where_they_were,
    "graphs-collectives": collectives_in_graphs_are_not_counted,
    "graphs-pipeline": graphs_hold_one_micro_batch,
    "graphs-checkpointing": graphs_compute_nothing_again,
    "graphs-offloading": graphs_offload_nothing,
    "graphs-compiled": graphs_of_compiled_blocks_fail,
    "graphs-schedule": graphs_have_one_shape,
}
"""Rule -> what shows that it is needed."""
