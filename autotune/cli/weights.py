"""`autotune weights`: a model's weights in another kind of file."""

import dataclasses
from pathlib import Path

from autotune.cli.status import Status
from autotune.text.console import Console
from executor.files.convert import convert_weights
from search_spaces.models.huggingface import resolve_model


def weights_command(model: str, source: Path, target: Path, mtp_layers: int) -> Status:
    """Check and convert the weights, and say how many tensors were written."""
    spec = resolve_model(model)
    if mtp_layers:
        spec = dataclasses.replace(spec, mtp_layers=mtp_layers)
    count = convert_weights(spec, source, target)
    Console().print(f"{target}: {count:,} tensors of {spec.name}")
    return Status.OK
