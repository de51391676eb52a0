"""Pipeline parallelism: runs the stages of this rank by a schedule of torch.distributed.pipelining."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.utils import checkpoint

from executor.parallel.collectives import Clock, ProcessGroup
from executor.parallel.replica import ModelPart, Replica
from search_spaces.models.pipeline import stages_of_rank
from search_spaces.trial_config import TrialConfig

SCHEDULES: Mapping[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class Pipeline:
    """Runs a step's micro-batches through the stages of all ranks of the pipeline.

    Shapes are given, not inferred by a first run: stages exchange the hidden state of a micro-batch, or a share of it with
    context and sequence parallelism.
    """

    def __init__(
        self,
        replicas: Sequence[tuple[Replica, ModelPart]],
        config: TrialConfig,
        group: ProcessGroup,
        micro_batches: int,
        scale_of: Callable[[int], float],
        device: torch.device,
    ) -> None:
        """`replicas` are the stages of this rank, in order, with the part of the model that each holds.

        `micro_batches`: number in a whole step; `scale_of`: number of micro-batches -> factor of a loss.
        """
        self.micro_batches, self._scale_of, self._loss_scale = micro_batches, scale_of, scale_of(micro_batches)
        indices = stages_of_rank(config, group.rank)
        self._work, self._waits = Clock(), group.clock
        self.stages = [
            _NotifyingStage(replica, part, index, config, group, micro_batches, device, self._work)
            for (replica, part), index in zip(replicas, indices, strict=True)
        ]
        self._enters = replicas[0][1].enters
        self._reads = sorted({name for _, part in replicas for name in part.reads})
        self._kind = SCHEDULES[config.pipeline_schedule]
        self._schedules = {micro_batches: self._make_schedule(micro_batches)}

    def run(self, batch: Mapping[str, Tensor], micro_batches: int | None = None) -> Tensor | None:
        """Forward and backward of all micro-batches of `batch` {name: [samples of this rank, …]}.

        `micro_batches`: their number, if the step has fewer than a whole one. Returns the mean loss if this rank has the last
        stage, else None.
        """
        count = micro_batches or self.micro_batches
        if count not in self._schedules:
            self._schedules[count] = self._make_schedule(count)
        schedule, self._loss_scale = self._schedules[count], self._scale_of(count)
        for stage in self.stages:
            stage.begin_step(count)
        losses: list[Tensor] = []
        first = any(stage.is_first for stage in self.stages)
        inputs = (batch[self._enters],) if first else ()
        keyword_inputs = {name: batch[name] for name in self._reads}
        began, busy = time.perf_counter(), self._work.seconds
        try:
            if any(stage.is_last for stage in self.stages):
                # The stage computes the loss itself: torch uses the target only to check that each micro-batch has one.
                schedule.step(*inputs, target=batch[self._enters], losses=losses, return_outputs=False, **keyword_inputs)
            else:
                schedule.step(*inputs, return_outputs=False, **keyword_inputs)
        except RuntimeError as error:
            # torch wraps errors of stages, which hides their type, such as out of memory.
            raise error.__cause__ or error from None
        # A schedule spends the time outside its stages' work on communication with other stages.
        self._waits.seconds += time.perf_counter() - began - (self._work.seconds - busy)
        for stage in self.stages:
            stage.end_step()
        return torch.stack(losses).detach().sum() / (self._loss_scale * count) if losses else None

    def receive_buffers(self) -> Iterator[Tensor]:
        """torch's receive buffers for hidden states and gradients, one per micro-batch, kept from the first step on."""
        for stage in self.stages:
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                yield from (buffer for buffer in map(_buffer, infos) if buffer is not None)

    def _scaled(self, loss: Tensor, _labels: Tensor) -> Tensor:
        return precise(loss) * self._loss_scale

    def _make_schedule(self, micro_batches: int) -> Any:
        stages: Any = self.stages[0] if issubclass(self._kind, PipelineScheduleSingle) else self.stages
        return self._kind(stages, micro_batches, loss_fn=self._scaled, scale_grads=False)


