"""Jobs: submit, list, read, steer; webhooks that are called when a job ends."""

import itertools
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from autotune.client.errors import UnavailableError, UnreachableError, WaitTimeoutError
from autotune.client.fields import SUBMISSION, Model, body_of
from autotune.client.transport import HttpTransport, quoted
from autotune.errors import RequestError
from autotune.wire.jobs import Job, JobPage, JobSummary, Leaderboard, Link, LinkList, Overview, OverviewList
from autotune.wire.service import Delivery, DeliveryList, NewWebhook, Webhook, WebhookList

JOBS = "/v1/jobs"
PAGE = 100


class JobCalls:
    """Calls about jobs. A job is given by its whole id, or as a `Job` or `JobSummary`."""

    _transport: HttpTransport
    _outage_seconds: float

    def submit(self, model: Model | None = None, *, idempotency_key: str | None = None, **fields: Any) -> Job:
        """Submit a tuning job. It is sent again where the connection breaks, and opens one job however often that happens.

        Args:
            model: a preset's name, a `module:factory` that the service allows, the path of a Hugging Face config.json (or of
                its folder), which is read here and sent along, or {"name": …, "config": …} with its content. None: a command.
            idempotency_key: your own name of this submission, up to 128 visible characters: submitting again under it opens no
                second job, from another process or on another day too. None: a random one.
            fields: those of `JobFields` that a service accepts, and `priority`; what is left out has the default of
                `autotune sweep`.

        Raises:
            RequestError: the model's file cannot be read.
            InvalidRequestError: a field is refused, or the key was used before with other fields.
            ServiceError: any other; see `autotune.client.errors`.
        """
        return self._transport.post(Job, JOBS, body_of(model, fields, SUBMISSION), _key(idempotency_key))

    def job(self, job: str | JobSummary) -> Job:
        """One job as it is now.

        Raises:
            NotFoundError: there is none of this id, or it is not yours.
        """
        return self._transport.get(Job, job_path(job))

    def overviews(self, jobs: Sequence[str | JobSummary]) -> tuple[Overview, ...]:
        """How far up to 200 jobs are: trials by outcome, and the best so far.

        Raises:
            NotFoundError: one of them is not there, or not yours.
        """
        ids = [job.id if isinstance(job, JobSummary) else job for job in jobs]
        return self._transport.get(OverviewList, "/v1/overviews", {"job": ids}).items

    def leaderboard(self, *, model: str | None = None, cluster: str | None = None) -> Leaderboard:
        """The fastest answers by model and cluster.

        Args:
            model: only this model; None: all.
            cluster: only this cluster; None: all.
        """
        return self._transport.get(Leaderboard, "/v1/leaderboard", _given(model=model, cluster=cluster))

    def jobs(
        self,
        *,
        state: str | Sequence[str] | None = None,
        submitter: str | None = None,
        limit: int | None = None,
        tag: str | Sequence[str] | None = None,
        text: str | None = None,
    ) -> Iterator[JobSummary]:
        """The newest jobs first, page by page as they are asked for.

        Args:
            state: one state or several; None: all.
            submitter: whose jobs; other people's for administrators alone. None: yours, or all for an administrator.
            limit: jobs at most; None: all.
            tag: one tag or several, all of which a job has; None: any or none.
            text: words, all of which are part of a job's name, note, tags, model, cluster, id, state, message or submitter.
        """
        states, tags = (
            [filter_value] if isinstance(filter_value, str) else list(filter_value or ()) for filter_value in (state, tag)
        )
        pages = self._pages({"state": states, "tag": tags, **_given(submitter=submitter, text=text)}, limit)
        return itertools.islice(pages, limit)

    def pause(self, job: str | JobSummary) -> Job:
        """Let running trials end, and wait until the job is resumed.

        Raises:
            ConflictError: the job has ended.
        """
        return self._ask(job, "pause")

    def resume(self, job: str | JobSummary, *, trials: int | None = None, max_seconds: float | None = None) -> Job:
        """Let a job wait for a worker again that is paused, has failed, or has succeeded and is given a larger budget.

        Args:
            job: the job.
            trials: search trials in all; None: as it is.
            max_seconds: seconds of active time in all; None: as it is.

        Raises:
            ConflictError: the job was cancelled, or has succeeded and its budget is no larger than before.
        """
        return self._transport.post(Job, f"{job_path(job)}/resume", _given(trials=trials, max_seconds=max_seconds) or None)

    def label(
        self,
        job: str | JobSummary,
        *,
        name: str | None = None,
        tags: Sequence[str] | None = None,
        note: str | None = None,
        team: str | None = None,
    ) -> Job:
        """Change what a job is called and who sees it, in any state.

        Args:
            job: the job.
            name: empty: none; None: as it is.
            tags: in place of the former ones; None: as they are.
            note: empty: none; None: as it is.
            team: that sees it; empty: none; None: as it is.

        Raises:
            InvalidRequestError: one of them is refused.
        """
        body = _given(name=name, tags=None if tags is None else list(tags), note=note, team=team)
        return self._transport.patch(Job, job_path(job), body, {}, repeatable=True)

    def stop(self, job: str | JobSummary) -> Job:
        """Let running trials end, and be content with the best so far.

        Raises:
            ConflictError: the job has ended.
        """
        return self._ask(job, "stop")

    def cancel(self, job: str | JobSummary) -> Job:
        """Kill running trials, and end.

        Raises:
            ConflictError: the job has ended otherwise.
        """
        return self._ask(job, "cancel")

    def clone(self, job: str | JobSummary, *, idempotency_key: str | None = None) -> Job:
        """Submit the same request once more; `idempotency_key` as in `submit`."""
        return self._transport.post(Job, f"{job_path(job)}/clone", None, _key(idempotency_key))

    def share(self, job: str | JobSummary, *, days: int = 7) -> Link:
        """Make a link that shows this job, and nothing else, to whoever has it. The token is in the answer, only this once.

        Raises:
            ConflictError: the service makes no links, or the job has as many as there may be.
        """
        return self._transport.once(Link, f"{job_path(job)}/links", {"days": days})

    def links(self, job: str | JobSummary) -> LinkList:
        """The links of a job that work, oldest first, without their tokens."""
        return self._transport.get(LinkList, f"{job_path(job)}/links")

    def withdraw_link(self, job: str | JobSummary, link: Link | str) -> None:
        """End a link: within 5 seconds it shows nothing more.

        Raises:
            NotFoundError: the job has no such link.
        """
        number = link.id if isinstance(link, Link) else link
        self._transport.send("DELETE", f"{job_path(job)}/links/{quoted(number)}", repeatable=False)

    def extend(self, job: str | JobSummary, *, trials: int | None = None, max_seconds: float | None = None) -> Job:
        """Set the budget, in all: what was spent counts. It may be made smaller too.

        Args:
            job: a `Job`, or one of a list, is changed only if nothing has happened to it since it was read; an id in any case.
            trials: search trials in all; None: as it is.
            max_seconds: seconds of active time in all; None: as it is.

        Raises:
            ConflictError: the job has ended, or has changed since it was read.
        """
        body = _given(trials=trials, max_seconds=max_seconds)
        headers = {"If-Match": job.etag} if isinstance(job, JobSummary) else {}
        # A change of one version, sent twice, would be refused the second time.
        return self._transport.patch(Job, job_path(job), body, headers, repeatable=not headers)

    def wait(self, job: str | JobSummary, timeout: float | None = None) -> Job:
        """Wait until the job has ended: SUCCEEDED, FAILED or CANCELLED. A paused one has not.

        Args:
            job: the job.
            timeout: seconds to wait; None: for as long as it takes.

        Raises:
            WaitTimeoutError: it had not ended by then.
            UnreachableError, UnavailableError: the service was away for longer than `outage_seconds`.
        """
        began = heard = time.monotonic()
        # Between two looks of `wait`: at first, and at most.
        pause, most = 0.2, 2.0
        while True:
            try:
                summary = self.job(job)
                heard = time.monotonic()
                if summary.ended:
                    return summary
            except (UnreachableError, UnavailableError):
                if time.monotonic() - heard > self._outage_seconds:
                    raise
            remaining_seconds = float("inf") if timeout is None else began + timeout - time.monotonic()
            if remaining_seconds <= 0:
                raise WaitTimeoutError(f"job: {job_id(job)} has not ended after {timeout:g} s; wait longer, or stop it")
            time.sleep(min(pause, remaining_seconds))
            pause = min(1.5 * pause, most)

    def _ask(self, job: str | JobSummary, action: str) -> Job:
        return self._transport.post(Job, f"{job_path(job)}/{action}")

    def _pages(self, filters: dict[str, object], most: int | None) -> Iterator[JobSummary]:
        size = PAGE if most is None else max(1, min(most, PAGE))
        page = self._transport.get(JobPage, JOBS, {**filters, "limit": size})
        yield from page.items
        while page.next is not None:
            page = self._transport.get(JobPage, JOBS, {**filters, "limit": size, "cursor": page.next})
            yield from page.items


def job_id(job: str | JobSummary) -> str:
    """The job's whole id."""
    return job.id if isinstance(job, JobSummary) else job


def job_path(job: str | JobSummary) -> str:
    """Where the job is.

    Raises:
        RequestError: the text cannot be an id.
    """
    text = job_id(job)
    if re.fullmatch(r"[A-Za-z0-9-]{1,100}", text) is None:
        raise RequestError("job", f"{quoted(text)!r} is no id of a job", "give a whole id, such as 20300131-120000-abcd")
    return f"{JOBS}/{text}"


def _given(**fields: object) -> dict[str, object]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _key(key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": secrets.token_urlsafe(24) if key is None else key}


class WebhookCalls:
    """Calls that are about webhooks."""

    _transport: HttpTransport

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
