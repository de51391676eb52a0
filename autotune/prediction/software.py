"""Profiles of software that trains: our own engine's, and those that tables of measurements name."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from autotune.prediction.cases import Software, scalar

_FILE = Path(__file__).with_name("software.toml")


def software_named(text: str, *, gated: bool, first_rank: bool = False) -> tuple[Software, dict[str, float]]:
    """The profile of software that `text` (framework, kernel, precision, notes) names, and its own defaults of a layout."""
    values = profile(text.lower())
    mlp = values["gated_bytes"] if gated else values["plain_bytes"]
    software = Software(
        gradient_bytes=scalar(values["gradient_bytes"]),
        holds_gradients=scalar(values["holds_gradients"]),
        buckets=scalar(values["buckets"]),
        state_bytes=scalar(values["state_bytes"]),
        kept_logit_bytes=scalar(values["kept_logit_bytes"]),
        fragments=scalar(values["fragments"]),
        scores=scalar(values["scores"]),
        norm_extra=scalar(values["rms_extra"] if gated else 0.0),
        input_share=scalar(values["input_share"]),
        mlp_bytes=scalar(mlp),
        frozen_outputs=scalar(values["frozen_outputs"]),
        quantised_extra=scalar(values["quantised_extra"]),
        gathers_whole=scalar(values["gathers_whole"]),
        logit_bytes=scalar(values["logit_bytes"]),
        whole_logits=scalar(values["whole_logits"]),
        keeps_gathered=scalar(values["keeps_gathered"]),
        scatters=scalar(values["scatters"]),
        tensor_hidden=scalar(values["tensor_hidden"]),
        attention_speed=scalar(values["attention_speed"]),
        elementwise=scalar(values["elementwise"]),
        first_heavy=scalar(values["first_heavy"]),
        first_rank=scalar(float(first_rank)),
    )
    return software, values


def profile(text: str) -> dict[str, float]:
    """The values of every stack whose words are all in `text`, over the defaults."""
    tables = _tables()
    values: dict[str, float] = dict(tables["default"])
    for stack in tables["stack"]:
        if all(word in text for word in stack["words"]):
            values |= {name: value for name, value in stack.items() if name != "words"}
    return values


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))
