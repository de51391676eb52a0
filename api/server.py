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
    app = create_app(from_plain(Settings, json.loads(os.environ[VARIABLE])))
    app.openapi()  # it is kept: to make it for the first who asks would hold up everybody else
    return app
