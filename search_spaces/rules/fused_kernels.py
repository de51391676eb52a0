"""Rules of fused kernels: the models, devices and precisions that they support."""

from search_spaces.context import SpaceContext
from search_spaces.fused_kernels import (
    DEVICE_RULE,
    FUSED_KERNELS,
    NONE,
    OFF,
    PACKAGE_RULE,
    PRECISION_RULE,
    REMEDIES,
    device_problem,
    package_problem,
    precision_problem,
)
from search_spaces.models.model import FactoryModel
from search_spaces.rules.rule import Rule
from search_spaces.trial_config import TrialConfig


def kernels_model(config: TrialConfig, context: SpaceContext) -> str | None:
    if config.fused_kernels == NONE or not isinstance(context.model, FactoryModel):
        return None
    return f"fused kernels replace operators of our own modules, not those of {context.model.name}"


def kernels_device(config: TrialConfig, context: SpaceContext) -> str | None:
    device = context.cluster.device
    return device_problem(config.fused_kernels, device.kind, device.name)


def kernels_package(config: TrialConfig, context: SpaceContext) -> str | None:
    installed = context.cluster.kernel_packages if context.cluster.device.kind == "cuda" else None
    return package_problem(config.fused_kernels, installed)


def kernels_precision(config: TrialConfig, _: SpaceContext) -> str | None:
    return precision_problem(config.fused_kernels, config.precision)


def kernels_untested(config: TrialConfig, context: SpaceContext) -> str | None:
    """Liger's loss reads tensor values on the host, which a graph cannot; compilation and padding are untested."""
    if config.fused_kernels == NONE:
        return None
    untested = {
        "compile_blocks": config.compile_blocks,
        "cuda_graphs": config.cuda_graphs,
        "document_lengths": bool(context.workload.document_lengths),
    }
    found = [name for name, there in untested.items() if there]
    return f"kernels of {config.fused_kernels} are untested with {' and '.join(found)}" if found else None


KERNEL_RULES: tuple[Rule, ...] = (
    Rule("fused-kernels-model", (FUSED_KERNELS,), OFF, kernels_model),
    Rule(DEVICE_RULE, (FUSED_KERNELS,), REMEDIES[DEVICE_RULE], kernels_device),
    Rule(PACKAGE_RULE, (FUSED_KERNELS,), REMEDIES[PACKAGE_RULE], kernels_package),
    Rule(PRECISION_RULE, (FUSED_KERNELS, "precision"), REMEDIES[PRECISION_RULE], kernels_precision),
    Rule(
        "fused-kernels-beside",
        (FUSED_KERNELS, "compile_blocks", "cuda_graphs"),
        f"{OFF}, or leave these out",
        kernels_untested,
    ),
)
