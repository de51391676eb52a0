"""In a process that has the command line's packages: what a database's calibration predicts. JSON in, JSON out."""

import json
import sys

from autotune.prediction.planning.calibrated import asked_here
from benchmarks.gpu_grid import prediction, question_of
from search_spaces.trial_config import TrialConfig
from storage.sql import open_store


def main() -> None:
    """`database`, `size` and `configs` on standard input."""
    asked = json.load(sys.stdin)
    with open_store(asked["database"]) as store:
        question = asked_here(store, question_of(asked["size"]))
    predicted = prediction(question, [TrialConfig().replace(config) for config in asked["configs"]])
    json.dump({"source": question.rests_on, "predicted": predicted}, sys.stdout)


if __name__ == "__main__":
    main()
