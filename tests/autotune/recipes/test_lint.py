"""Recipes with planted faults: every fault is found with its fix, and nothing is said of good ones."""

import os
from pathlib import Path

import pytest
from lint_recipes import BRIDGE_CASES, CASES, RecipeCase, said

from autotune.errors import RequestError
from autotune.frameworks.check import legality

PAGE = Path(__file__).parents[3] / "docs" / "results" / "lint-recipes.md"
GOOD = [case for case in CASES if not case.fault]
FAULTY = [case for case in CASES if case.expected]
UNREADABLE = [case for case in CASES if case.refusal]


def named(case: RecipeCase) -> str:
    return f"{case.name}{'@' + case.cluster if case.cluster else ''}"


@pytest.mark.prove(every=4)
@pytest.mark.parametrize("case", GOOD, ids=named)
def test_nothing_is_said_of_a_good_recipe(case: RecipeCase) -> None:
    assert said(case) == "nothing"


@pytest.mark.parametrize("case", FAULTY, ids=named)
def test_every_planted_fault_is_found_with_its_fix(case: RecipeCase) -> None:
    found = case.linted().findings
    assert {finding.rule: dict(finding.fix) for finding in found} == case.expected, said(case)
    assert all(key in finding.remedy or "did you mean" in finding.remedy or case.file.startswith("deepspeed")
               for finding in found for key in finding.fix)  # fmt: skip


@pytest.mark.parametrize("case", FAULTY, ids=named)
def test_a_fix_removes_its_finding(case: RecipeCase) -> None:
    linted = case.linted()
    for finding in linted.findings:
        if finding.rule in ("memory", "experts-beyond-links"):
            continue  # predicted: checked below, with a cluster
        changed = linted.case.changed(finding.fix)
        assert finding.rule not in {one.rule for one in legality(changed)}


@pytest.mark.parametrize("case", UNREADABLE, ids=named)
def test_an_older_file_is_one_line(case: RecipeCase) -> None:
    with pytest.raises(RequestError) as caught:
        case.linted()
    assert str(caught.value) == case.refusal


def test_the_fix_of_memory_fits() -> None:
    from autotune.prediction.planning.estimate import StepEstimate
    from autotune.recipes.outlook import outlook

    case = next(case for case in FAULTY if "memory" in (case.expected or {}))
    linted = case.linted()
    (finding,) = linted.findings
    better = outlook(linted.case.changed(finding.fix))
    assert isinstance(linted.outlook, StepEstimate) and isinstance(better, StepEstimate)
    assert linted.outlook.fit_probability < 0.01 < 0.95 <= better.fit_probability


def test_the_thread_about_a_faster_layout() -> None:
    """Megatron-Bridge #949: the shipped layout is legal; the proposed one is predicted faster, and was measured to be."""
    from autotune.prediction.planning.estimate import StepEstimate

    shipped, proposed = (
        next(case for case in BRIDGE_CASES if name in case.file).linted().outlook for name in ("shipped", "proposed")
    )
    assert isinstance(shipped, StepEstimate) and isinstance(proposed, StepEstimate)
    assert proposed.samples_per_second.mean > shipped.samples_per_second.mean


@pytest.mark.prove
def test_the_page_is_current() -> None:
    """Write the page anew with AUTOTUNE_WRITE_GOLDEN=1."""
    text = page()
    if os.environ.get("AUTOTUNE_WRITE_GOLDEN"):
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text


def page() -> str:
    good, faulty = len(GOOD), len(CASES) - len(GOOD)
    about = (
        "Written by `AUTOTUNE_WRITE_GOLDEN=1 pytest tests/autotune/recipes/test_lint.py`. The files are in "
        "`tests/autotune/recipes/files`; they have the shapes of the published ones that are named. "
        f"{good} are good, and [lint](../recipes.md#check-a-recipe) says nothing of them; "
        f"{faulty} have a fault, which it finds with its fix. "
        "Faults with *as published* are in the named version."
    )
    lines = [
        "# Recipes under lint",
        "",
        about,
        "",
        "| file | shape of | cluster | fault | lint |",
        "|---|---|---|---|---|",
    ]
    for case in CASES:
        cells = (f"`{case.name}`", case.source, case.cluster or "–", case.fault or "–", said(case))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
