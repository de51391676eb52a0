"""The client is light: it runs where nothing but httpx2 is installed."""

import subprocess
import sys

HEAVY = {
    "torch", "ray", "sqlalchemy", "optuna", "fastapi", "starlette", "pydantic", "numpy", "re2", "api", "executor", "storage",
}  # fmt: skip


def test_the_client_imports_no_heavy_package() -> None:
    program = "import sys, autotune.client; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"autotune", "httpx2"} <= loaded
    assert not loaded & HEAVY, f"the client imports {', '.join(sorted(loaded & HEAVY))}"
