"""Loopback addresses."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
