"""Exports the placement of ranks: launch lines of torchrun, a Slurm script, and a script for Ray Train."""

import shlex

from autotune.frameworks.best_config import Winner
from autotune.frameworks.export import Export, header, python_text, remarks
from search_spaces.environment import ENVIRONMENT
from search_spaces.knob_values import value_text
from search_spaces.mesh import DIMENSIONS, make_mesh
from search_spaces.models.command import CommandModel
from search_spaces.placeholders import FILES, files_read, launch_paths, template_of
from search_spaces.trial_config import TrialConfig

PORT = 29500
FILE_FORMATS = {"config": "deepspeed", "accelerate": "accelerate-fsdp"}
"""Placeholder of a file that a script reads -> the export format that writes it."""
VARIABLES = frozenset({"expandable_segments", ENVIRONMENT})
"""Knobs that are environment variables, which the launcher sets."""


def export_torchrun(winner: Winner) -> Export:
    """Return a shell script with the launch line of each node."""
    notes = remarks(winner, layout_notes(winner), None)
    usage = f"# {'NODE_RANK=0 MASTER_ADDR=first-node ' if winner.nodes > 1 else ''}bash FILE {_arguments(winner)}\n"
    start = f"#!/bin/bash\n{header(winner, 'torchrun', notes)}{usage}{_places(winner)}"
    return Export(text=f"{start}{environment(winner)}{_lines(winner)}", notes=notes)


def export_slurm(winner: Winner) -> Export:
    """Return a script for sbatch that starts torchrun on each node, with nodes in Slurm's order."""
    notes = remarks(winner, layout_notes(winner), None)
    gpus = f"#SBATCH --gpus-per-node={winner.ranks_per_node}\n" if winner.on_gpus else ""
    inner = " ".join(["exec", *torchrun_words(winner, "$SLURM_NODEID", "$MASTER_ADDR"), '"$@"'])
    script = " ".join(["bash", *script_words(winner), '"$@"'])
    text = (
        "#!/bin/bash\n"
        "#SBATCH --job-name=autotuned\n"
        f"#SBATCH --nodes={winner.nodes}\n"
        "#SBATCH --ntasks-per-node=1\n"
        f"{gpus}"
        "#SBATCH --exclusive\n"
        "#SBATCH --distribution=block\n"
        f"{header(winner, f'Slurm (sbatch FILE {_arguments(winner)})', notes)}"
        f"{_places(winner)}"
        "set -euo pipefail\n"
        f"{environment(winner)}"
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        "export MASTER_ADDR\n"
        f"srun bash -c '{inner}' {script}\n"
    )
    return Export(text=text, notes=notes)


def torchrun_words(winner: Winner, node: str = "${NODE_RANK:-0}", address: str = "${MASTER_ADDR:-127.0.0.1}") -> list[str]:
    """The words of the torchrun command. Node ranks are fixed, not negotiated, so that ranks are placed as in the layout."""
    return [
        "torchrun",
        f"--nnodes={winner.nodes}",
        f"--nproc-per-node={winner.ranks_per_node}",
        f'--node-rank="{node}"' if node.startswith("$") else f"--node-rank={node}",
        f'--master-addr="{address}"',
        f"--master-port={PORT}",
        *(["--numa-binding=node"] if winner.config.numa_binding and winner.on_gpus else []),
    ]


def script_words(winner: Winner) -> list[str]:
    """The quoted words that torchrun starts: the user's script with its arguments; empty: the user adds it."""
    words = winner.script
    if not words:
        return []
    python = words[0] in ("python", "python3")
    return [*([] if python else ["--no-python"]), *map(shlex.quote, words[int(python) :])]


def _arguments(winner: Winner) -> str:
    """The arguments of the launch script, for its usage line."""
    return "MORE_ARGUMENTS …" if winner.script else "train.py …"


def files_of(winner: Winner) -> list[str]:
    """Placeholders of the files that the launch of the user's script reads."""
    if not isinstance(winner.model, CommandModel):
        return []
    names = files_read(winner.model)
    # In trials, and in launches on CPUs, variables replace this file.
    if winner.model.plugin == "fsdp" and "accelerate" not in names and winner.on_gpus:
        names.append("accelerate")
    return names


