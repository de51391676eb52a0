"""A project whose packages have our names, and an environment with this repository's wheel installed."""

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("api", "autotune", "executor", "search_spaces", "storage")
BUILT_FROM = (*PACKAGES, "tests", "benchmarks", "examples", "docs")
MODULES = (
    "api/__init__", "api/routes", "storage/__init__", "storage/rows", "storage/store", "executor/__init__", "executor/errors",
)  # fmt: skip
REFERENCE = "mymodel:build"
PARAMETERS = 72
MODEL = '''\
import api                  # at load
import storage.rows
from pathlib import Path

import torch


def theirs(*modules):
    """Every module must be the project's own."""
    here = Path(__file__).parent
    for module in modules:
        assert module.OWNER == "theirs" and Path(module.__file__).is_relative_to(here), module


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        import executor.errors      # lazily, with a name that ours has too
        from storage import store   # lazily, a sub-module of a package that is loaded already

        theirs(api, executor, executor.errors, storage.rows, store)
        (Path(__file__).parent / "forward").touch()
        return self.inner(x).square().mean()


def batch(micro_batch_size, generator):
    import api.routes

    import autotune                 # ours, as installed

    theirs(api.routes)
    assert "site-packages" in autotune.__file__, autotune.__file__
    return {"x": torch.randn(micro_batch_size, 8, generator=generator)}


def build():
    import executor

    theirs(executor)
    return Net(), batch
'''


def build_wheel(source: Path) -> Path:
    """Build the wheel from a copy in `source`, so that the repository stays clean."""
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    printed(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", folder=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


def install(wheel: Path, environment: Path) -> Path:
    """Create an environment with the wheel and this environment's packages; return the folder of its programs."""
    printed(sys.executable, "-m", "venv", "--without-pip", str(environment))
    python = environment / "bin" / "python"
    packages = Path(printed(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # .pth files inside a path from a .pth file are not read, so an editable install of ours there has no effect.
    (packages / "around.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    printed(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    return python.parent


def write_project(folder: Path) -> Path:
    """Write a user's project with its own `api`, `storage` and `executor`; `REFERENCE` is its factory."""
    for name in MODULES:
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("OWNER = 'theirs'\n")
    (folder / "mymodel.py").write_text(MODEL)
    return folder


def printed(*words: str, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run a program; return its standard output.

    Raises:
        RuntimeError: it failed; the message has its output.
    """
    answer = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    if answer.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{answer.stdout}\n{answer.stderr}")
    return answer.stdout
