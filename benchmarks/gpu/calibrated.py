"""Predictions from a database's calibration, in a process that has the command line's packages. JSON in, JSON out."""

import json
import sys

from autotune.prediction.planning.calibrated import asked_here
from benchmarks.gpu.grid import prediction, question_of
from search_spaces.trial_config import TrialConfig
from storage.store import open_store


def main() -> None:
    """Read `database`, `size` and `configs` from standard input; print `source` and `predicted`."""
    request = json.load(sys.stdin)
    with open_store(request["database"]) as store:
        question = asked_here(store, question_of(request["size"]))
    predicted = prediction(question, [TrialConfig().replace(config) for config in request["configs"]])
    json.dump({"source": question.calibration_source, "predicted": predicted}, sys.stdout)


if __name__ == "__main__":
    main()
