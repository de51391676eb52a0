"""Each combination that an engine refuses is really wrong or fails: where torch mends it, this test fails and the rule goes."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from fused_ranks import compare_by_stand_ins
from refused_case import PIPELINE, RANKS, SCHEDULES, WRONG, case, off, refused_alone
from refused_graphs import GRAPH_PROOFS
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common.gang import Gang, TaskError
from benchmarks.correctness.parity_cases import BF16_LEAST, CAPABILITIES, FLOAT64_BOUND, FP8_LOSS_BOUND, Case
from benchmarks.correctness.parity_rank import compare
from executor.engine import HOST, RankContext
from executor.engines.capabilities import release
from executor.engines.native.engine import NativeEngine
from executor.engines.native.offload import Hyperparameters
from executor.engines.native.optimizers.device_optimizer import Shares
from executor.engines.native.optimizers.onebit_adam import OneBitAdam
from executor.engines.native.parameter_shard import BucketLayout, MasterShard, make_layout
from executor.engines.native.zero import ShardedModel
from executor.parallel.activation_offload import ActivationOffload
from executor.parallel.checkpointing import checkpoint_blocks
from executor.parallel.collectives import InFlight, ProcessGroup
from executor.parallel.context import ContextParallel
from executor.parallel.graphs import compile_blocks, compile_seconds, forget_compiled
from executor.parallel.model import Block, whole
from executor.parallel.overlapped import multiply_columns
from executor.parallel.recomputed_modules import recompute_modules
from search_spaces.capability import Combination
from search_spaces.knob import Value
from search_spaces.models.model import ModelSpec
from search_spaces.models.pipeline import ZERO_BUBBLE_SCHEDULES
from search_spaces.optimizers import OPTIMIZERS
from search_spaces.trial_config import TrialConfig

FSDP2_PIPELINE = {name: value for name, value in PIPELINE.items() if name != "param_persistence_threshold"}


NORMED = ModelSpec(
    name="normed", family="llama", num_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
    ffn_hidden_size=64, vocab_size=32, sequence_length=16,
)  # fmt: skip


def zero_bubbles_are_wrong(gang: Gang, rule: str, engine: str, knobs: Mapping[str, Value], legal: Mapping[str, Value]) -> None:
    control = case(engine, {**knobs, **legal})
    assert CAPABILITIES[engine].refusals(control.config, RANKS) == []
    assert off(gang, control) <= FLOAT64_BOUND
    for schedule in ZERO_BUBBLE_SCHEDULES:
        tried = case(engine, {**knobs, "pipeline_schedule": schedule})
        refused_alone(rule, tried)
        assert off(gang, tried) > WRONG, f"{schedule} is right now: let {engine} run it"


def fsdp2_under_zero_bubble(gang: Gang, rule: str) -> None:
    zero_bubbles_are_wrong(gang, rule, "fsdp2", FSDP2_PIPELINE, {"pipeline_schedule": "looped_bfs"})


def predictions_under_zero_bubble(gang: Gang, rule: str) -> None:
    knobs = {**PIPELINE, "zero_stage": 1, "mtp_layers": 2}
    tried = [
        dataclasses.replace(case("native", {**knobs, "pipeline_schedule": name}), model="llama")
        for name in ("looped_bfs", "zbv")
    ]
    assert off(gang, tried[0]) <= FLOAT64_BOUND
    refused_alone(rule, tried[1])
    assert off(gang, tried[1]) > WRONG, "backward in parts knows shared paths now: let zero-bubble schedules run it"


def native_resharding_under_zero_bubble(gang: Gang, rule: str) -> None:
    zero_bubbles_are_wrong(gang, rule, "native", PIPELINE, {"pipeline_schedule": "zbv", "reshard_after_forward": False})


def fsdp2_offloads_all_or_nothing(_: Gang, rule: str) -> None:
    """torch's policy has no word for one without the other: what it can be told is whether to pin."""
    for kind in ("offload_optimizer", "offload_param"):
        refused_alone(rule, case("fsdp2", {"zero_stage": 3, "precision": "fp64", kind: "cpu"}))
    assert [field.name for field in dataclasses.fields(fsdp.CPUOffloadPolicy)] == ["pin_memory"]
    others = {name for name in fsdp.__all__ if name.endswith("OffloadPolicy")} - {"OffloadPolicy", "CPUOffloadPolicy"}
    assert not others, f"torch has {others} now: see whether they move one without the other"


