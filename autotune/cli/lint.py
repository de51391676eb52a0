"""`autotune lint`: show what a framework refuses, or silently ignores or changes, in a configuration file."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from autotune.cli.status import Status
from autotune.errors import RequestError, UnknownFormatError
from autotune.text.console import Console
from executor.engines.deepspeed.capability import installed_version
from search_spaces.deepspeed.lint import findings
from search_spaces.file_kinds import DEEPSPEED, kind_of
from search_spaces.finding import Effect, Finding
from search_spaces.plain import to_plain

CHECKED_VERSION = "0.19.8"
"""The version against which the rules are checked; used if none is installed or given."""
STOPS = (Effect.REFUSED, Effect.FAILS)


def lint_command(format_name: str, path: Path, version: str | None, ranks: int | None, as_json: bool) -> Status:
    """Print all findings; exit status 1 if DeepSpeed would refuse the configuration."""
    if format_name != "deepspeed":
        raise UnknownFormatError("format", f"{format_name!r} is not known", "use deepspeed")
    if version is not None and not re.match(r"\d+\.\d+", version):
        raise RequestError("for", f"{version!r} is not a version", f"write it as in {CHECKED_VERSION}")
    checked = version or installed_version() or CHECKED_VERSION
    found = findings(_read(path), checked, ranks)
    if as_json:
        document = {"format": format_name, "version": checked, "findings": to_plain(found)}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        _print(path, checked, found)
    return Status.FAILURE if any(finding.effect in STOPS for finding in found) else Status.OK


def _print(path: Path, version: str, found: list[Finding]) -> None:
    console = Console()
    for finding in found:
        console.print(str(finding), markup=False, highlight=False, soft_wrap=True)
    if not found:
        console.print(
            f"{path}: nothing that DeepSpeed {version} would refuse, ignore or change", highlight=False, soft_wrap=True
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError("file", f"{path} cannot be read as JSON ({error})", "give a DeepSpeed configuration") from error
    if not isinstance(content, dict):
        raise RequestError("file", f"{path} is not a JSON object", "give a DeepSpeed configuration")
    if (kind := kind_of(content)) not in ("", DEEPSPEED):
        raise RequestError("file", f"{path} is {kind}", "give a DeepSpeed configuration")
    return content
