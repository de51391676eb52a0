"""Approximate orthogonalization of a matrix by Newton-Schulz iterations."""

from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5. They bring singular values in [0, 1] close to 1 in few steps [Jordan et al. 2024, Muon]."""
STEPS = 5
LEAST_NORM = 1e-7


def orthogonalized(matrix: Tensor) -> Tensor:
    """Orthogonalize a bf16 matrix [rows, columns]: same singular vectors, singular values between 0.5 and 1.5, in bf16.

    Uses the same operations in the same order as `torch.optim.Muon` (2.13), so that the result is bitwise equal.
    """
    first, third, fifth = COEFFICIENTS
    transposed = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if transposed else matrix
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(STEPS):
        gram = x @ x.T
        x = x.addmm(gram.addmm(gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.T if transposed else x


def flops(rows: int, columns: int) -> int:
    """FLOPs of the matrix products of `orthogonalized`."""
    short, long = min(rows, columns), max(rows, columns)
    return STEPS * (4 * short * short * long + 2 * short**3)