def fsdp2_copies_alone(gang: Gang, rule: str) -> None:
    knobs = {"zero_stage": 3, "precision": "fp64", "micro_batch_size": 4}
    control = case("fsdp2", {**knobs, "hsdp_shard_size": 2})
    assert off(gang, control) <= FLOAT64_BOUND
    tried = case("fsdp2", {**knobs, "hsdp_shard_size": 1})
    refused_alone(rule, tried)
    assert off(gang, tried) > WRONG, "fully_shard makes whole copies now: let fsdp2 run it"


def fsdp2_does_not_cast_alone(gang: Gang, rule: str) -> None:
    """A loss in bf16 differs from float64 by more than one in fp32 ever does; where nothing is sharded it does not."""
    knobs = {"zero_stage": 3, "precision": "bf16", "micro_batch_size": 4}
    control = case("fsdp2", {**knobs, "tensor_parallel_size": 2})
    assert off(gang, control) > BF16_LEAST
    tried = case("fsdp2", {**knobs, "tensor_parallel_size": 4})
    refused_alone(rule, tried)
    assert off(gang, tried) < BF16_LEAST, "what is computed is bf16 now: let fsdp2 run it"


def zero_bubbles_of_compiled_blocks_are_wrong(gang: Gang, rule: str) -> None:
    """Compiled backward frees what the second part would need; told to keep it (`donated_buffer`), it trains wrong weights."""
    knobs = {**PIPELINE, "zero_stage": 0, "pipeline_schedule": "zbv", "compile_blocks": True}
    tried = dataclasses.replace(case("native", knobs), model="experts")
    refused_alone(rule, tried)
    assert off(gang, tried) > WRONG, "compiled blocks have a backward in two parts now: let them run it"


def native_updates_adamw_alone_on_the_host(_: Gang, rule: str) -> None:
    """Built all the same, everything stays on the device: nothing is offloaded, and nobody is told."""
    alone = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
    for optimizer in OPTIMIZERS:
        tried = case("native", {"zero_stage": 1, "offload_optimizer": "cpu", "optimizer": optimizer})
        with patch("executor.engines.native.engine.refuse"):
            session = NativeEngine().build(alone, tried.model_of(), tried.config, tried.workload())
        offloaded = sum(value.nbytes for tag, value in session.tagged_storages() if tag == HOST)
        session.close()
        assert (offloaded > 0) is (optimizer == "adamw")
        if optimizer not in ("adamw", "onebit_adam"):  # the last one has no stage at which states may leave the device
            refused_alone(rule, tried)


def copies_of_shards_leave_experts_out(gang: Gang, rule: str) -> None:
    """The norm then counts experts that other ranks hold too seldom, and clips too little."""
    knobs: dict[str, Value] = {"precision": "fp64", "zero_stage": 3, "expert_parallel_size": 2, "micro_batch_size": 4}
    control = dataclasses.replace(case("native", knobs), model="capped")
    assert off(gang, control) <= FLOAT64_BOUND
    tried = dataclasses.replace(case("native", {**knobs, "hsdp_shard_size": 2}), model="capped")
    refused_alone(rule, tried)
    assert off(gang, tried) > WRONG, "copies of shards go with experts across ranks now: let them run"


def experts_are_compiled_anew_for_other_rows(_: Gang, rule: str) -> None:
    knobs: dict[str, Value] = {"expert_parallel_size": 2, "micro_batch_size": 4, "compile_blocks": True, "precision": "fp8"}
    refused_alone(rule, dataclasses.replace(case("native", knobs), model="experts"))
    assert compiles_twice((24, 4), (40, 4)), "one kernel serves every number of rows now: let them run"


def compiles_twice(*shapes: tuple[int, ...]) -> bool:
    """Whether a compiled block that has met the first shape is compiled again for the second."""
    forget_compiled()
    block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    compile_blocks([block])
    spent = []
    for shape in shapes:
        block(torch.ones(shape)).sum().backward()
        spent.append(compile_seconds())
    forget_compiled()
    return 0.0 < spent[0] < spent[1]


