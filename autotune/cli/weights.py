"""`autotune weights`: a model's weights from one framework's names to another's."""

import dataclasses
from pathlib import Path

from autotune.cli.status import Status
from autotune.text.console import Console
from executor.files.convert import convert_weights
from executor.files.frameworks import Framework
from search_spaces.models.huggingface import resolve_model


def weights_command(model: str, source: Path, target: Path, before: Framework, after: Framework, mtp_layers: int) -> Status:
    """Convert the weights, and say how many tensors were written."""
    spec = resolve_model(model)
    if mtp_layers:
        spec = dataclasses.replace(spec, mtp_layers=mtp_layers)
    count = convert_weights(spec, source, target, before, after)
    Console().print(f"{target}: {count:,} tensors of {spec.name} by the names of {after}", markup=False, highlight=False)
    return Status.OK
