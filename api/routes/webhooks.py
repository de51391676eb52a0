"""Webhooks, which are called when a job ends."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from api.auth import Principal, Reader, SettingsOf, StoreOf, Submitter
from api.computing import PoolsOf
from api.deliverer import checked_target, networks
from autotune.wire.service import Delivery, DeliveryList, NewWebhook, Webhook, WebhookList
from storage.errors import UnknownWebhookError
from storage.records import Scope
from storage.service_records import DeliveryRecord, DeliveryState, WebhookRecord
from storage.store import Store

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])

WebhookId = Annotated[str, Path(pattern=r"^[0-9a-f]{12}$", description="A webhook's id.")]


class WebhookSubmission(BaseModel):
    """The address of a new webhook."""

    model_config = ConfigDict(extra="forbid")

    url: Annotated[str, Field(min_length=1, max_length=2000, pattern=r"^https?://")]
    """`https://…` on the public internet."""


@router.post(
    "", operation_id="create_webhook", status_code=201, responses={409: {"description": "There are too many webhooks."}}
)
async def create_webhook(
    body: WebhookSubmission, store: StoreOf, settings: SettingsOf, principal: Submitter, pools: PoolsOf
) -> NewWebhook:
    """Get a signed POST when one of your jobs ends; it is retried for a day."""
    await pools.naming.run(checked_target, body.url, networks(settings.webhook_networks))
    webhook = await run_in_threadpool(store.by(principal.actor).webhooks.create, principal.owner, body.url)
    return NewWebhook(id=webhook.id, owner=webhook.owner, url=webhook.url, created=webhook.created, secret=webhook.secret)


@router.get("", operation_id="list_webhooks")
def list_webhooks(store: StoreOf, principal: Reader) -> WebhookList:
    """Your webhooks; for an administrator all webhooks. Their secrets are not shown again."""
    webhooks = store.webhooks.of(None if principal.may(Scope.ADMIN) else principal.owner)
    return WebhookList(
        items=tuple(Webhook(id=item.id, owner=item.owner, url=item.url, created=item.created) for item in webhooks)
    )


@router.delete("/{webhook_id}", operation_id="delete_webhook", status_code=204)
def delete_webhook(webhook_id: WebhookId, store: StoreOf, principal: Submitter) -> Response:
    """Delete the webhook and its deliveries."""
    store.by(principal.actor).webhooks.delete(_visible(store, principal, webhook_id).id)
    return Response(status_code=204)


@router.get("/{webhook_id}/deliveries", operation_id="list_deliveries")
def list_deliveries(
    webhook_id: WebhookId, store: StoreOf, principal: Reader, limit: Annotated[int, Query(ge=1, le=200)] = 50
) -> DeliveryList:
    """The deliveries of the webhook, and the result of each try."""
    deliveries = store.webhooks.deliveries(_visible(store, principal, webhook_id).id, limit)
    return DeliveryList(items=tuple(_view(delivery) for delivery in deliveries))


def _visible(store: Store, principal: Principal, webhook_id: str) -> WebhookRecord:
    for item in store.webhooks.of(None if principal.may(Scope.ADMIN) else principal.owner):
        if item.id == webhook_id:
            return item
    raise UnknownWebhookError(f"webhook_id: there is no webhook {webhook_id!r}; list yours with GET /v1/webhooks")


def _view(delivery: DeliveryRecord) -> Delivery:
    due = delivery.due if delivery.state is DeliveryState.PENDING else None
    return Delivery(
        id=delivery.id, job=delivery.job_id, created=delivery.created, state=str(delivery.state), due=due, tries=delivery.tries
    )  # fmt: skip
