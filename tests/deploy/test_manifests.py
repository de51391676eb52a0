"""The manifests for Kubernetes: rendered, checked against strict schemas, and agreeing with each other."""

import copy
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.crds import FILE, FOLDER, IMAGE, ROOT, SOURCES

KUBERNETES = json.loads((Path(__file__).parent / "manifests.schema.json").read_text("utf-8"))["$defs"]
KINDS = KUBERNETES | json.loads(FILE.read_text("utf-8"))["$defs"]
Manifest = dict[str, Any]


def rendered(image: str = "registry.example.com/autotune:1") -> list[Manifest]:
    """All manifests, with the image as the page says to set it."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.yaml"))]
    return [item for text in texts for item in yaml.safe_load_all(text.replace(IMAGE, image))]


def by_kind(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {item["kind"]: item for item in manifests}


def pods(manifest: Manifest) -> Iterator[Manifest]:
    """Every pod template in a manifest that Kubernetes or KubeRay makes pods of as it stands."""
    spec = manifest.get("spec", {})
    spec = spec.get("rayClusterSpec", spec)
    groups = [spec] if "template" in spec else [spec[key] for key in ("headGroupSpec",) if key in spec]
    yield from (group["template"] for group in (*groups, *spec.get("workerGroupSpecs", ())))


def containers(manifest: Manifest) -> Iterator[Manifest]:
    for pod in pods(manifest):
        yield from (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])


def problems(manifest: Manifest) -> list[str]:
    kind = {"$ref": f"#/$defs/{manifest['kind']}", "$defs": KINDS}
    return [f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(kind).iter_errors(manifest)]


@pytest.mark.parametrize("manifest", rendered(), ids=lambda item: f"{item['kind']}-{item['metadata']['name']}")
def test_every_manifest_keeps_the_schema(manifest: Manifest) -> None:
    assert problems(manifest) == [], "a field that was not used before needs a new run of tests/deploy/crds.py"


def by_path(manifest: Any, path: str) -> tuple[Any, str]:
    """The object that has the last name of a path, and that name; numbers are positions in lists."""
    *names, last = path.split(".")
    for name in names:
        manifest = manifest[int(name) if name.isdecimal() else name]
    return manifest, last


WRONG = [
    ("RayCluster", "spec.workerGroupSpecs.0.minReplica", 1),
    ("RayCluster", "spec.headGroupSpec.template", None),
    ("RayCluster", "spec.headGroupSpec.rayStartParams.num-cpus", 0),
    ("RayCluster", "spec.workerGroupSpecs.0.template.spec.containers.0.resources.limits.memory", "512 GB"),
    ("RayCluster", "apiVersion", "ray.io/v1alpha1"),
    ("RayJob", "spec.entryPoint", "sweep.sh llama-tiny"),
    ("RayJob", "spec.backoffLimit", "3"),
    ("RayJob", "spec.shutdownAfterJobFinishes", "true"),
    ("RayJob", "spec.rayClusterSpec.headGroupSpec", None),
    ("RayJob", "spec.rayClusterSpec.workerGroupSpecs.0.groupName", None),
    ("RayJob", "spec.rayClusterSpec.workerGroupSpecs.0.template.spec.containers.0.name", None),
    ("RayJob", "spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.env.0.values", "x"),
    ("RayJob", "spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.ports.0.containerPort", "6379"),
    ("ClusterQueue", "spec.resourceGroups.0.flavors.0.resources.0.quota", "1"),
    ("ClusterQueue", "spec.resourceGroups.0.flavors.0.resources.0.nominalQuota", None),
    ("ClusterQueue", "spec.resourceGroups.0.coveredResources", []),
    ("LocalQueue", "spec.clusterQueue", "Not A Name"),
    ("LocalQueue", "spec.queue", "autotune"),
    ("ResourceFlavor", "spec", {"labels": {}}),
    ("TrainJob", "spec.runtimeRef.name", None),
    ("TrainJob", "spec.trainer.numProcPerNode", "eight"),
    ("TrainJob", "spec.trainer.command", "torchrun"),
    ("TrainJob", "spec.trainer.volumeMounts", []),
    ("TrainJob", "spec.podTemplateOverrides", []),
    ("TrainJob", "spec.runtimePatches.0.manager", None),
    ("TrainJob", "metadata.labels.kueue", 1),
]
"""Kind, path, and a wrong value there; None: what is required is missing."""


@pytest.mark.parametrize(("kind", "path", "value"), WRONG, ids=lambda part: str(part))
def test_the_schema_refuses_what_the_api_server_would(kind: str, path: str, value: Any) -> None:
    manifest = copy.deepcopy(by_kind(rendered())[kind])
    parent, name = by_path(manifest, path)
    if value is None:
        del parent[name]
    else:
        parent[name] = value
    (problem,) = problems(manifest)
    assert name in problem or problem.startswith(f"$.{path.replace('.0', '[0]')}")


def test_the_schemas_are_those_of_the_releases() -> None:
    document = json.loads(FILE.read_text("utf-8"))
    assert {*document["$defs"]} == {*SOURCES}
    for project, tag, _ in SOURCES.values():
        assert f"{project} {tag}" in document["$comment"]


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
        for pod in pods(manifest):
            volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
            for item in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
                assert {mount["name"] for mount in item.get("volumeMounts", ())} <= set(volumes), item["name"]
    group = by_kind(rendered())["RayCluster"]["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    (mount,) = (mount for mount in group["containers"][0]["volumeMounts"] if mount["mountPath"] == "/dev/shm")
    assert next(volume for volume in group["volumes"] if volume["name"] == mount["name"])["emptyDir"]["medium"] == "Memory"


def test_the_image_is_set_in_one_stroke_and_scripts_in_it_are_scripts() -> None:
    images = {item["image"] for manifest in rendered("here/autotune:2") for item in containers(manifest)}
    assert images | {by_kind(rendered("here/autotune:2"))["TrainJob"]["spec"]["trainer"]["image"]} == {"here/autotune:2"}
    scripts = [
        item["args"][2] for manifest in rendered() for item in containers(manifest) if item.get("args", [""])[0] == "bash"
    ]
    assert len(scripts) == 3
    for script in scripts:
        subprocess.run(["bash", "-n", "-c", script], check=True)


def cores(amount: str) -> float:
    return int(amount.removesuffix("m")) / 1000 if amount.endswith("m") else float(amount)


def gibibytes(amount: str) -> float:
    return int(amount[:-2]) / {"Gi": 1, "Mi": 1024}[amount[-2:]]


def test_a_ray_job_is_one_that_kubernetes_and_kueue_admit() -> None:
    """The rules of the operators' webhooks, and room for the job, its nodes and the pod that submits it in the queue."""
    kinds = by_kind(rendered())
    job, cluster = kinds["RayJob"], kinds["RayCluster"]
    assert len(job["metadata"]["name"]) <= 47 and re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    # KubeRay puts the words into a shell's command as they stand, and Ray those into another one's.
    assert re.fullmatch(r"[\w ./=-]+", job["spec"]["entrypoint"])
    assert job["spec"]["shutdownAfterJobFinishes"] and "clusterSelector" not in job["spec"]
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == cluster["spec"]["rayVersion"]
    assert "enableInTreeAutoscaling" not in job["spec"]["rayClusterSpec"]
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert len(groups) <= 7
    (node,) = (container for group in groups for container in group["template"]["spec"]["containers"])
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    (resources,) = kinds["ClusterQueue"]["spec"]["resourceGroups"]
    quota = {resource["name"]: resource["nominalQuota"] for resource in resources["flavors"][0]["resources"]}
    assert list(quota) == resources["coveredResources"]
    submitter = {"cpu": "500m", "memory": "200Mi"}  # KubeRay's own
    replicas = groups[0]["replicas"]
    ours, theirs = node["resources"]["requests"], head["resources"]["requests"]
    for name, amount in (("cpu", cores), ("memory", gibibytes)):
        needed = replicas * amount(ours[name]) + amount(theirs[name]) + amount(submitter[name])
        assert needed <= amount(quota[name]) <= 1.01 * needed + 1, name
    assert quota["nvidia.com/gpu"] == str(replicas * int(ours["nvidia.com/gpu"]))
    assert resources["flavors"][0]["name"] == kinds["ResourceFlavor"]["metadata"]["name"]
    assert kinds["LocalQueue"]["spec"]["clusterQueue"] == kinds["ClusterQueue"]["metadata"]["name"]
    for kind in ("RayJob", "TrainJob"):
        assert kinds[kind]["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": kinds["LocalQueue"]["metadata"]["name"]}


