"""`--ray-address` against a Ray that runs: what is there, what is not, each told in one line as a user sees it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from called import Answer, Command

from tests.chaos.ray_nodes import WORKERS
from tests.documents import check_document
from tests.ports import free_port

pytestmark = pytest.mark.ray

MAIN = "import sys; from autotune.cli import main; sys.exit(main())"
VERSIONS = """
import json
import sys
from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
from ray._private.ray_constants import KV_NAMESPACE_CLUSTER
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
real = json.loads(client.internal_kv_get(CLUSTER_METADATA_KEY, namespace=KV_NAMESPACE_CLUSTER))
for line in sys.stdin:
    instead = json.dumps(real | json.loads(line)).encode()
    client.internal_kv_put(CLUSTER_METADATA_KEY, instead, True, namespace=KV_NAMESPACE_CLUSTER)
    print("written", flush=True)
"""
"""Replaces the versions that a head has written down: for each line of input, by its own and those that the line gives."""
JOURNEY = """
import sys
import ray
from executor.errors import RunnerError
from executor.runners.ray.cluster import RayCluster

@ray.remote
class Teller:
    def tell(self):
        yield "told"

for where in sys.argv[1:]:
    try:
        cluster = RayCluster(None if where == "here" else where, 2)
    except RunnerError as error:
        print("refused")
        continue
    teller = Teller.remote()
    print(*[ray.get(item) for item in teller.tell.options(num_returns="streaming").remote()])
    cluster.close()
