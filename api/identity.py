"""Persons whom a proxy has identified, such as oauth2-proxy: their name and groups are in headers of its requests."""

import ipaddress
from dataclasses import dataclass
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from api.problems import problem
from api.settings import Settings

IDENTITY = "autotune.identity"
"""Key of a request's scope that has its `Identity`."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a trusted proxy says the person is."""

    name: str
    groups: tuple[str, ...]


class ProxyIdentities:
    """ASGI middleware that reads who a request is from. It must see the proxy's own address, not the one that it forwards."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self._name, self._groups = (name.lower().encode() for name in (settings.identity_header, settings.groups_header))
        self._proxies = [ipaddress.ip_network(proxy) for proxy in settings.trusted_proxies]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = [value for name, value in scope.get("headers", ()) if name == self._name and self._name]
        if scope["type"] != "http" or not names:
            await self.app(scope, receive, send)
            return
        header = self._name.decode()
        if not self._is_trusted(scope):
            # Nobody but a proxy may say who a person is, and its own requests come from its address.
            await problem(
                HTTPStatus.FORBIDDEN, f"{header}: names a person, and does not come from a trusted proxy; leave it out"
            )(scope, receive, send)
            return
        name = _text(names[0])
        if len(names) > 1 or not name or len(name) > 64 or not name.isprintable():
            await problem(
                HTTPStatus.BAD_REQUEST, f"{header}: is not one name of up to 64 printable characters; correct the proxy"
            )(scope, receive, send)
            return
        groups = [group.strip() for key, value in scope["headers"] if key == self._groups for group in _text(value).split(",")]
        await self.app({**scope, IDENTITY: Identity(name, tuple(filter(None, groups)))}, receive, send)

    def _is_trusted(self, scope: Scope) -> bool:
        try:
            address = ipaddress.ip_address((scope.get("client") or ("",))[0])
        except ValueError:
            return False
        return any(address in proxy for proxy in self._proxies)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace").strip()
