"""Creates the optimizer that a configuration names."""

from torch import Tensor

from executor.engines.native.offload import Hyperparameters
from executor.engines.native.optimizers.device_optimizer import AdamW8bit, AdamWBf16, DeviceOptimizer, Lamb, Sgd, Shares
from executor.engines.native.optimizers.muon import Muon
from executor.engines.native.optimizers.onebit_adam import OneBitAdam
from executor.errors import EngineRefusalError
from executor.parallel.replica import ModelPart
from search_spaces.trial_config import TrialConfig


def device_optimizer(config: TrialConfig, master: Tensor, shares: Shares, hyperparameters: Hyperparameters) -> DeviceOptimizer:
    """Create any optimizer except AdamW, which may be split between device and host (`SplitAdamW`)."""
    match config.optimizer:
        case "sgd":
            return Sgd(master, shares.layout, hyperparameters)
        case "lamb":
            return Lamb(master, shares, hyperparameters)
        case "adamw8bit":
            return AdamW8bit(master, shares.layout, hyperparameters)
        case "adamw_bf16":
            return AdamWBf16(master, shares, hyperparameters)
        case "onebit_adam":
            return OneBitAdam(master, shares, hyperparameters, config.onebit_warmup_steps)
        case _:
            return Muon(master, shares, hyperparameters)


def block_matrices(part: ModelPart) -> frozenset[str]:
    """Names of the trained matrices of the blocks, without embeddings and the output projection.

    Raises:
        EngineRefusalError: there are none, so that muon would be the same as AdamW.
    """
    trained = (parameter for block in part.blocks for parameter in block.parameters() if parameter.requires_grad)
    inside = {id(parameter) for parameter in trained if parameter.dim() == 2}
    names = frozenset(name for name, parameter in part.module.named_parameters() if id(parameter) in inside)
    if not names:
        raise EngineRefusalError(
            "muon-matrices", "muon updates the matrices of a model's blocks, but the blocks of this module are unknown; "
            "name them in the factory's plan, or use optimizer=adamw",
        )  # fmt: skip
    return names
