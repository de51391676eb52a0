"""Progress of `autotune.tune` in a terminal or a notebook: one line of plain text that is rewritten in place."""

import shutil
import sys
import time
from typing import TextIO

from autotune.loop.listener import LoopListener
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.verdict import JobVerdict
from autotune.session.session import Session
from autotune.text.rows import TrialRows, baseline_of, duration_text, state_word
from search_spaces.outcome import JobState, Purpose
from search_spaces.quantities import number_text
from search_spaces.trial import Progress
from storage.records import TrialRecord


class ProgressBar(LoopListener):
    """Shows how many trials are done and the best so far; forwards every call to another listener.

    If the output is neither a terminal nor a notebook, it writes one line for each trial that ends.
    """

    def __init__(self, session: Session, inner: LoopListener | None = None, output: TextIO | None = None) -> None:
        """`output`: None: standard error; in a notebook standard output, because notebooks show standard error as an error."""
        self._session = session
        self._inner = inner or LoopListener()
        self._output = output or (sys.stdout if in_notebook() else sys.stderr)
        self._rewrites = in_notebook() or self._output.isatty()
        self._rows: TrialRows | None = None
        self._began = time.monotonic()
        self._snapshot: JobSnapshot | None = None
        self._running: dict[int, str] = {}
        self._written = 0
        self._drawn = 0.0
        self._verdict: JobVerdict | None = None

    def on_state(self, state: JobState, message: str, snapshot: JobSnapshot) -> None:
        self._inner.on_state(state, message, snapshot)
        self._snapshot = snapshot
        if state is JobState.RUNNING:
            self._draw()
        else:
            self._say(f"job {snapshot.job.id}: {state_word(state, snapshot.job.reason)}{f': {message}' if message else ''}")

    def on_note(self, note: str) -> None:
        self._inner.on_note(note)

    def on_news(self, news: str) -> None:
        self._inner.on_news(news)
        self._say(news)

    def on_start(self, trial: TrialRecord) -> None:
        self._inner.on_start(trial)
        self._running[trial.number] = "starting"
        self._draw()

    def on_progress(self, trial: TrialRecord, progress: Progress) -> None:
        self._inner.on_progress(trial, progress)
        self._running[trial.number] = f"{progress.phase}{f' {progress.step}' if progress.step else ''}"
        if time.monotonic() - self._drawn >= 0.2:
            self._draw()

    def on_answer(self, verdict: JobVerdict | None) -> None:
        self._inner.on_answer(verdict)
        self._verdict = verdict

    def on_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:
        self._inner.on_trial(trial, snapshot)
        self._snapshot = snapshot
        self._running.pop(trial.number, None)
        if self._rewrites:
            self._draw()
        else:
            self._rows = self._rows or TrialRows(baseline_of(snapshot.trials))
            self._say(self._rows.line(trial))

    def _draw(self) -> None:
        if not self._rewrites or self._snapshot is None:
            return
        columns = shutil.get_terminal_size().columns if self._output.isatty() else 120  # in a notebook
        line = self._line(self._snapshot)[: columns - 1]
        # Blanks overwrite the rest of a longer previous line.
        self._output.write("\r" + line + " " * (self._written - len(line)))
        self._output.flush()
        self._written = len(line)
        self._drawn = time.monotonic()

    def _line(self, snapshot: JobSnapshot) -> str:
        trial_count = snapshot.job.request["trials"]  # may change while the job runs
        done = sum(trial.counted and trial.outcome is not None for trial in snapshot.trials)
        # Characters of the bar.
        width = 10
        filled = min(width, width * done // trial_count)
        parts = [
            f"[{'#' * filled}{'.' * (width - filled)}] {done}/{trial_count} trials",
            duration_text(time.monotonic() - self._began),
        ]
        rate = self._verdict.rate(self._verdict.best) if self._verdict is not None else None
        if rate is not None:
            parts.append(f"best {number_text(rate.mean)} samples/s")
        if any(trial.purpose is Purpose.CONFIRM for trial in snapshot.trials):
            parts.append("confirming")
        parts += [f"trial {number}: {does}" for number, does in sorted(self._running.items())[:2]]
        return ", ".join(parts)

    def _say(self, line: str) -> None:
        """Print a line that stays, in place of the progress line."""
        blanks = " " * (self._written - len(line))
        self._output.write(("\r" if self._rewrites and self._written else "") + line + blanks + "\n")
        self._output.flush()
        self._written = 0


def in_notebook() -> bool:
    """Whether this process is a notebook kernel, which is not a terminal but still shows output."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")
