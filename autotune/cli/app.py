"""All commands with their options. Each is implemented in the module of its name, which is imported when it is called."""

import dataclasses
import errno
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from autotune import installed
from autotune.cli import options, service_app
from autotune.cli.database import database_app, study_app
from autotune.cli.jobs import jobs_app
from autotune.cli.options import SET, Database, Job, Json, Url
from autotune.cli.overview import OverviewGroup
from autotune.cli.question_app import planning_app, tuning_app
from autotune.cli.question_options import QuestionCommand, asked_values, command_of, given_fields, without_command
from autotune.cli.status import PROGRAM, Status, exit_status, print_error

app = typer.Typer(
    name=PROGRAM,
    cls=OverviewGroup,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def run() -> int:
    """Run the command line; return the exit status."""
    try:
        status = exit_status(app, *without_command(sys.argv[1:]))
        sys.stdout.flush()
        return status
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        with suppress(OSError):
            sys.stdout.close()  # what it still holds cannot be written either
        print_error("output: cannot be written, no space is left; free some where it goes")
        return Status.FAILURE


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


app.registered_commands += tuning_app.registered_commands
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
) -> Status:
    """Repeat a best configuration and check that it is inside its interval; exit status 1 if it is not."""
    from autotune.cli.reproduce import reproduce_command

    return reproduce_command(path, runner, ray_address, repeats, trace, json)


@app.command()
def guard(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A best-config.json.")],
    against: Annotated[
        Path, typer.Option(metavar="HISTORY", help="A file of its earlier runs, or a folder in which the script runs in turn.")
    ],
    record: Annotated[bool, typer.Option("--record", help="Add this run to HISTORY.")] = False,
    trials: Annotated[int, typer.Option(min=2, metavar="N", help="Trials of this run.")] = 5,
    tolerance: Annotated[float, typer.Option(min=0.0, metavar="SHARE", help="Slowdown that is no regression.")] = 0.01,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JUnit's XML too.")] = None,
    runner: Annotated[str | None, typer.Option(metavar="NAME", help="ray or local; default: as in the file.")] = None,
    ray_address: options.RayAddress = None,
    json: Json = False,
) -> Status:
    """Run a best configuration again and compare it with its earlier runs, or in turn with another checkout: whether a step
    became slower, by how much, and in which part (compute, communication, data or host); exit status 1 if it did."""
    from autotune.cli.guard import GuardOptions, guard_command

    asked = GuardOptions(
        path=path, against=against, trials=trials, tolerance=tolerance, record=record, junit=junit, runner=runner,
        ray_address=ray_address, json=json,
    )  # fmt: skip
    return guard_command(asked)


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
) -> Status:
    """Run a best configuration on another engine and compare samples/s and gain with the promised ones. For your own script,
    use --engine command and add its command after --."""
    from autotune.cli.reproduce import verify_command

    command = command_of(
        context, launcher=launcher, plugin=plugin, folder=folder, pattern=pattern, report_seconds=report_seconds
    )
    return verify_command(path, engine, command, runner, ray_address, rounds, write, json)


@app.command(cls=QuestionCommand)
def space(
    context: typer.Context,
    knobs: Annotated[bool, typer.Option("--knobs", help="List all knobs instead.")] = False,
    json: Json = False,
) -> Status:
    """Count the configurations of a space: how many are legal, and which rules refuse the others and why."""
    from autotune.cli.space import SpaceOptions, knobs_command, space_command

    if knobs:
        return knobs_command(json)
    return space_command(SpaceOptions(**asked_values(context), json=json))


@app.command()
def models(json: Json = False) -> Status:
    """List the models that are known by name: size, shape and source; also those in the Hugging Face hub's cache here."""
    from autotune.cli.names import models_command

    return models_command(json)


@app.command()
def clusters(json: Json = False) -> Status:
    """List the machines, cloud instances and devices that are known by name."""
    from autotune.cli.names import clusters_command

    return clusters_command(json)


@app.command()
def engines(markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/engines.md.")] = False) -> Status:
    """Show the values of each knob that the engines honour, and the combinations that they refuse and why."""
    from autotune.cli.engines import engines_command

    return engines_command(markdown)


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
) -> Status:
    """Check that files hold a model's weights, and convert them to another kind."""
    from autotune.text.console import Console
    from executor.files.convert import convert_weights
    from search_spaces.models.huggingface import resolve_model

    spec = resolve_model(model)
    if mtp_layers:
        spec = dataclasses.replace(spec, mtp_layers=mtp_layers)
    count = convert_weights(spec, source, target)
    Console().print(f"{target}: {count:,} tensors of {spec.name}")
    return Status.OK


@app.command(cls=QuestionCommand)
def profile(
    context: typer.Context,
    depth: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Levels of modules to show; 0: only the model. [default: all]")
    ] = None,
    every_block: Annotated[
        bool, typer.Option("--every-block", help="Show one row per block, even if blocks are alike.")
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds after which the profile is killed.")] = 300.0,
    json: Json = False,
) -> Status:
    """Show the cost of each module in a step: parameters, FLOPs, forward and backward time, share."""
    from autotune.cli.profile import ProfileOptions, profile_command

    # A job's default is no profile's: one micro-batch.
    asked = asked_values(context) | {"global_batch_size": given_fields(context).get("global_batch_size")}
    return profile_command(ProfileOptions(**asked, depth=depth, every_block=every_block, timeout=timeout, json=json))


