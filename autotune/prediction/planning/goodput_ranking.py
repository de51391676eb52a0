"""Plans ranked by tokens kept per device-hour on nodes that fail: the layout decides what a failure costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.goodput.choice import RunChoice, RunLayout, choices, rates_of
from autotune.goodput.run import SavedState
from autotune.goodput.terms import GoodputTerms
from autotune.prediction.equations.step import predict
from autotune.prediction.planning.buckets import Tuned
from autotune.prediction.planning.estimate import alike
from autotune.prediction.planning.question import Question
from search_spaces.trial_config import TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRuns:
    """A configuration, and the best ways to run it, best first."""

    item: Tuned
    choices: tuple[RunChoice, ...]

    @property
    def goodput(self) -> float:
        """Tokens kept per device-hour."""
        return self.choices[0].tokens_kept_per_device_hour


def ranked_by_goodput(
    question: Question, candidates: Sequence[Tuned], terms: GoodputTerms, price: float | None, top: int
) -> list[CandidateRuns]:
    """The best `top` of the configurations, sorted by their speed before, most tokens kept per device-hour first.

    No configuration keeps more tokens than it trains. The list is therefore searched from the fastest on, until a configuration
    without failures is slower than the `top` best with failures.

    Raises:
        RequestError: the terms' failure rates cannot be read.
    """
    rates = rates_of(terms, question.cluster.nodes)
    best: list[CandidateRuns] = []
    for item, state in _with_states(question, sorted(candidates, key=lambda item: item.seconds)):
        most = question.tokens / item.seconds * 3600 / question.cluster.world_size
        if len(best) == top and most <= best[-1].goodput:
            break
        item_choices = choices(layout_of(question, item.config, item.seconds, state), terms, rates, price)
        if item_choices:
            best = sorted([*best, CandidateRuns(item=item, choices=tuple(item_choices))], key=lambda entry: -entry.goodput)[
                :top
            ]
    return best


def _with_states(question: Question, candidates: Sequence[Tuned]) -> Iterator[tuple[Tuned, tuple[float, float]]]:
    """Each configuration with its `saved_bytes`."""
    # Configurations whose states are predicted together.
    batch = 64
    for start in range(0, len(candidates), batch):
        part = candidates[start : start + batch]
        yield from zip(part, saved_bytes(question, [item.config for item in part]), strict=True)


def saved_bytes(question: Question, configs: Sequence[TrialConfig]) -> list[tuple[float, float]]:
    """The bytes of parameters and of optimizer state on the fullest rank of each configuration."""
    states: dict[int, tuple[float, float]] = {}
    # Offloaded states are saved too: their bytes are predicted as if they were on the device.
    on_device = [config.replace({"offload_optimizer": "none", "offload_param": "none"}) for config in configs]
    for places, cases in alike(question, on_device):
        tags = predict(cases, question.rates).memory.by_tag
        count = len(places)
        bytes_by_tag = zip(
            *(np.broadcast_to(tags[tag], count).tolist() for tag in ("parameters", "optimizer_state")), strict=True
        )
        states |= dict(zip(places, bytes_by_tag, strict=True))
    return [states[index] for index in range(len(configs))]


def layout_of(question: Question, config: TrialConfig, seconds: float, state: tuple[float, float]) -> RunLayout:
    """What failures cost in this layout.

    `seconds`: of a step; `state`: its `saved_bytes`.

    1. The data-parallel and context ranks of one stage hold the same parameters up to stage 2, and at stage 3 one copy for each
       sharding group; the optimizer state is one copy for each sharding group from stage 1 on.
    2. Experts are divided over expert-parallel ranks: there are as many fewer copies.
    3. A copy is saved once: its holders share the work. A restart reads all of it on every device.
    4. Copies on one node are lost together.
    """
    cluster = question.cluster
    world, devices = cluster.world_size, cluster.devices_per_node
    ranks = config.zero_ranks(world)
    sharded = config.shard_ranks(world)
    groups = max(ranks // max(sharded, config.expert_parallel_size), 1)
    of_optimizer = groups if config.zero_stage >= 1 else max(ranks // config.expert_parallel_size, 1)
    of_parameters = groups if config.zero_stage == 3 else max(ranks // config.expert_parallel_size, 1)
    parameters, optimizer = state
    saved = parameters / of_parameters + optimizer / of_optimizer
    return RunLayout(
        nodes=cluster.nodes,
        devices_per_node=devices,
        step_seconds=seconds,
        tokens_per_step=question.tokens,
        state=SavedState(
            total_bytes=saved * world, saved_bytes_per_device=saved, loaded_bytes_per_device=parameters + optimizer
        ),
        copies=_on_nodes(min(of_parameters, of_optimizer), world, devices),
        replicas=_on_nodes(config.data_parallel_size(world), world, devices),
    )


def _on_nodes(copies: int, world: int, devices: int) -> int:
    """Copies that no node holds two of: consecutive ranks hold one copy."""
    ranks_per_copy = max(world // copies, 1)
    return copies if ranks_per_copy >= devices else max(copies * ranks_per_copy // devices, 1)
