"""Usage: accelerate_step.py FILE: the processes that the file states train a step by Accelerate, over gloo."""

import os
import subprocess
import sys
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

PROGRAM = """
import json, os, torch
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(accelerator.process_index)
module = torch.nn.Linear(4, 4)
module, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
for _ in range(2):
    with accelerator.accumulate(module):
        accelerator.backward(module(torch.randn(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
weights = accelerator.gather(accelerator.unwrap_model(module).weight.detach()[None])
told = {
    "processes": accelerator.num_processes, "distributed_type": accelerator.distributed_type.value,
    "equal_weights": bool((weights == weights[0]).all()),
}
if accelerator.is_main_process:
    print(json.dumps(told), flush=True)
accelerator.end_training()
os._exit(0)  # gloo's threads may still hold tensors, at which a Python that takes its time to end aborts
"""


def main() -> None:
    words = launch_command_parser().parse_args(["--config_file", sys.argv[1], "train.py"])
    arguments, *_ = _validate_launch_command(words)
    environment = os.environ | prepare_multi_gpu_env(arguments) | {"ACCELERATE_USE_CPU": "true"}
    program = Path(sys.argv[1]).parent / "step.py"
    program.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.num_processes}"]
    answer = subprocess.run([*launcher, program], env=environment, capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(answer.stderr)
    print(answer.stdout.strip())


if __name__ == "__main__":
    main()
