"""Real libraries whose runs tune themselves train what they train untuned, on two ranks, whatever changes between steps."""

import os
from importlib.util import find_spec

import pytest

from benchmarks.inside.ranks import run_ranks

PACKAGES = {"trainer": "transformers", "fsdp2": "torch", "ddp": "torch", "nanogpt": "torch"}
LIBRARIES = [
    "ddp",
    "fsdp2",
    "nanogpt",
    "trainer",
    "trl",
    "accelerate",
    "lightning",
    *(f"deepspeed-{stage}" for stage in range(4)),
]


@pytest.mark.prove
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_tuned_run_is_the_untuned_run(library: str) -> None:
    package = PACKAGES.get(library, library.partition("-")[0])
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if library == "nanogpt" and "NANOGPT" not in os.environ:
        pytest.skip("needs nanoGPT: NANOGPT names a folder with its model.py")
    # DeepSpeed trains in fp32, and models of Transformers compute their loss in it.
    bound = 1e-5 if library.startswith("deepspeed") else 1e-8 if library == "trl" else 1e-9
    ranks = run_ranks("benchmarks.inside.libraries", 2, library, "3")
    for runs in ranks:
        for run in runs:
            assert run["in_order"], runs
            assert run["weights"] < bound, runs
    assert all(run["settings"] > 2 for run in ranks[0]), ranks[0]
