"""A launch script with other settings, and for other nodes: values are replaced where the text states them."""

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

from autotune.frameworks.framework import Settings
from autotune.frameworks.read import Written
from autotune.frameworks.shell import ENVIRONMENT, LAUNCHER
from autotune.frameworks.torchtitan_checks import TORCHTITAN
from search_spaces.clusters.cluster import ClusterSpec

SEPARATOR = r"(?:=|[ \t]+(?!--)|[ \t]*\\\n[ \t]*(?!--))"
"""Between an option and its value; a value may stand in the next line."""
VALUE = r"(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s\\)\"'#][^\s\\)\"']*)"
ENDS = r"(?=[\s\\)\"']|$)"
REFERENCE = re.compile(r"\"?\$\{?(\w+)(?::?[-=]([^}]*))?\}?\"?")


def edited_scripts(source: str, changes: Settings, present: Settings, titan: bool = False) -> Iterator[str]:
    """Texts with the changed settings: through the variables that state them, else at the options themselves.

    `present`: those of the source; `titan`: the options are torchtitan's, whose switches have no values.
    """
    code, comments = _masked(source)
    switches = [key for key, value in changes.items() if value is None and present.get(key) is True and not titan]
    for key in switches:  # what follows is not their value
        code = re.sub(rf"(?<![^\s\"'(]){re.escape(key)}{ENDS}", "", code)
    changes = {key: value for key, value in changes.items() if key not in switches}
    for through_variables in (True, False):
        changed = _with_settings(code, changes, through_variables, titan)
        yield re.sub("\0(\\d+)\0", lambda mark: comments[int(mark[1])], changed)


def _masked(text: str) -> tuple[str, list[str]]:
    """The text with marks for its comments, whose options are no settings, and these."""
    comments: list[str] = []

    def mark(comment: re.Match[str]) -> str:
        comments.append(comment[0])
        return f"\0{len(comments) - 1}\0"

    return re.sub(r"^[ \t]*#.*$|(?<=\s)#[^'\"\n]*$", mark, text, flags=re.MULTILINE), comments


def _with_settings(text: str, changes: Settings, through_variables: bool, titan: bool) -> str:
    missing = []
    for key, value in changes.items():
        text, is_stated = _replaced(text, key, value, through_variables, titan)
        if not is_stated and value is not None:
            missing.append((key, value))
    for key, value in missing:
        # An option or override, with its value, beside which others can stand; a launcher's beside the launcher's.
        if key.startswith(LAUNCHER):
            text = re.sub(rf"(torchrun|torch\.distributed\.(?:run|launch)){ENDS}", rf"\1 {_option(key, value)}", text, count=1)
            continue
        anchors = (
            r"--(?:micro-batch-size|tensor-model-parallel-size|per_device_train_batch_size)",
            r"--(?:num-layers|training\.\w+|parallelism\.\w+)",
            r"model\.\w+",
        )
        found = (re.search(rf"(?<![^\s\"'(]){name}{SEPARATOR}{VALUE}{ENDS}", text) for name in anchors)
        anchor = next(filter(None, found), None)
        if anchor is not None:
            added = _option(key, value, titan) if anchor[0].startswith("--") else f"{key}={word(value)}"
            text = f"{text[: anchor.end()]} {added}{text[anchor.end() :]}"
    return text


def word(value: Any) -> str:
    """A value as a word of a script."""
    if isinstance(value, list | tuple | dict):
        return json.dumps(value, separators=(",", ":"))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _option(key: str, value: Any, titan: bool = False) -> str:
    option = "--" + key.removeprefix(LAUNCHER).removeprefix("--")
    if titan and isinstance(value, bool):
        return option if value else re.sub(r"(?<=\.|-)(?=\w+$)", "no_", option)
    if titan and isinstance(value, list):
        return " ".join([option, *map(word, value)])
    return option if value is True and key.startswith("--") else f"{option} {word(value)}"


