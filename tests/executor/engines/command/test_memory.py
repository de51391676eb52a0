"""What a script with everything that it has started holds."""

import subprocess
import sys
from pathlib import Path

import pytest

from executor.engines.command.watch import ProcessTree

HELD = 100_000_000
HOLD = f"held = bytearray({HELD}); print('held', flush=True); import time; time.sleep(60)"


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell what processes hold")
@pytest.mark.parametrize(("name", "counts"), [("loader", True), ("cc1plus", False)])
def test_what_a_script_has_started_counts_but_for_compilers(tmp_path: Path, name: str, counts: bool) -> None:
    started = f"import ctypes; ctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0); {HOLD}"  # 15: PR_SET_NAME
    script = f"import subprocess, sys; sys.exit(subprocess.Popen([sys.executable, '-c', {started!r}]).wait())"
    supervisor = (
        f"import subprocess, sys; one = subprocess.Popen([sys.executable, '-c', {script!r}]); "
        "print(one.pid, flush=True); one.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", supervisor], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]  # of two processes, in any order
        lines.remove("held\n")
        pid = int(lines[0])
        tree = ProcessTree(process.pid, pid)
        try:
            tree.look()
            assert len(tree.processes) == 2
            assert (tree.peak_bytes > HELD) == counts
            assert tree.compiler == ("" if counts else name)
        finally:
            for one in (*tree.processes, process.pid):
                subprocess.run(["kill", "-9", str(one)], check=False)
