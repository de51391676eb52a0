"""Commands for jobs in a service or a database; each is implemented in the module of its name."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import options
from autotune.cli.options import Database, Job, Json, OneJob, Url
from autotune.cli.status import end

FORMATS = (
    "json", "deepspeed", "accelerate-fsdp", "accelerate-deepspeed", "transformers", "torchtitan", "megatron", "lightning",
    "torch", "ray", "slurm", "torchrun",
)  # fmt: skip
"""Formats of `autotune.frameworks.exporters`, which is not imported for the help."""

jobs_app = typer.Typer()


@jobs_app.command()
def submit() -> None:
    """Submit a tuning job to the workers; prints its id to standard output."""


@jobs_app.command()
def jobs(
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="NAME", help="Jobs in this state, such as running. May be repeated. [default: all]"),
    ] = None,
    submitter: Annotated[str | None, typer.Option(metavar="NAME", help="Jobs of this submitter. [default: all]")] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="WORD", help="Jobs with this tag. May be repeated: jobs with all of them."),
    ] = None,
    text: Annotated[
        str,
        typer.Option(metavar="WORDS", help="Jobs with all these words in their name, note, tags, model, id or message."),
    ] = "",
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of jobs.")] = 50,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """List the newest jobs: model, state, trials, gain relative to the baseline."""
    from autotune.cli.jobs import list_command

    end(lambda: list_command(url, db, state or (), submitter, tag or (), text, limit, json))


@jobs_app.command()
def watch(job: Job = None, url: Url = None, db: Database = None) -> None:
    """Follow a job until it ends: finished trials and the best so far. Ctrl-C detaches; the job continues."""
    from autotune.cli.watch import watch_command

    end(lambda: watch_command(job, url, db))


@jobs_app.command()
def show(
    job: Job = None,
    top: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Show only the N best search trials; with --sort the first N of all. [default: all]"
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD", help="number, samples_per_second, peak_memory_bytes, seconds, or a knob. [default: number]"
        ),
    ] = None,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Show a job: its state, its trials, the best configuration."""
    from autotune.cli.show import ShowOptions, show_command

    end(lambda: show_command(ShowOptions(job=job, top=top, sort=sort, url=url, database=db, json=json)))


@jobs_app.command()
def logs(
    job: OneJob,
    trial: Annotated[int, typer.Argument(metavar="TRIAL", min=0, max=2**31 - 1, help="A trial's number.")],
    attempt: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only this attempt. [default: all attempts]")] = None,
    rank: Annotated[int | None, typer.Option(min=0, metavar="N", help="Only this rank. [default: all ranks]")] = None,
    tail: Annotated[int | None, typer.Option(min=0, metavar="N", help="Only the last N lines. [default: all]")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until the trial ends, over all its attempts.")
    ] = False,
    url: Url = None,
    db: Database = None,
) -> None:
    """Print the output of a trial's ranks: the beginning and the end of each attempt."""
    from autotune.cli.logs import LogsOptions, logs_command

    end(
        lambda: logs_command(
            LogsOptions(
                job=job, trial=trial, attempt=attempt, rank=rank, tail=tail, follow=follow, url=url, database=db
            )
        )
    )  # fmt: skip


@jobs_app.command()
def explain(
    job: Job = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the report as Markdown instead.")
    ] = None,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Explain why a job's best configuration is the best: time, memory, each knob, bottlenecks, possible improvements."""
    from autotune.cli.explain import ExplainOptions, explain_command

    end(lambda: explain_command(ExplainOptions(job=job, markdown=markdown, url=url, database=db, json=json)))


@jobs_app.command()
def report(
    job: Job = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output file. [default: standard output, with --format md]")
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="html or md. [default: by FILE's suffix, else html]")
    ] = None,
    url: Url = None,
    db: Database = None,
) -> None:
    """Write a report of a job as one self-contained HTML file with figures, data and explanation, or as Markdown."""
    from autotune.cli.report import report_command

    end(lambda: report_command(job, format_, out, url, db))


@jobs_app.command()
def export(
    job: Job = None,
    format_: Annotated[str, typer.Option("--format", metavar="NAME", help=f"{', '.join(FORMATS)}.")] = "json",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Output file. [default: standard output]")] = None,
    url: Url = None,
    db: Database = None,
) -> None:
    """Write a job's best configuration in a framework's format."""
    from autotune.cli.export import export_command

    end(lambda: export_command(job, format_, out, url, db))


@jobs_app.command()
def pause(job: OneJob, url: Url = None, db: Database = None, json: Json = False) -> None:
    """Pause a job after its running trials have ended, until it is resumed."""
    from autotune.cli.jobs import ask_command

    end(lambda: ask_command("pause", job, url, db, json))


@jobs_app.command()
def resume(
    job: OneJob,
    trials: options.AllTrials = None,
    max_seconds: options.AllSeconds = None,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Queue a paused or failed job again, or one that gets a larger budget."""
    from autotune.cli.jobs import ask_command

    end(lambda: ask_command("resume", job, url, db, json, options.given(trials=trials, max_seconds=max_seconds)))


@jobs_app.command()
def stop(job: OneJob, url: Url = None, db: Database = None, json: Json = False) -> None:
    """Stop a job after its running trials have ended; the answer is the best so far."""
    from autotune.cli.jobs import ask_command

    end(lambda: ask_command("stop", job, url, db, json))


@jobs_app.command()
def cancel(job: OneJob, url: Url = None, db: Database = None, json: Json = False) -> None:
    """Kill a job's running trials and end the job."""
    from autotune.cli.jobs import ask_command

    end(lambda: ask_command("cancel", job, url, db, json))


@jobs_app.command()
def clone(job: OneJob, url: Url = None, db: Database = None, json: Json = False) -> None:
    """Submit a job's request again; prints the new id to standard output."""
    from autotune.cli.jobs import clone_command

    end(lambda: clone_command(job, url, db, json))


@jobs_app.command()
def extend(
    job: OneJob,
    trials: options.AllTrials = None,
    max_seconds: options.AllSeconds = None,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Set the total budget of a job that has not ended. Use `resume` for a job that has succeeded."""
    from autotune.cli.jobs import extend_command

    end(lambda: extend_command(job, trials, max_seconds, url, db, json))


@jobs_app.command()
def label(
    job: OneJob,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="Name of the job; '' removes it.")] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="WORD", help="A tag that replaces the present ones; '' removes them. May be repeated."),
    ] = None,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="Note about the job; '' removes it.")] = None,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Change the name, tags or note of a job in any state."""
    from autotune.cli.jobs import label_command

    tags = None if tag is None else tuple(word for word in tag if word)
    end(lambda: label_command(job, options.given(name=name, tags=tags, note=note), url, db, json))
