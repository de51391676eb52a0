"""Webhooks: calls of the user's addresses when a job ends."""

from urllib.parse import quote

from autotune.client.transport import Transport
from autotune.wire.webhooks import Delivery, DeliveryList, NewWebhook, Webhook, WebhookList


class WebhookCalls:
    """Calls that are about webhooks."""

    _transport: Transport

    def create_webhook(self, url: str) -> NewWebhook:
        """Have `url` called when one of your jobs ends. The secret is in the answer, only this once.

        Raises:
            InvalidRequestError: the service may not call that address.
            ConflictError: you have as many webhooks as there may be.
        """
        return self._transport.once(NewWebhook, "/v1/webhooks", {"url": url})

    def webhooks(self) -> tuple[Webhook, ...]:
        """Your webhooks, oldest first; everybody's for an administrator."""
        return self._transport.get(WebhookList, "/v1/webhooks").items

    def delete_webhook(self, webhook: Webhook | str) -> None:
        """Send nothing more, and delete the record of what was sent.

        Raises:
            NotFoundError: there is none, or it is not yours.
        """
        self._transport.send("DELETE", f"/v1/webhooks/{_id(webhook)}", repeatable=False)

    def deliveries(self, webhook: Webhook | str, limit: int = 50) -> tuple[Delivery, ...]:
        """What was sent to a webhook, newest first, and the result of each try.

        Raises:
            NotFoundError: there is none, or it is not yours.
        """
        return self._transport.get(DeliveryList, f"/v1/webhooks/{_id(webhook)}/deliveries", {"limit": limit}).items


def _id(webhook: Webhook | str) -> str:
    return quote(webhook if isinstance(webhook, str) else webhook.id, safe="")
