"""Two warm ranks that run configurations of one model for a step, to hold what they send and keep against closed forms."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from executor.runners.local import LocalRunner
from search_spaces.knob import Value
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

RANKS = 2
QUICK = Fidelity(min_steps=1, max_steps=1, max_warmup_steps=2)

Measure = Callable[..., TrialResult]


@contextmanager
def measuring(spec: ModelSpec, workload: Workload, **standing: Value) -> Iterator[Measure]:
    """Runs the knobs that it is given, beside those that stand, once however often it is asked for."""
    # "counted" leaves out what nobody reads here: the FLOPs of a step, which takes longer than all others.
    environment = {"PYTHONPATH": str(Path(__file__).parent)}
    with LocalRunner(RANKS, environment=environment, trial_function="counted:run_trial") as runner:
        known: dict[str, TrialResult] = {}

        def run(**knobs: Any) -> TrialResult:
            config = TrialConfig(micro_batch_size=4).replace({**standing, **knobs})
            if config.hash not in known:
                known[config.hash] = _run(runner, spec, workload, config)
            return known[config.hash]

        yield run


def _run(runner: LocalRunner, spec: ModelSpec, workload: Workload, config: TrialConfig) -> TrialResult:
    request = TrialRequest(
        attempt=config.hash, model=spec, config=config, workload=workload, world_size=RANKS, fidelity=QUICK, timeout_seconds=60
    )
    result = runner.run(request)
    assert result.outcome is Outcome.OK, result.traceback or result.message
    return result
