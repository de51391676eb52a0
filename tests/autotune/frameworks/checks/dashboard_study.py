"""Usage: dashboard_study.py STORAGE NAME: the study as optuna-dashboard's own service gives it to its pages."""

import json
import sys
from wsgiref.util import setup_testing_defaults

from optuna_dashboard import wsgi


def get(app, path: str) -> dict:
    address, _, query = path.partition("?")
    environment = {"PATH_INFO": address, "QUERY_STRING": query}
    setup_testing_defaults(environment)
    status: list[str] = []
    answer = b"".join(app(environment, lambda line, *_: status.append(line)))
    assert status[0].startswith("200"), status
    return json.loads(answer)


def main() -> None:
    app = wsgi(sys.argv[1])
    (summary,) = [one for one in get(app, "/api/studies")["study_summaries"] if one["study_name"] == sys.argv[2]]
    study = get(app, f"/api/studies/{summary['study_id']}?after=0")
    told = {
        "directions": summary["directions"],
        "states": [trial["state"] for trial in study["trials"]],
        "parameters": sorted({one["name"] for trial in study["trials"] for one in trial["params"]}),
        "values": [trial.get("values") for trial in study["trials"]],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
