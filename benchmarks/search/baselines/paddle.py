"""The procedure of Paddle's auto tuner."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.strategies.strategy import Candidates, Score
from benchmarks.search.baselines.replay import Combinations, Procedure, ReplayStrategy, context_of, place_of
from search_spaces.capability import SpaceContext
from search_spaces.trial_config import TrialConfig

RECOMPUTATION = ("none", "selective", "full")
"""Its levels of recomputation: none, `core_attn`, `full`."""
DIMENSIONS = (
    "tensor_parallel_size", "pipeline_parallel_size", "zero_stage", "micro_batch_size", "virtual_stages",
    "activation_checkpointing",
)  # fmt: skip
"""The knobs of its grid."""


class PaddleStrategy(ReplayStrategy):
    """Replays `python/paddle/distributed/auto_tuner` of PaddlePaddle (develop, 2024: tuner.py, search.py, prune.py, utils.py).

    1. A grid in the order of its `schedule_mode` "performance" (utils.py, `dist_degree` and `search_all`): tensor parallelism
       ascending; sharded data parallelism before plain; pipeline depth descending; ZeRO stage ascending from 1; micro-batch
       descending; virtual stages descending; no recomputation first. Its default mode "memory" starts with configurations
       most likely to fit: faster to a first result if little fits, far slower to the best if much does.
    2. Skipped before any run (`_PRUNE_FUNC`): tensor parallelism beyond a node, or that does not divide hidden size, heads and
       vocabulary; pipelines that do not divide the layers, or deeper than nodes + 1 if there are several; fewer
       micro-batches than stages; ZeRO 2 or 3 with a pipeline; virtual stages on fewer than 3 pipeline ranks.
    3. Skipped because of runs (`_PRUNE_HISTORY_FUNC`), all else being equal: a smaller micro-batch than one that runs, a larger
       one than one that is out of memory; a higher ZeRO stage than one that runs, a lower one than one that is out
       of memory; more recomputation than one that runs, less than one that is out of memory; fewer virtual stages than one
       that is out of memory. A skipped configuration then counts as running or out of memory, like the cause of the skip.
    4. It ends after 100 tasks.

    Its rule that compares equal products of tensor and pipeline degree reads a key that is never set, and so never applies;
    it is omitted here. Unknown knobs are dimensions of the grid that vary fastest (its `custom_search_dim`) if there are few
    candidates, else they keep the user's setting. Stage 0 is its sharding degree 1; intermediate group sizes are not
    replayed. Rules that need the model or the cluster (2) are not applied if the candidates do not state them.
    """

    def __init__(self, score: Score) -> None:
        super().__init__(score)
        self._tasks: dict[str, list[TrialConfig]] = {}

    def procedure(self, candidates: Candidates) -> Procedure:
        if candidates.hash not in self._tasks:
            self._tasks[candidates.hash] = _grid(candidates, Combinations(candidates, DIMENSIONS, self.listing))
        verdicts, launched = _Seen(candidates), 0
        for config in self._tasks[candidates.hash]:
            verdict = verdicts.verdict(config)
            if verdict is _Verdict.UNKNOWN:
                if launched == 100:  # `task_limit`
                    return
                launched += 1
                answer = yield config
                verdict = _Verdict.RUNS if answer.ran else _Verdict.MEMORY if answer.out_of_memory else _Verdict.FAILS
            verdicts.add(config, verdict)


class _Verdict(StrEnum):
    """What is known or assumed of a configuration."""

    UNKNOWN = "unknown"
    RUNS = "runs"
    MEMORY = "memory"
    """Out of memory."""
    FAILS = "fails"


def _grid(candidates: Candidates, combinations: Combinations) -> list[TrialConfig]:
    context = context_of(candidates)
    other_knobs = [name for name in candidates.domains if name not in DIMENSIONS]

    def key(config: TrialConfig) -> tuple[int, ...]:
        return (
            config.tensor_parallel_size,
            config.zero_stage == 0,
            -config.pipeline_parallel_size,
            config.zero_stage,
            -config.micro_batch_size,
            -config.virtual_stages,
            RECOMPUTATION.index(config.activation_checkpointing),
            *(place_of(candidates.domains, name, config) for name in other_knobs),
        )

    return sorted((config for config in combinations.all() if _allowed(config, context)), key=key)


def _allowed(config: TrialConfig, context: SpaceContext | None) -> bool:
    deep = config.pipeline_parallel_size
    if (deep > 1 and config.zero_stage > 1) or (config.virtual_stages > 1 and deep <= 2):
        return False
    return context is None or _fits_model(config, context)


def _fits_model(config: TrialConfig, context: SpaceContext) -> bool:
    tensor, deep = config.tensor_parallel_size, config.pipeline_parallel_size
    model, cluster = context.model, context.cluster
    divided = (getattr(model, name, 0) for name in ("hidden_size", "num_attention_heads", "vocab_size"))
    steps = config.gradient_accumulation_steps(context.workload.global_batch_size, context.world_size)
    return (
        tensor <= cluster.devices_per_node
        and not any(size % tensor for size in divided)
        and getattr(model, "num_layers", 0) % (deep * config.virtual_stages) == 0
        and (cluster.nodes == 1 or deep <= cluster.nodes + 1)
        and steps >= deep
        and (config.virtual_stages == 1 or steps % deep == 0)
    )


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A knob by which configurations are compared that are equal in all other knobs."""

    knob: str
    smaller_runs: bool = False
    """True: a larger value is skipped if a smaller one runs; False: a smaller one if a larger one runs."""
    larger_lost: bool = True
    """True: a smaller value is skipped if a larger one is out of memory; False: a larger one if a smaller one is."""
    running: bool = True
    """Whether running configurations cause skips."""
    ignored: tuple[str, ...] = ()
    """Other knobs that may differ."""

    def level(self, config: TrialConfig) -> int:
        value = getattr(config, self.knob)
        return RECOMPUTATION.index(value) if isinstance(value, str) else int(value)


