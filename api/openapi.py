"""Prints the OpenAPI document: `python -m api.openapi > docs/openapi.json`."""

import json
import sys

from fastapi import FastAPI

from api.app import with_routes


def document() -> str:
    """The OpenAPI document as docs/openapi.json has it."""
    app: FastAPI = with_routes()
    return json.dumps(app.openapi(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
