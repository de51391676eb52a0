"""`autotune calibrate`: measure the cluster, or reuse a measurement, and show the resulting prediction coefficients."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.cli.calibrate_table import print_calibration
from autotune.cli.documents import write_document
from autotune.cli.status import Status
from autotune.cluster.ray_cluster import with_address
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.rates import shipped_rates
from autotune.prediction.planning.calibrated import Calibrated, calibrated
from autotune.session.calibrate import Calibration, CalibrationRequest, measure_cluster, prepare_calibration
from autotune.text.console import Console
from search_spaces.plain import to_plain
from storage.address import default_database_url
from storage.store import open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """Parsed options of the command."""

    cluster: str | None
    """None: the cluster at the Ray address; local without an address."""
    ranks: int | None
    runner: str
    ray_address: str | None
    engine: str
    seconds: float
    timeout: float
    force: bool
    nvme_path: str | None
    database: str | None
    json: bool


def calibrate_command(options: CalibrateOptions) -> Status:
    """Reuse or measure, then print. All checks come before anything is started."""
    fields = with_address({"runner": options.runner, "ray_address": options.ray_address})
    request = CalibrationRequest(
        cluster=options.cluster or ("ray" if fields["ray_address"] else "local"),
        ranks=options.ranks,
        runner=options.runner,
        ray_address=fields["ray_address"],
        engine=options.engine,
        seconds=options.seconds,
        timeout=options.timeout,
        force=options.force,
        nvme_path=str(Path(options.nvme_path).expanduser().absolute()) if options.nvme_path else None,
    )
    console = Console(stderr=True)
    shipped = shipped_rates()
    with open_store(options.database or default_database_url()) as store:
        cluster, found, reason = prepare_calibration(store, request)
        if found is None:
            with console.status(f"measuring {cluster.world_size} ranks for about {options.seconds:g} s"):
                found = measure_cluster(store, request, cluster, reason)
        known = calibrated(store, cluster, options.engine, shipped)
    if options.json:
        write_document(_document(found, known, shipped, options.engine))
    else:
        print_calibration(found, known, shipped, options.engine, Console())
    return Status.OK


def _document(found: Calibration, known: Calibrated, shipped: Coefficients, engine: str) -> dict[str, Any]:
    record = found.record
    before, after = dataclasses.asdict(shipped), dataclasses.asdict(known.rates)
    return {
        "id": record.id,
        "fingerprint": record.fingerprint,
        "created": record.created.isoformat(),
        "reused": found.reused,
        "reason": found.reason,
        "seconds": record.seconds,
        "cluster": to_plain(found.cluster),
        "environment": dict(record.environment),
        "hosts": list(record.hosts),
        "context_bytes": record.context_bytes,
        "workspace_bytes": record.workspace_bytes,
        "rows": to_plain(record.rows),
        "engine": engine,
        "trials": known.trials,
        "source": known.source,
        "coefficients": {name: {"shipped": before[name], "calibrated": after[name]} for name in before},
    }
