"""Reads one of our best-config documents as the start of a sweep on another engine."""

from collections.abc import Mapping
from typing import Any

from autotune.errors import RequestError
from autotune.exports.best_config_file import request_of, require_schema_version
from autotune.exports.winner import stated_of
from autotune.imports.imported import Imported
from search_spaces.errors import KnobValueError
from search_spaces.knob_values import check_value
from search_spaces.trial_config import TrialConfig


def from_best_config(content: Mapping[str, Any], source: str) -> Imported:
    """Read the document: its best configuration, its global batch size and its ranks.

    Raises:
        RequestError: it lacks a part, or a value is outside its knob's domain.
        BestConfigError: it has another schema version, or its request cannot be read.
    """
    require_schema_version(content, source)
    try:
        values, ranks, engine = content["best"]["config"], content["launch"]["world_size"], content["engine"]
        knobs = {name: check_value(name, value) for name, value in values.items()}
        config = TrialConfig().replace(knobs)
        knobs = config.differences(TrialConfig())
    except (KeyError, TypeError) as error:
        raise RequestError("from", f"{source} lacks {error}", "write it again with `autotune export`") from error
    except KnobValueError as error:
        raise RequestError("from", f"{source}: {error}", error.remedy) from error
    request = request_of(content)
    return Imported(
        knobs=knobs, global_batch_size=request.global_batch_size, ranks=ranks, engine=engine, stated=stated_of(request, config)
    )
