"""Answers HEAD requests as GET requests without a body."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadRequests:
    """ASGI middleware: a HEAD request gets the status and the headers of the GET request. A stream ends after them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        asked = {**scope, "method": "GET"}
        is_answered = False

        async def without_body(message: MutableMapping[str, Any]) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                scope["route"] = asked.get("route")  # for the metrics
                await send(message)
            elif not is_answered:
                is_answered = True
                await send({"type": "http.response.body"})
                if message.get("more_body"):
                    answer.cancel()  # a stream would go on as long as its job

        answer = asyncio.ensure_future(self.app(asked, receive, without_body))
        try:
            await answer
        except asyncio.CancelledError:
            if not is_answered:
                raise
