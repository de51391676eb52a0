"""The commands of the service with their options: `serve`, `worker`, `keys`."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import Database, Json, Logs, PassEnvironment, RayAddress, only_database
from autotune.cli.status import end
from autotune.ops.logs import LogFormat

AllowFactory = Annotated[
    list[str] | None,
    typer.Option("--allow-factory", metavar="MODULE:NAME", help="A factory that requests may name. May be repeated."),
]
AllowCommand = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-command",
        metavar="FOLDER:COMMAND",
        help="What a submitted command must begin with, and where it runs. May be repeated.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(serve)
    app.command()(worker)
    app.add_typer(keys_app, name="keys")
    app.command()(audit)


def serve(
    host: Annotated[str, typer.Option(metavar="NAME", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="Port to listen on.")] = 8000,
    keys: Annotated[
        bool | None, typer.Option("--keys/--no-keys", help="Ask for API keys. [default: unless bound to loopback]")
    ] = None,
    worker: Annotated[bool, typer.Option("--worker/--no-worker", help="Run jobs too, not the API alone.")] = True,
    allow_factory: AllowFactory = None,
    allow_command: AllowCommand = None,
    requests_per_second: Annotated[float, typer.Option(min=0, metavar="N", help="Requests of a client; 0: no limit.")] = 0.0,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=LIMIT",
            help="What owners may take: queued_jobs, stored_bytes, streams, device_hours (a day) or webhooks. May be repeated.",
        ),
    ] = None,
    webhook_network: Annotated[
        list[str] | None,
        typer.Option("--webhook-network", metavar="CIDR", help="A private network that webhooks may be in. May be repeated."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="API processes on the port.")] = 1,
    tls_certificate: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Certificate chain (PEM) to serve HTTPS with; with --tls-key.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The certificate's key (PEM), without a password.")
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            metavar="ADDRESS",
            help="A proxy, or a network of them, whose X-Forwarded-For and X-Forwarded-Proto are believed. May be repeated.",
        ),
    ] = None,
    connections: Annotated[int, typer.Option(min=64, metavar="N", help="Open connections of each process.")] = 1000,
    connections_per_address: Annotated[
        int, typer.Option(min=1, metavar="N", help="Those of one address; trusted proxies have no such limit.")
    ] = 500,
    header_seconds: Annotated[
        float, typer.Option(min=0.1, metavar="N", help="Seconds in which the header of a request must arrive.")
    ] = 10.0,
    ray_address: RayAddress = None,
    pass_environment: PassEnvironment = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every request.")] = False,
    log_format: Logs = LogFormat.TEXT,
    db: Database = None,
) -> None:
    """Serve the REST API on a database, with a worker that runs what is submitted."""
    from autotune.cli.serve_api import ServeOptions, serve_command

    end(
        lambda: serve_command(
            ServeOptions(
                host=host, port=port, database=db, keys=keys, worker=worker, factories=tuple(allow_factory or ()),
                commands=tuple(allow_command or ()),
                requests_per_second=requests_per_second, quotas=tuple(quota or ()),
                webhook_networks=tuple(webhook_network or ()),
                workers=workers, tls_certificate=tls_certificate, tls_key=tls_key, trusted_proxies=tuple(trusted_proxy or ()),
                connections=connections, connections_per_address=connections_per_address, header_seconds=header_seconds,
                ray_address=ray_address, pass_environment=tuple(pass_environment or ()), log_format=log_format,
                access_log=access_log,
            )
        )
    )  # fmt: skip


def worker(
    running_jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Jobs of one submitter that may run at a time. [default: no limit]")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, metavar="N", help="End after so many jobs. [default: never]")] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Answer trials from this file of measurements instead of running them.")
    ] = None,
    runner: Annotated[
        list[str] | None,
        typer.Option("--runner", metavar="NAME", help="Take jobs of this runner alone. May be repeated. [default: all]"),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", metavar="KIND", help="Take jobs for cpu, or for cuda, alone. [default: all]"),
    ] = None,
    device_seconds: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="N", help="Device-seconds of a submitter in a day (UTC), after which no job of theirs starts."
        ),
    ] = None,
    ray_address: RayAddress = None,
    allow_factory: AllowFactory = None,
    allow_command: AllowCommand = None,
    pass_environment: PassEnvironment = None,
    log_format: Logs = LogFormat.TEXT,
    until_input_ends: Annotated[bool, typer.Option("--until-input-ends", hidden=True)] = False,
    db: Database = None,
) -> None:
    """Take submitted jobs from a database and run them, until a signal ends it."""
    from autotune.cli.serve import WorkerOptions, worker_command

    end(
        lambda: worker_command(
            WorkerOptions(
                database=db, running_jobs=running_jobs, device_seconds=device_seconds, runners=tuple(runner or ()),
                devices=tuple(device or ()), replay=replay, most_jobs=jobs, ray_address=ray_address,
                factories=tuple(allow_factory or ()), commands=tuple(allow_command or ()),
                pass_environment=tuple(pass_environment or ()), log_format=log_format,
                until_input_ends=until_input_ends,
            )
        )
    )  # fmt: skip


keys_app = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True)


@keys_app.command("create")
def create_key(
    owner: Annotated[str, typer.Argument(metavar="OWNER", help="Whose key it is: jobs are theirs.")],
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", metavar="NAME", help="read, submit, operate, admin. May be repeated. [default: read, submit]"),
    ] = None,
    days: Annotated[
        int | None, typer.Option(min=1, max=36500, metavar="N", help="Days until it expires. [default: never]")
    ] = None,
    db: Database = None,
) -> None:
    """Make a key; standard output has its text, this once."""
    from autotune.cli.serve import create_key_command

    end(lambda: create_key_command(only_database("keys create", db), owner, tuple(scope or ()), days))


@keys_app.command("list")
def list_keys(db: Database = None, json: Json = False) -> None:
    """Show all keys, without their secrets."""
    from autotune.cli.serve import list_keys_command

    end(lambda: list_keys_command(only_database("keys list", db), json))


@keys_app.command("quota")
def quota(
    owner: Annotated[str | None, typer.Argument(metavar="OWNER", help="Whose; left out: everybody's are shown.")] = None,
    limits: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=LIMIT",
            help="Limits of this owner: queued_jobs, stored_bytes, streams, device_hours (a day), webhooks; "
            "`none` is no limit, `default` everybody's.",
        ),
    ] = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Show what owners may take and have taken, or give an owner limits of their own."""
    from autotune.cli.quota import quota_command

    end(lambda: quota_command(only_database("keys quota", db), owner, limits or (), json))


@keys_app.command("revoke")
def revoke_key(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key's id, as `autotune keys list` shows it.")],
    db: Database = None,
) -> None:
    """End a key."""
    from autotune.cli.serve import revoke_key_command

    end(lambda: revoke_key_command(only_database("keys revoke", db), key))


def audit(
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Newest entries to show. [default: all]")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Nothing before: ISO 8601 with a zone.")] = None,
    actor: Annotated[str | None, typer.Option(metavar="OWNER", help="What this owner, or user of a machine, did.")] = None,
    action: Annotated[str | None, typer.Option(metavar="NAME", help="Such as key.create, job.submit or db.backup.")] = None,
    format: Annotated[str, typer.Option(metavar="NAME", help="table, jsonl or csv.")] = "table",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="A file. [default: standard output]")] = None,
    db: Database = None,
) -> None:
    """Show who did what, from where, and with which key; newest first."""
    from autotune.cli.audit import AuditOptions, audit_command, parsed_format, parsed_time

    end(
        lambda: audit_command(
            AuditOptions(
                database=only_database("audit", db), limit=limit, since=parsed_time(since), actor=actor, action=action,
                format=parsed_format(format, out), out=out,
            )
        )
    )  # fmt: skip
