"""All commands with their options. Each is implemented in the module of its name, which is imported when it is called."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from autotune import installed
from autotune.cli import options, planning_app, service_app
from autotune.cli.command_words import command_of, without_command
from autotune.cli.database import database_app, study_app
from autotune.cli.jobs import jobs_app
from autotune.cli.options import Database, Job, Json, Url
from autotune.cli.status import PROGRAM, Status, end, exit_status


class Commands(TyperGroup):
    """The commands. Those of `request_app` are only built when they are needed: a request's declarations take time to load."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """See `TyperGroup.resolve_command`."""
        if args and args[0] in ("sweep", "scale", "submit"):
            self.build()
        return super().resolve_command(ctx, args)

    def build(self) -> "Commands":
        """Build the commands of `request_app`."""
        from autotune.cli.request_app import request_app

        self.commands.update(get_group(request_app).commands)
        return self


app = typer.Typer(
    name=PROGRAM,
    cls=Commands,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def run() -> int:
    """Run the command line; return the exit status."""
    return exit_status(app, *without_command(sys.argv[1:]))


def _version(requested: bool) -> None:
    if requested:
        version = installed.version()
        typer.echo(f"{PROGRAM} {version}" if version else f"{PROGRAM}, not installed, in {Path(__file__).resolve().parents[2]}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Find the fastest parallel training configuration on your cluster by real trial runs."""
    del version  # handled by its callback
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(Status.USAGE)


@app.command()
def sweep() -> None:
    """Tune a model by real trials and write the best configuration as JSON. For your own script, add its command after --."""


@app.command()
def scale() -> None:
    """Sweep a model on 1, 2, 4 ranks: samples/s and efficiency of each size, and where more ranks reduce throughput."""


app.registered_commands += jobs_app.registered_commands  # here, because `--help` lists commands in this order


@app.command()
def reproduce(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A best-config.json.")],
    runner: Annotated[str | None, typer.Option(metavar="NAME", help="ray or local; default: as in the file.")] = None,
    ray_address: options.RayAddress = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Trials to run.")] = 1,
    trace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write every rank's profiler trace of one more step into this folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Repeat a best configuration and check that it is inside its interval; exit status 1 if it is not."""
    from autotune.cli.reproduce import reproduce_command

    end(lambda: reproduce_command(path, runner, ray_address, repeats, trace, json))


@app.command()
def verify(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A best-config.json.")],
    engine: Annotated[str, typer.Option(metavar="NAME", help="The engine that the configuration is for.")],
    launcher: options.Launcher = None,
    plugin: options.Plugin = None,
    folder: options.Folder = None,
    pattern: options.Pattern = None,
    report_seconds: options.ReportSeconds = None,
    runner: Annotated[str | None, typer.Option(metavar="NAME", help="ray or local; default: as in the file.")] = None,
    ray_address: options.RayAddress = None,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Trials of the best and of the baseline, alternating.")] = 3,
    write: Annotated[bool, typer.Option("--write", help="Write the result into FILE.")] = False,
    json: Json = False,
) -> None:
    """Run a best configuration on another engine and compare samples/s and gain with the promised ones. For your own script,
    use --engine command and add its command after --."""
    from autotune.cli.reproduce import verify_command

    command = command_of(
        context, launcher=launcher, plugin=plugin, folder=folder, pattern=pattern, report_seconds=report_seconds
    )
    end(lambda: verify_command(path, engine, command, runner, ray_address, rounds, write, json))


@app.command()
def space(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A preset or a Hugging Face config.json.")] = None,
    cluster: options.AnyCluster = None,
    ray_address: options.RayToDescribe = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks; default: 2 for local, else every device.")
    ] = None,
    space_: Annotated[
        str, typer.Option("--space", metavar="NAME", help="zero, zero-buckets, 3d, parallel, full, or a TOML file.")
    ] = "zero",
    global_batch_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Samples per optimizer step, over all ranks. [default: 8, or one per rank]"),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens per sample; default: at most the model's maximum, 128 for local."),
    ] = None,
    memory_limit: options.MemoryLimit = None,
    pin: options.Pins = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="native, ddp, fsdp2 or deepspeed; any: count without an engine's restrictions.")
    ] = "native",
    knobs: Annotated[bool, typer.Option("--knobs", help="List all knobs instead.")] = False,
    json: Json = False,
) -> None:
    """Count the configurations of a space: how many are legal, and which rules refuse the others and why."""
    from autotune.cli.space import SpaceOptions, knobs_command, space_command

    if knobs:
        end(lambda: knobs_command(json))
    end(
        lambda: space_command(
            SpaceOptions(
                model=model,
                cluster=cluster,
                ray_address=ray_address,
                ranks=ranks,
                space=space_,
                global_batch_size=global_batch_size,
                sequence_length=sequence_length,
                memory_limit=memory_limit,
                pins=tuple(pin or ()),
                engine=engine,
                json=json,
            )
        )
    )