def precise(loss: Tensor) -> Tensor:
    """The loss in at least fp32, since a scaled loss overflows fp16."""
    return loss.to(torch.promote_types(loss.dtype, torch.float32))


def _buffer(info: object) -> Tensor | None:
    """The receive buffer of a stage's input. The model's input has none: it is None in torch 2.13, and missing in 2.11."""
    return getattr(info, "buffer", None)


class _NotifyingStage(PipelineStage):
    """A stage that notifies its replica of a micro-batch's gradients, and counts the messages that it sends.

    torch computes weight gradients depending on the type of backward: `full` by autograd with its hooks; `input` none yet;
    `weight` written to `parameter.grad` without hooks. Every micro-batch has one of `full` and `weight`, so counting identifies
    the last one of a step.
    """

    def __init__(
        self,
        replica: Replica,
        part: ModelPart,
        index: int,
        config: TrialConfig,
        group: ProcessGroup,
        micro_batches: int,
        device: torch.device,
        work: Clock,
    ) -> None:
        if part.entry is None or part.hidden is None:
            raise TypeError("this part was not created for a pipeline")
        stages = config.pipeline_parallel_size * config.virtual_stages
        at_least_fp32 = torch.promote_types(part.hidden.dtype, torch.float32)
        loss = torch.empty((), dtype=at_least_fp32, device="meta", requires_grad=True)
        super().__init__(
            replica.module, index, stages, device, group=group.group,
            input_args=part.entry if index == 0 else part.hidden, output_args=loss if index == stages - 1 else part.hidden,
        )  # fmt: skip
        self.replica, self.traffic, self.micro_batches = replica, group, micro_batches
        self.work = work
        self._finished_backwards = 0

    def begin_step(self, micro_batches: int) -> None:
        """Call before the schedule's step of `micro_batches`."""
        self._finished_backwards, self.micro_batches = 0, micro_batches
        self.replica.begin_step()

    def end_step(self) -> None:
        """Call after the schedule's step."""
        self._release_local_inputs()
        self.replica.end_step()

    def _release_local_inputs(self) -> None:
        """Release inputs from other stages of this rank, which torch would keep until they are replaced in the next step."""
        ranks = self.stage_index_to_group_rank
        for neighbour, received in ((self.stage_index - 1, self.args_recv_info), (self.stage_index + 1, self.grad_recv_info)):
            if ranks.get(neighbour) == self.group_rank:
                for info in (info for infos in received.values() for info in infos):
                    info.buffer = None

    def clear_runtime_states(self) -> None:
        """Clear the state of the last step. torch 2.11's method fails on inputs that `_release_local_inputs` has released."""
        self.fwd_cache.clear()
        self.output_chunks.clear()
        for infos in self.args_recv_info.values():
            for buffer in map(_buffer, infos):
                if buffer is not None:
                    buffer.grad = None

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """The warm-up messages of torch 2.11, without those between stages of the same rank (zbv, dualpipev)."""
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.group_peer != self.group_rank]

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.work.running():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self.work.running():
            super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self.work.running():
            super().backward_weight_one_chunk(*args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        if backward_type == "input":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        self._finished_backwards += 1
        self.replica.begin_micro_batch(last=self._finished_backwards == self.micro_batches)
        # torch computes the weight gradients of a stage in one backward per group of weights. Each would recompute a
        # checkpointed block with its communication; within a GraphExecGroup they share one recomputation. Older torch does not
        # have it.
        share_recomputation = getattr(checkpoint, "GraphExecGroup", nullcontext)
        with share_recomputation() if backward_type == "weight" else nullcontext():
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type == "weight":
            self.replica.gradients_written()
        self.replica.end_micro_batch()
        return result

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        for operation in operations:
            self.traffic.count("send", operation.tensor)
        return operations
