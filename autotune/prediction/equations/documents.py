"""Shapes of document rows: tokens that attention reads in packed rows, and the share of a row that is not padding."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autotune.prediction.equations.cases import Shapes
from search_spaces.training.documents import looked_at, rows_share
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


def documented(shapes: Shapes, workload: Workload, configs: Sequence[TrialConfig]) -> Shapes:
    """Add the rows that each configuration makes of a workload's documents to the shapes; unchanged without documents."""
    if not workload.document_lengths:
        return shapes
    looked = looked_at(workload.document_lengths, workload.sequence_length)
    packed = np.array([config.pack_sequences for config in configs], dtype=np.float64)
    useful = np.array([rows_share(config, workload) for config in configs], dtype=np.float64)
    return dataclasses.replace(shapes, document=packed * looked, useful=useful)
