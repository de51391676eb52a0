"""Options that several commands have."""

from typing import Annotated

import typer

from autotune.cli.sizes import parse_bytes
from autotune.logs import LogFormat

Database = Annotated[
    str | None,
    typer.Option("--db", metavar="URL", help="Database: a URL or a file. Default: AUTOTUNE_DB, else your data folder."),
]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on standard output.")]
Job = Annotated[str | None, typer.Argument(metavar="JOB", help="A job's id or the beginning of it; the latest when left out.")]
Pins = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KNOB=VALUE", help="Pin a knob to a value, or to several (KNOB=A,B). May be repeated."),
]
Logs = Annotated[LogFormat, typer.Option("--log-format", help="How lines of the log are written.")]
Bytes = Annotated[
    int | None, typer.Option(parser=parse_bytes, metavar="BYTES", help="Bytes a rank may allocate: 2000000000, 2GB or 1.5GiB.")
]
