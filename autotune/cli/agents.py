"""`autotune mcp`: serve the tools for agents over standard input and output, or over HTTP on this machine."""

from autotune.cli.status import Status
from autotune.client import Client
from autotune.errors import MissingPackageError, RequestError
from autotune.installed import install_line

PROTECTED = ("127.0.0.1", "localhost", "::1")
"""Addresses of this machine for which the protocol's server checks which page of a browser asks."""


def mcp_command(http: str | None) -> Status:
    """Serve until the client closes the connection.

    `http`: ADDRESS:PORT; None: standard input and output.

    Raises:
        MissingPackageError: the package `mcp` is not installed.
        RequestError: the address can be reached from other machines, or is not one.
    """
    endpoint = None if http is None else _address(http)
    try:
        from autotune.agents.server import make_server
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
    if host not in PROTECTED:
        problem = f"{host} can be reached by other machines, or by pages in a browser, which would use your key"
        raise RequestError("http", problem, f"use {' or '.join(PROTECTED)}")
    return host, int(port)