def _replaced(text: str, key: str, value: Any, through_variables: bool, titan: bool) -> tuple[str, bool]:
    """The text with another value of a setting, and whether the text states it."""
    if key == "activation_checkpoint.mode":
        text, count = re.subn(r"activation-checkpoint:\w+", f"activation-checkpoint:{value}", text)
        return text, bool(count)
    if key.startswith(ENVIRONMENT):
        name = re.escape(key.removeprefix(ENVIRONMENT))
        text, count = re.subn(rf"(export\s+{name}=)\S+", lambda assignment: f"{assignment[1]}{word(value)}", text)
        return text, bool(count)
    name = re.escape(key.removeprefix(LAUNCHER).removeprefix("--"))
    if titan or key.startswith(LAUNCHER):
        name = name.replace("_", "[-_]")
    if titan and isinstance(value, bool):
        table, dot, switch = name.rpartition(r"\.")
        switches = re.compile(rf"(?<![^\s\"'(])--{table}{dot}(?:no[-_])?{switch}(?:{SEPARATOR}(?i:true|false))?{ENDS}")
        text, count = switches.subn(_option(key, value, titan), text)
        return text, bool(count)
    option = f"--{name}" if key.startswith(("--", LAUNCHER)) else f"(?:--)?{name}"
    spelled = re.compile(rf"(?<![^\s\"'(])({option})(?:({SEPARATOR})({VALUE}))?{ENDS}")
    match = spelled.search(text)
    if match is None:
        return text, False
    if value is None:
        return spelled.sub("", text), True
    if value is True and key.startswith("--"):
        return text, True
    if through_variables and (reference := REFERENCE.fullmatch(match[3] or "")) is not None:
        text, count = _assigned(text, reference[1], value)
        if count or reference[2]:
            return text if count else text.replace(match[3], f"${{{reference[1]}:-{word(value)}}}"), True
    return spelled.sub(lambda found: f"{found[1]}{found[2] or ' '}{word(value)}", text), True


def _assigned(text: str, variable: str, value: Any) -> tuple[str, int]:
    """The text with another number in the assignments of a variable, and how many there are."""
    assignment = re.compile(
        rf"^([ \t]*(?:export[ \t]+|local[ \t]+|readonly[ \t]+)?{variable}=\"?)(\$\{{\w+:?[-=])?([^\s\"'}}$()#;]+)", re.MULTILINE
    )
    return assignment.subn(lambda found: f"{found[1]}{found[2] or ''}{word(value)}", text)


def launch_anew(recipe: Written, source: str, settings: Settings, cluster: ClusterSpec | None) -> str:
    """A launch script of Megatron-LM or torchtitan with all settings, started as the source starts its own."""
    code, titan = _masked(source)[0], recipe.format == TORCHTITAN.name
    program = next(iter(re.findall(r"\S+\.py(?=[\s\"'\\])", code)), "pretrain_gpt.py")
    words_before, option = r"[^\"'$\\\n]*?", r"--[\w-]+[= ]\$\{?\w+\}?"
    end = r"\s+(?:bash|python3?|torchrun|[\"'$\\])"
    scheduler = re.search(rf"\b((?:srun|mpirun|mpiexec)\b(?:{words_before}{option})*{words_before}){end}", code)
    starts = [scheduler[1]] if scheduler else []
    launcher = {  # but what a command or a branch decides, and the scheduler's
        key.removeprefix(LAUNCHER): value for key, value in settings.items()
        if key.startswith(LAUNCHER) and "$(a " not in str(value) and f"--{key.removeprefix(LAUNCHER)} " not in "".join(starts)
    }  # fmt: skip
    if STARTS_RANKS.search(code) or not scheduler:
        if cluster is not None and "nproc_per_node" not in launcher:
            launcher |= {"nnodes": cluster.nodes, "nproc_per_node": cluster.devices_per_node}
        starts.append(" ".join(["torchrun", *(f"--{name} {word(value)}" for name, value in launcher.items())]))
    starts.append("-m torchtitan.train" if titan else program if "torchrun" in starts[-1] else f"python3 {program}")
    lines = [line for line in source.splitlines() if line.startswith("#SBATCH")]
    words = [" ".join(starts)]
    for key, value in settings.items():
        option = {"recipe": "--config"}.get(key, key if key.startswith("--") else f"--{key}")
        if key.startswith(ENVIRONMENT):
            lines.append(f"export {key.removeprefix(ENVIRONMENT)}={word(value)}")
        elif not key.startswith(LAUNCHER) and key != "activation_checkpoint.mode":
            words.append(_quoted(_option(option, value, titan)))
    if mode := settings.get("activation_checkpoint.mode"):
        words.append(f"activation-checkpoint:{mode}")
    return "\n".join(["#!/bin/bash", *lines, " \\\n  ".join(words)]) + "\n"


