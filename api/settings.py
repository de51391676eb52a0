"""What a server is told when it starts."""

import ipaddress
from dataclasses import dataclass, field

from autotune.errors import RequestError
from autotune.ops.network import is_loopback
from autotune.session.allowed import AllowList
from storage.service_records import Quotas


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the service behaves.

    Raises:
        RequestError: it would listen beyond loopback without asking for keys.
    """

    database_url: str
    host: str = "127.0.0.1"
    require_keys: bool = True
    """Whether a request needs an API key. Without, the service listens on loopback alone, and checks Host and Origin."""
    factories: tuple[str, ...] = ()
    """`module:factory` models that requests may name: nothing else of a request makes a worker import anything."""
    commands: tuple[str, ...] = ()
    """`FOLDER:COMMAND`: what a user's command must begin with, and where it runs. Empty: no request may run one."""
    runners: tuple[str, ...] = ("ray", "local")
    body_bytes: int = 1_000_000
    """Longest body of a request."""
    depth: int = 32
    """Deepest nesting of JSON in a body."""
    body_seconds: float = 30.0
    """Longest that a body may take to arrive."""
    requests_per_second: float = 0.0
    """Of one key, and of one address without a valid key, over bursts of ten seconds; 0: no limit."""
    counts_at_once: int = 2
    """Spaces that are counted, and predictions and figures that are made, at the same time."""
    submissions_at_once: int = 1
    """Submissions that are resolved at the same time."""
    names_at_once: int = 4
    """Names of webhooks' hosts that are resolved at the same time."""
    count_steps: int = 120_000
    """What counting one may take: some three seconds."""
    plan_configurations: int = 1_000_000
    """Configurations that a plan ranks at most: some three seconds."""
    plan_seconds: float = 10.0
    """Seconds after which a plan is given up."""
    submission_steps: int = 20_000
    """What finding a legal configuration of a submission's space may take: most take some dozens."""
    quotas: Quotas = field(default_factory=Quotas)
    """What each owner may take who has no limits of their own."""
    hosts: tuple[str, ...] = ()
    """Further names that a Host header may have where keys are not asked for."""
    webhook_networks: tuple[str, ...] = ()
    """Networks beside the public internet that webhooks may be in, such as 10.1.0.0/16."""
    access_log: bool = False
    """Whether every request is a line of the log."""
    connections: int = 1000
    """Open connections of this process. `autotune serve` lowers it to what its limit of descriptors leaves."""
    connections_per_address: int = 500
    """Of one address, or one IPv6 network of 64 bits. Trusted proxies have no such limit."""
    header_seconds: float = 10.0
    """Longest that the header of a request, or the handshake of TLS, may take to arrive."""
    stall_seconds: float = 30.0
    """Longest that a client may leave an answer unread."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed. Nobody else's are."""

    @property
    def allow_list(self) -> AllowList:
        """What jobs may run."""
        return AllowList(factories=self.factories, commands=self.commands, runners=self.runners)

    def __post_init__(self) -> None:
        if not self.require_keys and not is_loopback(self.host):
            raise RequestError(
                "host",
                f"{self.host} is reached from other machines, and no API keys are asked for",
                "make one with `autotune keys create` and leave out --no-keys, or bind to 127.0.0.1",
            )
        if self.trusted_proxies and not self.require_keys:
            problem = "is given, and no API keys are asked for: whoever reaches the proxy could do anything"
            raise RequestError("trusted_proxy", problem, "give --keys")
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError:
                problem = f"{proxy!r} is neither an address nor a network"
                raise RequestError("trusted_proxy", problem, "give one such as 127.0.0.1 or 10.1.0.0/16") from None