def files_notes(winner: Winner) -> list[str]:
    """Notes on how to write each file that the user's script reads."""
    command = " ".join(["autotune export", *([winner.job] if winner.job else [])])
    notes = [
        f"{FILES[name]}: `{command} --format {FILE_FORMATS[name]} --out {FILES[name]}` writes it" for name in files_of(winner)
    ]
    if isinstance(winner.model, CommandModel) and winner.model.template:
        notes.append(f"{winner.model.template_name}: the script of `{command} --format torchrun` writes it and starts it")
    return notes


def layout_notes(winner: Winner) -> list[str]:
    """Notes about the settings that the launcher leaves to the program."""
    launch_knobs = {*VARIABLES, *(["numa_binding"] if winner.on_gpus else [])}
    knobs = {name: value for name, value in winner.config.differences(TrialConfig()).items() if name not in launch_knobs}
    knobs |= winner.hyperparameters.values()
    settings = " ".join(f"{name}={value_text(value)}" for name, value in knobs.items()) or "every knob stands at its default"
    if winner.script:
        return [f"your script's line is filled in with the best configuration: {settings}", *_script_notes(winner)]
    if not knobs:
        return [f"a launcher says where ranks run; {settings}"]
    return [f"a launcher says where ranks run; the knobs are the program's to set, from another export: {settings}"]


def _script_notes(winner: Winner) -> list[str]:
    """Notes on what the user's script needs besides its command line."""
    assert isinstance(winner.model, CommandModel)
    notes = [*([f"start it in {winner.model.folder}"] if winner.model.folder else []), *files_notes(winner)]
    if winner.model.launcher != "torchrun":
        notes.append(f"it was measured under {winner.model.launcher}, whose variables it may read: {winner.launch}")
    return notes


def rank_places(winner: Winner) -> list[str]:
    """A line for each node: its ranks, and their coordinates along the mesh dimensions larger than 1."""
    mesh = make_mesh(winner.config, winner.world_size)
    lines = []
    for node in range(winner.nodes):
        first, after = node * winner.ranks_per_node, min((node + 1) * winner.ranks_per_node, winner.world_size)
        places = [mesh.coordinates(rank) for rank in range(first, after)]
        along = [f"{name} {_span([coordinates[name] for coordinates in places])}" for name in DIMENSIONS if mesh.size(name) > 1]
        lines.append(f"node {node}: ranks {_span([first, after - 1])}" + (f" ({', '.join(along)})" if along else ""))
    return lines


def _span(numbers: list[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least}-{most}"


def _places(winner: Winner) -> str:
    order = f"# mesh, innermost first: {winner.config.rank_order}\n"
    return order + "".join(f"# {line}\n" for line in rank_places(winner))


def environment(winner: Winner) -> str:
    """Shell lines that export the launch's environment variables, and write the command's template, filled in."""
    lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in winner.env.items())
    command = winner.model
    if not isinstance(command, CommandModel) or not command.template:
        return lines
    text = template_of(command, winner.config, winner.workload, winner.world_size, launch_paths(command))
    return f"{lines}cat > {shlex.quote(command.template_name)} <<'END OF FILE'\n{text.rstrip()}\nEND OF FILE\n"


def _lines(winner: Winner) -> str:
    if winner.nodes == 1:
        return " ".join(["exec", *torchrun_words(winner, "0"), *script_words(winner), '"$@"']) + "\n"
    address = "${MASTER_ADDR:?the first node}"
    lines = [
        f"  {node}) " + " ".join(["exec", *torchrun_words(winner, str(node), address), *script_words(winner), '"$@"', ";;\n"])
        for node in range(winner.nodes)
    ]
    return 'case "${NODE_RANK:?0 to ' + str(winner.nodes - 1) + '}" in\n' + "".join(lines) + "esac\n"


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


def export_ray(winner: Winner) -> Export:
    """Return the script. It checks that Ray placed the ranks as in the layout."""
    notes = remarks(winner, layout_notes(winner), None)
    start = '    ray.init(runtime_env={"env_vars": environment})  # what libraries read when their process starts\n'
    text = SCRIPT.format(
        places="".join(f"# {line}\n" for line in rank_places(winner)),
        workers=winner.world_size,
        gpus=winner.on_gpus,
        placement="STRICT_PACK" if winner.nodes == 1 else "PACK",
        layout=_layout(winner),
        environment=python_text(winner.env),
        start=start if winner.config.environment else "",
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
