"""`autotune challenge`: is a recipe beaten by rivals that predictions nominate?"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from autotune.cli.carry import RecipeOptions
from autotune.cli.foreground import print_line
from autotune.cli.imported import with_found
from autotune.cli.status import Status, write_document
from autotune.errors import RequestError
from autotune.frameworks.framework import LintCase, Surroundings
from autotune.outcome.job_snapshot import read_snapshot
from autotune.prediction.planning.question import cluster_of
from autotune.ray_cluster import with_address
from autotune.recipes.assumed import conditional
from autotune.recipes.candidates import shortage
from autotune.recipes.challenge import (
    Challenged,
    Nomination,
    Result,
    Rival,
    challenge_session,
    judge,
    nominate,
    rival_text,
)  # fmt: skip
from autotune.recipes.lint import assumed_lines, outlook_text
from autotune.recipes.outlook import fits
from autotune.recipes.recipe import Recipe
from autotune.request.rows import request_from_fields
from autotune.session.resolve import prepare
from autotune.session.session import Session
from autotune.session.trial_requests import make_runner
from autotune.text.console import Console
from autotune.text.rows import rate_text
from autotune.tuning import finish, open_job
from executor.runners.runner import Runner
from search_spaces.plain import to_plain
from search_spaces.trial import Interval
from storage.address import default_database_url
from storage.store import Store, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class ChallengeOptions:
    """Parsed options of the command."""

    recipe: RecipeOptions
    cluster: str | None
    ranks: int | None
    rivals: int
    rounds: int
    predict_only: bool
    json: bool
    fields: Mapping[str, Any]
    """Further fields of the request of the trials."""


def challenge_command(options: ChallengeOptions) -> Status:
    """Nominate, run and print. Status 1: the recipe is beaten, or did not run."""
    recipe, console = options.recipe.read(), Console(stderr=True)
    if options.predict_only:
        case = _placed(recipe, options, None)
        nomination = nominate(case, _batch(case, recipe), options.rivals)
        _report(recipe, nomination, None, options.json)
        return Status.FAILURE if nomination.result is Result.BEATEN else Status.OK
    quiet = (lambda _: None) if options.json else (lambda line: print_line(console, line))
    session, nomination = prepare_challenge(recipe, options, quiet)
    rivals = len(nomination.rivals)
    with (
        open_store(options.recipe.database or default_database_url()) as store,
        Console(stderr=True).status(f"running the recipe and {rivals} rivals"),
        make_runner(session) as runner,
    ):
        challenged = run_challenge(session, nomination, store, runner)
    _report(recipe, nomination, challenged, options.json)
    return Status.FAILURE if challenged.result is Result.BEATEN or challenged.rate is None else Status.OK


def prepare_challenge(recipe: Recipe, options: ChallengeOptions, say: Callable[[str], None]) -> tuple[Session, Nomination]:
    """The session whose baseline is the recipe, and its rivals. `say`: takes what was read from the recipe, line by line."""
    fields = _fields(recipe, options)
    request = request_from_fields(with_found(fields, recipe.case.imported, recipe.name, _ranks(options), say))
    session = prepare(dataclasses.replace(request, resolved_model=recipe.case.model))
    case = _placed(recipe, options, session)
    return session, nominate(case, session.request.global_batch_size, options.rivals)


def run_challenge(session: Session, nomination: Nomination, store: Store, runner: Runner) -> Challenged:
    """Run the recipe and its rivals as a job, and decide."""
    session, rivals = challenge_session(session, nomination)
    job = open_job(store, session)
    finish(session, store, job.id, runner)
    return judge(session, read_snapshot(store, job.id), rivals)


def _ranks(options: ChallengeOptions) -> tuple[int, ...]:
    return (options.ranks,) if options.ranks else ()


def _fields(recipe: Recipe, options: ChallengeOptions) -> dict[str, Any]:
    """The fields of the request. The text of the model is the user's, or the recipe's own model."""
    case = recipe.case
    if case.model is None:
        raise RequestError("model", f"{recipe.name} does not say which model it trains", "give --model MODEL")
    fields = {
        "model": options.recipe.asked.model or case.model.name, "cluster": options.cluster,
        "ranks": options.ranks, "global_batch_size": options.recipe.asked.global_batch_size,
        "sequence_length": options.recipe.asked.sequence_length or case.imported.sequence_length or case.around.sequence_length,
        "confirm_repeats": options.rounds, "strategy": "random", "environments": None, "name": f"challenge of {recipe.name}",
        **options.fields,
    }  # fmt: skip
    return with_address({name: value for name, value in fields.items() if value is not None})


def _placed(recipe: Recipe, options: ChallengeOptions, session: Session | None) -> LintCase:
    """The recipe on the cluster that is asked for."""
    around = recipe.case.around
    if session is not None:
        request = session.request
        around = Surroundings(
            model=recipe.case.model, cluster=session.cluster, global_batch_size=request.global_batch_size,
            sequence_length=request.sequence_length,
        )  # fmt: skip
    elif options.cluster:
        around = dataclasses.replace(around, cluster=cluster_of(options.cluster, options.ranks, None))
    if around.cluster is None:
        raise RequestError("cluster", "is missing: predictions need one", "give --cluster NAME:NODES")
    return dataclasses.replace(recipe.case, around=around)


def _batch(case: LintCase, recipe: Recipe) -> int:
    if case.batch is None:
        raise RequestError("recipe", f"{recipe.name} does not state its global batch", "give --global-batch-size")
    return case.batch


def _report(recipe: Recipe, nomination: Nomination, challenged: Challenged | None, as_json: bool) -> None:
    result = nomination.result if challenged is None else challenged.result
    rivals = nomination.rivals if challenged is None else challenged.rivals
    if as_json:
        write_document(_document(recipe, nomination, challenged))
        return
    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    outlook = nomination.outlook
    answer = None if isinstance(outlook, str) else conditional(nomination.case, outlook)
    for line in (f"{recipe.name}: {outlook_text(answer or outlook)}", *assumed_lines(answer)):
        say(line)
    if rivals:
        console.print(_table(rivals), highlight=False)
    say(_verdict(result, nomination, challenged))


def _verdict(result: Result, nomination: Nomination, challenged: Challenged | None) -> str:
    if challenged is None:
        rivals = [rival for rival in nomination.rivals if rival.predicted is not None]
        best = max(rivals, key=lambda rival: rival.predicted.mean if rival.predicted else 0.0, default=None)
        outlook = nomination.outlook
        if isinstance(outlook, str):
            return f"by prediction: {result.value}, because the recipe is not predicted here: {outlook}"
        if not fits(outlook):
            why = f"{shortage(outlook)} (fits with probability {outlook.fit_probability:.2f})"
            return f"by prediction the recipe does not fit: {why}"
        if best is None or best.predicted is None:
            return f"by prediction: {result.value}; no rival was found"
        return f"by prediction: {result.value}; the best rival is {_times(best.predicted)} as fast ({rival_text(best)})"
    if challenged.rate is None:
        return challenged.message
    rate = f"the recipe reached {rate_text(challenged.rate)} samples/s in {challenged.rounds} measurements"
    match challenged:
        case Challenged(result=Result.BEATEN, gain=Interval() as gain, best=Rival() as best):
            return f"beaten: {_times(gain)} as fast with {rival_text(best)}; {rate}"
        case Challenged(gain=Interval() as gain):
            return f"{result.value}: the best rival was {_times(gain)} as fast; {rate}"
        case _:
            return f"{result.value}: no rival ran to its end; {rate}"


def _times(ratio: Interval) -> str:
    return f"{ratio.mean:.2f} times ({ratio.low:.2f} to {ratio.high:.2f})"


def _table(rivals: tuple[Rival, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("rival", "predicted", "measured"):
        table.add_column(name, overflow="fold")
    for rival in rivals:
        measured = _times(rival.measured) if rival.measured else rival.outcome.lower() or "–"
        table.add_row(rival_text(rival), _times(rival.predicted) if rival.predicted else "–", measured)
    return table


def _document(recipe: Recipe, nomination: Nomination, challenged: Challenged | None) -> dict[str, Any]:
    outlook = nomination.outlook
    predicted = None if isinstance(outlook, str) else outlook.document(every_rank=False)["predicted"]
    return {
        "recipe": recipe.name,
        "format": recipe.case.framework.name,
        "by": "prediction" if challenged is None else "trials",
        "result": (nomination.result if challenged is None else challenged.result).value,
        "gain": None if challenged is None else to_plain(challenged.gain),
        "best": None if challenged is None else to_plain(challenged.best),
        "rate": None if challenged is None else to_plain(challenged.rate),
        "measurements": None if challenged is None else challenged.rounds,
        "message": "" if challenged is None else challenged.message,
        "predicted": predicted,
        "not_predicted": outlook if isinstance(outlook, str) else None,
        "assumed": [] if isinstance(outlook, str) else conditional(nomination.case, outlook).conditions.document(),
        "rivals": [to_plain(rival) for rival in (nomination.rivals if challenged is None else challenged.rivals)],
    }
