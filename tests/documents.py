"""The documents of `--json` against their published schemas: every output of the command line that tests see."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from autotune.cli.status import SCHEMAS, schema_path

_BASE = "file:///commands/"


def check_document(words: Sequence[object], output: str) -> None:
    """Validate the output of a call with these words; nothing is checked without `--json`, or if nothing was printed."""
    given = [str(word) for word in words]
    own = given[: given.index("--")] if "--" in given else given
    if "--json" not in own or not output:
        return
    document = json.loads(output, parse_constant=_refuse)
    failed = isinstance(document, dict) and document.keys() == {"error"}
    validator("error" if failed else _command(own)).validate(document)


@cache
def validator(name: str) -> Draft202012Validator:
    """For the documents of a command, or for `error`."""
    return Draft202012Validator({"$ref": f"{_BASE}{schema_path(name).name}"}, registry=_registry())


@cache
def _registry() -> Registry[Any]:
    files = {_BASE + path.name: path for path in SCHEMAS.iterdir()}
    files |= {f"file:///{path.name}": path for path in SCHEMAS.parent.glob("*.json")}
    return Registry().with_resources(
        (address, Resource.from_contents(json.loads(path.read_text("utf-8")), default_specification=DRAFT202012))
        for address, path in files.items()
    )


def _command(words: Sequence[str]) -> str:
    """`keys list` and such have two words."""
    two = " ".join(words[:2])
    return two if schema_path(two).exists() else words[0]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
