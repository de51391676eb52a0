"""The commands of the service with their options: `serve`, `worker`, `mcp`."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.administration import audit, keys_app
from autotune.cli.options import Database, Logs, PassEnvironment, RayAddress
from autotune.cli.status import Status
from autotune.cli.worker import AllowCommand, AllowFactory, worker
from autotune.errors import MissingPackageError, RequestError
from autotune.installed import install_line
from autotune.logs import LogFormat


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
    identity_header: Annotated[
        str,
        typer.Option(metavar="NAME", help="Header in which a trusted proxy names the person, such as X-Auth-Request-Email."),
    ] = "",
    groups_header: Annotated[
        str, typer.Option(metavar="NAME", help="Header in which it lists the person's groups, which are their teams.")
    ] = "",
    role: Annotated[
        list[str] | None,
        typer.Option(
            "--role",
            metavar="[GROUP=]ROLE",
            help="Role of such persons, or of a group. May be repeated. [default: read, submit]",
        ),
    ] = None,
    share_days: Annotated[
        int,
        typer.Option(min=0, max=3650, metavar="N", help="Most days of a link that shows a job to anybody; 0: there are none."),
    ] = 0,
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
) -> Status:
    """Serve the REST API on a database, with a worker that runs submitted jobs."""
    from autotune.cli.serve import ServeOptions, serve_command

    return serve_command(
        ServeOptions(
            host=host, port=port, database=db, keys=keys, worker=worker, factories=tuple(allow_factory or ()),
            commands=tuple(allow_command or ()),
            requests_per_second=requests_per_second, quotas=tuple(quota or ()),
            webhook_networks=tuple(webhook_network or ()),
            workers=workers, tls_certificate=tls_certificate, tls_key=tls_key, trusted_proxies=tuple(trusted_proxy or ()),
            identity_header=identity_header, groups_header=groups_header, roles=tuple(role or ("read", "submit")),
            share_days=share_days,
            connections=connections, connections_per_address=connections_per_address, header_seconds=header_seconds,
            ray_address=ray_address, pass_environment=tuple(pass_environment or ()), log_format=log_format,
            access_log=access_log,
        )
    )  # fmt: skip


def mcp(
    http: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS:PORT", help="Serve over HTTP on this machine. [default: standard input and output]"),
    ] = None,
) -> Status:
    """Tools for agents (Model Context Protocol), on the service of AUTOTUNE_URL with the key of AUTOTUNE_API_KEY."""
    from autotune.client import Client

    endpoint = None if http is None else _address(http)
    try:
        from autotune.agents import make_server
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "mcp":
            raise
        raise MissingPackageError("mcp", "is not installed", install_line("mcp")) from error
    with Client() as client:
        server = make_server(client)
        if endpoint is None:
            server.run("stdio")
        else:
            server.run("streamable-http", host=endpoint[0], port=endpoint[1])
    return Status.OK


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise RequestError("http", f"{text!r} is not an address", "give ADDRESS:PORT, such as 127.0.0.1:8765")
    # Addresses of this machine for which the protocol's server checks which page of a browser asks.
    local_addresses = ("127.0.0.1", "localhost", "::1")
    if host not in local_addresses:
        problem = f"{host} can be reached by other machines, or by pages in a browser, which would use your key"
        raise RequestError("http", problem, f"use {' or '.join(local_addresses)}")
    return host, int(port)