@pytest.mark.prove
def test_a_train_job_runs_the_exported_program(tmp_path: Path) -> None:
    """The command of the manifest, with the variables that Trainer sets, on two ranks of this machine."""
    job = by_kind(rendered())["TrainJob"]["spec"]
    (patch,) = job["runtimePatches"]
    (pods_of_nodes,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = pods_of_nodes["template"]["spec"]["template"]["spec"]
    mounted = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {*mounted} == {volume["name"] for volume in pod["volumes"]}
    assert not any(variable["name"].startswith("PET_") for variable in job["trainer"].get("env", ()))
    comments = (FOLDER / "trainjob.yaml").read_text("utf-8").partition("apiVersion")[0]
    export, configmap = (shlex.split(line.removeprefix("#")) for line in comments.splitlines() if line.startswith("#   "))
    assert configmap[3] == next(volume for volume in pod["volumes"] if volume["name"] == "best")["configMap"]["name"]
    program = export[export.index("--out") + 1]
    assert configmap[4] == f"--from-file={program}" and f"{mounted['best']}/{program}" in job["trainer"]["args"]

    def autotune(*words: str) -> str:
        command = [sys.executable, "-c", "import sys; from autotune.cli import main; sys.exit(main())", *words]
        return subprocess.run(command, cwd=tmp_path, env=variables, check=True, capture_output=True, text=True).stdout

    variables = os.environ | {"PYTHONPATH": str(ROOT), "AUTOTUNE_DB": str(tmp_path / "jobs.db")}
    question = ("llama-tiny", "--cluster", "2xh100", "--global-batch-size", "8", "--pin", "compile_blocks=false", "--json")
    (tmp_path / "best-config.json").write_text(autotune("plan", *question))
    autotune(*export[1:])
    words = [str(tmp_path / program) if word.endswith(program) else word for word in job["trainer"]["args"]]
    words[words.index("--steps") + 1] = "2"
    pet = {
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": "29400",
    }
    (launcher,) = job["trainer"]["command"]
    assert launcher == "torchrun"
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "--tiny"],
        env=variables | pet, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "loss" in ran.stdout