def _quoted(option: str) -> str:
    """An option with its value as words of bash; what is a variable stays one."""
    return " ".join(shlex.quote(part) if re.search(r"[^\w$@%+=:,./-]", part) else part for part in option.split(" "))


SRUN, MPI = r"#SBATCH|\b(?:srun|salloc|sbatch)\b", r"\bmpi(?:run|exec)\b"
STARTS_RANKS = re.compile(r"\btorchrun\b|torch\.distributed\.|\baccelerate launch\b|^\s*deepspeed\b", re.MULTILINE)
"""A launcher that starts the ranks of its node, so that the scheduler starts one task a node."""
COUNTS = (
    (r"--(?:nodes|nnodes|num[-_]machines|num[-_]nodes)", "", "nodes"),
    (r"--(?:ntasks-per-node|gpus-per-node|nproc[-_]per[-_]node|num_gpus)", "", "devices_per_node"),
    (r"--(?:ntasks|num[-_]processes|gpus)", "", "world_size"),
    (r"-N", SRUN, "nodes"), (r"-[nG]", SRUN, "world_size"),
    (r"-np?", MPI, "world_size"), (r"--?(?:npernode|ppn)", MPI, "devices_per_node"),
)  # fmt: skip
"""Options of launchers and schedulers, as their manuals spell them; the commands whose they are (empty: they are nobody
else's); and the property of the cluster that they state."""


def relaunched(source: str, cluster: ClusterSpec) -> tuple[str, list[str]]:
    """The script started on the cluster's nodes, with one rank for each device, and a line for each count that it takes from
    elsewhere.

    A count is replaced where the text states it: in `#SBATCH` lines, at the launcher, or in the variable that the launcher
    takes. Where torchrun or the like starts the ranks of a node, its one task a node stays.
    """
    text, notes, one_task = source, list[str](), STARTS_RANKS.search(source) is not None
    nodes = re.search(r"--nodes[= ](\d+)|(?:#SBATCH|srun).*\s-N[ =]?(\d+)", source)
    task_per_node = ("1", *(filter(None, nodes.groups()) if nodes else ()))
    for option, commands, count in COUNTS:
        gap = r"[ \t]*=?[ \t]*" if commands else r"(?:=|[ \t]+)"
        value = r"\"?\$\{?\w+(?::?-\w+)?\}?\"?|\$\(\([^()]*\)\)|\d+(?:-\d+)?"
        variables: dict[str, tuple[str, int]] = {}
        for match in reversed([*re.finditer(rf"(?<![\w-])({option})({gap})({value})(?![\w.:,])", text)]):
            command, number = _command_before(text, match.end()), getattr(cluster, count)
            if re.match(r"\s*#(?!SBATCH)", command) or not re.search(commands, command):
                continue
            if one_task and match[1] in ("--ntasks-per-node", "--ntasks", "-n") and match[3] in task_per_node:
                number = 1 if match[1] == "--ntasks-per-node" else cluster.nodes
            if match[3].startswith("$(("):  # ranks as nodes times the ranks of each
                for name in re.findall(r"[A-Za-z_]\w*", match[3]):
                    in_node = re.search("(?i)per_?node|gpu|proc|task", name)
                    variables[name] = match[0], cluster.devices_per_node if in_node else cluster.nodes
            elif "$" in match[3] and (reference := REFERENCE.fullmatch(match[3])) is not None:
                variables[reference[1]] = match[0], number
            else:
                text = f"{text[: match.start(3)]}{number}{text[match.end(3) :]}"
        for name, (stated, number) in variables.items():
            text, assigned = _assigned(text, name, number)
            if not assigned and not name.startswith("SLURM_"):
                notes.append(f"{stated}: {name} is to be {number}")
    return re.sub(r"(--gres=gpu:(?:[A-Za-z][\w.-]*:)?|ppr:)\d+", rf"\g<1>{cluster.devices_per_node}", text), notes


