"""Checks which addresses the server may call for webhooks: none in its own network, whatever a host name resolves to."""

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from autotune.errors import RequestError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
PORTS = {"http": 80, "https": 443}
MOST_CHARACTERS = 2000
_METADATA = tuple(map(ipaddress.ip_network, (
    "169.254.0.0/16",  # link-local: AWS, Google, Azure, Oracle, DigitalOcean, OpenStack; AWS ECS at 169.254.170.2
    "fd00:ec2::/32",  # AWS by IPv6
    "fd20:ce::/32",  # Google by IPv6
    "100.100.100.200/32",  # Alibaba
    "192.0.0.192/32",  # Oracle, formerly
    "168.63.129.16/32",  # Azure's host, a public address
    "192.0.0.0/24", "192.88.99.0/24",  # protocol assignments, and the former relays of 6to4
)))  # fmt: skip
"""Cloud metadata services, which reveal secrets, and other special networks, some of which `ipaddress` counts as public."""
_CARRIERS = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "fec0::/10")))
"""IPv6 networks that gateways may translate to IPv4 addresses, even private ones; and the former site-local addresses."""


@dataclass(frozen=True, slots=True)
class CheckedTarget:
    """A receiver with its checked address. The caller must connect to this address and not resolve the name again."""

    scheme: str
    host: str
    port: int
    path: str
    address: str


def networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Parse networks.

    Raises:
        RequestError: a network is invalid.
    """
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as error:
        raise RequestError("webhook_network", str(error), "give a network such as 10.1.0.0/16") from error


def checked_target(url: str, allowed: Sequence[Network] = ()) -> CheckedTarget:
    """Resolve the URL of a receiver. Its addresses must be on the public internet or in an allowed network.

    Raises:
        RequestError: it is not an http or https URL, its name does not resolve, or one of its addresses is private.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _refused(f"is not a URL ({error})") from error
    if len(url) > MOST_CHARACTERS or any(character <= " " or character > "~" for character in url):
        raise _refused("holds characters that a URL cannot have, or is too long")
    if parts.scheme not in PORTS or not host or port == 0:
        raise _refused("is not an http or https URL")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise _refused("holds a user, a password or a fragment")
    port = port or PORTS[parts.scheme]
    addresses = _resolved(host, port)
    if not all(_may_be_called(address, allowed) for address in addresses):
        # Do not report the address: that would let clients map the network.
        raise _refused("is not on the public internet")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return CheckedTarget(parts.scheme, host, port, path, str(addresses[0]))


def _resolved(host: str, port: int) -> list[Address]:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # A zone (fe80::1%eth0) has a meaning only on this machine.
        return [ipaddress.ip_address(str(item[4][0]).partition("%")[0]) for item in addresses]
    except (OSError, ValueError) as error:
        raise _refused("has a host that does not resolve") from error


def _may_be_called(address: Address, allowed: Sequence[Network]) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if any(address in network for network in _METADATA):
        return any(address in network and network.prefixlen == network.max_prefixlen for network in allowed)
    if any(address in network for network in allowed):
        return True
    carried = any(address in network for network in _CARRIERS)
    return address.is_global and not (carried or address.is_multicast or address.is_reserved or address.is_unspecified)


def _refused(problem: str) -> RequestError:
    return RequestError("url", problem, "give https://HOST/PATH of a host on the public internet, or ask the operator")
