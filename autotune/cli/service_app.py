"""The commands of the service with their options: `serve`, `worker`, `mcp`, `keys`."""

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
        help="Required beginning of submitted commands, and their working directory. May be repeated.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(serve)
    app.command()(worker)
    app.command()(mcp)
    app.add_typer(keys_app, name="keys")
    app.command()(audit)


def serve(
    host: Annotated[str, typer.Option(metavar="NAME", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="Port to listen on.")] = 8000,
    keys: Annotated[
        bool | None, typer.Option("--keys/--no-keys", help="Require API keys. [default: unless bound to loopback]")
    ] = None,
    worker: Annotated[bool, typer.Option("--worker/--no-worker", help="Also run jobs, not only the API.")] = True,
    allow_factory: AllowFactory = None,
    allow_command: AllowCommand = None,
    requests_per_second: Annotated[
        float, typer.Option(min=0, metavar="N", help="Maximum requests per second of a client; 0: no limit.")
    ] = 0.0,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=LIMIT",
            help="Quota of owners: queued_jobs, stored_bytes, streams, device_hours (per day) or webhooks. May be repeated.",
        ),
    ] = None,
    webhook_network: Annotated[
        list[str] | None,
        typer.Option(
            "--webhook-network", metavar="CIDR", help="A private network to which webhooks may send. May be repeated."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Number of API processes.")] = 1,
    tls_certificate: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Certificate chain (PEM) for HTTPS; requires --tls-key.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The certificate's key (PEM), without a password.")
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            metavar="ADDRESS",
            help="A proxy or network of proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted. May be repeated.",
        ),
    ] = None,
    connections: Annotated[int, typer.Option(min=64, metavar="N", help="Maximum open connections per process.")] = 1000,
    connections_per_address: Annotated[
        int, typer.Option(min=1, metavar="N", help="Maximum open connections per client address; trusted proxies are exempt.")
    ] = 500,
    header_seconds: Annotated[
        float, typer.Option(min=0.1, metavar="N", help="Seconds within which a request's header must arrive.")
    ] = 10.0,
    ray_address: RayAddress = None,
    pass_environment: PassEnvironment = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every request.")] = False,
    log_format: Logs = LogFormat.TEXT,
    db: Database = None,
) -> None:
    """Serve the REST API on a database, with a worker that runs submitted jobs."""
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
        int | None, typer.Option(min=1, metavar="N", help="Maximum concurrent jobs of one submitter. [default: no limit]")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Exit after this many jobs. [default: never]")] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Take trial results from this file of measurements instead of running trials."),
    ] = None,
    runner: Annotated[
        list[str] | None,
        typer.Option("--runner", metavar="NAME", help="Take only jobs of this runner. May be repeated. [default: all]"),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", metavar="KIND", help="Take only jobs for cpu, or for cuda. [default: all]"),
    ] = None,
    device_seconds: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="N", help="Device-seconds of a submitter per day (UTC), after which none of their jobs starts."
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
    """Take submitted jobs from a database and run them until a signal arrives."""
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


def mcp(
    http: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS:PORT", help="Serve over HTTP on this machine. [default: standard input and output]"),
    ] = None,
) -> None:
    """Tools for agents (Model Context Protocol), on the service of AUTOTUNE_URL with the key of AUTOTUNE_API_KEY."""
    from autotune.cli.agents import mcp_command

    end(lambda: mcp_command(http))


keys_app = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True)


@keys_app.command("create")
def create_key(
    owner: Annotated[str, typer.Argument(metavar="OWNER", help="Owner of the key and of jobs submitted with it.")],
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", metavar="NAME", help="read, submit, operate, admin. May be repeated. [default: read, submit]"),
    ] = None,
    days: Annotated[
        int | None, typer.Option(min=1, max=36500, metavar="N", help="Days until it expires. [default: never]")
    ] = None,
    db: Database = None,
) -> None:
    """Create a key and print its text once, to standard output."""
    from autotune.cli.serve import create_key_command

    end(lambda: create_key_command(only_database("keys create", db), owner, tuple(scope or ()), days))


@keys_app.command("list")
def list_keys(db: Database = None, json: Json = False) -> None:
    """Show all keys, without their secrets."""
    from autotune.cli.serve import list_keys_command

    end(lambda: list_keys_command(only_database("keys list", db), json))


@keys_app.command("quota")
def quota(
    owner: Annotated[str | None, typer.Argument(metavar="OWNER", help="Owner. [default: show all owners]")] = None,
    limits: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=LIMIT",
            help="Limits of this owner: queued_jobs, stored_bytes, streams, device_hours (per day), webhooks; "
            "`none`: no limit, `default`: the limit of other owners.",
        ),
    ] = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Show quotas and usage of owners, or set an owner's limits."""
    from autotune.cli.quota import quota_command

    end(lambda: quota_command(only_database("keys quota", db), owner, limits or (), json))


@keys_app.command("revoke")
def revoke_key(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key's id, as shown by `autotune keys list`.")],
    db: Database = None,
) -> None:
    """Revoke a key."""
    from autotune.cli.serve import revoke_key_command

    end(lambda: revoke_key_command(only_database("keys revoke", db), key))


def audit(
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Maximum number of entries. [default: all]")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Earliest time: ISO 8601 with a time zone.")] = None,
    actor: Annotated[
        str | None, typer.Option(metavar="OWNER", help="Actions of this owner, or of this user of a machine.")
    ] = None,
    action: Annotated[
        str | None, typer.Option(metavar="NAME", help="Action, such as key.create, job.submit or db.backup.")
    ] = None,
    format: Annotated[str, typer.Option(metavar="NAME", help="table, jsonl or csv.")] = "table",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Output file. [default: standard output]")] = None,
    db: Database = None,
) -> None:
    """Show the audit log, newest first: actor, action, source and key."""
    from autotune.cli.audit import AuditOptions, audit_command, parsed_format, parsed_time

    end(
        lambda: audit_command(
            AuditOptions(
                database=only_database("audit", db), limit=limit, since=parsed_time(since), actor=actor, action=action,
                format=parsed_format(format, out), out=out,
            )
        )
    )  # fmt: skip
