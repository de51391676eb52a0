"""Best-config documents as far as exporters read them, on a small CPU machine and on two DGX H100."""

from pathlib import Path
from typing import Any

import table

from autotune.request.request import JobRequest
from autotune.request.rows import request_from_fields, request_to_row
from autotune.session.placement import launch_of
from autotune.session.resolve import resolve
from autotune.session.session import Session
from search_spaces.models.model import FactoryModel
from search_spaces.trial_config import TrialConfig

JOB = "20261121-120000-abcd"


def small(folder: Path, ranks: int = 2, **changes: Any) -> Session:
    """A Llama of two layers on CPU ranks."""
    return table.session(folder, ranks=ranks, **changes)


def large(model: str = "llama-3-8b", **changes: Any) -> Session:
    """An 8B model on 16 GPUs."""
    fields: dict[str, Any] = {
        "model": model, "cluster": "dgx-h100:2", "space": "parallel", "global_batch_size": 64, "sequence_length": 4096,
    }  # fmt: skip
    return resolve(JobRequest(**fields | changes))


def unknown(ranks: int = 2) -> Session:
    """A user's own module."""
    model = FactoryModel(reference="mine:make", parameter_count=1_000_000)
    return resolve(JobRequest(model="mine:make", ranks=ranks, resolved_model=model, strategy="random"))


def script(ranks: int = 2) -> Session:
    """A user's own script that reads a DeepSpeed file."""
    return resolve(request_from_fields({"command": ["python", "train.py", "{config}"], "ranks": ranks, "strategy": "random"}))


def document(session: Session, baseline: dict[str, Any] | None = None, **knobs: Any) -> dict[str, Any]:
    """What exporters read. `baseline` None: the defaults."""
    config = TrialConfig(**knobs)
    return {
        "schema_version": 1,
        "job": {"id": JOB, "request": request_to_row(session.request)},
        "model": {"parameter_count": session.model.parameter_count},
        "best": {"config": config.values(), "measured": {}},
        "baseline": {"config": TrialConfig(**(baseline or {})).values()},
        "launch": launch_of(config, session),
        "verified": "native-only",
    }
