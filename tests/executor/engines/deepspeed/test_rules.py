"""The table of what DeepSpeed takes without a word, held against DeepSpeed's own configuration classes."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.frameworks.deepspeed_checks import FORBIDS_OTHERS, findings
from executor.engines.deepspeed.capability import installed_version
from search_spaces.finding import Effect

pytestmark = pytest.mark.skipif(
    installed_version() != "0.19.8", reason="DeepSpeed 0.19.8 is not installed: pip install 'autotune[deepspeed]'"
)
TESTS = Path(__file__).parents[3] / "search_spaces"
SCRIPT = """
import json, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.comm.config import CommsLoggerConfig

def keys(model):
    return sorted({name for field, info in model.model_fields.items() for name in (field, info.alias) if name})

taken = {}
for name, config in json.load(sys.stdin).items():
    try:
        DeepSpeedConfig(config)
        taken[name] = True
    except Exception:
        taken[name] = False
models = {
    "zero_optimization": DeepSpeedZeroConfig, "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig, "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config, "tensor_parallel": TPTrainingConfig, "comms_logger": CommsLoggerConfig,
}
print("\\n" + json.dumps({"taken": taken, "keys": {path: keys(model) for path, model in models.items()}}))
"""


@pytest.fixture(scope="module")
def cases() -> Mapping[str, Any]:
    spec = importlib.util.spec_from_file_location("deepspeed_rule_cases", TESTS / "deepspeed" / "test_lint.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {**{name: config for name, (config, _) in module.CASES.items()}, **module.CLEAN}


@pytest.fixture(scope="module")
def answer(cases: Mapping[str, Any]) -> dict[str, Any]:
    """In a process of its own: DeepSpeed warns when it is imported, and patches torch."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=json.dumps(cases), capture_output=True, text=True, check=True, timeout=120
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_it_stops_at_what_is_called_refused_and_at_nothing_else(cases: Mapping[str, Any], answer: dict[str, Any]) -> None:
    filled_in_by_others = {"as Hugging Face fills it in"}
    # Its classes stand on one rank here, where the product of the three is no longer one replica's.
    told = {
        name: not any(finding.effect is Effect.REFUSED for finding in findings(config, "0.19.8"))
        for name, config in cases.items()
        if name not in filled_in_by_others and not name.startswith("AutoTP with")
    }
    assert {name: answer["taken"][name] for name in told} == told


def test_the_keys_of_closed_sections_are_its_own(answer: dict[str, Any]) -> None:
    assert {path: sorted(keys) for path, keys in FORBIDS_OTHERS.items()} == answer["keys"]
