"""How to run the proofs on a machine with a GPU: a section of their page."""

MANUAL = """
## Run it on a GPU

The machine needs Linux on x86-64, one GPU with 80 GB, and Python with torch 2.11 or newer, NumPy and SciPy; no network. On a
machine that has a package index and this checkout, once:

    make gpu-bundle    # build/gpu-bundle: 15 MB of wheels for Python 3.12, which the part sweep needs
    make gpu-ahead     # build/gpu/ahead.jsonl: dry runs and losses on a CPU, about 15 minutes on one core

Git ignores both: copy `build/gpu-bundle` and `build/gpu/ahead.jsonl` along with the checkout. Without the first, the sweep is
*not run*; without the second, the GPU waits for results that a CPU could have computed before. Then, on the GPU, either
`make gpu PYTHON=python3`, or piece by piece, each of which can be repeated:

    L=build/gpu/cuda.jsonl; A=build/gpu/ahead.jsonl
    python3 -m benchmarks.gpu --part first --out $L --resume $L $A --seconds 520
    python3 -m benchmarks.gpu --part correctness --out $L --resume $L $A --seconds 520
    python3 -m benchmarks.gpu --part grid --out $L --resume $L $A --seconds 520
    python3 -m benchmarks.gpu --part sweep --out $L --resume $L $A --seconds 520
    python3 -m benchmarks.gpu --part by-hand --out $L --resume $L $A --seconds 520
    python3 -m benchmarks.gpu --page benchmarks/data/gpu-*.jsonl $L $A --markdown docs/results/gpu.md

Status 0: every item of the part has a result and none fails. 1: some fail, or lack something that can be provided. 75: items
are left; the same command continues. Any command may be killed at any point, and `$L` may be moved to another machine with the
same kind of GPU, together with `build/gpu/cuda-large`, which has the sweep's database. `--items NAME` runs items whose names
begin with NAME; `--again fails undecided` repeats those with these results. Results of the same card in
benchmarks/data/gpu-*.jsonl are resumed by every checkout: results of an H100 and of an H200 are never mixed. Copy `$L` there
under the card's name to keep them. Items of `first` run by descending value, and each has a deadline.

The order matters: the sweep is compared with the grid's best, and the faster of the two competes with the model by hand.

| part | seconds expected on one H100 | main work |
|---|---|---|
| first | 750: two pieces | own scripts, 9 wrapped pairs, a 7B with adapters, 45 s against the wall clock |
| correctness | 900: two pieces | 20 starts of engines on one rank, 17 gangs of two ranks, 6 memory accounts of a 1B model |
| grid | 1,200: three pieces for 40 points, of which 17 cover every pair | 15 to 25 s a point, 40 to 60 where compiled |
| sweep | 620: two pieces | calibration 60, sweep 300 to 400, winner against the grid's best 100 to 200 |
| by-hand | 500: one piece | compiling both models, 20 rounds; float8 170, flex attention 120 |

These are estimates. Items that time nothing may run beside each other, each process with an `--out` and a `--folder` of its
own: on an H200 with 16 cores, correctness without the families took 290 s so. An item starts if the time that its kind has
taken so far is left, so that a wrong estimate costs at most one piece. An item that does not end is abandoned after six times
its estimate plus a minute, with all stacks on standard error; one that leaves the device unusable ends its process, and the
next piece continues after it.

In ten minutes: `first`. In one hour: `first` and `correctness` twice, `grid` once (about 20 points), `sweep` twice, `by-hand`
once. On a CPU all parts run at a small size, with `--device cpu`: `make gpu GPU_DEVICE=cpu GPU_PAGE=build/gpu/cpu.md`.
"""
