"""Multi-token prediction: modules after the model that predict further tokens [DeepSeek-AI 2024, DeepSeek-V3, 2.2]."""

from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, Model
from search_spaces.training.adapters import adapts
from search_spaces.training.data_schedule import is_scheduled
from search_spaces.trial_config import TrialConfig

MODEL_REMEDY = "set mtp_layers=0, or give a model with rotary positions"
TOGETHER_REMEDY = "set mtp_layers=0, or leave adapters and data schedules out"


def prediction_problem(config: TrialConfig, model: Model) -> str | None:
    """Why the model cannot have the configuration's modules, in a clause; None: it can, or needs none."""
    if not config.mtp_layers or isinstance(model, CommandModel):  # a script has its own
        return None
    if isinstance(model, FactoryModel):
        return f"mtp_layers={config.mtp_layers} adds modules to our own models, not to {model.name}"
    return model.mtp_problem or None


def together_problem(config: TrialConfig) -> str | None:
    """The problem of other training methods beside the modules, in a clause; None: there is none."""
    if not config.mtp_layers:
        return None
    if adapts(config):
        return f"mtp_layers={config.mtp_layers} trains new modules, and adapters freeze all that is not an adapter"
    return f"mtp_layers={config.mtp_layers} needs whole samples, which data schedules cut" if is_scheduled(config) else None
