"""Live output streams of trials."""

from collections.abc import Collection, Mapping

from pydantic_core import to_json

from api.hub import Hub, News, Part, message
from api.views import log_view
from storage.log_records import LogRecord
from storage.store import Store

POLL_SECONDS = 0.5
"""How often workers write the output to the database."""
PAGE = 50
Trial = tuple[str, int]
"""A job's id and a trial's number."""


class LogHub(Hub[Trial]):
    """Follows trials."""

    cached = PAGE
    """Fewer than other hubs: a part may have tens of kilobytes."""

    def __init__(self, store: Store, poll_seconds: float = POLL_SECONDS) -> None:
        super().__init__(poll_seconds)
        self._store = store

    def look(self, sequences: Mapping[Trial, int], live: Collection[Trial]) -> Mapping[Trial, News]:
        del live
        trial_news: dict[Trial, News] = {}
        for trial, news in self._store.log_news(sequences, PAGE).items():
            more = bool(news.parts) and news.parts[-1].sequence < news.last
            trial_news[trial] = News(parts=[_encoded(part) for part in news.parts], over=news.over, more=more)
        return trial_news

    def read(self, key: Trial, after: int) -> list[Part]:
        return [_encoded(part) for part in self._store.logs(*key, after, PAGE)]


def _encoded(part: LogRecord) -> Part:
    return part.sequence, message(part.sequence, "log", to_json(log_view(part)))
