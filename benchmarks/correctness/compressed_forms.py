"""Closed forms of what compressed communication sends and keeps (docs/closed-forms.md), for data-parallel ranks only.

Nothing is prefetched and nothing persists (`prefetch_bucket_size` 0, `param_persistence_threshold` 0), one bucket holds all
gradients, and the gradient norm is computed once a step.
"""

from collections.abc import Iterator, Sequence

from search_spaces.communication import INT8, integer_bytes, sign_bytes, sign_share
from search_spaces.models.model import ModelSpec
from search_spaces.optimizers import LEAST_QUANTISED, QUANTISED_BLOCK
from search_spaces.training.states import PARAMETER_BYTES
from search_spaces.trial_config import TrialConfig

Messages = dict[tuple[str, str], tuple[int, int]]
"""(operation, mesh dimension) -> (count, bytes of full messages) in a step."""
FULL = 4
"""Bytes of a number in fp32."""


def units(spec: ModelSpec) -> list[list[int]]:
    """Elements of each parameter, by group gathered together: embedding, blocks, head. For a llama."""
    hidden, keys = spec.hidden_size, spec.num_key_value_heads * spec.head_dim
    queries = spec.num_attention_heads * spec.head_dim
    block = [hidden * queries] * 2 + [hidden * keys] * 2 + [hidden * spec.ffn_hidden_size] * 3 + [hidden] * 2
    table = spec.vocab_size * hidden
    return [[table], *[block] * spec.num_layers, [hidden, table]]


class Forms:
    """The closed forms of one configuration on `ranks` ranks."""

    def __init__(self, spec: ModelSpec, config: TrialConfig, ranks: int, micro_batches: int = 1) -> None:
        self.config, self.ranks, self.micro_batches = config, ranks, micro_batches
        self.units = units(spec)
        self.elements = sum(map(sum, self.units))
        self.shards = config.shard_ranks(ranks) if config.zero_stage == 3 else ranks
        self.integers = config.gather_dtype == INT8 and config.zero_stage == 3

    def padded(self) -> int:
        """Elements held by all sharding ranks together, padding included."""
        return sum(self.shards * self._share(elements) for unit in self.units for elements in unit)

    def messages(self) -> Messages:
        """Messages of a rank in a step."""
        total: Messages = {}
        for operation, dimension, size in (*self._reductions(), *self._gathers(), *self._norm()):
            count, before = total.get((operation, dimension), (0, 0))
            total[operation, dimension] = (count + 1, before + size)
        return total

    def second_copy(self) -> int:
        """Bytes of a rank's part of the secondary shards; 0: there are none."""
        near = self.config.secondary_shard_size
        return sum(map(self._unit, self.units)) // near if near else 0

    def momentum_errors(self) -> int:
        """Bytes of 1-bit Adam's compression errors on a rank: of its own momentum, and of its part of the common one."""
        share = sign_share(self.elements, self.ranks)
        return FULL * (self.ranks + 1) * share if self.config.optimizer == "onebit_adam" else 0

    def _share(self, elements: int) -> int:
        blocks = self.integers and elements >= LEAST_QUANTISED
        multiple = QUANTISED_BLOCK if blocks or (self.config.optimizer == "adamw8bit" and elements >= LEAST_QUANTISED) else 1
        return -(-elements // (self.shards * multiple)) * multiple

    def _unit(self, parameters: Sequence[int]) -> int:
        """Bytes of a gather."""
        width = PARAMETER_BYTES[self.config.precision]
        return sum(
            self.shards * integer_bytes(self._share(elements))
            if self.integers and elements >= LEAST_QUANTISED
            else self.shards * self._share(elements) * width
            for elements in parameters
        )

    def _reductions(self) -> Iterator[tuple[str, str, int]]:
        if self.config.optimizer == "onebit_adam":
            size = self.ranks * sign_bytes(sign_share(self.elements, self.ranks))
            yield from (("all_to_all", "data", size), ("all_gather", "data", size))
            return
        integers = self.config.reduce_dtype == INT8
        parameters = [elements for unit in self.units for elements in unit]
        if self.config.zero_stage == 0:
            yield from self._all_reduced("data", parameters, self.ranks)
            return
        own = [self._share(elements) for elements in parameters]
        for _ in range(self.micro_batches if self.config.zero_stage > 1 else 1):
            size = self.shards * sum(integer_bytes(share) if integers else FULL * share for share in own)
            yield ("all_to_all" if integers else "reduce_scatter", "data", size)
        if self.shards < self.ranks:
            yield from self._all_reduced("replica", own, self.ranks // self.shards)

    def _all_reduced(self, dimension: str, parameters: Sequence[int], ranks: int) -> Iterator[tuple[str, str, int]]:
        if self.config.reduce_dtype != INT8:
            yield ("all_reduce", dimension, FULL * sum(parameters))
            return
        size = ranks * sum(integer_bytes(-(-elements // ranks)) for elements in parameters)
        yield from (("all_to_all", dimension, size), ("all_gather", dimension, size))

    def _gathers(self) -> Iterator[tuple[str, str, int]]:
        if self.config.zero_stage in (1, 2):
            yield ("all_gather", "data", FULL * self.padded())
        if self.config.zero_stage < 3:
            return
        # The embedding's backward does not read it; the last unit's backward directly follows its forward.
        once = (0, len(self.units) - 1)
        for place, unit in enumerate(self.units):
            uses = self.micro_batches * (1 if place in once else 2)
            for use in range(uses):
                near = self.config.secondary_shard_size if use else 0
                if near != 1:  # if each rank has all of it, nothing is sent
                    yield ("all_gather", "near" if near else "data", self._unit(unit))

    def _norm(self) -> Iterator[tuple[str, str, int]]:
        if self.config.zero_stage or self.config.optimizer == "onebit_adam":
            yield ("all_reduce", "data", FULL)