@app.command()
def engines(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/engines.md.")] = False,
) -> None:
    """Show the values of each knob that the engines honour, and the combinations that they refuse and why."""
    from autotune.cli.engines import engines_command

    end(lambda: engines_command(markdown))


@app.command()
def weights(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A preset, or a Hugging Face config.json.")],
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A .safetensors or .pt file, or a folder of weights without other states.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="A new .safetensors or .pt file; without a suffix: a folder of shards.")
    ],
    mtp_layers: Annotated[
        int, typer.Option(min=0, metavar="N", help="Modules for multi-token prediction that SOURCE contains.")
    ] = 0,
) -> None:
    """Check that files hold a model's weights, and convert them to another kind."""
    from autotune.cli.weights import weights_command

    end(lambda: weights_command(model, source, target, mtp_layers))


@app.command()
def profile(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A preset, a Hugging Face config.json, or module:factory.")
    ] = None,
    pin: options.KnobValues = None,
    depth: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Levels of modules to show; 0: only the model. [default: all]")
    ] = None,
    every_block: Annotated[
        bool, typer.Option("--every-block", help="Show one row per block, even if blocks are alike.")
    ] = False,
    global_batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Samples per optimizer step. [default: one micro-batch]")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens per sample. [default: 128]")] = None,
    data_path: Annotated[Path | None, typer.Option(metavar="PATH", help="A file or folder of text to train on.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds after which the profile is killed.")] = 300.0,
    json: Json = False,
) -> None:
    """Show the cost of each module in a step: parameters, FLOPs, forward and backward time, share."""
    from autotune.cli.profile import ProfileOptions, profile_command

    end(
        lambda: profile_command(
            ProfileOptions(
                model=model,
                pins=tuple(pin or ()),
                depth=depth,
                every_block=every_block,
                global_batch_size=global_batch_size,
                sequence_length=sequence_length,
                data_path=data_path,
                timeout=timeout,
                json=json,
            )
        )
    )


app.registered_commands += planning_app.app.registered_commands
service_app.register(app)
app.add_typer(database_app, name="db")
app.add_typer(study_app, name="study")


