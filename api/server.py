"""The service as `autotune serve` starts it: by import string, with its settings in the environment."""

import json
import os
import sys

from fastapi import FastAPI

from api.app import create_app
from api.settings import Settings
from search_spaces.plain import from_plain

VARIABLE = "AUTOTUNE_SERVER"
"""Settings as JSON."""


def make_app() -> FastAPI:
    """The service with the settings of the environment."""
    # A thread that computes gives way this often to the event loop and to reads: at Python's 5 ms each read waits for several.
    sys.setswitchinterval(0.0005)
    app = create_app(settings_of(os.environ[VARIABLE]))
    app.openapi()  # it is kept: to make it for the first who asks would hold up everybody else
    return app


def settings_of(text: str) -> Settings:
    """The settings that the text says.

    Raises:
        RequestError: one is wrong.
    """
    return from_plain(Settings, json.loads(text))
