"""Options that several commands have."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.errors import RequestError
from autotune.ops.logs import LogFormat
from autotune.request.field import Panel
from autotune.request.sizes import parse_size


def parse_bytes(text: str | int) -> int:
    """The value of an option as bytes; see `parse_size`.

    Raises:
        typer.BadParameter: the text is not a size, or out of range.
    """
    try:
        return parse_size("", str(text))
    except RequestError as error:
        raise typer.BadParameter(f"{error.problem}; {error.remedy}") from None


Database = Annotated[
    str | None,
    typer.Option("--db", metavar="URL", help="Database: a URL or a file. Default: AUTOTUNE_DB, else your data folder."),
]
Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="A service instead of a database. Default: AUTOTUNE_URL, unless --db is given."),
]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on standard output.")]
Job = Annotated[str | None, typer.Argument(metavar="JOB", help="A job's id or the beginning of it; `latest` when left out.")]
OneJob = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, the beginning of it, or `latest`.")]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="KNOB=VALUE",
        help="Pin a knob to a value, or to several (KNOB=A,B). May be repeated.",
        rich_help_panel=Panel.BASIC.value,
    ),
]
KnobValues = Annotated[list[str] | None, typer.Option("--pin", metavar="KNOB=VALUE", help="A knob's value. May be repeated.")]
MemoryLimit = Annotated[
    int | None, typer.Option(parser=parse_bytes, metavar="BYTES", help="Bytes a rank may allocate: 2000000000, 2GB or 1.5GiB.")
]
DataPath = Annotated[Path | None, typer.Option(metavar="PATH", help="A file or folder of text to train on.")]
NvmePath = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="A folder on a fast local disk, for states offloaded to files (nvme)."),
]
Logs = Annotated[LogFormat, typer.Option("--log-format", help="How lines of the log are written.")]

# Beside a tuning request, whose options `request_options` makes: what `sweep` and `submit` share.

Model = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="A preset, a Hugging Face config.json, hf:CONFIG, or module:factory.")
]
Cluster = Annotated[
    str | None, typer.Option(metavar="NAME", help="local, ray, a preset as NAME:NODES, or a TOML file. [default: local]")
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Ray to run on, HOST:PORT or auto. Default: AUTOTUNE_RAY_ADDRESS, RAY_ADDRESS, else one is started here.",
    ),
]
PassEnvironment = Annotated[
    list[str] | None,
    typer.Option(
        "--pass-environment",
        metavar="NAME",
        help="A variable that trials find as it is here, beside those of a fixed list. May be repeated.",
        rich_help_panel=Panel.HARDWARE.value,
    ),
]
RayToLookAt = Annotated[
    str | None,
    typer.Option(
        "--ray-address", metavar="ADDRESS",
        help="HOST:PORT. Default: AUTOTUNE_RAY_ADDRESS, RAY_ADDRESS, else the Ray that this machine belongs to.",
    ),
]  # fmt: skip
Ranks = Annotated[int | None, typer.Option(metavar="N", help="Ranks of a trial. [default: every GPU; on CPUs 2]")]
Price = Annotated[
    float | None,
    typer.Option(metavar="PRICE", help="Of a device for an hour, with the objective cost.", rich_help_panel=Panel.SERIES.value),
]
Rate = Annotated[
    float | None,
    typer.Option(metavar="RATE", help="Samples/s to reach, with the objective devices.", rich_help_panel=Panel.SERIES.value),
]
Step = Annotated[
    int | None,
    typer.Option(metavar="TOKENS", help="To which sequence is found. [default: 128]", rich_help_panel=Panel.SERIES.value),
]
AllTrials = Annotated[int | None, typer.Option("--trials", min=1, metavar="N", help="Search trials in all.")]
AllSeconds = Annotated[float | None, typer.Option("--max-seconds", metavar="SECONDS", help="Seconds in all.")]
TrainingSteps = Annotated[
    int | None, typer.Option(metavar="N", help="Optimizer steps of the run, over which schedules of the data are weighed.")
]
DocumentLengths = Annotated[
    str | None,
    typer.Option(
        metavar="LENGTHS",
        help="Tokens of each document of a sample of your data, with commas, or a file of them; default: samples are whole.",
    ),
]
TrialSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="Seconds of timed steps in a trial, at most. [default: 5]", rich_help_panel=Panel.TRIALS.value
    ),
]
Baseline = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="JSON of your present knobs: becomes trial 0.", rich_help_panel=Panel.SEARCH.value),
]
From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="A DeepSpeed JSON or Accelerate YAML that you have: becomes trial 0.",
        rich_help_panel=Panel.SEARCH.value,
    ),
]
History = Annotated[
    str | None,
    typer.Option(
        "--history",
        metavar="STUDY",
        help="Earlier trials to learn from: a CSV file, or an Optuna storage[#study].",
        rich_help_panel=Panel.SEARCH.value,
    ),
]
Launcher = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of a command: torchrun, deepspeed or accelerate. [default: torchrun]",
        rich_help_panel=Panel.SCRIPT.value,
    ),
]
Folder = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Of a command: where it runs, on every node. [default: the current folder]",
        rich_help_panel=Panel.SCRIPT.value,
    ),
]
Plugin = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Of a command: deepspeed or fsdp, with --launcher accelerate.", rich_help_panel=Panel.SCRIPT.value
    ),
]
Pattern = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX",
        help="Of a command: what in its log tells its rate, in named groups.",
        rich_help_panel=Panel.SCRIPT.value,
    ),
]
ParameterCount = Annotated[
    str | None,
    typer.Option(metavar="COUNT", help="Of a command: trained parameters, such as 125M.", rich_help_panel=Panel.SCRIPT.value),
]
ScriptKnobs = Annotated[
    list[str] | None,
    typer.Option(
        "--script-knob",
        metavar="NAME=A,B",
        help="Of a command: values for its {NAME}. May be repeated.",
        rich_help_panel=Panel.SCRIPT.value,
    ),
]
EnvironmentKnobs = Annotated[
    list[str] | None,
    typer.Option(
        "--environment-knob",
        metavar="NAME=A,B",
        help="Of a command: values of a variable. May be repeated.",
        rich_help_panel=Panel.SCRIPT.value,
    ),
]
ReportSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Of a command: until its first report. [default: half the trial's limit]",
        rich_help_panel=Panel.SCRIPT.value,
    ),
]
Simple = Annotated[
    str | None,
    typer.Option(
        metavar="TARGET",
        help="Search only what this framework's export says without loss: deepspeed, torchtitan, megatron, …",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A TOML file with any of these; options win over it.", rich_help_panel=Panel.BASIC.value),
]

# What is predicted for: what `predict` and `plan` share.

ShapedModel = Annotated[str | None, typer.Argument(metavar="MODEL", help="A preset or a Hugging Face config.json.")]
Anywhere = Annotated[
    str | None,
    typer.Option("--cluster", metavar="NAME", help="local, ray, a preset as NAME:NODES, or a TOML file. [default: local]"),
]
RayToDescribe = Annotated[
    str | None,
    typer.Option(
        "--ray-address", metavar="ADDRESS",
        help="HOST:PORT or auto: the Ray that --cluster ray describes. Default: AUTOTUNE_RAY_ADDRESS, RAY_ADDRESS, else auto.",
    ),
]  # fmt: skip
EveryRank = Annotated[
    int | None,
    typer.Option("--ranks", min=1, metavar="N", help="Ranks; default: every device, and on local without GPUs 2."),
]
AnyBatch = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Samples in an optimizer step, over all ranks. [default: 8, or one a rank]"),
]
AnyLength = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Tokens in a sample; default: the model's own, at most 128 for local."),
]
NamedEngine = Annotated[str, typer.Option("--engine", metavar="NAME", help="native, ddp, fsdp2 or deepspeed.")]
LoraRank = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Train low-rank adapters of this rank, all else frozen.")
]
LoraTargets = Annotated[
    str | None,
    typer.Option(metavar="NAMES", help="Matrices that carry them, with commas. [default: query,value]"),
]
FrozenBits = Annotated[int | None, typer.Option(metavar="BITS", help="Bits of a frozen parameter: 16, 8 or 4. [default: 16]")]


def only_database(command: str, database: str | None, remedy: str = "") -> str | None:
    """The option `--db` of a command that no service offers.

    Raises:
        RequestError: AUTOTUNE_URL names a service and --db no database. The default database would be another than that of the
            commands that follow AUTOTUNE_URL.
    """
    if database is None and os.environ.get("AUTOTUNE_URL"):
        problem = "works on a database, and AUTOTUNE_URL names a service"
        raise RequestError(command, problem, f"{remedy}give --db, or unset AUTOTUNE_URL")
    return database


def given(**fields: Any) -> dict[str, Any]:
    """The fields of a request that were given as options; a switch that was left out is none.

    `racing` alone is None where it was left out, since it can be switched off too.
    """
    return {name: value for name, value in fields.items() if value is not None and (value is not False or name == "racing")}
