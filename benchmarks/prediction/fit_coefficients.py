"""Fits the shipped coefficients to published measurements, and writes them with their sources.

    python -m benchmarks.prediction.fit_coefficients [--data ../shared/data] [--out autotune/prediction/equations/fitted.toml]

Every source has the same weight. Only the coefficients are kept, not the measurements.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from autotune.knowledge.row_cases import refusal
from autotune.knowledge.table import read_table
from autotune.prediction.equations.coefficients import Coefficients
from benchmarks.prediction.scoring.table_predictor import fitted_rates

HEADER = """# Made by benchmarks/prediction/fit_coefficients.py from measurements of the sources named below; not to be edited.
# Units and meaning: autotune/prediction/equations/coefficients.py.
"""


def main() -> int:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("autotune/prediction/equations/fitted.toml"))
    options = parser.parse_args()
    table = options.data / "measured.csv"
    if not table.exists():
        print(f"{table}: not found; give --data, the folder of measurements", file=sys.stderr)
        return 2
    rows = [row for row in read_table(table).rows if refusal(row) is None]
    rates = fitted_rates(rows, together=True)
    options.out.write_text(_document(rates, sorted({row.source for row in rows})), encoding="utf-8")
    prior = dataclasses.asdict(Coefficients())
    for name, value in dataclasses.asdict(rates).items():
        print(f"{name:26} {value:12.4g}   prior {prior[name]:10.4g}")
    return 0


def _document(rates: Coefficients, sources: list[str]) -> str:
    lines = [HEADER, "[sources]", "names = ["]
    lines += [f"  {_quoted(source)}," for source in sources]
    lines += ["]", "", "[coefficients]"]
    lines += [f"{name} = {value:.6g}" for name, value in dataclasses.asdict(rates).items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


if __name__ == "__main__":
    sys.exit(main())
