"""The optimizers that a job may train with: what each keeps for a parameter, and the constants that no knob turns."""

OPTIMIZERS = ("adamw", "sgd", "lamb", "muon", "adamw8bit", "onebit_adam")
KERNELS = ("adamw", "sgd")
"""Those of which torch has one kernel for the whole update."""

SGD_MOMENTUM = 0.9
"""Of sgd, whose weight decay is added to the gradient, as in `torch.optim.SGD`."""
BETAS = (0.9, 0.999)
"""Of the moments of adamw, lamb, adamw8bit and onebit_adam."""
EPSILON = 1e-8
"""Of adamw, adamw8bit and onebit_adam."""
LAMB_EPSILON = 1e-6
"""[You et al. 2020, LAMB, algorithm 2 and its code]"""
MUON_MOMENTUM = 0.95
"""Of muon, with Nesterov's look ahead [Jordan et al. 2024; `torch.optim.Muon`]."""
LEAST_ROOT = 0.1
"""Of onebit_adam: the least root of an element's second moment, as a share of the root of its parameter's mean."""
QUANTISED_BLOCK = 256
"""Elements of a moment that share one scale. bitsandbytes and torchao have come down to it from 2048 [Dettmers et al. 2022,
8-bit Optimizers via Block-wise Quantization]."""
LEAST_QUANTISED = 4096
"""Elements below which a parameter's moments stay as they are, as in bitsandbytes and torchao."""
QUANTISED_BYTES = 2 * (1 + 4 / QUANTISED_BLOCK)
"""Of both moments of a parameter in 8 bits, with an fp32 scale for each block."""


def moment_bytes(optimizer: str, full: float, ranks: float = float("inf")) -> tuple[float, float]:
    """Bytes of state beside the master copy: of an element of a block's matrix, and of any other parameter.

    Args:
        optimizer: one of OPTIMIZERS.
        full: bytes of an element of the master copy.
        ranks: data-parallel ones, of which each keeps what all have not said of its part under onebit_adam; inf: that is left
            out.

    muon has one moment for the blocks' matrices, and is adamw for embeddings, the output projection and vectors. Moments that
    are too small to be quantised (under 0.1 % of a model's) count as quantised. onebit_adam keeps two moments and what its rank
    has not said yet.
    """
    match optimizer:
        case "sgd":
            return full, full
        case "muon":
            return full, 2 * full
        case "adamw8bit":
            return QUANTISED_BYTES, QUANTISED_BYTES
        case "onebit_adam":
            kept = 3 * full + full / ranks
            return kept, kept
        case _:
            return 2 * full, 2 * full
