"""The table of what DeepSpeed takes without a word, held against DeepSpeed's own configuration classes."""

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.frameworks import deepspeed_sections
from autotune.frameworks.deepspeed_checks import findings
from executor.engines.deepspeed.capability import installed_version
from search_spaces.errors import Effect

pytestmark = pytest.mark.skipif(
    installed_version() != "0.19.8", reason="DeepSpeed 0.19.8 is not installed: pip install 'autotune-parallel[deepspeed]'"
)
CASES = Path(__file__).parents[3] / "autotune" / "frameworks" / "test_deepspeed_checks.py"
TABLE = Path(deepspeed_sections.__file__).with_suffix(".toml")
SCRIPT = """
import enum, json, os, pathlib, sys, types, typing
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.runtime.config import DeepSpeedConfig, HybridEngineConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel

NAMES = {
    bool: "bool", int: "int", float: "float", str: "text", pathlib.Path: "text", list: "list", tuple: "list", dict: "table",
    object: "any",
}
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def words(kind, rules):
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind is type(None):
        return "null"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(words(part, rules) for part in parts)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, parts))
    if origin is list:
        return "list of " + words(parts[0], ())
    kind = origin or kind
    if issubclass(kind, enum.Enum):
        return "one of " + ", ".join(str(value) for value in dict.fromkeys(member.value for member in kind))
    if issubclass(kind, BaseModel):
        return "section"
    bounds = [f" {sign} {getattr(rule, name)}" for rule in rules for name, sign in BOUNDS.items() if hasattr(rule, name)]
    return NAMES.get(kind, "nothing") + "".join(bounds)


def add(path, model):
    table = tables[path] = {}
    for field, info in model.model_fields.items():
        extra = info.json_schema_extra or {}
        now = extra.get("new_param") if extra.get("set_new_param", True) else None
        text = words(info.annotation, info.metadata)
        table[info.alias or field] = text + (f", now {now}" if now else "")
        names = [info.alias or field]
        if info.alias and info.alias != field:
            table[field] = f"{text}, now {info.alias}"
            names.append(field)
        for kind in (info.annotation, *typing.get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                for name in names:
                    add(f"{path}.{name}", kind)


taken, tables = {}, {}
for name, config in json.load(sys.stdin).items():
    try:
        DeepSpeedConfig(config)
        taken[name] = True
    except Exception:
        taken[name] = False
for path, model in {
    "zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "bfloat16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config, "tensor_parallel": TPTrainingConfig, "comms_logger": CommsLoggerConfig,
    "hybrid_engine": HybridEngineConfig, "compile": CompileConfig, "weight_quantization": WeightQuantConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    **{field: info.annotation for field, info in DeepSpeedMonitorConfig.model_fields.items()},
}.items():
    add(path, model)
print("\\n" + json.dumps({"taken": taken, "keys": tables}))
"""


@pytest.fixture(scope="module")
def cases() -> Mapping[str, Any]:
    spec = importlib.util.spec_from_file_location("deepspeed_rule_cases", CASES)
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
    """Write the table anew with AUTOTUNE_WRITE_GOLDEN=1: a new key is in no older version than the one that is installed."""
    table = tomllib.loads(TABLE.read_text())
    if os.environ.get("AUTOTUNE_WRITE_GOLDEN"):
        comments = [line for line in TABLE.read_text().splitlines() if line.startswith("#")]
        for path, keys in answer["keys"].items():
            comments += ["", f'["{path}"]' if "." in path else f"[{path}]"]
            for key, text in keys.items():
                _, comma, since = table.get(path, {}).get(key, f", since {installed_version()}").partition(", since ")
                comments.append(f'{key} = "{text}{comma}{since}"')
        TABLE.write_text("\n".join(comments) + "\n")
        table = tomllib.loads(TABLE.read_text())
    without_versions = {path: {key: text.partition(", since")[0] for key, text in keys.items()} for path, keys in table.items()}
    assert without_versions == answer["keys"]
