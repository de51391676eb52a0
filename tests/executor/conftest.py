"""Four warm ranks on which the closed forms are measured, and where ranks of tests find their modules."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from executor.runners.local import LocalRunner
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, TrialResult
from search_spaces.trial_config import TrialConfig

FOLDER = str(Path(__file__).parent / "engines" / "native")
sys.path.insert(0, FOLDER)  # for `closed_forms`; ranks get it by PYTHONPATH, for `counted`

Count = Callable[..., TrialResult]


@pytest.fixture(autouse=True)
def _every_attention_kernel() -> Iterator[None]:
    """A session in this process leaves torch only the kernel of its configuration, which other tests cannot use."""
    yield
    if (attention := sys.modules.get("executor.parallel.attention")) is not None:
        attention.choose_attention_kernel(attention.BEST)


@pytest.fixture(scope="module")
def count(forked_ranks: None) -> Iterator[Count]:
    """Runs a layout (`closed_forms.Layout`) for a few steps, once however often it is asked for.

    Not wider than a module: its ranks would live on beside tests that count processes.
    """
    known: dict[Any, TrialResult] = {}
    with LocalRunner(4, environment={"PYTHONPATH": FOLDER}, trial_function="counted:run_trial") as runner:

        def run(layout: Any, memory: bool = False) -> TrialResult:
            if (layout.key, memory) not in known:
                known[layout.key, memory] = _run(runner, layout, memory)
            return known[layout.key, memory]

        yield run


def _run(runner: LocalRunner, layout: Any, memory: bool) -> TrialResult:
    config: TrialConfig = layout.config
    # After the first update all state is there, and every further step sends and holds the same.
    request = TrialRequest(
        attempt=config.hash,
        model=layout.spec,
        config=config,
        workload=layout.workload,
        world_size=4,
        fidelity=Fidelity(warmup_updates=1, min_steps=1, max_steps=1, max_warmup_steps=1, measure_memory=memory),
        timeout_seconds=120,
    )
    result = runner.run(request)
    assert result.outcome is Outcome.OK, result.traceback or result.message
    return result
