"""What a run tells while it goes on: for a live table, a log, a page."""

from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.verdict import Verdict
from search_spaces.outcome import JobState
from search_spaces.trial import Progress
from storage.records import TrialRecord


class LoopListener:
    """Called from the loop's thread; override what is of interest. What a method raises ends the run."""

    def on_state(self, state: JobState, message: str, book: JobSnapshot) -> None:
        """The job began, is being stopped, or has ended."""

    def on_note(self, note: str) -> None:
        """Something that people should know of how the job decides, before its first trial."""

    def on_news(self, news: str) -> None:
        """Something happened to the machines that the job runs on, in one line."""

    def on_start(self, trial: TrialRecord) -> None:
        """An attempt at the trial was handed to the runner."""

    def on_progress(self, trial: TrialRecord, progress: Progress) -> None:
        """A running trial gave a sign of life."""

    def on_answer(self, verdict: Verdict | None) -> None:
        """What the job has found so far changed; None: nothing may win any more."""

    def on_trial(self, trial: TrialRecord, book: JobSnapshot) -> None:
        """A trial has its outcome; refused candidates have one without having run."""