def frozen_parameters_are_shared_out_twice(gang: Gang, rule: str) -> None:
    """By the sharding of what every rank holds and by that of the experts, which each have all of them."""
    for targets in ("attention", "both"):
        knobs: dict[str, Value] = {"precision": "fp64", "zero_stage": 3, "micro_batch_size": 4, "lora_rank": 4}
        knobs = {**knobs, "lora_targets": targets, "param_persistence_threshold": 0}
        control = dataclasses.replace(case("native", knobs), model="experts")
        assert off(gang, control) <= FLOAT64_BOUND
        tried = dataclasses.replace(case("native", {**knobs, "expert_parallel_size": 2}), model="experts")
        refused_alone(rule, tried)
        assert frozen_elements(tried) >= 2 * frozen_elements(control), "each is shared out once now: let them run"
    for method in ("adapter_size", "prefix_length", "prompt_length"):
        tried = dataclasses.replace(case("native", {"expert_parallel_size": 2, method: 4}), model="experts")
        refused_alone(rule, tried)


def frozen_elements(case: Case) -> int:
    """That one of the ranks keeps."""
    kept: list[int] = []
    share = ShardedModel._shard_frozen

    def counting(self: ShardedModel, layout: BucketLayout, start: int, dtype: torch.dtype) -> torch.Tensor:
        vector = share(self, layout, start, dtype)
        kept.append(vector.numel())
        return vector

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        context = RankContext(rank=0, world_size=RANKS, device=torch.device("cpu"))
        with patch.object(ShardedModel, "_shard_frozen", counting), patch("executor.engines.native.engine.refuse"):
            NativeEngine().build(context, case.model_of(), case.config, case.workload()).close()
    finally:
        dist.destroy_process_group()
    return sum(kept)


def a_prompt_is_not_cut_among_context_ranks(gang: Gang, rule: str) -> None:
    knobs: dict[str, Value] = {"precision": "fp64", "micro_batch_size": 4, "prompt_length": 4}
    assert off(gang, case("native", knobs)) <= FLOAT64_BOUND
    tried = case("native", {**knobs, "context_parallel_size": 2})
    refused_alone(rule, tried)
    assert off(gang, tried) > WRONG, "context ranks cut prompts now: let them run"


def muon_finds_no_matrices_among_virtual_tokens(gang: Gang, rule: str) -> None:
    for method in ("prefix_length", "prompt_length"):
        tried = case("native", {"precision": "fp64", "micro_batch_size": 4, "optimizer": "muon", method: 4})
        refused_alone(rule, tried)
        assert off(gang, tried) > WRONG, "muon makes something of virtual tokens now: let it run"


def what_is_recalled_stays_on_the_device(_: Gang, rule: str) -> None:
    """Of a block that runs again selectively no more leaves than of one that runs again in full: its input."""
    refused_alone(rule, case("native", {"offload_activations": True, "activation_checkpointing": "selective"}))
    left = {}
    for kind in ("selective", "full", "none"):
        block = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        offload = ActivationOffload(torch.device("cpu"))
        checkpoint_blocks([block], TrialConfig(activation_checkpointing=kind))
        offload.attach([block], keeps_last=False)
        block(torch.ones(32, 32, requires_grad=True)).sum().backward()
        left[kind] = offload.pool.bytes
    assert left["selective"] == left["full"] < left["none"], "what is recalled is offloaded now: let it be"


def compiled_blocks_take_no_hooks(gang: Gang, rule: str) -> None:
    """Of experts the graph breaks where rows are counted."""
    knobs: dict[str, Value] = {"precision": "fp64", "micro_batch_size": 4, "compile_blocks": True, "offload_activations": True}
    tried = dataclasses.replace(case("native", knobs), model="experts")
    refused_alone(rule, tried)
    assert off(gang, tried) > WRONG, "compiled blocks have their saved tensors moved now: let them run"


def what_is_recomputed_by_module_is_not_offloaded(_: Gang, rule: str) -> None:
    refused_alone(rule, case("native", {"offload_activations": True, "recompute_modules": "norms"}))
    moved = {}
    for modules in ("norms", ""):
        block, offload = Block(NORMED, whole(NORMED), 0), ActivationOffload(torch.device("cpu"))
        recompute_modules([block], modules)
        offload.attach([block], keeps_last=False)
        block(torch.ones(8, 16, 32, requires_grad=True), None)
        moved[modules] = offload.pool.bytes
    assert moved["norms"] == 0 < moved[""], "what modules do not recompute is offloaded now: let it be"


def attention_between_context_ranks_is_sent_again(_: Gang, rule: str) -> None:
    refused_alone(rule, case("native", {"context_parallel_size": 2, "recompute_modules": "attention"}))
    sent = {}
    for modules in ("attention", ""):
        group = Echo(None, 2, 0)
        block = Block(NORMED, dataclasses.replace(whole(NORMED), context=ContextParallel(group)), 0)
        recompute_modules([block], modules)
        block(torch.ones(8, 16, 32, requires_grad=True), None).sum().backward()
        sent[modules] = group.sent["all_gather"][0]
    assert sent["attention"] > sent[""], "attention is sent once now: let context ranks run it"


