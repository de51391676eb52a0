"""Figures as JSON can say them."""

import math
from typing import Any


def finite(value: Any) -> Any:
    """Plain data in which every figure that is not finite, as a loss may be, is null."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