def _command_before(text: str, end: int) -> str:
    """The text of the command up to a place: its line, with the lines that it continues."""
    start = text.rfind("\n", 0, end) + 1
    while start and text[: start - 1].endswith("\\"):
        start = text.rfind("\n", 0, start - 1) + 1
    return text[start:end]


def unkept(text: str, cluster: ClusterSpec, source: ClusterSpec | None) -> Iterator[str]:
    """What of a script's launch is of its old nodes, one line each.

    `source`: the cluster that the recipe is for; None: not known.
    """
    nodes, device = cluster.nodes, cluster.device.name
    patterns = {
        rf"--?(?:hostfile|machinefile)[= \t]+{VALUE}": f"lists hosts: it needs {nodes}",
        rf"#SBATCH.*\s(?:--nodelist|-w)[= \t]*{VALUE}": f"names nodes: name {nodes}, or leave it out",
    }
    if source is None or source.device.name != device:
        patterns |= {
            r"--gres=gpu:[A-Za-z][\w.-]*": f"is a type of device: the target has {device}",
            rf"#SBATCH.*\s(?:--partition|-p|--constraint|-C)[= \t]*{VALUE}": "is of the recipe's cluster: name the target's",
        }
    if (
        "accelerate launch" in text
        and "--num_processes" not in text
        and (source is None or source.world_size != cluster.world_size)
    ):
        needs = f"states the processes: it needs num_machines: {nodes}, num_processes: {cluster.world_size}"
        patterns[rf"--config_file[= \t]+{VALUE}"] = needs
    for pattern, meaning in patterns.items():
        yield from (f"{match[0].strip()}: {meaning}" for match in re.finditer(pattern, text))
    if re.search(r"\bsrun\b", text) and not re.search(r"--n(?:odes|tasks)|(?:srun|#SBATCH).*\s-[Nn]", text):
        tasks = f"--ntasks-per-node={cluster.devices_per_node} (1 where torchrun starts the ranks)"
        yield f"srun: its tasks are stated elsewhere: give --nodes={nodes} {tasks}"
    on_several = (
        (r"\btorchrun\b", r"--(node[_-]rank|rdzv[_-])", "torchrun", "give each its --node_rank, and all of them --master_addr"),
        (r"^\s*deepspeed\s", r"--hostfile", "deepspeed", f"give it a --hostfile with {nodes} hosts"),
        (r"\bNPROC_PER_NODE=.*\s(swift|llamafactory-cli)\s", r"\bNNODES=|torchrun", "NPROC_PER_NODE",
         f"give each NNODES={nodes}, NODE_RANK and MASTER_ADDR too"),
    )  # fmt: skip
    for launcher, stated, name, remedy in on_several:
        if nodes > 1 and re.search(launcher, text.replace("\\\n", " "), re.MULTILINE) and not re.search(stated, text):
            yield f"{name}: on several nodes {remedy}"