class Echo(ProcessGroup):
    """Two ranks with the same numbers."""

    def all_gather(self, rows: torch.Tensor, shard: torch.Tensor) -> InFlight:
        self.count("all_gather", rows)
        rows.copy_(shard.expand_as(rows))
        return InFlight(lambda: None)

    def reduce_scatter(self, output: torch.Tensor, rows: torch.Tensor) -> InFlight:
        output.copy_(rows[0])
        return InFlight(lambda: None)


def kernels_of_a_schedule_are_not_those_of_its_points(_: Gang, rule: str) -> None:
    """A block that has met two lengths has been compiled twice; a trial that stands at one compiles for it alone."""
    for schedule in SCHEDULES:
        refused_alone(rule, case("native", {**schedule, "micro_batch_size": 4, "compile_blocks": True}))
    assert compiles_twice((2, 8, 4), (2, 16, 4)), "one kernel serves every length now: let schedules compile"


def tokens_are_chosen_of_whole_sequences(gang: Gang, rule: str) -> None:
    """Places beyond what a rank has of a sequence, or a sequence of its own length, are none to choose from."""
    _, dropping = SCHEDULES
    others: dict[str, dict[str, Value]] = {
        "random-ltd-curriculum": SCHEDULES[0],
        "random-ltd-divided": {"context_parallel_size": 2},
    }
    knobs: dict[str, Value] = {"precision": "fp64", "micro_batch_size": 4, **dropping}
    model = "llama"
    assert off(gang, dataclasses.replace(case("native", knobs), model=model)) <= FLOAT64_BOUND
    tried = dataclasses.replace(case("native", {**knobs, **others[rule]}), model=model)
    refused_alone(rule, tried)
    assert off(gang, tried) > WRONG, "tokens are chosen of what there is now: let it run"


def masters_would_be_fp32(_: Gang, rule: str) -> None:
    """Built all the same, the master has the parameters' type: there is nothing to round."""
    tried = case("native", {"precision": "fp32", "optimizer": "adamw_bf16"})
    refused_alone(rule, tried)
    with patch("executor.engines.native.engine.refuse"):
        alone = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
        session = NativeEngine().build(alone, tried.model_of(), tried.config, tried.workload())
    (replica,) = session.replicas
    assert isinstance(replica, ShardedModel) and replica.master_dtype == torch.float32
    session.close()


def onebit_shares_nothing(_: Gang, rule: str) -> None:
    """Built all the same over a share, it never hears of what this rank's own gradient says of the others' shares."""
    refused_alone(rule, case("native", {"zero_stage": 1, "optimizer": "onebit_adam"}))
    whole, shares = (one_bit(ranks, own_row=0) for ranks in (1, 2))
    assert whole.master.numel() == 2 * shares.master.numel()
    assert not any(len(kept) >= whole.master.numel() for kept in (shares._first, shares._second))


def onebit_copies_drift_apart(_: Gang, rule: str) -> None:
    """A norm that two tensor ranks hold lies among numbers of other slices, whose mean magnitude moves it too."""
    refused_alone(rule, case("native", {"tensor_parallel_size": 2, "optimizer": "onebit_adam"}))
    norms = []
    for turn in (1.0, -1.0):
        optimizer = one_bit(1, own_row=0)
        (norm, _) = optimizer.layout.slots
        for step in range(3):
            gradient = torch.full_like(optimizer.master, turn**step)
            gradient[norm.offset : norm.offset + norm.elements] = 1.0
            optimizer.step([gradient], MasterShard(optimizer.master, torch.float32))
        norms.append(optimizer.master[norm.offset : norm.offset + norm.elements].clone())
    assert float((norms[0] - norms[1]).abs().max()) > WRONG, "copies stay the same now: let them be"


def one_bit(ranks: int, own_row: int) -> OneBitAdam:
    """Of one process, over its share of a norm and of a slice; it sends signs from its second step on."""
    parameters = [("slice", torch.nn.Parameter(torch.ones(96))), ("norm", torch.nn.Parameter(torch.ones(32)))]
    layout = make_layout(parameters, ranks, 10**9)
    alone = ProcessGroup(None, 1, 0)
    shares = Shares(layout=layout, own_row=own_row, group=alone, tensor=alone, split={}, matrices=frozenset())
    rates = Hyperparameters(learning_rate=1e-2, weight_decay=0.0, fused=False)
    return OneBitAdam(torch.ones(layout.master_elements), shares, rates, 1)


