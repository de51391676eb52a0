"""Rows of documents, as shapes: what attention looks at in packed ones, and what of a row is no padding."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autotune.prediction.equations.cases import Shapes
from search_spaces.documents import looked_at, rows_share
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


def documented(shapes: Shapes, workload: Workload, configs: Sequence[TrialConfig]) -> Shapes:
    """The shapes with the rows that each configuration makes of a workload's documents; as they are where it has none."""
    if not workload.document_lengths:
        return shapes
    looked = looked_at(workload.document_lengths, workload.sequence_length)
    packed = np.array([config.pack_sequences for config in configs], dtype=np.float64)
    useful = np.array([rows_share(config, workload) for config in configs], dtype=np.float64)
    return dataclasses.replace(shapes, document=packed * looked, useful=useful)
