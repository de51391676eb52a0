"""Runs the export `torch` in many layouts: every one must train like one rank.

    python -m benchmarks.frameworks.torch_export [--markdown FILE] [--steps N]

Each layout of a tiny model is started by torchrun on gloo; its losses are compared with those of one rank.
"""

import argparse
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from autotune.frameworks.exporters import exporter
from autotune.request.request import JobRequest
from autotune.request.rows import request_to_row
from autotune.session.placement import launch_of
from autotune.session.resolve import resolve
from search_spaces.trial_config import TrialConfig

PP: dict[str, Any] = {"pipeline_parallel_size": 2, "micro_batch_size": 1}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"reduce_bucket_size": 20_000}),
    (2, {"zero_stage": 2}),
    (2, {"zero_stage": 3, "activation_checkpointing": "selective"}),
    (4, {"zero_stage": 3, "hsdp_shard_size": 2, "activation_checkpointing": "full", "checkpoint_every_k": 2}),
    (4, {"zero_stage": 3, "reshard_after_forward": False, "tensor_parallel_size": 2, "sequence_parallel": True}),
    (2, {"tensor_parallel_size": 2}),
    (4, {"tensor_parallel_size": 2, "reduce_bucket_size": 20_000}),
    (4, {**PP, "zero_stage": 3, "pipeline_schedule": "gpipe"}),
    (4, {**PP, "tensor_parallel_size": 2, "sequence_parallel": True}),
    (4, {**PP, "zero_stage": 1, "virtual_stages": 2, "pipeline_schedule": "interleaved_1f1b"}),
    (2, {**PP, "virtual_stages": 2, "pipeline_schedule": "looped_bfs"}),
    (2, {**PP, "virtual_stages": 2, "pipeline_schedule": "interleaved_zero_bubble"}),
    (2, {**PP, "virtual_stages": 2, "pipeline_schedule": "zbv"}),
    (4, {**PP, "virtual_stages": 2, "pipeline_schedule": "dualpipev", "rank_order": "tp-cp-pp-dp"}),
    (2, {"zero_stage": 3, "precision": "bf16", "reduce_dtype": "bf16"}),
]
BOUND, NARROW_BOUND = 1e-4, 2e-2
"""Largest difference of a loss, in fp32 and in bf16."""


def main() -> int:
    """Run every layout; return the number of layouts that differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [(ranks, knobs, losses(Path(folder), ranks, knobs, options.steps)) for ranks, knobs in LAYOUTS]
    reference = runs[0][2]
    rows, wrong = [], 0
    for ranks, knobs, found in runs:
        difference = max(abs(one - other) for one, other in zip(found, reference, strict=True))
        good = difference <= (NARROW_BOUND if "precision" in knobs else BOUND)
        wrong += not good
        text = " ".join(f"{name}={value}" for name, value in knobs.items()) or "the defaults"
        rows.append(f"| {ranks} | {text} | {found[-1]:.6f} | {difference:.1e} | {'ok' if good else 'WRONG'} |")
    page = "\n".join(["| ranks | layout | last loss | largest difference | |", "|---|---|---|---|---|", *rows]) + "\n"
    print(page)
    if options.markdown is not None:
        options.markdown.write_text(HEAD + page, encoding="utf-8")
    return wrong


HEAD = """# The torch export in many layouts

Written by `benchmarks/frameworks/torch_export.py`: the script that `autotune export --format torch` writes, run unchanged
(`--tiny`) by torchrun on gloo, each layout's losses against those of one rank.

"""


def losses(folder: Path, ranks: int, knobs: dict[str, Any], steps: int) -> list[float]:
    """The losses that rank 0 prints."""
    request = JobRequest(
        model="llama-tiny", ranks=ranks, global_batch_size=16, sequence_length=64, strategy="random",
        lr=1e-3, weight_decay=0.1, clip=1.0,
    )  # fmt: skip
    session = resolve(request)
    config = TrialConfig(**knobs)
    best = {
        "job": {"id": "", "request": request_to_row(session.request)},
        "best": {"config": config.values()},
        "launch": launch_of(config, session),
    }
    script = folder / "train.py"
    script.write_text(exporter("torch")(best).text)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}"]
    command = [*launcher, str(script), "--tiny", "--steps", str(steps)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if answer.returncode:
        raise SystemExit(f"{ranks} ranks, {knobs}:\n{answer.stderr[-4000:]}")
    print(ranks, knobs, re.findall(r"loss (\S+)", answer.stdout), file=sys.stderr, flush=True)
    return [float(loss) for loss in re.findall(r"loss (\S+)", answer.stdout)]


if __name__ == "__main__":
    sys.exit(main())
