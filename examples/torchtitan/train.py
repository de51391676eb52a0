"""A stand-in for torchtitan's train.py: its argument names, what it asserts of them, and its log line. Nothing is trained.

Every rank sleeps for as long as a formula says that its step takes, so that the recipe beside it (README.md) runs in seconds on
any machine. The names are those of torchtitan 0.3.0.
"""

import argparse
import os
import time


def main() -> None:
    arguments = parsed()
    world, tensor = int(os.environ["WORLD_SIZE"]), arguments.tensor
    copies = arguments.replicate
    shards = world // (tensor * copies) if arguments.shard < 0 else arguments.shard
    assert copies * shards * tensor == world, f"dp_replicate({copies}) * dp_shard({shards}) * tp({tensor}) != {world} ranks"
    at_once = arguments.local_batch_size * copies * shards
    assert arguments.global_batch_size % at_once == 0, f"global batch size is not divisible by {at_once}"
    seconds = step_seconds(arguments, arguments.global_batch_size // at_once, shards)
    tokens = arguments.global_batch_size * arguments.seq_len
    for step in range(1, arguments.steps + 1):
        began = time.perf_counter()
        time.sleep(seconds)
        if step == 1 or step % arguments.log_freq == 0:
            log(step, tokens / (time.perf_counter() - began) / world)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="torchtitan (stand-in)", allow_abbrev=False)
    parser.add_argument("--module", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--training.local_batch_size", dest="local_batch_size", type=int, default=8)
    parser.add_argument("--training.global_batch_size", dest="global_batch_size", type=int, required=True)
    parser.add_argument("--training.seq_len", dest="seq_len", type=int, default=2048)
    parser.add_argument("--training.steps", dest="steps", type=int, default=10_000)
    parser.add_argument("--parallelism.data_parallel_replicate_degree", dest="replicate", type=int, default=1)
    parser.add_argument("--parallelism.data_parallel_shard_degree", dest="shard", type=int, default=-1)
    policies = ("default", "always", "never")
    parser.add_argument("--parallelism.fsdp_reshard_after_forward", dest="reshard", choices=policies, default="default")
    parser.add_argument("--parallelism.tensor_parallel_degree", dest="tensor", type=int, default=1)
    parser.add_argument("--parallelism.no-enable-sequence-parallel", dest="sequence", action="store_false")
    parser.add_argument("--metrics.log_freq", dest="log_freq", type=int, default=10)
    checkpointing = [f"activation-checkpoint:{mode}" for mode in ("none", "selective", "full")]
    parser.add_argument("checkpointing", choices=checkpointing)
    return parser.parse_args()


def step_seconds(arguments: argparse.Namespace, micro_batches: int, shards: int) -> float:
    """Invented, but for its signs: larger micro-batches are faster, recomputation, gathering and reductions cost."""
    again = {"full": 4 / 3, "selective": 1.05}.get(arguments.checkpointing.partition(":")[2], 1.0)
    layers = 0.001 + 0.0004 * arguments.local_batch_size / arguments.tensor * again
    within = 0.0 if arguments.tensor == 1 else 0.0004 * arguments.local_batch_size / (2 if arguments.sequence else 1)
    gathers = 0 if shards == 1 else 1 if arguments.reshard == "never" else 2 * micro_batches
    return micro_batches * (layers + within) + 0.001 * gathers + 0.002


def log(step: int, tokens_per_second: float) -> None:
    told = f"step: {step:2}  loss: {8.0 / step**0.1:8.5f}  grad_norm:  1.0000  memory:  0.00GiB(0.00%)"
    print(f"[titan] {told}  tps: {round(tokens_per_second):,}  tflops: 0.00  mfu: N/A", flush=True)


if __name__ == "__main__":
    main()
