"""An engine: torch's DistributedDataParallel with a pause after each step."""

import time

from example_plugin.capability import EXAMPLE
from executor.engine import EngineSession, RankContext, StepReport
from executor.engines.torch_engines import DdpEngine
from search_spaces.models.model import Model
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


class ExampleEngine(DdpEngine):
    """Builds the ddp engine's session, whose steps then take longer."""

    capability = EXAMPLE

    def build(self, context: RankContext, model: Model, config: TrialConfig, workload: Workload) -> EngineSession:
        pause = getattr(config, "step_pause") / 1000  # noqa: B009
        session = DdpEngine().build(context, model, config.replace({"step_pause": 0}), workload)
        step = session.train_step

        def paused() -> StepReport:
            report = step()
            time.sleep(pause)
            return report

        session.train_step = paused  # type: ignore[method-assign]
        return session


ENGINE = ExampleEngine()
