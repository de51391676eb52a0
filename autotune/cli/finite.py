"""Replace numbers that JSON cannot represent."""

import math
from typing import Any


def finite(value: Any) -> Any:
    """Plain data with None in place of non-finite numbers, such as a diverged loss."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
