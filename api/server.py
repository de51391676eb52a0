"""The service as `autotune serve` starts it: by import string, with its settings in the environment."""

import json
import os

from fastapi import FastAPI

from api.app import create_app
from api.settings import Settings
from search_spaces.plain import from_plain

VARIABLE = "AUTOTUNE_SERVER"
"""Settings as JSON."""


def make_app() -> FastAPI:
    """The service with the settings of the environment."""
    return create_app(settings_of(os.environ[VARIABLE]))


def settings_of(text: str) -> Settings:
    """The settings that the text says.

    Raises:
        RequestError: one is wrong.
    """
    return from_plain(Settings, json.loads(text))
