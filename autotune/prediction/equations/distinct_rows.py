"""Cases with equal values, evaluated once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.cases import Array


@dataclass(frozen=True, slots=True)
class DistinctRows:
    """Distinct combinations of values."""

    columns: dict[str, Array]
    """Name -> (rows)."""
    inverse: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The row of each case."""
    shape: tuple[int, ...] = ()
    """Of the cases."""

    @staticmethod
    def of(columns: Mapping[str, Array]) -> "DistinctRows":
        """The distinct rows of columns that broadcast against each other."""
        shape = np.broadcast_shapes(*(values.shape for values in columns.values()))
        codes = np.broadcast_to(_codes([*columns.values()]), shape).reshape(-1)
        _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        distinct_columns = {name: np.broadcast_to(values, shape).reshape(-1)[first] for name, values in columns.items()}
        return DistinctRows(distinct_columns, inverse.reshape(-1), shape)

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values())))

    def spread(self, values: Array) -> Array:
        """Values by row as an array over the cases."""
        return values[self.inverse].reshape(self.shape)

    def alike(self, names: Sequence[str]) -> Iterator[NDArray[np.int64]]:
        """Places of rows with equal values in these columns."""
        codes = np.broadcast_to(_codes([self.columns[name] for name in names]), (self.count,))
        order = codes.argsort(kind="stable")
        yield from np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)


def _codes(columns: Sequence[Array]) -> NDArray[np.int64]:
    """Equal numbers for equal combinations, of the columns' common shape."""
    codes, count = np.zeros(1, dtype=np.int64), 1
    for values in columns:
        distinct_values, value_codes = np.unique(values, return_inverse=True)
        if len(distinct_values) == 1:
            continue
        if count * len(distinct_values) > 1 << 62:  # an int64 cannot number more
            distinct_codes, renumbered = np.unique(codes, return_inverse=True)
            codes, count = renumbered.reshape(codes.shape), len(distinct_codes)
        codes = codes * len(distinct_values) + value_codes.reshape(values.shape)
        count *= len(distinct_values)
    return codes
