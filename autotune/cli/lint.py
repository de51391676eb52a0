"""`autotune lint`: check configurations of other frameworks: what has no effect, whether it fits, and how fast it is."""

from dataclasses import dataclass, replace
from pathlib import Path

from autotune.cli.status import Status, print_error, write_document
from autotune.errors import AutotuneError, RequestError, UnknownFormatError
from autotune.frameworks.deepspeed_checks import version_of
from autotune.frameworks.framework import Surroundings
from autotune.frameworks.read import FORMATS, FRAMEWORKS, Written, named, read_written
from autotune.frameworks.shell_values import stated_variables
from autotune.prediction.planning.question import cluster_of
from autotune.question.question import QuestionFields
from autotune.recipes.assumed import surroundings_with
from autotune.recipes.lint import Linted, checked_version, document, lint, sarif, text_lines
from autotune.recipes.outlook import STOPS, dry_run
from autotune.recipes.remedies import exact
from autotune.text.console import Console
from search_spaces.errors import Effect, SearchSpaceError
from search_spaces.models.huggingface import resolve_model


@dataclass(frozen=True, slots=True, kw_only=True)
class LintOptions:
    """Parsed options of the command."""

    words: tuple[str, ...]
    """A format, which may be missing, and files."""
    version: str | None
    asked: QuestionFields
    """What the files do not say, or say otherwise."""
    stated: tuple[str, ...]
    """NAME=VALUE of variables and arguments of launch scripts."""
    assume: tuple[str, ...]
    """NAME=VALUE of what the program that trains decides."""
    dry_run: bool
    json: bool
    sarif: bool


def lint_command(options: LintOptions) -> Status:
    """Check every file and print. Exit status 0: no findings but warnings that a configuration may not fit; 1: findings; 2: a
    file could not be read."""
    if options.json and options.sarif:
        raise RequestError("sarif", "is a document of its own", "leave --json out")
    format_name, paths = _asked(options.words)
    around = _surroundings(options, format_name)
    linted: list[Linted] = []
    unread: list[str] = []
    for path in paths:
        try:
            linted += [
                _checked(recipe, around, options.dry_run) for recipe in read_written(path, format_name, stated=around.variables)
            ]
        except UnknownFormatError:
            raise
        except (AutotuneError, SearchSpaceError) as caught:
            error = named(caught, "file")
            if len(paths) == 1 and not options.sarif:
                raise error from None
            unread.append(f"{path}: {error}")
    _print(linted, unread, options)
    if unread:
        return Status.USAGE
    effects = {finding.effect for configuration in linted for finding in configuration.findings}
    return Status.FAILURE if effects - {Effect.MAY_NOT_FIT} else Status.OK


def _asked(words: tuple[str, ...]) -> tuple[str, list[Path]]:
    """The format, empty if the files decide it, and the files."""
    first, further = words[0], words[1:]
    if first in ("auto", *FORMATS):
        if not further:
            raise RequestError("file", "is missing", "name the files to check")
        return "" if first == "auto" else first, [Path(word) for word in further]
    if further and not Path(first).exists():
        raise UnknownFormatError("format", f"{first!r} is not known", f"use auto, {', '.join(FORMATS)}")
    return "", [Path(word) for word in words]


def _surroundings(options: LintOptions, format_name: str) -> Surroundings:
    if options.version is not None and format_name not in ("", "deepspeed"):
        framework = FRAMEWORKS[format_name]
        raise RequestError("for", f"{framework.title} is checked as of {framework.checked}", "leave it out")
    version_of(options.version or "")
    asked = options.asked
    around = Surroundings(
        model=resolve_model(asked.model) if asked.model else None,
        cluster=cluster_of(asked.cluster, asked.ranks, None) if asked.cluster else None,
        ranks=asked.ranks,
        global_batch_size=asked.global_batch_size,
        sequence_length=asked.sequence_length,
        variables=stated_variables(options.stated),
        version=options.version or "",
    )
    return surroundings_with(around, options.assume)


def _checked(recipe: Written, around: Surroundings, dry: bool) -> Linted:
    linted = lint(recipe, around)
    if not dry or any(finding.effect in STOPS for finding in linted.findings):
        return linted
    # The dry run is exact for our engine, so that its answer replaces the predicted one.
    other_findings = tuple(finding for finding in linted.findings if finding.rule != "memory")
    with Console(stderr=True).status(f"dry run of {recipe.name}"):
        return replace(linted, findings=(*other_findings, *exact(linted.case, dry_run(linted.case))))


def _print(linted: list[Linted], unread: list[str], options: LintOptions) -> None:
    if options.sarif:
        write_document(sarif(linted, unread))
        return
    for line in unread:
        print_error(line)
    if options.json:
        files = [document(configuration, checked_version(configuration, options.version or "")) for configuration in linted]
        write_document({"files": files, "unread": unread})
        return
    console = Console()
    for configuration in linted:
        for line in text_lines(configuration, checked_version(configuration, options.version or "")):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
