"""Live event streams of jobs."""

import json
from collections.abc import Collection, Mapping

from pydantic_core import to_json

from api.hub import POLL_SECONDS, Hub, News, Part, message
from api.views import event_view, progress_view
from storage.records import ENDED, EventRecord
from storage.store import Store

PAGE = 500
LOOK = 5000
"""Most events per database query, but at least one for each followed job."""
PROGRESS = "progress"
"""The kind of messages with the progress of running attempts."""


class EventHub(Hub[str]):
    """Follows jobs. The live messages are the progress of their running attempts."""

    def __init__(self, store: Store, poll_seconds: float = POLL_SECONDS) -> None:
        super().__init__(poll_seconds)
        self._store = store

    def look(self, sequences: Mapping[str, int], live: Collection[str]) -> Mapping[str, News]:
        progress = self._store.progress(live) if live else {}
        job_news: dict[str, News] = {}
        for job_id, news in self._store.news(sequences, max(1, min(PAGE, LOOK // len(sequences)))).items():
            last = news.events[-1].sequence if news.events else sequences[job_id]
            job_news[job_id] = News(
                parts=[_encoded(event) for event in news.events],
                over=news.state in ENDED and news.version <= last,
                more=news.version > last,
                live={
                    record.trial_number: message(None, PROGRESS, to_json(progress_view(record), inf_nan_mode="null"))
                    for record in progress[job_id]
                }
                if job_id in progress
                else None,
            )
        return job_news

    def read(self, key: str, after: int) -> list[Part]:
        return [_encoded(event) for event in self._store.events(key, after, PAGE)]


def _encoded(event: EventRecord) -> Part:
    # A line break in the kind would break the stream.
    kind = json.dumps(event.kind)[1:-1]
    return event.sequence, message(event.sequence, kind, to_json(event_view(event), inf_nan_mode="null"))
