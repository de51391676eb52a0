"""Exports a script for Ray Train: the scaling configuration and a trainer."""

from autotune.exports.export import Export, header, python_text, remarks
from autotune.exports.launch import layout_notes, rank_places
from autotune.exports.winner import Winner
from search_spaces.trial_config import TrialConfig

SCRIPT = '''
import os

import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

{places}
scaling = ScalingConfig(
    num_workers={workers},
    use_gpu={gpus},
    placement_strategy="{placement}",
)
layout = {layout}
"""What your training function reads: every knob that is not at its default, the batch, and what you stated."""
environment = {environment}


def train(layout):
    """Put your training here; ranks of a node are neighbours, so that the mesh of the layout holds."""
    os.environ.update(environment)
    context = ray.train.get_context()
    rank, local, node = context.get_world_rank(), context.get_local_rank(), context.get_node_rank()
    if rank != node * {per_node} + local:
        raise RuntimeError(f"rank {{rank}} is number {{local}} of node {{node}}: give each node {per_node} workers")
    return {{"rank": rank, "world_size": context.get_world_size()}}


if __name__ == "__main__":
{start}    trainer = TorchTrainer(
        train, train_loop_config=layout, scaling_config=scaling, torch_config=TorchConfig(backend="{backend}")
    )
    print(trainer.fit().return_value)
'''
_START = '    ray.init(runtime_env={"env_vars": environment})  # what libraries read when their process starts\n'


def export_ray(winner: Winner) -> Export:
    """Return the script. It checks that Ray placed the ranks as in the layout."""
    notes = remarks(winner, layout_notes(winner), None)
    text = SCRIPT.format(
        places="".join(f"# {line}\n" for line in rank_places(winner)),
        workers=winner.world_size,
        gpus=winner.on_gpus,
        placement="STRICT_PACK" if winner.nodes == 1 else "PACK",
        layout=_layout(winner),
        environment=python_text(winner.env),
        start=_START if winner.config.environment else "",
        per_node=winner.ranks_per_node,
        backend="nccl" if winner.on_gpus else "gloo",
    )
    return Export(text=header(winner, "Ray Train", notes) + text, notes=notes)


def _layout(winner: Winner) -> str:
    values = {
        "global_batch_size": winner.workload.global_batch_size,
        "gradient_accumulation_steps": winner.gradient_accumulation_steps,
        "micro_batch_size": winner.config.micro_batch_size,
        **winner.config.differences(TrialConfig()),
        **winner.hyperparameters.values(),
    }
    return python_text(values)