def zero_bubbles_send_input_gradients_twice(_: Gang, rule: str) -> None:
    """Backward for the weights makes the gradient of the input again, and sends it again."""
    knobs: dict[str, Value] = {**PIPELINE, "zero_stage": 0, "tensor_parallel_size": 2, "async_tensor_parallel": True}
    for schedule in ZERO_BUBBLE_SCHEDULES:
        refused_alone(rule, case("native", {**knobs, "pipeline_schedule": schedule}))
    group, weight = ProcessGroup(None, 2, 0), torch.nn.Parameter(torch.ones(4, 4))
    x = torch.ones(1, 2, 4, requires_grad=True)
    with patch.object(torch.distributed, "all_reduce", return_value=None):
        _, (product,) = multiply_columns(x.sin(), [weight], group, sequence_parallel=False)
        _, groups = stage_backward_input([product.sum()], None, [x], iter([weight]))
        if release(torch.__version__) < (2, 13):
            with pytest.raises(RuntimeError):  # it cannot come back to a product of our own at all
                stage_backward_weight(iter([weight]), groups)
            return
        stage_backward_weight(iter([weight]), groups)
    assert group.sent["all_reduce"][0] == 2, "each backward sends what is its own now: let zero-bubble schedules run it"


def integers_are_multiplied_whole(gang: Gang, rule: str) -> None:
    knobs: dict[str, Value] = {"precision": "fp64", "tensor_parallel_size": 2, "micro_batch_size": 4, "lora_rank": 2}
    knobs = {**knobs, "async_tensor_parallel": True}
    assert off(gang, case("native", knobs)) <= FLOAT64_BOUND
    for dtype in ("int8", "nf4"):
        tried = case("native", {**knobs, "frozen_dtype": dtype})
        refused_alone(rule, tried)
        assert off(gang, tried) > WRONG, "matrices in integers are multiplied in parts now: let them run"


def off_by_stand_ins(tried: Case) -> float:
    """As `off`, with packages in the place of Liger and Transformer Engine that overwrite what these overwrite."""
    with Gang(RANKS, compare_by_stand_ins, seconds_limit=60) as gang:
        try:
            return max(report.off for report, _ in gang.run(tried))
        except TaskError:
            return float("inf")


def kernels_run_backward_once(_: Gang, rule: str) -> None:
    """Liger's loss multiplies its gradients by the loss's a second time; Transformer Engine has let go of what it saved."""
    for kernels in ("liger", "transformer_engine"):
        knobs: dict[str, Value] = {**PIPELINE, "zero_stage": 0, "fused_kernels": kernels}
        for schedule in ZERO_BUBBLE_SCHEDULES:
            refused_alone(rule, case("native", {**knobs, "pipeline_schedule": schedule}))
        tried = dataclasses.replace(case("native", {**knobs, "pipeline_schedule": "zbv"}), model="llama")
        assert off_by_stand_ins(tried) > WRONG, f"{kernels} has a backward in two parts now: let zero-bubble schedules run it"


def what_is_recalled_is_rotated_twice(_: Gang, rule: str) -> None:
    knobs: dict[str, Value] = {"precision": "fp64", "micro_batch_size": 4, "fused_kernels": "liger"}
    tried = dataclasses.replace(case("native", {**knobs, "activation_checkpointing": "selective"}), model="llama")
    refused_alone(rule, tried)
    assert off_by_stand_ins(tried) > WRONG, "Liger rotates out of place now: let what is kept be recalled"


def products_in_parts_are_in_bf16(gang: Gang, rule: str) -> None:
    of_bf16_alone(gang, rule, {"tensor_parallel_size": 2, "async_tensor_parallel": True}, {"async_tensor_parallel": False})


def products_of_integers_are_in_bf16(gang: Gang, rule: str) -> None:
    of_bf16_alone(gang, rule, {"lora_rank": 2, "frozen_dtype": "nf4"}, {"frozen_dtype": "same"})


