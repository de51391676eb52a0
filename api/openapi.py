"""`python -m api.openapi > docs/openapi.json`: the interface as a document."""

import json
import sys

from fastapi import FastAPI

from api.app import with_routes


def document() -> str:
    """The OpenAPI document, as it is kept in docs/."""
    app: FastAPI = with_routes()
    return json.dumps(app.openapi(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
