"""A run that tunes itself is killed at random, goes on from its checkpoint, and trains what an untuned run trains."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from autotune.inside.memory import RunMemory
from benchmarks.inside.models import full_weights, make_batches
from tests.autotune.inside.test_tuner import _float64, made, untuned  # noqa: F401  the fixture is for every test here

ROOT = Path(__file__).parents[3]
STEPS = 48
SCRIPT = f"""
import os, sys
from pathlib import Path
import torch
from autotune.inside.tuner import InRunTuner
from benchmarks.inside.models import Language, make_batches

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
folder, step = Path(sys.argv[1]), 0
torch.manual_seed(0)
model = Language()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
if (folder / "checkpoint.pt").exists():
    saved = torch.load(folder / "checkpoint.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
tuner = InRunTuner(model, optimizer, steps={STEPS}, share=0.5, remember=folder / "run.json")
ids = []
for batch in tuner.batches(make_batches({STEPS}, 8, 1, ragged=True)[step:]):
    if tuner.is_first_part:
        ids = []
    with tuner:
        ids += batch["ids"].tolist()
        tuner.backward(model(batch["input_ids"], batch["labels"]))
        optimizer.step()
        optimizer.zero_grad()
    if tuner.step_ends and not tuner.has_failed:
        step += 1
        state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "ids": ids}}
        torch.save(state, folder / "new.pt")
        os.replace(folder / "new.pt", folder / "checkpoint.pt")
        print(step, tuner.setting, flush=True)
"""


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(1))
def test_killed_and_resumed(tmp_path: Path, seed: int) -> None:
    draw, starts, settings = random.Random(seed), 0, set()
    while True:
        starts += 1
        with subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as run:
            assert run.stdout is not None
            for count, line in enumerate(run.stdout):
                settings.add(line.split(" ", 1)[1])
                if starts < 7 and count == 5:
                    time.sleep(draw.uniform(0.0, 0.02))
                    run.send_signal(signal.SIGKILL)
        if run.returncode == 0:
            break
        assert run.returncode == -signal.SIGKILL
        RunMemory(tmp_path / "run.json").records()
    assert starts == 7
    assert len(settings) > 1, "the search tried nothing"
    batches = make_batches(STEPS, 8, 1, ragged=True)
    tuned, _ = made()
    saved = torch.load(tmp_path / "checkpoint.pt")
    tuned.load_state_dict(saved["model"])
    assert (saved["step"], saved["ids"]) == (STEPS, batches[-1]["ids"].tolist())
    for weights, expected in zip(full_weights(tuned), untuned(batches, 1), strict=True):
        assert float((weights - expected).detach().abs().max()) < 1e-9
