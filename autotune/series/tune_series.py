"""`autotune.tune_series`: a series of jobs as a function, the same as `autotune sweep --objective cost|devices|sequence`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.cluster.ray_cluster import with_address
from autotune.frameworks.best_config import best_config_text
from autotune.loop.listener import LoopListener
from autotune.ops.output import require_writable, write_whole
from autotune.series.run import run_series
from autotune.series.series import SeriesRequest, SeriesResult
from autotune.series.size_forecast import EquationForecast
from autotune.tuning import run_new_job
from storage.address import default_database_url


def tune_series(
    model: str,
    *,
    objective: str,
    ranks: int | Sequence[int] = (),
    price: float | None = None,
    rate: float | None = None,
    step: int | None = None,
    out: str | Path | None = None,
    database: str | None = None,
    listener: LoopListener | None = None,
    **fields: Any,
) -> SeriesResult:
    """Find the cheapest number of ranks, the fewest that reach a rate, or the longest samples that run.

    Args:
        model: as in `autotune.tune`.
        objective: `cost` (with `price`), `devices` (with `rate`) or `sequence` (with `memory_limit` on a CPU).
        ranks: the sizes to compare; objective `sequence`: at most one.
        price: price of a device per hour, in any currency.
        rate: samples/s to reach.
        step: precision of the longest sample in tokens; None: 128.
        out: file for the answer's best configuration; None: it is not written.
        database: URL or path; None: AUTOTUNE_DB, else a file in the user's data folder.
        fields: other fields of `autotune.request.request.JobRequest`, for every job.

    Raises:
        AutotuneError, SearchSpaceError, StorageError, ExecutorError: a one-line message with the remedy.
    """
    if out is not None:
        require_writable(Path(out))
    database_url = database or default_database_url()
    series = SeriesRequest(
        objective=objective,  # type: ignore[arg-type]  # it checks the name itself
        fields=with_address({**fields, "model": model}), ranks=(ranks,) if isinstance(ranks, int) else tuple(ranks),
        price=price, rate=rate, step=step,
    )  # fmt: skip
    series_result = run_series(
        series, lambda session: run_new_job(session, database_url, listener=listener), EquationForecast(database=database_url)
    )
    if out is not None and series_result.best_config is not None:
        write_whole(Path(out), best_config_text(series_result.best_config))
    return series_result
