"""The model as a configuration trains it."""

from typing import TypeVar

from search_spaces.models.model import Model
from search_spaces.training.adapters import adapted
from search_spaces.training.windows import windowed
from search_spaces.trial_config import TrialConfig

Trained = TypeVar("Trained", bound=Model)


def configured(model: Trained, config: TrialConfig) -> Trained:
    """With the adapters and the window of attention that the configuration asks for."""
    return windowed(adapted(model, config), config)
