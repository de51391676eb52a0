"""How communication is chunked to overlap with computation. Does not import torch: engine and prediction import it."""

ROW_PARTS = 4
"""Number of token chunks of a row-parallel product whose reduction overlaps with it (`async_tensor_parallel`)."""
