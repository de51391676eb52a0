"""What a step sends and holds on each rank, by docs/closed-forms.md. Sizes are elements of full messages."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from search_spaces.communication import ROW_PARTS
from search_spaces.mesh import PIPELINE, make_mesh
from search_spaces.models.model import ModelSpec, NormPlace
from search_spaces.models.pipeline import ZERO_BUBBLE_SCHEDULES, rank_of_stage, split_layers, stages_of_rank
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

RANKS = 4
BYTES = 4  # fp32
SPEC = ModelSpec(
    name="closed-forms", family="llama", num_layers=4, hidden_size=32, num_attention_heads=8, num_key_value_heads=4, head_dim=4,
    ffn_hidden_size=48, vocab_size=64, sequence_length=32,
)  # fmt: skip
SHORT, LONG = dataclasses.replace(SPEC, num_layers=2), dataclasses.replace(SPEC, num_layers=8)
TIED = dataclasses.replace(SPEC, tied_embeddings=True)

Traffic = dict[tuple[str, str], tuple[int, int]]
"""(operation, mesh dimension) -> (count, elements)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the model on a rank."""

    layers: int
    first: bool
    last: bool


class Layout:
    """A configuration on four ranks."""

    def __init__(self, spec: ModelSpec = SPEC, global_batch_size: int = 8, **knobs: Any) -> None:
        # Nothing is gathered ahead and nothing persists: what stage 3 sends then has a closed form.
        fixed = {"prefetch_bucket_size": 0, "param_persistence_threshold": 0, "pipeline_split": "even"}
        self.spec, self.config = spec, TrialConfig().replace({**fixed, **knobs})
        self.workload = Workload(global_batch_size=global_batch_size, sequence_length=spec.sequence_length)
        self.key = (spec, self.config, global_batch_size)
        self.mesh = make_mesh(self.config, RANKS)
        self.micro_batches = self.config.gradient_accumulation_steps(self.workload.global_batch_size, RANKS)
        self.tokens = self.config.micro_batch_size * self.workload.sequence_length // self.mesh.context
        """Of a micro-batch, on a rank."""

    def stages(self, place: int) -> list[Stage]:
        """The stages of a rank at a place along the pipeline, in order."""
        layers = split_layers(self.spec, self.config, self.workload.sequence_length)
        last = len(layers) - 1
        mine = stages_of_rank(self.config, place)
        return [Stage(layers=len(layers[index]), first=index == 0, last=index == last) for index in mine]

    def traffic(self, rank: int) -> Traffic:
        """What a rank sends in a step."""
        place = self.mesh.coordinates(rank)[PIPELINE]
        total: Traffic = {}
        for forms in (self._tensor, self._context, self._expert, self._expert_tensor, self._pipeline, self._data):
            for operation, dimension, count, elements in forms(place):
                before = total.get((operation, dimension), (0, 0))
                total[operation, dimension] = (before[0] + count, before[1] + count * elements)
        return {key: value for key, value in total.items() if value[0]}

    def _tensor(self, place: int) -> Iterator[tuple[str, str, int, int]]:
        ranks, sequence, times = self.mesh.tensor, self.config.sequence_parallel, self.micro_batches
        if ranks == 1:
            return
        message = self.tokens * self.spec.hidden_size
        for stage in self.stages(place):
            again = self._runs_again(stage)
            # A block that runs again stops before its last reduction, but where a norm comes after that.
            lasts = 0 if self.spec.norm_place is NormPlace.INPUT else again
            sums = "reduce_scatter" if sequence else "all_reduce"
            # Enters of attention and of the MLP in forward; leaves in backward.
            entered, mlps = 2 * stage.layers + again, stage.layers * self._summed_mlps
            if sequence:
                gathered = entered + 2 * mlps + again * self._summed_mlps
                yield "all_gather", "tensor", times * (gathered + stage.first + stage.last), message
            rows, others = stage.layers + again, stage.layers + 2 * mlps + stage.first + stage.last
            # A shared expert that computes while tokens travel does not come last.
            summed_again = again if self._divides_tokens and self.config.shared_expert_overlap else lasts
            others += summed_again * self._summed_mlps
            if self._divides_tokens:
                # A shared expert runs after the gather of the others' results.
                joined = again if self._runs_shared_last else lasts
                yield "all_gather", "tensor", times * (not sequence) * (2 * stage.layers + joined), message
                counts = self.config.micro_batch_size * self.spec.num_experts
                yield "all_reduce", "tensor", times * stage.layers * (self.spec.load_balance > 0), counts
                yield from self._loads("tensor", stage)
            if not self.spec.num_experts or (self._divides_tokens and self.spec.shared_expert_size):
                rows, others = rows + stage.layers + summed_again, others - stage.layers - summed_again
            parts = ROW_PARTS if self.config.async_tensor_parallel else 1
            yield sums, "tensor", times * rows * parts, message // parts
            yield sums, "tensor", times * others, message
            # The vocabulary-parallel loss: largest logits, then sums of exponentials with the targets' logits.
            chunk = self.config.loss_chunk_size or self.tokens
            losses = times * stage.last * (self.tokens // chunk)
            yield "all_reduce", "tensor", losses, chunk
            yield "all_reduce", "tensor", losses, 2 * chunk
            # Parameters that are whole on every rank and have a summand of their gradient there, in one message a step.
            norms = self._norms(stage) if sequence else stage.layers * self._head_norms
            summands = norms + stage.layers * self._router
            yield "all_reduce", "tensor", int(summands > 0), summands // self._owners
        yield "all_reduce", "tensor", 1, 1  # the squared norm

    def _context(self, place: int) -> Iterator[tuple[str, str, int, int]]:
        if self.mesh.context == 1:
            return
        stages, times = self.stages(place), self.micro_batches
        layers = times * sum(stage.layers for stage in stages)
        again = times * sum(self._runs_again(stage) for stage in stages)
        keys = self.spec.num_key_value_heads * self.spec.head_dim // self.mesh.tensor
        queries = self.spec.num_attention_heads * self.spec.head_dim // self.mesh.tensor
        if self.config.context_parallel_method == "ulysses":
            # Queries, keys and values go to their heads' ranks and results come back; gradients the other way.
            yield "all_to_all", "context", 2 * layers + again, self.tokens * (queries + 2 * keys)
            yield "all_to_all", "context", 2 * layers + again, self.tokens * queries
            return
        message = 2 * self.config.micro_batch_size * self.workload.sequence_length * keys
        yield "all_gather", "context", layers + again, message
        yield "reduce_scatter", "context", layers, message

    def _expert(self, place: int) -> Iterator[tuple[str, str, int, int]]:
        if self.mesh.expert == 1:
            return
        stages, times = self.stages(place), self.micro_batches
        layers = times * sum(stage.layers for stage in stages)
        again = times * sum(self._runs_again(stage) for stage in stages)
        # Rows go and come back, in forward and in backward. Without a capacity ranks tell each other first how many.
        rows = self.tokens * self.spec.experts_per_token * self.mesh.expert_slices // self.mesh.tensor
        counts = 2 * self.spec.num_experts  # of eight bytes each
        if self.spec.capacity_factor:
            places = self.spec.expert_capacity(self.workload.sequence_length)
            rows, counts = self.config.micro_batch_size * self.spec.num_experts * places, 0
        yield "all_to_all", "expert", 4 * layers + 2 * again, rows * self.spec.hidden_size
        yield "all_to_all", "expert", (layers + again) * (counts > 0), counts
        if self.config.zero_stage == 0:
            yield "all_reduce", "expert", len(stages), 1  # the squared norm of each rank's own

    def _expert_tensor(self, place: int) -> Iterator[tuple[str, str, int, int]]:
        """Between the ranks that divide each expert, if they are not all tensor ranks: as with sequence parallelism."""
        ranks, stages = self.mesh.expert_slices, self.stages(place)
        if ranks == 1 or ranks == self.mesh.tensor:
            return
        layers, again = (sum(numbers) for numbers in zip(*((one.layers, self._runs_again(one)) for one in stages), strict=True))
        message = self.tokens * self.spec.hidden_size * ranks // self.mesh.tensor
        left = again if self._runs_shared_last or self.spec.norm_place is not NormPlace.INPUT else 0
        yield "all_gather", "expert_tensor", self.micro_batches * (2 * layers + again), message
        yield "reduce_scatter", "expert_tensor", self.micro_batches * (2 * layers + left), message
        if self.config.zero_stage == 0:
            yield "all_reduce", "expert_tensor", len(stages), 1  # the squared norm

    def _pipeline(self, place: int) -> Iterator[tuple[str, str, int, int]]:
        if self.mesh.pipeline == 1:
            return
        last = self.mesh.pipeline * self.config.virtual_stages - 1
        mine = stages_of_rank(self.config, place)
        neighbours = [near for stage in mine for near in (stage - 1, stage + 1) if 0 <= near <= last and near not in mine]
        message = self.tokens * self.spec.hidden_size // (self.mesh.tensor if self.config.sequence_parallel else 1)
        yield "send", "pipeline", self.micro_batches * len(neighbours), message
        yield "all_reduce", "pipeline", 1, 1  # the squared norm
        ends = {rank_of_stage(self.config, 0), rank_of_stage(self.config, last)}
        if self.spec.tied_embeddings and len(ends) > 1 and place in ends:
            yield "all_reduce", "pipeline", 1, self._table // self._owners

    def _data(self, place: int) -> Iterator[tuple[str, str, int, int]]:
        zero, times = self.config.zero_stage, self.micro_batches
        for index, stage in enumerate(self.stages(place)):
            yield from self._experts_data(place, index, stage)
        if self.mesh.shard_ranks == 1:
            return
        for index, stage in enumerate(self.stages(place)):
            units = self._units(stage)
            yield from self._loads("data", stage)
            if zero == 0:
                yield "all_reduce", "data", 1, sum(units)
                continue
            yield "reduce_scatter", "data", 1 if zero == 1 or self.config.defer_gradient_reduction else times, sum(units)
            if zero < 3:
                late = self.config.overlap_param_gather
                yield from (("all_gather", "data", 1, elements) for elements in (units if late else [sum(units)]))
            else:
                for number, unit in enumerate(units):
                    table = stage.first and number == 0
                    yield "all_gather", "data", self._uses(place, index, table, number == len(units) - 1), unit
            if self.mesh.shard_ranks < self.mesh.zero_ranks:
                yield "all_reduce", "replica", 1, sum(units) // self._owners
        if zero:
            yield "all_reduce", "data", 1, 1  # the squared norm

    def _experts_data(self, place: int, index: int, stage: Stage) -> Iterator[tuple[str, str, int, int]]:
        """The experts that are divided over other ranks than the rest, over those that hold the same ones."""
        zero, times = self.config.zero_stage, self.micro_batches
        if not self.mesh.places_experts_apart or self.mesh.expert_data == 1:
            return
        own = stage.layers * self._own_experts
        if zero == 0:
            yield "all_reduce", "expert_data", 1, own
            return
        yield "reduce_scatter", "expert_data", 1 if zero == 1 or self.config.defer_gradient_reduction else times, own
        gathers = [self._uses(place, index, False, number == stage.layers - 1) for number in range(stage.layers)]
        yield "all_gather", "expert_data", sum(gathers) if zero == 3 else 1, self._own_experts if zero == 3 else own

    def _runs_again(self, stage: Stage) -> int:
        """Blocks of a stage that run again in backward, each time counted, for a micro-batch.

        Zero-bubble schedules make the gradients of inputs and of weights apart, each of which needs what the block computes;
        the first stage has no input gradient to make.
        """
        if self.config.activation_checkpointing != "full":
            return 0
        split = self.mesh.pipeline > 1 and self.config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES and not stage.first
        return stage.layers * (2 if split else 1)

    def _uses(self, place: int, index: int, table: bool, last_unit: bool) -> int:
        """Gathers of a unit in a step: each forward and backward, the last unit once where they follow one another.

        Backward of a table does not read it.
        """
        times = self.micro_batches
        if not self.config.reshard_after_forward:
            return 1
        if table:
            return times
        turns = times if self.mesh.pipeline == 1 else _turns(self.config, times, place, index)
        return 2 * times - turns * last_unit

    def _units(self, stage: Stage) -> list[int]:
        """Elements that are gathered together, on a tensor-parallel rank: embedding, blocks, head."""
        norm = self.spec.hidden_size if self.spec.final_norm else 0
        whole = self._layer_norms + self._router
        block = (self.spec.layer_parameters - whole) // self.mesh.tensor + whole
        if self.mesh.places_experts_apart:
            block -= self._layer_experts // self.mesh.tensor
        return [*[self._table] * stage.first, *[block] * stage.layers, *[self._table + norm] * stage.last]

    def _norms(self, stage: Stage) -> int:
        return self._layer_norms * stage.layers + stage.last * self.spec.final_norm * self.spec.hidden_size

    @property
    def _layer_norms(self) -> int:
        """Elements of a layer's norms, which every tensor-parallel rank has whole."""
        return self.spec.layer_norms * self.spec.hidden_size + self._head_norms

    @property
    def _head_norms(self) -> int:
        return self.spec.head_norm_parameters

    @property
    def _own_experts(self) -> int:
        """Elements of a layer's experts on a rank."""
        return self._layer_experts // (self.mesh.expert_slices * self.mesh.expert)

    def _loads(self, dimension: str, stage: Stage) -> Iterator[tuple[str, str, int, int]]:
        """Loads of the experts, by which biases move: of eight bytes each."""
        if self.config.router_bias_update_rate:
            yield "all_reduce", dimension, 1, stage.layers * 2 * self.spec.num_experts

    @property
    def _runs_shared_last(self) -> bool:
        """Whether a shared expert comes after the others."""
        return self.spec.shared_expert_size > 0 and not self.config.shared_expert_overlap

    @property
    def _layer_experts(self) -> int:
        return self.spec.expert_parameters // self.spec.num_layers

    @property
    def _divides_tokens(self) -> bool:
        """Whether tensor ranks have different tokens at the experts."""
        return self.spec.num_experts > 0 and self.mesh.expert_slices < self.mesh.tensor

    @property
    def _summed_mlps(self) -> int:
        """1 if tensor ranks sum a layer's MLP, or its shared expert."""
        return int(not self._divides_tokens or self.spec.shared_expert_size > 0)

    @property
    def _router(self) -> int:
        return (self.spec.num_experts or 0) * self.spec.hidden_size

    @property
    def _table(self) -> int:
        return self.spec.vocab_size * self.spec.hidden_size // self.mesh.tensor

    @property
    def _owners(self) -> int:
        """Ranks that share a reduced gradient."""
        return self.mesh.shard_ranks if self.config.zero_stage else 1

    def in_flight(self, place: int) -> float:
        """Micro-batches of a rank's layers that it holds at most, where there are many."""
        ranks, stages, times = self.mesh.pipeline, self.config.virtual_stages, self.micro_batches
        match self.config.pipeline_schedule:
            case "1f1b":
                return min(times, ranks - place)
            case "interleaved_1f1b":
                return min(times, (ranks * stages + ranks - 2 * place - 1) / stages)
            case "interleaved_zero_bubble" | "zbv":
                return min(times, ranks)
            case "dualpipev":
                return ranks + 0.5
            case _:
                return times


