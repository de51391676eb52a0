"""How the proofs are run on a machine with a GPU: a section of their page."""

MANUAL = """
## Run it on a GPU

The machine needs Linux on x86-64, one GPU with 80 GB, and Python with torch 2.11 or newer, NumPy and SciPy; no network. On a
machine that has a package index and this checkout, once:

    make gpu-bundle    # build/gpu-bundle: 15 MB of wheels for Python 3.12, which the part sweep needs
    make gpu-ahead     # build/gpu/ahead.jsonl: dry runs and losses of a CPU, about 15 minutes of one core

Both lie where git ignores them: copy `build/gpu-bundle` and `build/gpu/ahead.jsonl` along with the checkout. Without the first,
the sweep is *not run*; without the second, the GPU waits for what a CPU could have found before. Then, on the GPU, either
`make gpu PYTHON=python3`, or piece by piece, each with an end of its own:

    L=build/gpu/cuda.jsonl; A=build/gpu/ahead.jsonl
    python3 -m benchmarks.gpu --part correctness --out $L --resume $L $A --seconds 520
    python3 -m benchmarks.gpu --part grid --out $L --resume $L $A --seconds 520
    python3 -m benchmarks.gpu --part sweep --out $L --resume $L $A --seconds 520
    python3 -m benchmarks.gpu --part by-hand --out $L --resume $L $A --seconds 520
    python3 -m benchmarks.gpu --page $L $A --markdown docs/gpu.md

Status 0: every item of the part has a result and none fails. 1: some fail, or lack what can be brought. 75: items are left;
the same command goes on. Any command may be killed at any point, and `$L` may be carried to another machine with the same kind
of GPU, together with `build/gpu/cuda-large`, which has the database of the sweep. `--items NAME` runs items whose names begin
so; `--again fails undecided` runs those with such results once more. The order matters: the sweep is held against the grid's
best, and the model by hand is raced by whichever of both is faster.

| part | seconds expected on one H100 | what takes them |
|---|---|---|
| correctness | 900: two pieces | 20 starts of engines on one rank, 17 gangs of two ranks, 6 memory accounts of a 1B model |
| grid | 1,200: three pieces for 40 points, of which 17 have every pair | 15 to 25 s a point, 40 to 60 where compiled |
| sweep | 620: two pieces | calibration 60, sweep 300 to 400, winner against the grid's best 100 to 200 |
| by-hand | 500: one piece | compiling both models, 20 rounds; float8 170, flex attention 120 |

These are estimates: no GPU has run them yet. An item is begun where the time that its kind took so far is left, so that a wrong
estimate costs a piece at most. One that does not end is given up after six times its estimate and a minute, with all stacks on
standard error; one that leaves the device unusable ends its process, and the next piece goes on behind it.

In one hour: `correctness` twice, `grid` once (about 20 points), `sweep` twice, `by-hand` once. On a
CPU all of it runs in small, with `--device cpu`: `make gpu GPU_DEVICE=cpu GPU_PAGE=build/gpu/cpu.md`.
"""
