"""The schemas of Ray's, Kueue's and Trainer's kinds, reduced to the fields that our manifests use:

    make extras
    .venv-extras/bin/python -m tests.deploy.crds KUBERAY KUEUE TRAINER

The words are the projects' Git folders, with the tags of `SOURCES`. Their definitions are under Apache-2.0 and have 52,000
lines; crds.schema.json has what is left of them. As `kubectl apply --validate=strict` does, the reduced schemas refuse fields
that the definitions do not have. They also refuse fields that no manifest used when this program ran: a manifest with a new
field needs a new run. Rules in CEL and the checks of the operators' webhooks are not part of a schema; `test_manifests.py` has
those that matter.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/deploy/kuberay"
FILE = Path(__file__).parent / "crds.schema.json"
IMAGE = "registry.example.com/autotune:latest"
SOURCES = {
    "RayCluster": ("ray-project/kuberay", "v1.7.0", "ray-operator/config/crd/bases/ray.io_rayclusters.yaml"),
    "RayJob": ("ray-project/kuberay", "v1.7.0", "ray-operator/config/crd/bases/ray.io_rayjobs.yaml"),
    "ClusterQueue": ("kubernetes-sigs/kueue", "v0.19.2", "config/components/crd/bases/kueue.x-k8s.io_clusterqueues.yaml"),
    "LocalQueue": ("kubernetes-sigs/kueue", "v0.19.2", "config/components/crd/bases/kueue.x-k8s.io_localqueues.yaml"),
    "ResourceFlavor": ("kubernetes-sigs/kueue", "v0.19.2", "config/components/crd/bases/kueue.x-k8s.io_resourceflavors.yaml"),
    "TrainJob": ("kubeflow/trainer", "v2.3.0", "manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml"),
}
"""Kind -> its project, the release, and the path of the definition."""
COPIED = (
    "type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties",
    "maxProperties", "uniqueItems", "required", "anyOf", "allOf", "oneOf", "not",
)  # fmt: skip
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
        "labels": STRINGS,
        "annotations": STRINGS,
    },
    "required": ["name"],
    "additionalProperties": False,
}
"""An object's own metadata, which no definition describes."""
Schema = dict[str, Any]


def examples() -> list[Schema]:
    """The manifests of the folder."""
    texts = [path.read_text("utf-8") for path in sorted(FOLDER.glob("*.yaml"))]
    return [item for text in texts for item in yaml.safe_load_all(text)]


def reduced(schema: Schema, values: Iterable[Any]) -> Schema:
    """What a definition says about values like these, as a JSON schema that refuses all other fields."""
    values = list(values)
    kept: Schema = {key: schema[key] for key in COPIED if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        kept["type"] = ["integer", "string"]
    if schema.get("nullable"):
        kept["type"] = [kept["type"], "null"]
    if "items" in schema:
        kept["items"] = reduced(schema["items"], [item for value in values for item in value])
    if isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = reduced(
            schema["additionalProperties"], [item for value in values for item in value.values()]
        )
    elif schema.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        names = {name for value in values for name in value} | set(schema.get("required", ()))
        kept["properties"] = {
            name: reduced(field, [value[name] for value in values if name in value])
            for name, field in schema.get("properties", {}).items()
            if name in names
        }
        kept["additionalProperties"] = False
    return kept


def reduced_definition(definition: Schema, manifests: list[Schema]) -> Schema:
    """The schema of one kind in the version that is stored, for these manifests of it."""
    (version,) = (version for version in definition["spec"]["versions"] if version["storage"])
    whole = version["schema"]["openAPIV3Schema"]
    whole["properties"] = {name: field for name, field in whole["properties"].items() if name != "status"}
    schema = reduced(whole, [{**manifest, "metadata": {}} for manifest in manifests])
    api_version = f"{definition['spec']['group']}/{version['name']}"
    schema["properties"] |= {
        "apiVersion": {"const": api_version}, "kind": {"const": definition["spec"]["names"]["kind"]}, "metadata": METADATA
    }  # fmt: skip
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    if not any("spec" in manifest for manifest in manifests):
        schema["required"].remove("spec")
    return schema


def main(folders: list[str]) -> None:
    # Only here: the chart is rendered by a package that `make extras` installs.
    from tests.deploy.test_chart import CASES, rendered

    manifests = [*examples(), *(manifest for values in CASES.values() for manifest in rendered(values).values())]
    checkouts = dict(zip(dict.fromkeys(project for project, _, _ in SOURCES.values()), folders, strict=True))
    kinds = {}
    for kind, (project, tag, path) in SOURCES.items():
        text = subprocess.run(
            ["git", "-C", checkouts[project], "show", f"{tag}:{path}"], check=True, capture_output=True, text=True
        ).stdout
        definition = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        kinds[kind] = reduced_definition(definition, [manifest for manifest in manifests if manifest["kind"] == kind])
    releases = ", ".join(dict.fromkeys(f"{project} {tag}" for project, tag, _ in SOURCES.values()))
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"Written by tests/deploy/crds.py from the custom resource definitions of {releases} (Apache-2.0).",
        "$defs": kinds,
    }
    FILE.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
