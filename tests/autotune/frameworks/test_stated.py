"""Learning rate, weight decay, clipping and optimizer: exported where they are stated, and never made up."""

import json
import re
from pathlib import Path
from typing import Any

import export_cases as cases
import exported
import pytest

from autotune.frameworks.best_config import winner_of
from autotune.frameworks.exporters import EXPORTERS, exporter

STATED: dict[str, Any] = {"lr": 0.00037, "weight_decay": 0.0173, "clip": 0.731, "optimizer": "adamw"}
NEW = tuple(name for name in EXPORTERS if name != "json")
WORDS = (
    "lr", "learning_rate", "weight_decay", "clip_grad", "gradient_clipping", "gradient_clip_val", "max_norm", "max_grad_norm",
    "optim", "optimizer",
)  # fmt: skip
VALUE = re.compile(rf"\b({'|'.join(WORDS)})\b[\"']?\s*[:=]?\s*[\"']?(\w[\w.]*)", re.IGNORECASE)
"""A hyperparameter with its value, as any of the formats writes it."""


def written(text: str) -> dict[str, str]:
    """Hyperparameters with their values in a file: not its comments, and not the code after the constants of `torch`."""
    head = text.partition("SIZES = dict")[0]
    lines = [line for line in head.splitlines() if not line.lstrip().startswith("#")]
    found = VALUE.findall("\n".join(lines).replace("-", "_"))
    return {name.lower(): value for name, value in found if value not in ("None", "auto", "YOUR_LEARNING_RATE")}


def told(name: str, case: str, folder: Path, **stated: Any) -> tuple[str, tuple[str, ...]]:
    document = cases.best(case, folder)
    document["job"]["request"] |= stated
    made = exporter(name)(document)
    return made.text, made.notes


@pytest.mark.parametrize(("name", "case"), cases.WRITTEN)
def test_nothing_is_made_up(tmp_path: Path, name: str, case: str) -> None:
    text, notes = told(name, case, tmp_path)
    assert written(text) == {}
    assert not [note for note in notes if "0.001" in note]


@pytest.mark.parametrize(("name", "case"), cases.WRITTEN)
def test_what_is_stated_is_written_or_told(tmp_path: Path, name: str, case: str) -> None:
    text, notes = told(name, case, tmp_path, **STATED)
    beside = exporter("deepspeed")(_with(cases.best(case, tmp_path))).text if name == "accelerate-deepspeed" else ""
    for value in ("0.00037", "0.0173", "0.731", "adam"):
        assert value in (text + beside).lower() or any(value in note for note in notes), value
    assert not [note for note in notes if note.startswith("not stated: ")]


def _with(document: dict[str, Any]) -> dict[str, Any]:
    document["job"]["request"] |= STATED
    return document


def test_deepspeed_has_each_where_it_reads_it(tmp_path: Path) -> None:
    def content(**stated: Any) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(told("deepspeed", "zero-3", tmp_path, **stated)[0])
        return {name: made[name] for name in ("optimizer", "gradient_clipping") if name in made}

    assert content(**STATED) == {
        "gradient_clipping": 0.731,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.00037, "weight_decay": 0.0173}},
    }
    assert content() == {}
    assert content(clip=0.0) == {"gradient_clipping": 0.0}
    assert content(optimizer="adamw") == {"optimizer": {"type": "AdamW", "params": {}}}
    assert content(lr=3e-4) == {}
    notes = told("deepspeed", "zero-3", tmp_path, lr=3e-4)[1]
    assert "lr=0.0003: DeepSpeed reads it beside a type of optimizer alone; give it to your own optimizer" in notes


def test_a_trainer_fills_in_what_is_not_stated(tmp_path: Path) -> None:
    content = json.loads(told("transformers", "zero-3", tmp_path)[0])
    assert (content["deepspeed"]["gradient_clipping"], "optimizer" in content["deepspeed"]) == ("auto", False)
    content = json.loads(told("transformers", "zero-3", tmp_path, **STATED)[0])
    assert (content["deepspeed"]["gradient_clipping"], content["max_grad_norm"]) == (0.731, 0.731)
    assert content["deepspeed"]["optimizer"]["params"]["lr"] == content["learning_rate"]
    assert content["optim"] == "adamw_torch_fused"


@pytest.mark.parametrize(
    ("request_fields", "config", "optimizer"),
    [
        ({}, {}, None),
        ({"optimizer": "adamw"}, {}, "adamw"),
        ({"pins": {"optimizer": "adamw"}}, {}, "adamw"),
        ({"baseline": {"optimizer": "adamw"}}, {}, "adamw"),
        ({}, {"optimizer": "sgd"}, "sgd"),
    ],
)
def test_who_names_the_optimizer(
    tmp_path: Path, request_fields: dict[str, Any], config: dict[str, Any], optimizer: str | None
) -> None:
    document = exported.document(exported.small(tmp_path), **config)
    document["job"]["request"] |= request_fields
    assert winner_of(document).hyperparameters.optimizer == optimizer


def test_a_file_of_before_has_none(tmp_path: Path) -> None:
    """Of a version that knew no such fields."""
    document = exported.document(exported.small(tmp_path))
    for name in STATED:
        del document["job"]["request"][name]
    winner = winner_of(document)
    assert winner.hyperparameters.values() == {}
    assert winner.workload.learning_rate == 1e-3