COMPARISONS = (
    # Its comparison omits every key that is a substring of "vpp_degree", which includes "pp_degree".
    _Comparison("virtual_stages", running=False, ignored=("pipeline_parallel_size",)),
    _Comparison("micro_batch_size", larger_lost=False),
    _Comparison("zero_stage", smaller_runs=True),
    _Comparison("activation_checkpointing", smaller_runs=True),
)
"""Its history rules, in order."""


@dataclass(slots=True)
class _Seen:
    """Tried or skipped configurations, by comparison key."""

    candidates: Candidates
    _levels: dict[tuple[object, ...], dict[_Verdict, list[int]]] = field(default_factory=dict)

    def verdict(self, config: TrialConfig) -> _Verdict:
        for comparison in COMPARISONS:
            levels = self._levels.get(self._key(comparison, config), {})
            verdict = _compared(comparison, comparison.level(config), levels)
            if verdict is not _Verdict.UNKNOWN:
                return verdict
        return _Verdict.UNKNOWN

    def add(self, config: TrialConfig, verdict: _Verdict) -> None:
        for comparison in COMPARISONS:
            levels = self._levels.setdefault(self._key(comparison, config), {})
            levels.setdefault(verdict, []).append(comparison.level(config))

    def _key(self, comparison: _Comparison, config: TrialConfig) -> tuple[object, ...]:
        left_out = (comparison.knob, *comparison.ignored)
        same = [getattr(config, name) for name in self.candidates.domains if name not in left_out]
        # Plain and sharded data parallelism differ in its sharding degree, which no comparison omits.
        return (comparison.knob, config.zero_stage == 0, *same)


def _compared(comparison: _Comparison, level: int, levels: Mapping[_Verdict, list[int]]) -> _Verdict:
    running, lost = levels.get(_Verdict.RUNS, []), levels.get(_Verdict.MEMORY, [])
    if comparison.running and any(other < level if comparison.smaller_runs else other > level for other in running):
        return _Verdict.RUNS
    if any(other > level if comparison.larger_lost else other < level for other in lost):
        return _Verdict.MEMORY
    return _Verdict.UNKNOWN
