"""Usage: deepspeed_config.py FILE RANKS [parse]: read by DeepSpeedConfig; then initialize and a step as rank 0 of RANKS."""

import importlib
import json
import os
import sys
from pathlib import Path

os.environ |= {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": sys.argv[2], "LOCAL_SIZE": sys.argv[2], "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29501", "DS_ACCELERATOR": "cpu",
}  # fmt: skip

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from torch.testing._internal.distributed.fake_pg import FakeStore


def main() -> None:
    # The op that shares memory between ranks is compiled where it is first asked for; nothing needs it here.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(sys.argv[2]))
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    content = json.loads(Path(sys.argv[1]).read_text())
    read = DeepSpeedConfig(dict(content))
    zero = read.zero_config
    told = {
        "stage": int(zero.stage), "train_batch_size": read.train_batch_size, "micro_batch": read.train_micro_batch_size_per_gpu,
        "accumulation": read.gradient_accumulation_steps, "reduce_bucket_size": zero.reduce_bucket_size,
        "prefetch_bucket_size": zero.prefetch_bucket_size, "param_persistence_threshold": zero.param_persistence_threshold,
        "bf16": bool(read.bfloat16_config.enabled),
    }  # fmt: skip
    if "parse" not in sys.argv:
        told |= step(content)
    print(json.dumps(told))


def step(content: dict) -> dict:
    module = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=content)
    for _ in range(engine.gradient_accumulation_steps()):
        output = engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 16, dtype=engine.get_data_types()[0]))
        engine.backward(output.float().square().mean())
        engine.step()
    return {"ran_stage": engine.zero_optimization_stage(), "updates": engine.global_steps}


if __name__ == "__main__":
    main()
