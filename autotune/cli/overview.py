"""The overview of all commands: in groups, each with an example, which its help shows too."""

from collections.abc import Mapping
from typing import Any

from typer.core import TyperGroup

OVERVIEW: Mapping[str, Mapping[str, str]] = {
    "Tune": {
        "sweep": "autotune sweep llama-3-8b --space 3d --trials 40",
        "check": "autotune check --config sweep.toml",
        "scale": "autotune scale llama-3-8b --ranks 2,4,8",
        "show": "autotune show latest",
        "explain": "autotune explain latest",
        "report": "autotune report latest --out report.html",
        "export": "autotune export latest --format megatron",
        "reproduce": "autotune reproduce best-config.json",
        "guard": "autotune guard best-config.json --against history.jsonl --record",
        "verify": "autotune verify best-config.json --engine deepspeed",
    },
    "Plan without trials": {
        "plan": "autotune plan llama-3-70b --cluster dgx-h100:8 --objective memory",
        "predict": "autotune predict llama-3-70b --cluster dgx-h100:8 --pin tensor_parallel_size=8",
        "fit": "autotune fit llama-3-8b --on 1xrtx-4090 --sequence-length 2k",
        "dry-run": "autotune dry-run llama-3-8b --cluster dgx-h100 --pin zero_stage=3",
        "space": "autotune space llama-3-8b --cluster dgx-h100 --space 3d",
        "calibrate": "autotune calibrate --cluster ray",
        "profile": "autotune profile llama-tiny --depth 2",
        "engines": "autotune engines",
        "models": "autotune models",
        "clusters": "autotune clusters",
    },
    "Recipes": {
        "lint": "autotune lint deepspeed ds_config.json --model llama-3-8b --cluster dgx-h100",
        "carry": "autotune carry recipe.toml --to dgx-h100:16 --batch scaled",
        "challenge": "autotune challenge recipe.toml --cluster dgx-h100 --predict-only",
        "weights": "autotune weights llama-3-8b model.safetensors shards",
    },
    "Jobs": {
        "submit": "autotune submit llama-3-8b --trials 40 --watch",
        "jobs": "autotune jobs --state running",
        "watch": "autotune watch latest",
        "logs": "autotune logs latest 3",
        "pause": "autotune pause latest",
        "resume": "autotune resume latest --trials 60",
        "stop": "autotune stop latest",
        "cancel": "autotune cancel latest",
        "clone": "autotune clone latest",
        "extend": "autotune extend latest --trials 60",
        "label": "autotune label latest --name nightly",
        "share": "autotune share latest --days 30",
        "clean": "autotune clean latest --yes",
        "study": "autotune study export latest --storage sqlite:///study.db",
    },
    "Service": {
        "serve": "autotune serve --port 8000",
        "worker": "autotune worker --db postgresql://host/autotune",
        "keys": "autotune keys create anna --scope submit",
        "audit": "autotune audit",
        "mcp": "autotune mcp",
    },
    "Administration": {
        "doctor": "autotune doctor --cluster",
        "cluster": "autotune cluster --ray-address auto",
        "db": "autotune db check",
    },
}
"""Group -> command -> an example."""


class OverviewGroup(TyperGroup):
    """The commands, whose help is in groups and ends with an example."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """See `TyperGroup.get_command`."""
        command = super().get_command(ctx, cmd_name)
        for examples in OVERVIEW.values():
            if command is not None and cmd_name in examples:
                command.epilog = f"Example: {examples[cmd_name]}"
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group, with the first sentence of each command's help."""
        for title, examples in OVERVIEW.items():
            commands = {name: self.get_command(ctx, name) for name in examples}
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str(limit=1000)) for name, command in commands.items()])
