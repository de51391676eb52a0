"""The settings of a server."""

import ipaddress
from dataclasses import dataclass, field

from autotune.client.transport import is_loopback
from autotune.errors import RequestError
from autotune.session.allowed import AllowList
from storage.records import Scope
from storage.service_records import Quotas


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the service.

    Raises:
        RequestError: it would listen beyond loopback without requiring keys, or a trusted proxy is invalid.
    """

    database_url: str
    host: str = "127.0.0.1"
    require_keys: bool = True
    """Whether a request needs an API key. If not, the service listens only on loopback, and checks Host and Origin."""
    factories: tuple[str, ...] = ()
    """`module:factory` models that requests may name. Nothing else in a request makes a worker import a module."""
    commands: tuple[str, ...] = ()
    """`FOLDER:COMMAND`: the folder and the first words of allowed commands. Empty: no request may run a command."""
    runners: tuple[str, ...] = ("ray", "local")
    body_bytes: int = 1_000_000
    """Most bytes of a request body."""
    depth: int = 32
    """Most nesting levels of JSON in a body."""
    body_seconds: float = 30.0
    """Longest time for a body to arrive."""
    requests_per_second: float = 0.0
    """Limit per key, and per address without a valid key, averaged over bursts of ten seconds; 0: no limit."""
    counts_at_once: int = 2
    """Most concurrent counts, predictions and figures."""
    submissions_at_once: int = 1
    """Most submissions that are resolved concurrently."""
    names_at_once: int = 4
    """Most host names of webhooks that are resolved concurrently."""
    count_steps: int = 120_000
    """Most steps for counting a space: about three seconds."""
    plan_configurations: int = 1_000_000
    """Most configurations that a plan ranks: about three seconds."""
    plan_seconds: float = 10.0
    """Time limit of a plan."""
    submission_steps: int = 20_000
    """Most steps for finding a legal configuration of a submission's space; most spaces take dozens."""
    quotas: Quotas = field(default_factory=Quotas)
    """Quotas of owners without their own limits."""
    hosts: tuple[str, ...] = ()
    """Further allowed names in a Host header if keys are not required."""
    webhook_networks: tuple[str, ...] = ()
    """Networks besides the public internet that webhooks may be in, such as 10.1.0.0/16."""
    access_log: bool = False
    """Whether to log every request."""
    connections: int = 1000
    """Most open connections of this process. `autotune serve` lowers it to fit the limit of file descriptors."""
    connections_per_address: int = 500
    """Most connections per address, or per 64-bit IPv6 network. Trusted proxies are exempt."""
    header_seconds: float = 10.0
    """Longest time for a request header or a TLS handshake to arrive."""
    stall_seconds: float = 30.0
    """Longest time that a client may leave a response unread."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks whose `X-Forwarded-For` and `X-Forwarded-Proto` are trusted; others are ignored."""

    identity_header: str = ""
    """Header in which a trusted proxy names the person whom it has identified; empty: persons need a key."""
    groups_header: str = ""
    """Header in which it lists the person's groups, separated by commas; empty: there are none."""
    roles: tuple[str, ...] = ("read", "submit")
    """Roles of identified persons; `GROUP=ROLE`: of those in a group."""
    share_days: int = 0
    """Most days that a link to one job works for whoever has it; 0: nobody may make one."""

    @property
    def allow_list(self) -> AllowList:
        """The factories, commands and runners that jobs may use."""
        return AllowList(factories=self.factories, commands=self.commands, runners=self.runners)

    def __post_init__(self) -> None:
        if not self.require_keys and not is_loopback(self.host):
            raise RequestError(
                "host",
                f"{self.host} is reachable from other machines, and no API keys are required",
                "make one with `autotune keys create` and leave out --no-keys, or bind to 127.0.0.1",
            )
        if self.trusted_proxies and not self.require_keys:
            problem = "is given, and no API keys are required: any client of the proxy could do anything"
            raise RequestError("trusted_proxy", problem, "give --keys")
        if self.share_days and not self.require_keys:
            problem = "is given, and no API keys are required: whoever reaches the service sees every job"
            raise RequestError("share_days", problem, "give --keys")
        if self.identity_header and not self.trusted_proxies:
            problem = "is given, and no proxy is trusted to set it: anybody could be anyone"
            raise RequestError("identity_header", problem, "give --trusted-proxy")
        for role in self.roles:
            if role.rpartition("=")[2] not in tuple(Scope):
                raise RequestError(
                    "role", f"{role!r} is not a role", f"give ROLE or GROUP=ROLE, with one of {', '.join(Scope)}"
                )
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError:
                problem = f"{proxy!r} is neither an address nor a network"
                raise RequestError("trusted_proxy", problem, "give one such as 127.0.0.1 or 10.1.0.0/16") from None
