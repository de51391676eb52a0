"""Features of configurations stand beside those of others, whichever knobs these have moved."""

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.fitting.features import config_features
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.knob_values import KNOBS
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

PLAIN = TrialConfig(precision="bf16")


def features(*configs: TrialConfig) -> np.ndarray:
    model, cluster = resolve_model("llama-tiny"), resolve_cluster("dgx-a100:1")
    cases = cases_of(model, cluster, Workload(global_batch_size=64, sequence_length=128), list(configs), "native")
    return config_features(cases, configs)


@pytest.mark.parametrize("knob", ["optimizer", "script", "compile_blocks", "cuda_graphs"])
def test_there_are_as_many_of_configurations_that_agree_in_a_knob(knob: str) -> None:
    """A space with two optimizers ended its sweep: the trials of one optimizer had fewer features than its candidates."""
    value = {"script": "NAME=1"}.get(knob, (KNOBS[knob].choices or ("",))[-1])
    other = PLAIN.replace({knob: value})
    alone, both = features(PLAIN), features(PLAIN, other)
    assert alone.shape[1] == both.shape[1] == features(other).shape[1]
    assert np.array_equal(alone[0], both[0])
    assert not np.array_equal(both[0], both[1])
