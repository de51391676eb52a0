"""The model with the changes of a configuration."""

from typing import TypeVar

from search_spaces.models.model import Model
from search_spaces.models.pipeline import predicting
from search_spaces.training.adapters import adapted
from search_spaces.training.windows import windowed
from search_spaces.trial_config import TrialConfig

Trained = TypeVar("Trained", bound=Model)


def configured(model: Trained, config: TrialConfig) -> Trained:
    """The model with the configuration's adapters, attention window and modules for multi-token prediction."""
    return predicting(windowed(adapted(model, config), config), config)
