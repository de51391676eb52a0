"""The user's program that DeepSpeed's autotuner runs: the same model on the same text as our engine's trials.

    deepspeed --autotuning tune --num_gpus 2 benchmarks/engines/deepspeed_train.py --deepspeed --deepspeed_config FILE

DeepSpeed's launcher starts it once for each rank; its engine ends it after the profiled step.
"""

import argparse
import importlib
import json
import logging
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from executor.batches import rank_batches, text_data
from executor.parallel.model import build_transformer
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload

STEPS = 40
"""Upper limit: the autotuner ends a run after its profiled step."""
WARMUP_STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-tiny")
    parser.add_argument("--sequence_length", type=int, default=128)
    parser.add_argument("--time_into", type=Path, help="file for the seconds of each step, to time one configuration")
    parser.add_argument("--local_rank", type=int, default=0)
    import deepspeed  # type: ignore[import-not-found]

    arguments = deepspeed.add_config_arguments(parser).parse_args()
    # The shared-memory operator compiles for minutes at its first use; it is left out for all tuners.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    train(deepspeed, arguments)


def train(deepspeed: object, arguments: argparse.Namespace) -> None:
    """Train until the autotuner ends the process, at most `STEPS` steps."""
    spec = resolve_model(arguments.model)
    assert isinstance(spec, ModelSpec)
    work = Workload(global_batch_size=1, sequence_length=arguments.sequence_length)
    module = build_transformer(spec, work.sequence_length, work.seed, torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=work.learning_rate, weight_decay=work.weight_decay, fused=True)
    engine = deepspeed.initialize(args=arguments, model=module, optimizer=optimizer)[0]  # type: ignore[attr-defined]
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batch = micro * accumulation * ranks
    data = text_data(Workload(global_batch_size=batch, sequence_length=work.sequence_length), spec.vocab_size)
    seconds: list[float] = []
    for step in range(STEPS):
        share = rank_batches(data.global_batch(step), step, rank=rank, ranks=ranks, size=micro, count=accumulation)
        if arguments.time_into:
            torch.distributed.barrier()
        began = time.perf_counter()
        for micro_batch in share:
            loss = engine(**{name: value.clone() for name, value in micro_batch.items()})
            engine.backward(loss)
            engine.step()
        if arguments.time_into:
            slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
            seconds.append(float(slowest))
    if arguments.time_into and rank == 0:
        arguments.time_into.write_text(json.dumps(seconds[WARMUP_STEPS:]))


if __name__ == "__main__":
    main()
