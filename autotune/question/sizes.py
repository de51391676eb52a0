"""Parse sizes in bytes and lengths in tokens."""

from autotune.errors import RequestError
from search_spaces.quantities import Quantity, read_quantity


def parse_size(field: str, text: str) -> int:
    """`2000000000`, `2e9`, `2GB`, `1.5GiB` as bytes.

    Raises:
        RequestError: the text is not a size, or not positive; the message names `field`.
    """
    size = read_quantity(Quantity.BYTES, text)
    if size is None:
        raise RequestError(field, f"{text!r} is not a size", f"write {Quantity.BYTES}")
    if not 1 <= size < 2**63:
        raise RequestError(field, f"{text!r} is out of range", "give at least one byte, and less than 8 EiB")
    return int(size)


def parse_length(field: str, text: str) -> int:
    """`8192`, `8k`, `1M` as tokens.

    Raises:
        RequestError: the text is not a whole, positive number of tokens; the message names `field`.
    """
    length = read_quantity(Quantity.LENGTH, text)
    if length is None or length != int(length) or length < 1:
        raise RequestError(field, f"{text!r} is not a length", f"write {Quantity.LENGTH}")
    return int(length)