@app.command()
def lint(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[FORMAT] FILE...",
            help="auto, deepspeed, torchtitan, megatron, megatron-bridge or accelerate; configurations or launch scripts.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A preset or a Hugging Face config.json. [default: the one that the file names]"),
    ] = None,
    cluster: options.AnyCluster = None,
    ranks: Annotated[int | None, typer.Option(min=1, metavar="N", help="Ranks of the run, to check sizes.")] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Samples per optimizer step. [default: as in the file]")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens per sample. [default: as in the file]")
    ] = None,
    version: Annotated[
        str | None,
        typer.Option("--for", metavar="VERSION", help="DeepSpeed version. [default: the installed one, else 0.19.8]"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compute the memory exactly, by a dry run.")] = False,
    json: Json = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Print SARIF 2.1.0, for code scanning.")] = False,
) -> None:
    """Check configurations of other frameworks: what is refused, ignored or changed, whether it fits, and the smallest fix.
    Exit status 1: findings; 2: a file that cannot be read."""
    from autotune.cli.lint import LintOptions, lint_command

    end(
        lambda: lint_command(
            LintOptions(
                words=tuple(words), version=version, ranks=ranks, model=model, cluster=cluster,
                global_batch_size=global_batch_size, sequence_length=sequence_length, dry_run=dry_run, json=json, sarif=sarif,
            )
        )
    )  # fmt: skip


@app.command()
def carry(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A file that `lint` reads (FILE.py:FUNCTION), a best-config.json, or a job's id."
        ),
    ],
    to: Annotated[
        str,
        typer.Option(metavar="NAME", help="The target: a preset as NAME:NODES, a TOML file, or NxM of the recipe's cluster."),
    ],
    from_: Annotated[
        str | None, typer.Option("--from", metavar="NAME", help="The recipe's cluster. [default: as in the recipe]")
    ] = None,
    batch: Annotated[str, typer.Option(metavar="RULE", help="Global batch: fixed, or scaled with the ranks.")] = "fixed",
    target_batch: Annotated[
        int | None,
        typer.Option("--target-batch-size", min=1, metavar="N", help="Global batch of the target, instead of --batch."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A preset or a Hugging Face config.json. [default: as in the recipe]"),
    ] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="The recipe's samples per optimizer step. [default: as in the recipe]"),
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens per sample. [default: as in the recipe]")
    ] = None,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Number of candidates to show.")] = 5,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File for the target's recipe. [default: printed]")] = None,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Carry a recipe over to more, fewer or other nodes: what stays, what must change and why, the best layouts by prediction,
    and the recipe for the target. Nothing is run."""
    from autotune.cli.carry import CarryOptions, RecipeOptions, carry_command

    source = RecipeOptions(
        recipe=recipe, source=from_, model=model, global_batch_size=global_batch_size, sequence_length=sequence_length,
        url=url, database=db,
    )  # fmt: skip
    end(
        lambda: carry_command(
            CarryOptions(recipe=source, to=to, batch=batch, target_batch=target_batch, top=top, out=out, json=json)
        )
    )


@app.command()
def challenge(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A file that `lint` reads (FILE.py:FUNCTION), a best-config.json, or a job's id."
        ),
    ],
    predict_only: Annotated[bool, typer.Option("--predict-only", help="Decide by predictions; run nothing.")] = False,
    rivals: Annotated[int, typer.Option(min=1, max=50, metavar="N", help="Number of rivals.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="Rounds of finalists and recipe, at most.")] = 5,
    cluster: options.AnyCluster = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks; default: 2 for local, else every device.")
    ] = None,
    engine: options.NamedEngine = "native",
    runner: Annotated[str | None, typer.Option(metavar="NAME", help="ray or local. [default: ray]")] = None,
    ray_address: options.RayAddress = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A preset or a Hugging Face config.json. [default: as in the recipe]"),
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Samples per optimizer step. [default: as in the recipe]")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens per sample. [default: as in the recipe]")
    ] = None,
    memory_limit: options.MemoryLimit = None,
    max_seconds: Annotated[float | None, typer.Option(metavar="SECONDS", help="Seconds after which no trial starts.")] = None,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Challenge a recipe: predictions nominate rivals, and interleaved trials decide whether it is beaten, not beaten, or
    undecided. Exit status 1: beaten, or the recipe does not run."""
    from autotune.cli.carry import RecipeOptions
    from autotune.cli.challenge import ChallengeOptions, challenge_command

    source = RecipeOptions(
        recipe=recipe, source=None, model=model, global_batch_size=global_batch_size, sequence_length=sequence_length,
        url=url, database=db,
    )  # fmt: skip
    fields = options.given(
        engine=engine, runner=runner, ray_address=ray_address, memory_limit=memory_limit, max_seconds=max_seconds
    )
    end(
        lambda: challenge_command(
            ChallengeOptions(
                recipe=source, cluster=cluster, ranks=ranks, rivals=rivals, rounds=rounds, predict_only=predict_only,
                json=json, fields=fields,
            )
        )
    )  # fmt: skip


@app.command()
def cluster(
    release: Annotated[str | None, typer.Option(metavar="NODE", help="Allow trials on a quarantined node again.")] = None,
    ray_address: options.RayToInspect = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Show a Ray cluster: nodes, devices, links, quarantine; compare Ray's figures with a calibration's measurements."""
    from autotune.cli.cluster import cluster_command, release_command

    database = options.only_database("cluster", db)
    end(lambda: cluster_command(ray_address, database, json) if release is None else release_command(release, database))


@app.command()
def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check every node of a Ray cluster and the links between them.")
    ] = False,
    ray_address: options.RayToInspect = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Check this installation and this machine; exit status 1 if something would prevent a sweep."""
    from autotune.cli.doctor import DoctorOptions, doctor_command

    end(lambda: doctor_command(DoctorOptions(cluster=cluster, ray_address=ray_address, database=db, json=json)))


@app.command()
def clean(
    job: Job = None,
    all_: Annotated[bool, typer.Option("--all", help="Every job.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without this option only show what would be removed.")] = False,
    db: Database = None,
) -> None:
    """Remove a job, or all jobs, from the database."""
    from autotune.cli.database import clean_command

    end(lambda: clean_command(job, all_, yes, options.only_database("clean", db)))