app.registered_commands += planning_app.registered_commands
service_app.register(app)
app.add_typer(database_app, name="db")
app.add_typer(study_app, name="study")


Set = Annotated[list[str] | None, typer.Option("--set", **SET)]
Assume = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="A knob or size that the program that trains decides. May be repeated."),
]


@app.command(cls=QuestionCommand)
def lint(
    context: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[FORMAT] FILE...",
            help="auto, deepspeed, torchtitan, megatron, megatron-bridge, accelerate, axolotl, llama-factory or trainer.",
        ),
    ],
    version: Annotated[
        str | None,
        typer.Option("--for", metavar="VERSION", help="DeepSpeed version. [default: the installed one, else 0.19.8]"),
    ] = None,
    set_: Set = None,
    assume: Assume = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compute the memory exactly, by a dry run.")] = False,
    json: Json = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Print SARIF 2.1.0, for code scanning.")] = False,
) -> Status:
    """Check configurations of other frameworks: what is refused, ignored or changed, whether it fits, and the smallest fix.
    Exit status 1: findings; 2: a file that cannot be read."""
    from autotune.cli.lint import LintOptions, lint_command
    from autotune.question.question import QuestionFields

    checked = LintOptions(
        words=tuple(words),
        asked=QuestionFields(**given_fields(context)),
        version=version,
        stated=tuple(set_ or ()),
        assume=tuple(assume or ()),
        dry_run=dry_run,
        json=json,
        sarif=sarif,
    )
    return lint_command(checked)


RecipeFile = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A file that `lint` reads (FILE.py:FUNCTION), a best-config.json, or a job's id."),
]


@app.command(cls=QuestionCommand)
def carry(
    context: typer.Context,
    recipe: RecipeFile,
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
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Number of candidates to show.")] = 5,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File for the target's recipe. [default: printed]")] = None,
    set_: Set = None,
    assume: Assume = None,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Carry a recipe over to more, fewer or other nodes: what stays, what must change and why, the best layouts by prediction,
    and the recipe for the target. Nothing is run."""
    from autotune.cli.carry import CarryOptions, RecipeOptions, carry_command
    from autotune.question.question import QuestionFields

    source = RecipeOptions(
        recipe=recipe,
        source=from_,
        asked=QuestionFields(**given_fields(context)),
        stated=tuple(set_ or ()),
        assume=tuple(assume or ()),
        url=url,
        database=db,
    )
    return carry_command(
        CarryOptions(recipe=source, to=to, batch=batch, target_batch=target_batch, top=top, out=out, json=json)
    )


@app.command(cls=QuestionCommand)
def challenge(
    context: typer.Context,
    recipe: RecipeFile,
    predict_only: Annotated[bool, typer.Option("--predict-only", help="Decide by predictions; run nothing.")] = False,
    rivals: Annotated[int, typer.Option(min=1, max=50, metavar="N", help="Number of rivals.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="Rounds of finalists and recipe, at most.")] = 5,
    assume: Assume = None,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Challenge a recipe: predictions nominate rivals, and interleaved trials decide whether it is beaten, not beaten, or
    undecided. Exit status 1: beaten, or the recipe does not run."""
    from autotune.cli.carry import RecipeOptions
    from autotune.cli.challenge import ChallengeOptions, challenge_command
    from autotune.question.question import QuestionFields

    fields = given_fields(context)
    stated = {name: fields.pop(name) for name in ("model", "global_batch_size", "sequence_length") if name in fields}
    source = RecipeOptions(
        recipe=recipe, source=None, asked=QuestionFields(**stated), assume=tuple(assume or ()), url=url, database=db
    )
    return challenge_command(
            ChallengeOptions(
                recipe=source, cluster=fields.pop("cluster", None), ranks=fields.pop("ranks", None), rivals=rivals,
                rounds=rounds, predict_only=predict_only, json=json, fields=fields,
            )
        )  # fmt: skip


@app.command()
def cluster(
    release: Annotated[str | None, typer.Option(metavar="NODE", help="Allow trials on a quarantined node again.")] = None,
    ray_address: options.RayToInspect = None,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Show a Ray cluster: nodes, devices, links, quarantine; compare Ray's figures with a calibration's measurements."""
    from autotune.cli.cluster import cluster_command, release_command

    database = options.only_database("cluster", db)
    return cluster_command(ray_address, database, json) if release is None else release_command(release, database)


@app.command()
def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check every node of a Ray cluster and the links between them.")
    ] = False,
    ray_address: options.RayToInspect = None,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Check this installation and this machine; exit status 1 if something would prevent a sweep."""
    from autotune.cli.doctor import doctor_command

    return doctor_command(cluster, ray_address, db, json)


@app.command()
def clean(
    job: Job = None,
    all_: Annotated[bool, typer.Option("--all", help="Every job.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without this option only show what would be removed.")] = False,
    db: Database = None,
) -> Status:
    """Remove a job, or all jobs, from the database."""
    from autotune.cli.database import clean_command

    return clean_command(job, all_, yes, options.only_database("clean", db))