def _turns(config: TrialConfig, times: int, place: int, index: int) -> int:
    """Forwards of a stage after which its next turn is a backward."""
    match config.pipeline_schedule:
        case "gpipe" | "looped_bfs":
            return 1
        case "1f1b":
            return times - min(times, config.pipeline_parallel_size - place) + 1
        case "interleaved_1f1b":
            turns = [kind for stage, kind in _interleaved(config, times, place) if stage == index]
            return sum(pair == ("F", "B") for pair in itertools.pairwise(turns))
    raise ValueError(f"{config.pipeline_schedule} releases no parameters: one of {ZERO_BUBBLE_SCHEDULES}")


def _interleaved(config: TrialConfig, times: int, place: int) -> Sequence[tuple[int, str]]:
    """A rank's turns (its stage, forward or backward), in rounds of as many micro-batches as ranks [Narayanan 2021, 2.2]."""
    ranks, stages = config.pipeline_parallel_size, config.virtual_stages
    each = times // max(1, times // ranks)
    forward = [(turn // each % stages, "F") for turn in range(times * stages)]
    backward = [(stages - 1 - turn // each % stages, "B") for turn in range(times * stages)]
    warm_up = min(len(forward), (stages - 1) * each + 2 * (ranks - 1 - place))
    steady = [turn for pair in zip(forward[warm_up:], backward, strict=False) for turn in pair]
    return [*forward[:warm_up], *steady, *backward[len(forward) - warm_up :]]
