"""What DeepSpeed does with its settings: the table of `search_spaces.deepspeed.lint`, and shapes and memory like the others."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from autotune.imports.deepspeed import DEEPSPEED_FORMAT, ZERO, from_deepspeed
from autotune.imports.imported import Imported, flat
from autotune.lint.case import Framework, LintCase, Settings
from executor.engines.deepspeed.capability import installed_version
from search_spaces.deepspeed.lint import findings
from search_spaces.finding import Effect, Finding
from search_spaces.knob import Value

CHECKED = "0.19.8"
"""The version against which the rules are checked; used if none is installed or given."""
KEYS: Mapping[str, str] = {
    "micro_batch_size": "train_micro_batch_size_per_gpu", "global_batch_size": "train_batch_size", "zero_stage": f"{ZERO}stage",
    "tensor_parallel_size": "tensor_parallel.autotp_size", "offload_optimizer": f"{ZERO}offload_optimizer.device",
    "offload_param": f"{ZERO}offload_param.device",
}  # fmt: skip


def version_of(stated_version: str) -> str:
    """The version that is checked: the stated one, else the installed one, else `CHECKED`.

    Raises:
        RequestError: the stated text is not a version.
    """
    if stated_version and not re.match(r"\d+\.\d+", stated_version):
        raise RequestError("for", f"{stated_version!r} is not a version", f"write it as in {CHECKED}")
    return stated_version or installed_version() or CHECKED


def _own(case: LintCase) -> list[Finding]:
    table_findings = findings(nested(case.imported.settings), version_of(case.around.version), case.ranks)
    if (refused := _refused_value(case)) is not None and all(
        table_finding.key != refused.key for table_finding in table_findings
    ):
        table_findings.append(refused)
    return [replace(finding, fix=_fix(case, finding)) for finding in table_findings]


def _refused_value(case: LintCase) -> Finding | None:
    """The first value that is no knob's, of another type or out of range. DeepSpeed takes 0 and 1 for switches and allows 0 for
    sizes, and does not check the clipping.
    """
    try:
        from_deepspeed(case.imported.settings, Path(case.source).name)
    except RequestError as error:
        if case.get(error.field) not in (0, 1) and error.field != "gradient_clipping":
            return Finding(rule="value", key=error.field, effect=Effect.REFUSED, problem=error.problem, remedy=error.remedy)
    return None


def _fix(case: LintCase, finding: Finding) -> Settings:
    """The change that the table's remedy describes, where it is one of settings."""
    if finding.rule == "batch-product":
        steps = case.get("gradient_accumulation_steps") or 1
        return {KEYS["global_batch_size"]: case.get(KEYS["micro_batch_size"]) * steps * case.ranks}
    if finding.rule == "offload-param-stage":
        return {finding.key: None, f"{finding.key}.device": None}
    meant = re.fullmatch(r"did you mean (\w+)\?", finding.remedy)
    if meant is not None:
        table, dot, _ = finding.key.rpartition(".")
        return {finding.key: None, f"{table}{dot}{meant[1]}": case.get(finding.key)}
    return {finding.key: None} if finding.remedy.startswith("leave it out") else {}


def nested(settings: Settings) -> dict[str, Any]:
    """The tables of flat keys."""
    content: dict[str, Any] = {}
    for key, value in settings.items():
        *tables, name = key.split(".")
        node = content
        for table in tables:
            node = node.setdefault(table, {})
        node[name] = value
    return content


def _read(settings: Settings, source: str) -> Imported:
    """As `from_deepspeed`; a file with a value that is no knob's has no knobs."""
    try:
        return from_deepspeed(settings, source)
    except RequestError as error:
        return Imported(knobs={}, format=DEEPSPEED_FORMAT, settings=dict(flat(settings)), unreadable=str(error))


def _write(_: LintCase, knob: str, value: Value) -> Settings:
    return {KEYS[knob]: value} if knob in KEYS else {}


DEEPSPEED = Framework(
    name=DEEPSPEED_FORMAT, title="DeepSpeed", checked=CHECKED, read=_read, checks=(), keys=KEYS, write=_write,
    undeclared_findings=_own,
    rules=frozenset({"tensor-divides"}),
)  # fmt: skip
