"""Entry point of `autotune serve`, which starts the service by import string with its settings in the environment."""

import json
import os
import sys

from fastapi import FastAPI

from api.app import create_app
from api.settings import Settings
from search_spaces.plain import from_plain

VARIABLE = "AUTOTUNE_SERVER"
"""Environment variable with the settings as JSON."""


def make_app() -> FastAPI:
    """Create the service with the settings from the environment."""
    # A computing thread yields this often to the event loop and to reads. With Python's default of 5 ms, each read would wait
    # several times.
    sys.setswitchinterval(0.0005)
    app = create_app(settings_of(os.environ[VARIABLE]))
    app.openapi()  # cached now: building it during the first request would delay all others
    return app


def settings_of(text: str) -> Settings:
    """The settings from their JSON text.

    Raises:
        RequestError: a setting is invalid.
    """
    return from_plain(Settings, json.loads(text))
