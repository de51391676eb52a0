"""The recipes of docs/deploy.md as far as they can be tried without their hosts: every command and script is sound."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from autotune.cli.app import app
from autotune.cli.question_options import without_command

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples/deploy"
PAGES = [ROOT / "docs/deploy.md"]
SCRIPTS = sorted((*DEPLOY.glob("*.sh"), *DEPLOY.glob("*.sbatch")))


def commands(page: Path) -> list[list[str]]:
    """The commands of a page, as they are to be typed."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    typed = [text for language, text in blocks if not language]
    return [shlex.split(line.removesuffix(" &")) for block in typed for line in block.splitlines() if line.strip()]


def autotune_words() -> Iterator[list[str]]:
    """The words of every `autotune …` in pages and scripts that stands at the end of its command."""
    for page in PAGES:
        for words in commands(page):
            places = [place for place, word in enumerate(words) if word == "autotune"]
            ours = places and len(words) > places[-1] + 1 and not words[places[-1] + 1].endswith(".sh")
            if ours and "build" not in words:
                yield words[places[-1] + 1 :]
    for path in (*SCRIPTS, *sorted(DEPLOY.glob("kuberay/*.yaml"))):
        for found in re.findall(
            r"(?:^|[ (!])autotune ((?:sweep|cluster|doctor|serve|show|keys)[^|&>;)\n]*)", path.read_text("utf-8")
        ):
            if "…" not in found and "[" not in found:
                yield shlex.split(re.sub(r' \d$|"\$@"', "", found))


@pytest.mark.prove(every=3)
@pytest.mark.parametrize("words", sorted({tuple(words) for words in autotune_words()}), ids=" ".join)
def test_every_command_of_ours_is_one(words: tuple[str, ...]) -> None:
    """Commands, options and their values are parsed as they stand; nothing is run."""
    arguments, further = without_command(words)
    command = typer.main.get_command(app)
    rest = list(arguments)
    with command.make_context("autotune", [], obj=further, resilient_parsing=True) as context:
        while subcommands := getattr(command, "commands", None):
            name, *rest = rest
            command = subcommands[name]
        command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    for path in re.findall(r"\b(?:examples|tests|docs)/[\w./*-]+", page.read_text(encoding="utf-8")):
        assert list(ROOT.glob(path.rstrip("."))), path
    for link in re.findall(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--shell=bash", script], check=True)
    if script.suffix == ".sh":
        assert script.stat().st_mode & 0o111, "is not executable"


def test_options_of_ray_start_are_known_to_the_ray_that_is_pinned() -> None:
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in parameter.opts}
    script = (DEPLOY / "ray-node.sh").read_text("utf-8")
    assert set(re.findall(r"(--[a-z-]+)", script.partition("exec ray start")[2])) <= known
    manifest = (DEPLOY / "kuberay/raycluster.yaml").read_text("utf-8")
    parameters = re.findall(r"rayStartParams:\n((?: +[#\w].*\n)+?) +template", manifest)
    assert {f"--{name}" for name in re.findall(r"^ +([a-z-]+):", "".join(parameters), re.MULTILINE)} <= known


@pytest.mark.parametrize(
    ("words", "told"),
    [((), "ray-node.sh head ADDRESS"), (("head",), "HEAD:PORT"), (("queen", "10.0.0.1"), "every other node")],
)
def test_wrong_words_are_told_and_not_tried_again(words: tuple[str, ...], told: str) -> None:
    ran = subprocess.run([DEPLOY / "keep-ray-node.sh", *words], capture_output=True, text=True, timeout=30)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert told in ran.stderr


@pytest.mark.skipif(shutil.which("ip") is None, reason="iproute2 is not installed")
def test_an_address_that_is_not_this_machines_is_one_line() -> None:
    ran = subprocess.run([DEPLOY / "ray-node.sh", "head", "192.0.2.1"], capture_output=True, text=True, timeout=30)
    assert ran.returncode == 1
    assert ran.stderr == "ray-node.sh: no interface of this machine is at or leads to 192.0.2.1; look at `ip address`\n"


def test_ray_is_started_again_whenever_it_ends_and_ended_with_its_keeper(tmp_path: Path) -> None:
    """With a stand-in for `ray` that ends by itself twice, then stays until it is told to end."""
    (tmp_path / "ray").write_text(
        "#!/usr/bin/env bash\n"
        f'echo "$*" >> {tmp_path}/starts\n'
        f"[ $(wc -l < {tmp_path}/starts) -gt 2 ] || exit 1\n"
        f"trap 'echo ended >> {tmp_path}/starts; exit 0' TERM\n"
        f"touch {tmp_path}/up\n"
        "while true; do sleep 0.05; done\n"
    )
    (tmp_path / "ray").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin", "RESTART_SECONDS": "0.05"}
    words = [DEPLOY / "keep-ray-node.sh", "worker", "127.0.0.1:6379", "--num-cpus", "2"]
    keeper = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
    try:
        subprocess.run(["bash", "-c", f"until [ -e {tmp_path}/up ]; do sleep 0.05; done"], check=True, timeout=30)
    finally:
        keeper.terminate()
        assert keeper.wait(30) == 0
    starts = (tmp_path / "starts").read_text().splitlines()
    assert starts == ["start --block --address=127.0.0.1:6379 --node-ip-address=127.0.0.1 --num-cpus 2"] * 3 + ["ended"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_one(tmp_path: Path) -> None:
    unit = tmp_path / "autotune-ray-node.service"
    text = (DEPLOY / unit.name).read_text("utf-8")
    assert "Restart=always" in text
    unit.write_text(text.replace("/opt/autotune/deploy", str(DEPLOY)))
    ran = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert (ran.returncode, [line for line in ran.stderr.splitlines() if unit.name in line]) == (0, [])


@pytest.mark.parametrize("script", sorted(DEPLOY.glob("*.sbatch")), ids=lambda path: path.stem)
def test_the_batch_script_asks_for_a_node_a_task_and_comes_back(script: Path) -> None:
    lines = script.read_text("utf-8").splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    # Slurm reads them up to the first command alone.
    first = next(place for place, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(lines.index(line) < first for line in directives)
    options = dict(shlex.split(line)[1].removeprefix("--").partition("=")[::2] for line in directives)
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "time", "requeue", "signal", "output"} <= set(options)
    assert (options["ntasks-per-node"], options["open-mode"]) == ("1", "append")
    assert re.fullmatch(r"B:TERM@\d+", options["signal"])
