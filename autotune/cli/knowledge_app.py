"""The commands of `autotune knowledge` with their options."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import Database, Json, only_database
from autotune.cli.status import end

app = typer.Typer(help="Exchange measurements with others: signed bundles without names.", no_args_is_help=True)

Out = Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")]
Key = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Your private key, of ssh-keygen -t ed25519. [default: own key, made at first use]"),
]


@app.command("export")
def export_bundle(
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="[JOB|TABLE.csv]...", help="Jobs of the database, or tables. [default: all jobs]"),
    ] = None,
    out: Out = Path("knowledge.json"),
    key: Key = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Write measurements of jobs and tables as a signed bundle, without names of people, hosts, paths and jobs."""
    from autotune.cli.knowledge import export_command

    end(lambda: export_command(tuple(sources or ()), out, key, only_database("knowledge export", db), json))


@app.command()
def merge(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...", help="Bundles of any organisations.")],
    out: Out = Path("merged.json"),
    json: Json = False,
) -> None:
    """Merge bundles: sources stay apart, with their signatures; duplicates are counted once."""
    from autotune.cli.knowledge import merge_command

    end(lambda: merge_command(bundles, out, json))


@app.command()
def check(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="A bundle: a file, or its address.")],
    public_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The sender's public key: the only one that is accepted.")
    ] = None,
    record: Annotated[str | None, typer.Option(metavar="NAME", help="Trust that key from now on, under this name.")] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="FILE|JOB", help="Local measurements to compare with. [default: the database's jobs]"),
    ] = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Verify version, content and signatures, and compare with local measurements. Exit status 1: a key is not trusted, or a
    source contradicts local measurements; 2: damaged or forged."""
    from autotune.cli.knowledge import CheckOptions, check_command

    options = CheckOptions(bundle=bundle, public_key=public_key, record=record, against=against, database=db, json=json)
    end(lambda: check_command(options))
