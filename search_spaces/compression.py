"""Formats of compressed communication: 8-bit integers, and signs, each with one scale per block."""

from search_spaces.optimizers import QUANTISED_BLOCK

SCALE_BYTES = 4
"""Size of a block's fp32 scale."""
INT8 = "int8"
"""Value of `gather_dtype` and `reduce_dtype`: blocks of QUANTISED_BLOCK integers. Parameters with fewer than LEAST_QUANTISED
elements are gathered uncompressed."""
INTEGER_BYTES = 1 + SCALE_BYTES / QUANTISED_BLOCK
"""Mean bytes per element in this format."""
REDUCED_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, INT8: INTEGER_BYTES}
"""`reduce_dtype` -> bytes per gradient element sent."""
SIGN_BLOCK = 1024
"""Momentum elements that share one scale when signs are sent; a rank's share of a momentum is a multiple of it."""
SIGN_BYTES = 1 / 8 + SCALE_BYTES / SIGN_BLOCK
"""Mean bytes per element when signs are sent."""


def integer_bytes(elements: int) -> int:
    """Bytes of this many contiguous elements as integers with their scales; the last block may be partial."""
    return elements + SCALE_BYTES * -(-elements // QUANTISED_BLOCK)


def sign_share(elements: int, ranks: int) -> int:
    """Momentum elements that each rank owns, padding included."""
    return -(-elements // (ranks * SIGN_BLOCK)) * SIGN_BLOCK


def sign_bytes(elements: int) -> int:
    """Bytes of whole blocks of signs with their scales."""
    return elements // 8 + SCALE_BYTES * (elements // SIGN_BLOCK)