"""
"""Goes from one Ray to the next, `here` being one of its own, and has an actor stream something to it on each."""
SWEEP = ("sweep", "config.json", "--out", "best.json")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray node with two CPUs, in processes of its own."""
    address = f"127.0.0.1:{free_port()}"
    log = tmp_path_factory.mktemp("head") / "log"
    words = ["start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={address.partition(':')[2]}", "--num-cpus=2"]
    options = ["--num-gpus=0", "--include-dashboard=false", f"--object-store-memory={80 * 2**20}", "--disable-usage-stats"]
    with log.open("w") as told:
        ray = Path(sys.executable).with_name("ray")
        process = subprocess.Popen(
            [ray, *words, *options],
            stdout=told,
            stderr=told,
            env=os.environ | WORKERS | {"RAY_AUTH_MODE": "disabled", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"},
        )
    try:
        limit = time.monotonic() + 120
        while "runtime started" not in log.read_text():
            assert process.poll() is None and time.monotonic() < limit, log.read_text()
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(120)


@pytest.fixture(scope="module")
def write_versions(head: str) -> Iterator[Callable[..., None]]:
    """Gives the head another `ray_version` or `python_version`; without either, its own again.

    Writes them from another process, whose Ray sends no token.
    """
    with subprocess.Popen(
        [sys.executable, "-c", VERSIONS, head], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
    ) as process:  # fmt: skip
        asked, told = process.stdin, process.stdout
        assert asked is not None and told is not None

        def write(**versions: str) -> None:
            asked.write(json.dumps(versions) + "\n")
            asked.flush()
            assert told.readline() == "written\n"

        yield write
        asked.close()


@pytest.fixture
def own_version(write_versions: Callable[..., None]) -> Iterator[None]:
    """Gives the head its own versions again after the test."""
    yield
    write_versions()


@pytest.fixture
def process() -> Command:
    """`autotune` in a process of its own, as users call it: what it leaves of Ray hinders no other test."""

    def run(*words: object) -> Answer:
        called = subprocess.run([sys.executable, "-c", MAIN, *map(str, words)], capture_output=True, text=True, timeout=300)
        check_document(words, called.stdout)
        return Answer(called.returncode, called.stdout, called.stderr)

    return run


def refused(command: Command, *words: object, says: tuple[str, ...], status: int) -> None:
    answer = command(*words)
    lines = answer.err.splitlines()
    assert (answer.status, answer.out, len(lines)) == (status, "", 1), answer.err
    assert lines[0].startswith("autotune: ")
    for part in says:
        assert part in lines[0]


@pytest.mark.prove
def test_a_cluster_is_shown_and_checked(process: Command, head: str) -> None:
    shown = process("cluster", "--ray-address", head, "--json")
    assert (shown.status, shown.err) == (0, "")
    found = json.loads(shown.out)
    (node,) = found["nodes"]
    assert (node["alive"], node["resources"]["CPU"], found["address"]) == (True, 2.0, head)
    assert (found["cluster"]["nodes"], found["cluster"]["devices_per_node"]) == (1, 2)
    checked = process("doctor", "--cluster", "--ray-address", head, "--json")
    findings = {item["name"]: item for item in json.loads(checked.out)}
    assert findings["Ray"]["text"] == f"1 node at {head}"
    for name in ("python", "ray", "torch"):
        assert findings[name]["good"], findings[name]
    assert findings[f"shared memory on {node['name']}"]["text"].endswith("free in /dev/shm"), findings
    assert f"locked memory on {node['name']}" in findings


@pytest.mark.prove
def test_what_is_there_is_predicted_for(process: Command, head: str, folder: Path) -> None:
    predicted = process("predict", "config.json", "--ray-address", head, "--json")
    assert (predicted.status, predicted.err) == (0, "")
    cluster = json.loads(predicted.out)["cluster"]
    assert (cluster["name"], cluster["nodes"], cluster["devices_per_node"]) == ("ray", 1, 2)


@pytest.mark.prove
def test_the_environment_names_the_cluster_too(process: Command, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:1")
    monkeypatch.setenv("AUTOTUNE_RAY_ADDRESS", head)
    assert json.loads(process("cluster", "--json").out)["address"] == head


@pytest.mark.nightly
def test_a_cluster_without_GPUs_refuses_a_job_for_them(process: Command, head: str, folder: Path) -> None:
    words = ("--cluster", "dgx-h100", "--ray-address", head, "--global-batch-size", 8, "--sequence-length", 64)
    refused(process, *SWEEP, *words, says=("cluster: dgx-h100 is 1 x 8 GPUs", f"Ray at {head} has no GPU; start Ray"), status=2)
    odd = (*SWEEP, "--ray-address", head, "--ranks", 3)
    refused(process, *odd, says=("ranks: 3 cannot be laid out", "give at most 2"), status=2)
    assert not (folder / "best.json").exists()


@pytest.mark.prove(every=4)
@pytest.mark.parametrize(
    "words",
    [
        (*SWEEP, "--cluster", "ray"),
        ("calibrate", "--ranks", 1),
        ("cluster",),
        ("plan", "config.json"),
        ("space", "config.json", "--cluster", "ray"),
        ("scale", "config.json", "--ranks", "1,2"),
    ],
    ids=lambda words: words[0],
)
def test_an_address_that_does_not_answer_is_one_line(command: Command, folder: Path, words: tuple[object, ...]) -> None:
    """Called in this process, because Ray is not asked."""
    address = f"127.0.0.1:{free_port()}"
    says = (f"the Ray cluster at {address} does not answer", "; check the address with `ray status`")
    refused(command, *words, "--ray-address", address, says=says, status=1)
    assert not (folder / "best.json").exists()


@pytest.mark.usefixtures("own_version")
@pytest.mark.parametrize(("name", "theirs"), [("ray_version", "2.1.0"), ("python_version", "3.9.1")])
@pytest.mark.nightly
def test_another_version_on_the_cluster_is_one_line(
    process: Command, head: str, write_versions: Callable[..., None], name: str, theirs: str
) -> None:
    """As a head of that version would tell it: drivers and nodes compare theirs with what it has written down."""
    write_versions(**{name: theirs})
    refused(process, "cluster", "--ray-address", head, says=(theirs, "use the same versions on every node"), status=1)


@pytest.mark.nightly
@pytest.mark.usefixtures("own_version")
def test_a_process_that_was_refused_starts_a_ray_of_its_own(head: str, write_versions: Callable[..., None]) -> None:
    """As a worker does whose next job names no address."""
    write_versions(ray_version="2.1.0")
    assert journey(head, "here") == ["refused", "told"]


@pytest.mark.nightly
def test_a_process_that_has_started_a_ray_joins_one_that_has_no_token(head: str) -> None:
    assert journey("here", head, "here") == ["told", "told", "told"]


def journey(*places: str) -> list[str]:
    """What was met, place by place."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"} | WORKERS
    words = [sys.executable, "-c", JOURNEY, *places]
    travelled = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert travelled.returncode == 0, travelled.stderr
    return travelled.stdout.split()
