"""A recipe that the user names: a file that lint reads, a best-config document, or a job."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from autotune.imports.read import BEST_CONFIG as BEST_CONFIG_KEYS
from autotune.imports.read import Written, read_table, read_written
from autotune.lint.case import Case, Surroundings
from autotune.lint.legality import undecided_settings
from autotune.lint.lint import case_of
from autotune.lint.memory import Outlook
from autotune.recipes import best_config
from autotune.recipes.rewriting import Rewritten, rewritten
from search_spaces.clusters.cluster import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe as it is."""

    name: str
    case: Case
    document: Mapping[str, Any] | None
    """The best-config document; None: it is another framework's file."""
    written: Written | None
    cluster: ClusterSpec | None
    """Where it runs; None: not known."""

    def text(self, case: Case, outlook: Outlook) -> Rewritten:
        """The recipe with another layout, in its own format."""
        if self.document is not None:
            return Rewritten(text=best_config.text_for(self.document, case, outlook), name="best-config.json")
        assert self.written is not None
        return rewritten(self.written, case.found.settings)


def recipe_of(name: str, around: Surroundings, find_job: Callable[[str], Mapping[str, Any]]) -> Recipe:
    """Read a recipe.

    Args:
        name: a file; FILE:FUNCTION for a Python file with several recipes; a job's id.
        around: what the user says beside it; the cluster is the one that it runs on.
        find_job: the best-config document of a job.

    Raises:
        RequestError: the file cannot be read, or has several recipes.
        BestConfigError: the document cannot be read.
        StorageError: there is neither such a file nor such a job.
    """
    file, _, function = name.partition(".py:")
    path = Path(f"{file}.py" if function else name)
    if not path.exists() and not path.suffix and "/" not in name:
        return _of_document(find_job(name), f"job {name}", around)
    if path.suffix == ".json" and path.exists() and read_table(path).keys() >= BEST_CONFIG_KEYS:
        return _of_document(read_table(path), path.name, around)
    found = [one for one in read_written(path) if not function or one.name == f"{path.name}:{function}"]
    if len(found) != 1:
        names = ", ".join(one.name for one in (found or read_written(path))[:5])
        raise RequestError("recipe", f"{path} has the recipes {names}", f"name one of them, as {path}:FUNCTION")
    case = case_of(found[0], around)
    if undecided := undecided_settings(case):
        problem = f"{path} decides {', '.join(undecided)} when it runs"
        raise RequestError("recipe", problem, "write the values into it, or give --global-batch-size and --sequence-length")
    return Recipe(name=found[0].name, case=case, document=None, written=found[0], cluster=around.cluster)


def _of_document(document: Mapping[str, Any], name: str, around: Surroundings) -> Recipe:
    settings, model, cluster = best_config.settings_of(document)
    known = Surroundings(
        model=around.model or model, cluster=around.cluster or cluster, global_batch_size=around.global_batch_size,
        sequence_length=around.sequence_length or best_config.tokens_of(document),
    )  # fmt: skip
    case = Case(framework=best_config.FRAMEWORK, found=best_config.FRAMEWORK.read(settings, name), around=known, source=name)
    return Recipe(name=name, case=case, document=document, written=None, cluster=known.cluster)
