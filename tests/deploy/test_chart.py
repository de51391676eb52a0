"""The Helm chart, rendered and linted by Helm's own engine (the package helm-python-sdk), checked against the strict schema."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from autotune.cli.app import app
from tests.deploy.test_manifests import problems

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make extras installs it")
CHART = Path(__file__).parents[2] / "examples/deploy/helm/autotune"
Manifest = dict[str, Any]
KEY = "A" * 43 + "="
LEAST: Manifest = {"service": {"secretKey": KEY}, "postgresql": {"password": "a long/secret"}}
ELSEWHERE: Manifest = {
    "service": {"secretKey": KEY, "options": ["--keys", "--log-format", "json"]},
    "postgresql": {"enabled": False},
    "database": {"url": "postgresql://autotune@db.example.com/autotune"},
    "ray": {"enabled": False, "address": "ray.example.com:6379"},
    "workers": {"replicas": 3, "options": ["--running-jobs", "2"], "environment": {"WANDB_MODE": "offline"}},
}
QUEUED: Manifest = {**LEAST, "kueue": {"enabled": True}, "ray": {"nodes": 2, "gpus": 4, "cpus": 16}}
CASES = {"least": LEAST, "elsewhere": ELSEWHERE, "queued": QUEUED, "cpus": {**LEAST, "ray": {"gpus": 0}}}


def rendered(values: Manifest) -> dict[tuple[str, str], Manifest]:
    """(kind, name) -> manifest."""
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name="mine", namespace="prod")
    items = [item for name, text in texts.items() if name.endswith(".yaml") for item in yaml.safe_load_all(text) if item]
    found = {(item["kind"], item["metadata"]["name"]): item for item in items}
    assert len(found) == len(items), "two of one name"
    return found


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_manifests_keep_the_schema(values: Manifest) -> None:
    for (kind, _), manifest in rendered(values).items():
        assert kind == "Secret" or problems(manifest) == []


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_lint_finds_nothing(values: Manifest) -> None:
    report = helm.lint(str(CHART), values, strict=True)
    assert [message for message in report["messages"] if message["severity"] > 1] == [] == report["errors"]


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_names_agree(values: Manifest) -> None:
    found = rendered(values)
    text = json.dumps(list(found.values()))
    for secret, key in re.findall(r'"secretKeyRef": {"name": "([^"]+)", "key": "([^"]+)"}', text):
        assert key in found["Secret", secret]["stringData"]
    for claim in re.findall(r'"claimName": "([^"]+)"', text):
        assert ("PersistentVolumeClaim", claim) in found
    for (kind, _), manifest in found.items():
        if kind == "Service":
            selector = manifest["spec"]["selector"]
            assert [one for (other, _), one in found.items() if other == "Deployment" and one["metadata"]["labels"] == selector]
    workers = found["Deployment", "mine-worker"]["spec"]["template"]["spec"]["containers"][0]
    (address,) = [one["value"] for one in workers["env"] if one["name"] == "RAY_ADDRESS"]
    assert address == ("ray.example.com:6379" if values is ELSEWHERE else "mine-head-svc:6379")
    assert (("RayCluster", "mine") in found) == (values is not ELSEWHERE)


def test_the_commands_are_ours() -> None:
    found = rendered(ELSEWHERE)
    group = typer.main.get_command(app)  # type: ignore[attr-defined]
    serve = found["Deployment", "mine-serve"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert serve[0] == "autotune"
    script, _, *options = found["Deployment", "mine-worker"]["spec"]["template"]["spec"]["containers"][0]["args"][2:]
    assert 'autotune worker --ray-address "$RAY_ADDRESS" "$@"' in script
    for words in (serve[1:], ["worker", "--ray-address", "h:1", *options]):
        with group.make_context("autotune", [], resilient_parsing=True) as parent:
            group.commands[words[0]].make_context(words[0], words[1:], parent=parent, resilient_parsing=False)


def test_secrets_are_only_in_the_secret() -> None:
    found = rendered(LEAST)
    secret = found.pop(("Secret", "mine-database"))["stringData"]
    assert secret["url"] == "postgresql://autotune:a+long%2Fsecret@mine-postgresql:5432/autotune".replace("+", "%20")
    assert "secret" not in json.dumps(list(found.values())).replace("secretKeyRef", "").replace("secret-key", "")


def test_the_queue_has_room_for_the_cluster() -> None:
    found = rendered(QUEUED)
    assert found["RayCluster", "mine"]["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "mine"}
    (group,) = found["ClusterQueue", "mine"]["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    quota = {one["name"]: one["nominalQuota"] for one in flavor["resources"]}
    assert (quota["cpu"], quota["nvidia.com/gpu"]) == (2 + 2 * 16, 2 * 4)
    assert group["coveredResources"] == list(quota)
    assert found["LocalQueue", "mine"]["spec"] == {"clusterQueue": "mine"}
    own = rendered({**QUEUED, "kueue": {"enabled": True, "queue": "theirs"}})
    assert own["RayCluster", "mine"]["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "theirs"}
    assert ("ClusterQueue", "mine") not in own


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"postgresql": {"password": "short"}}, "/postgresql/password"),
        ({"service": {"secretKey": "short"}}, "/service/secretKey"),
        ({"service": {"secretKey": KEY, "replicas": 0}}, "/service/replicas"),
        ({"service": {"secretKey": KEY, "replica": 1}}, "replica"),
        ({"postgresql": {"enabled": False}}, "/database"),
        ({"database": {"url": "sqlite:///jobs.db"}}, "/database/url"),
        ({"ray": {"enabled": False}}, "/ray"),
        ({"ray": {"memory": "much"}}, "/ray/memory"),
        ({"worker": {}}, "worker"),
    ],
)
def test_wrong_values_are_refused_by_name(changes: Manifest, field: str) -> None:
    with helm.Chart.load(str(CHART)) as chart, pytest.raises(helm.HelmValuesError) as refused:
        chart.validate_schema({**LEAST, **changes})
    assert field in str(refused.value)
