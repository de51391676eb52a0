"""`autotune plan --objective goodput`: what is printed, the JSON document, and refusals."""

import json
from pathlib import Path

import pytest
from called import Command

ASKED = ("plan", "llama-3-8b", "--cluster", "dgx-h100:16", "--space", "zero", "--sequence-length", "8192", "--top", "1")
OBJECTIVE = ("--objective", "goodput", "--global-batch-size", "128")


def test_a_plan_says_how_to_run_it(command: Command) -> None:
    answer = command(*ASKED, *OBJECTIVE, "--goodput", "failures=rsc1", "--goodput", "tokens=1e12", "--price", "2")
    assert (answer.status, answer.err) == (0, "")
    assert "ranked by tokens kept per device-hour on nodes that fail" in answer.out
    assert " effective, " in answer.out
    assert "interruptions until 1e+12 tokens in " in answer.out
    assert " in all" in answer.out


def test_a_log_of_failures_gives_the_rates(command: Command, tmp_path: Path) -> None:
    log = tmp_path / "failures.csv"
    log.write_text("hours,kind\n0,start\n100,gpu\n260,gpu\n400,planned\n480,end\n")
    answer = command(*ASKED, *OBJECTIVE, "--goodput", f"failures={log}", "--json")
    (plan,) = json.loads(answer.out)["plans"]
    best = plan["goodput"][0]
    assert best["failures_source"] == "failures.csv: 3 interruptions in 480 h on 16 nodes"
    assert best["interruptions"] / best["hours"] == pytest.approx(2 / 480, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*OBJECTIVE, "--goodput", "spare=1"), "goodput: 'spare' is not known; use one of failures, "),
        ((*OBJECTIVE, "--goodput", "failures=none.csv"), "failures: none.csv: it cannot be read"),
        (("--goodput", "spares=1"), "goodput: belongs to the objective goodput; leave it out"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(command: Command, arguments: tuple[str, ...], message: str) -> None:
    answer = command(*ASKED, *arguments)
    assert (answer.status, answer.out, len(answer.err.splitlines())) == (2, "", 1)
    assert message in answer.err
