"""The manifests for Kubernetes: rendered, checked against a strict schema, and agreeing with each other."""

import copy
import json
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/deploy/kuberay"
SCHEMA = json.loads((Path(__file__).parent / "manifests.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
Manifest = dict[str, Any]


def rendered(image: str = "registry.example.com/autotune:1") -> list[Manifest]:
    """All manifests, with the image as the page says to set it."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.yaml"))]
    return [item for text in texts for item in yaml.safe_load_all(text.replace("registry.example.com/autotune:latest", image))]


def by_kind(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {item["kind"]: item for item in manifests}


def pods(manifest: Manifest) -> Iterator[Manifest]:
    """Every pod template in a manifest."""
    spec = manifest["spec"]
    groups = [spec] if "template" in spec else [spec[key] for key in ("headGroupSpec",) if key in spec]
    yield from (group["template"] for group in (*groups, *spec.get("workerGroupSpecs", ())))


def containers(manifest: Manifest) -> Iterator[Manifest]:
    for pod in pods(manifest):
        yield from (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])


def problems(manifest: Manifest) -> list[str]:
    kind = {"$ref": f"#/$defs/{manifest['kind']}", "$defs": SCHEMA["$defs"]}
    return [f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(kind).iter_errors(manifest)]


@pytest.mark.parametrize("manifest", rendered(), ids=lambda item: f"{item['kind']}-{item['metadata']['name']}")
def test_every_manifest_keeps_the_schema(manifest: Manifest) -> None:
    assert problems(manifest) == []
    VALIDATOR.validate(manifest)


def misspelt(cluster: Manifest) -> None:
    cluster["spec"]["workerGroupSpecs"][0]["minReplica"] = 1


def without_parameters(cluster: Manifest) -> None:
    del cluster["spec"]["headGroupSpec"]["rayStartParams"]


def with_a_number(cluster: Manifest) -> None:
    cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0


def with_bad_memory(cluster: Manifest) -> None:
    cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] = "512 GB"


@pytest.mark.parametrize("change", [misspelt, without_parameters, with_a_number, with_bad_memory])
def test_the_schema_refuses_what_the_operator_would(change: Callable[[Manifest], None]) -> None:
    cluster = copy.deepcopy(by_kind(rendered())["RayCluster"])
    change(cluster)
    assert len(problems(cluster)) == 1


def test_they_agree_with_each_other_and_with_what_is_pinned() -> None:
    manifests = rendered()
    kinds = by_kind(manifests)
    cluster = kinds["RayCluster"]
    assert cluster["spec"]["rayVersion"] == version("ray")
    address = f"{cluster['metadata']['name']}-head-svc:6379"  # the service that the operator makes
    claim = kinds["PersistentVolumeClaim"]["metadata"]["name"]
    for kind in ("Deployment", "Job"):
        (main,) = (item for item in containers(kinds[kind]) if any(env["name"] == "RAY_ADDRESS" for env in item["env"]))
        assert {"name": "RAY_ADDRESS", "value": address} in main["env"]
        (pod,) = pods(kinds[kind])
        assert claim in {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        }
    deployment = kinds["Deployment"]["spec"]
    assert (
        kinds["Service"]["spec"]["selector"]
        == deployment["selector"]["matchLabels"]
        == deployment["template"]["metadata"]["labels"]
    )
    named = {port["name"] for item in containers(kinds["Deployment"]) for port in item.get("ports", ())}
    assert {port["targetPort"] for port in kinds["Service"]["spec"]["ports"]} <= named


def test_mounts_have_volumes_and_nodes_have_shared_memory() -> None:
    for manifest in rendered():
        if manifest["kind"] in ("Service", "PersistentVolumeClaim"):
            continue
        for pod in pods(manifest):
            volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
            for item in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
                assert {mount["name"] for mount in item.get("volumeMounts", ())} <= set(volumes), item["name"]
    group = by_kind(rendered())["RayCluster"]["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    (mount,) = (mount for mount in group["containers"][0]["volumeMounts"] if mount["mountPath"] == "/dev/shm")
    assert next(volume for volume in group["volumes"] if volume["name"] == mount["name"])["emptyDir"]["medium"] == "Memory"


def test_the_image_is_set_in_one_stroke_and_scripts_in_it_are_scripts() -> None:
    images = {item["image"] for manifest in rendered("here/autotune:2") for item in containers_of(manifest)}
    assert images == {"here/autotune:2"}
    scripts = [
        item["args"][2] for manifest in rendered() for item in containers_of(manifest) if item.get("args", [""])[0] == "bash"
    ]
    assert len(scripts) == 3
    for script in scripts:
        subprocess.run(["bash", "-n", "-c", script], check=True)


def containers_of(manifest: Manifest) -> list[Manifest]:
    return list(containers(manifest)) if manifest["kind"] in ("RayCluster", "Deployment", "Job") else []
