"""Real libraries whose runs tune themselves train what they train untuned, on two ranks, whatever changes between steps."""

import pytest

from benchmarks.inside.loops import missing
from benchmarks.inside.ranks import run_ranks

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
    if reason := missing(library):
        pytest.skip(reason)
    # DeepSpeed trains in fp32, and models of Transformers compute their loss in it.
    bound = 1e-5 if library.startswith("deepspeed") else 1e-8 if library == "trl" else 1e-9
    ranks = run_ranks("benchmarks.inside.libraries", 2, library, "3")
    for runs in ranks:
        for run in runs:
            assert run["in_order"], runs
            assert run["weights"] < bound, runs
    assert all(run["settings"] > 2 for run in ranks[0]), ranks[0]
