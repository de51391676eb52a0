"""The supported optimizers: their state per parameter, and their constants and those of loss scaling, which are no knobs."""

BF16_MASTERS = "adamw_bf16"
"""AdamW without fp32 masters: bf16 parameters are updated in fp32 and rounded stochastically."""
OPTIMIZERS = ("adamw", "sgd", "lamb", "muon", "adamw8bit", "onebit_adam", BF16_MASTERS)
KERNELS = ("adamw", "sgd")
"""Optimizers for which torch has a fused kernel."""

SGD_MOMENTUM = 0.9
"""Momentum of sgd. Its weight decay is added to the gradient, as in `torch.optim.SGD`."""
BETAS = (0.9, 0.999)
"""Betas of all optimizers but sgd and muon."""
EPSILON = 1e-8
"""Epsilon of all optimizers whose name begins with adamw, and of onebit_adam."""
DEVICE_CHUNK_ELEMENTS = 1 << 23
"""Elements whose 8-bit moments are dequantised at once on a device: an H200 needs 0.65 s for 953 M parameters in chunks of
`1 << 20`, 7 times what it reads and writes, since it waits for the host to start some 40 operators per chunk."""
LAMB_EPSILON = 1e-6
"""Epsilon of lamb [You et al. 2020, LAMB, algorithm 2 and its code]."""
MUON_MOMENTUM = 0.95
"""Nesterov momentum of muon [Jordan et al. 2024; `torch.optim.Muon`]."""
LEAST_ROOT = 0.1
"""onebit_adam: minimum square root of an element's second moment, relative to the root of the parameter's mean."""
QUANTISED_BLOCK = 256
"""Elements of a moment that share one scale. bitsandbytes and torchao use it too, formerly 2048 [Dettmers et al. 2022,
8-bit Optimizers via Block-wise Quantization]."""
LEAST_QUANTISED = 4096
"""Parameters with fewer elements have unquantised moments, as in bitsandbytes and torchao."""


def master_bytes(optimizer: str, full: float) -> float:
    """Bytes per element of the master copy; `full`: of other optimizers'."""
    return 2.0 if optimizer == BF16_MASTERS else full


def moment_bytes(optimizer: str, full: float, ranks: float = float("inf")) -> tuple[float, float]:
    """Bytes of state per element in addition to the master copy: for matrices of blocks, and for all other parameters.

    Args:
        optimizer: one of OPTIMIZERS.
        full: bytes per element of a master copy that is not rounded stochastically.
        ranks: data-parallel ranks. Under onebit_adam each also stores the compression error of the averaged momentum of its
            part; inf: without that.

    muon has one moment for the blocks' matrices, and is adamw for embeddings, the output projection and vectors. Moments too
    small to be quantised (under 0.1 % of a model's) count as quantised. onebit_adam stores two moments and its rank's
    compression error.
    """
    # Bytes of both 8-bit moments of a parameter, with one fp32 scale per block.
    quantised_bytes = 2 * (1 + 4 / QUANTISED_BLOCK)
    match optimizer:
        case "sgd":
            return full, full
        case "muon":
            return full, 2 * full
        case "adamw8bit":
            return quantised_bytes, quantised_bytes
        case "onebit_adam":
            bytes_per_element = 3 * full + full / ranks
            return bytes_per_element, bytes_per_element
        case _:
            return 2 * full, 2 * full


# As in `torch.amp.GradScaler`; DeepSpeed differs in its window (1000) and hysteresis (2). They are not knobs: after a few steps
# the scale depends only on the gradients, not on its start.
INITIAL_SCALE_POWER = 16
"""The first scale is 2 to this power."""
GROWTH_INTERVAL = 2000
"""Consecutive updates without overflow after which the scale doubles. An overflow halves it at once."""
LEAST_SCALE = 1.0
"""If gradients overflow at this scale, no scale helps."""
