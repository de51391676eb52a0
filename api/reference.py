"""Prints what docs/ has of the routes.

`python -m api.reference > docs/openapi.json` writes the OpenAPI document; `python -m api.reference roles` prints every route
and its required role as the Markdown table of docs/security.md.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant

from api.app import with_routes
from api.auth import RequiredScope


def document() -> str:
    """The OpenAPI document as docs/openapi.json has it."""
    app: FastAPI = with_routes()
    return json.dumps(app.openapi(), indent=1, sort_keys=True) + "\n"


EVERYBODY = "everybody"


def roles(app: FastAPI) -> dict[str, str]:
    """`METHOD /path` of each route -> the required role, as declared by the route."""
    route_roles: dict[str, str] = {}
    for route in _routes(app):
        needs = [" or ".join(need.scopes) for need in _needs(route.dependant)] if hasattr(route, "dependant") else []
        for method in sorted(route.methods - {"HEAD"}):
            route_roles[f"{method} {route.path}"] = " and ".join(needs) or EVERYBODY
    return route_roles


def table() -> str:
    """The Markdown table."""
    lines = ["| route | role |", "|---|---|", *(f"| `{route}` | {role} |" for route, role in roles(with_routes()).items())]
    return "\n".join(lines) + "\n"


def _routes(app: FastAPI) -> Iterator[Any]:
    """The route contexts of FastAPI, also for versions that keep included routers as nested objects."""
    for route in app.routes:
        yield from route.effective_route_contexts() if hasattr(route, "effective_route_contexts") else [route]


def _needs(dependant: Dependant) -> Iterator[RequiredScope]:
    if isinstance(dependant.call, RequiredScope):
        yield dependant.call
    for inner in dependant.dependencies:
        yield from _needs(inner)


if __name__ == "__main__":
    sys.stdout.write(table() if "roles" in sys.argv else document())
