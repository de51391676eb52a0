"""How communication is cut to run beside computation. Imports no torch: engine and prediction read it."""

ROW_PARTS = 4
"""Parts of the tokens in which a row product is made where its sums travel beside it (`async_tensor_parallel`)."""