def of_bf16_alone(gang: Gang, rule: str, knobs: Mapping[str, Value], legal: Mapping[str, Value]) -> None:
    """As far off float64 as precision=bf16 is, to the last bit, where products in 8 bits are not."""

    def loses(precision: str, others: Mapping[str, Value]) -> float:
        found = off(gang, case("native", {"micro_batch_size": 4, "precision": precision, **knobs, **others}))
        assert found <= FP8_LOSS_BOUND
        return found

    refused_alone(rule, case("native", {"micro_batch_size": 4, "precision": "fp8", **knobs}))
    assert loses("fp8", legal) != loses("bf16", legal)
    assert loses("fp8", {}) == loses("bf16", {}), "products are in 8 bits now: let them run"


PROOFS: Mapping[str, Callable[[Gang, str], None]] = {
    "fsdp2-zero-bubble": fsdp2_under_zero_bubble,
    "zero-bubble-reshard": native_resharding_under_zero_bubble,
    "mtp-zero-bubble": predictions_under_zero_bubble,
    "fsdp2-offloads-both": fsdp2_offloads_all_or_nothing,
    "fsdp2-copies-alone": fsdp2_copies_alone,
    "fsdp2-bf16-alone": fsdp2_does_not_cast_alone,
    "compile-zero-bubble": zero_bubbles_of_compiled_blocks_are_wrong,
    "offload-selective": what_is_recalled_stays_on_the_device,
    "offload-compiled": compiled_blocks_take_no_hooks,
    "recompute-modules-hooks": what_is_recomputed_by_module_is_not_offloaded,
    "recompute-attention-context": attention_between_context_ranks_is_sent_again,
    "async-tensor-zero-bubble": zero_bubbles_send_input_gradients_twice,
    "async-tensor-quantised": integers_are_multiplied_whole,
    "fused-kernels-zero-bubble": kernels_run_backward_once,
    "fused-kernels-selective": what_is_recalled_is_rotated_twice,
    "float8-async-tensor": products_in_parts_are_in_bf16,
    "float8-quantised": products_of_integers_are_in_bf16,
    "optimizer-on-device": native_updates_adamw_alone_on_the_host,
    "experts-copies": copies_of_shards_leave_experts_out,
    "experts-adapters": frozen_parameters_are_shared_out_twice,
    "prompt-context": a_prompt_is_not_cut_among_context_ranks,
    "virtual-tokens-muon": muon_finds_no_matrices_among_virtual_tokens,
    "experts-compiled": experts_are_compiled_anew_for_other_rows,
    "schedule-compiled": kernels_of_a_schedule_are_not_those_of_its_points,
    "random-ltd-curriculum": tokens_are_chosen_of_whole_sequences,
    "random-ltd-divided": tokens_are_chosen_of_whole_sequences,
    "bf16-masters": masters_would_be_fp32,
    "onebit-stage": onebit_shares_nothing,
    "onebit-dimensions": onebit_copies_drift_apart,
    **GRAPH_PROOFS,
}
"""Rule -> what shows that it is needed."""
COMBINATIONS = [*{item.rule: item for capability in CAPABILITIES.values() for item in capability.combinations}.values()]


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with Gang(RANKS, compare, seconds_limit=60) as ranks:
        yield ranks


def listed(combination: Combination) -> Any:
    """As a parameter; `make nightly` and `make oldest` run those that `make test` and `make prove` leave out."""
    sample = "compile_blocks" not in combination.reads and COMBINATIONS.index(combination) % 8 == 0
    return pytest.param(combination, id=combination.rule, marks=() if sample else pytest.mark.nightly)


@pytest.mark.prove
@pytest.mark.parametrize("combination", [listed(combination) for combination in COMBINATIONS])
def test_what_is_refused_is_wrong(gang: Gang, combination: Combination) -> None:
    PROOFS[combination.rule](gang, combination.rule)


def test_every_refused_combination_has_a_proof() -> None:
    assert {combination.rule for combination in COMBINATIONS} <= PROOFS.keys()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to offload from")
def test_torch_moves_parameters_gradients_and_state_together(tmp_path: object) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cuda", (1,))
        module = torch.nn.Linear(4, 4)
        fsdp.fully_shard(module, mesh=mesh, offload_policy=fsdp.CPUOffloadPolicy())
        optimizer = torch.optim.AdamW(module.parameters())
        module(torch.ones(2, 4, device="cuda")).sum().backward()
        optimizer.step()
        state = [value for values in optimizer.state.values() for value in values.values()]
        gradients = [value.grad for value in module.parameters() if value.grad is not None]
        assert {value.device.type for value in (*module.parameters(), *gradients, *state)} == {"cpu"}
    finally:
        torch.distributed.destroy_process_group()
