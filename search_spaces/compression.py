"""What compressed communication sends: integers of 8 bits with a scale a block, and signs with a scale a block."""

from search_spaces.optimizers import QUANTISED_BLOCK

SCALE_BYTES = 4
"""Of a block's scale, in fp32."""
INT8 = "int8"
"""Of `gather_dtype` and `reduce_dtype`: blocks of QUANTISED_BLOCK integers. Parameters of fewer than LEAST_QUANTISED elements
are gathered as they are."""
INTEGER_BYTES = 1 + SCALE_BYTES / QUANTISED_BLOCK
"""Of an element that is sent so, on the mean."""
REDUCED_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, INT8: INTEGER_BYTES}
"""Of a gradient element that is sent, by `reduce_dtype`."""
SIGN_BLOCK = 1024
"""Elements of a momentum that share one scale where signs are sent; what a rank owns of a momentum is a multiple of it."""
SIGN_BYTES = 1 / 8 + SCALE_BYTES / SIGN_BLOCK
"""Of an element of which the sign is sent, on the mean."""


def integer_bytes(elements: int) -> int:
    """Of so many elements in a row as integers with their scales: a last block may be a part of one."""
    return elements + SCALE_BYTES * -(-elements // QUANTISED_BLOCK)


def sign_share(elements: int, ranks: int) -> int:
    """Elements of a momentum that each of the ranks owns, padding included."""
    return -(-elements // (ranks * SIGN_BLOCK)) * SIGN_BLOCK


def sign_bytes(elements: int) -> int:
    """Of whole blocks of signs with their scales."""
    return elements // 8 + SCALE_BYTES * (elements // SIGN_BLOCK)
