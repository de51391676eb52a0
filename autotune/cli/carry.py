"""`autotune carry`: a recipe on another cluster."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from autotune.cli.open_backend import open_backend
from autotune.cli.status import Status, write_document
from autotune.errors import RequestError
from autotune.frameworks.framework import Surroundings
from autotune.frameworks.shell_values import stated_variables
from autotune.output import require_writable, write_whole
from autotune.prediction.planning.estimate import StepEstimate
from autotune.prediction.planning.question import cluster_of
from autotune.question.question import QuestionFields
from autotune.recipes.assumed import surroundings_with
from autotune.recipes.candidates import LEVERS, Candidate, certain_gain, tie_ratio
from autotune.recipes.carry import BatchRule, Carried, carry, document
from autotune.recipes.lint import assumed_lines, grouped, outlook_text
from autotune.recipes.outlook import GIB
from autotune.recipes.recipe import Recipe, recipe_of
from autotune.request.field_forms import reshaped
from autotune.text.console import Console
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.knob_values import value_text
from search_spaces.models.huggingface import resolve_model
from search_spaces.quantities import number_text


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """Parsed options about the recipe, of `carry` and `challenge`."""

    recipe: str
    source: str | None
    """The cluster that it is for."""
    asked: QuestionFields
    """What the recipe does not say, or says otherwise."""
    stated: tuple[str, ...] = ()
    """NAME=VALUE of variables and arguments of a launch script."""
    assume: tuple[str, ...] = ()
    """NAME=VALUE of what the program that trains decides."""
    url: str | None
    database: str | None

    def read(self) -> Recipe:
        """The recipe."""

        def job(name: str) -> Mapping[str, Any]:
            with open_backend(self.url, self.database) as backend:
                return dict(json.loads(backend.export(name, "json").text))

        around = Surroundings(
            model=resolve_model(self.asked.model) if self.asked.model else None,
            cluster=cluster_of(self.source, None, None) if self.source else None,
            global_batch_size=self.asked.global_batch_size,
            sequence_length=self.asked.sequence_length,
            variables=stated_variables(self.stated),
        )
        return recipe_of(self.recipe, surroundings_with(around, self.assume), job)


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryOptions:
    """Parsed options of the command."""

    recipe: RecipeOptions
    to: str
    batch: str
    target_batch: int | None
    top: int
    out: Path | None
    json: bool


def carry_command(options: CarryOptions) -> Status:
    """Print what changes and why, the candidates and the target's recipe, which goes to `out` if that is given."""
    if options.batch not in list(BatchRule):
        raise RequestError("batch", f"{options.batch!r} is not known", f"use {' or '.join(BatchRule)}")
    if options.out is not None:
        require_writable(options.out)
    recipe = options.recipe.read()
    carried = carry(recipe, _target(options.to, recipe.cluster), BatchRule(options.batch), options.target_batch, options.top)
    if options.out is not None:
        write_whole(options.out, carried.target.text)
    if options.json:
        write_document(document(carried))
        return Status.OK
    _print(carried, options.out, Console())
    return Status.OK


def _target(text: str, source: ClusterSpec | None) -> ClusterSpec:
    """The cluster that `text` names; NODESxDEVICES: nodes like those of the recipe's cluster."""
    nodes, _, devices = text.partition("x")
    if not (nodes.isdigit() and devices.isdigit()):
        return cluster_of(text, None, None)
    if source is None:
        problem = f"{text} is a shape of the recipe's cluster, which is not known"
        raise RequestError("to", problem, "give --from NAME:NODES, or the target as NAME:NODES")
    return reshaped(source, "to", text)


def _print(carried: Carried, out: Path | None, console: Console) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    source, cluster = carried.recipe.case, carried.cluster
    ranks = f"{source.ranks} ranks" if source.ranks else "its ranks"
    model = source.model.name if source.model else "?"
    devices = f"{cluster.nodes} x {cluster.devices_per_node} of {cluster.device.name}"
    say(f"{carried.recipe.name}: {model}, from {ranks} to {cluster.world_size} ({devices})")
    batch_note = "stays" if carried.batch == carried.batch_before else f"was {carried.batch_before}"
    say(f"global batch {carried.batch} ({batch_note})")
    say("\nunchanged layout, with another number of replicas", "bold")
    for finding in carried.problems:
        say(f"  {finding}")
    say(f"  {carried.same_outlook if isinstance(carried.same_outlook, str) else outlook_text(carried.same_outlook)}")
    for note in grouped(carried.same.imported.notes):
        say(f"  note: {note}")
    say("\nchanges", "bold")
    for change in carried.changes:
        before = "not stated" if change.before is None else value_text(change.before)
        after = "left out" if change.after is None else value_text(change.after)
        say(f"  {change.name}: {before} -> {after} ({'must' if change.required else 'gain'}: {change.reason})")
    if not carried.changes:
        say("  none")
    say("\nstays", "bold")
    say("  " + (", ".join(f"{name}={value_text(value)}" for name, value in carried.stays.items()) or "nothing"))
    say("\npredicted, best first", "bold")
    console.print(_table(carried), highlight=False)
    tie = tie_ratio(carried.same) - 1
    say(f"Of layouts up to {tie:.0%} slower than the fastest that remains, those with fewer changes come first.", "dim")
    if not carried.candidates[0].distance:
        say(f"The unchanged layout leads: no other is {certain_gain(carried.same):.2f} times as fast, which is certain.", "dim")
    for line in assumed_lines(carried.conditional):
        say(line)
    for note in carried.target.notes:
        say(f"note: {note}")
    if carried.target.anew:
        say("note: the file was written anew: its own form has no place for these settings")
    if carried.target.lost:
        say(f"note: the written file does not state {', '.join(carried.target.lost)} as wanted: set them by hand")
    if out is not None:
        say(f"\nwritten to {out}")
        return
    say(f"\n{carried.target.name}", "bold")
    console.print(carried.target.text, end="", highlight=False, markup=False, soft_wrap=True)


def _table(carried: Carried) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "samples/s", "GiB", "fits", "differs from the recipe in"):
        table.add_column(name, justify="right" if name in ("samples/s", "GiB", "fits") else "left", overflow="fold")
    for number, candidate in enumerate(carried.candidates, 1):
        table.add_row(str(number), *_figures(candidate.outlook), _differences(carried, candidate))
    if isinstance(carried.same_outlook, StepEstimate) and all(candidate.distance for candidate in carried.candidates):
        table.add_row("=", *_figures(carried.same_outlook), "only the number of replicas")
    return table


def _figures(outlook: StepEstimate) -> tuple[str, str, str]:
    return (
        number_text(outlook.samples_per_second.mean),
        f"{outlook.peak_memory_bytes.mean / GIB:.0f}",
        f"{outlook.fit_probability:.2f}",
    )


def _differences(carried: Carried, candidate: Candidate) -> str:
    source = carried.recipe.case.config
    different = [name for name in LEVERS if getattr(candidate.config, name) != getattr(source, name)]
    return (
        ", ".join(f"{name}={value_text(getattr(candidate.config, name))}" for name in different)
        or "only the number of replicas"
    )
