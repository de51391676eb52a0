"""What a framework's export says without loss: the part of a space that `--simple TARGET` searches."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator

from autotune.errors import ExportRefusedError, RequestError
from autotune.exports import MAKERS, Export
from autotune.exports.winner import Stated, Winner
from search_spaces.knobs import value_text
from search_spaces.space import SearchSpace
from search_spaces.spaces import COMPILED, settled
from search_spaces.trial_config import TrialConfig, Value

COMPANIONS = ("zero_stage", "tensor_parallel_size", "pipeline_parallel_size", "virtual_stages", "activation_checkpointing")
"""Knobs that decide whether others matter: a value is looked at beside each of theirs, of degrees beside 1 and one more."""
MOST_VALUES = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "virtual_stages": 2}
_NAMED = re.compile(r"(?:^|, )([a-z_]+)=")
"""A knob at the head of a note: `KNOB=VALUE: …`, or several."""


def expressible(space: SearchSpace, target: str, pinned: frozenset[str] = frozenset()) -> SearchSpace:
    """The space without what the target's export cannot say.

    A value of a knob stays where the export of a legal configuration that has it has no note `KNOB=VALUE: …`: it is then
    neither left out, nor approximated, nor for the user to do by hand. A knob of which no value stays is not searched, and
    stands at the value of the space's base. The micro-batch always stays: every framework takes it, where not in this file.

    Args:
        space: what would be searched.
        target: one of `SIMPLE_TARGETS`.
        pinned: knobs that the user gave values, of which one must stay.

    Raises:
        RequestError: no value of a pinned knob can be said.
    """
    export, companions, domains = MAKERS[target], [*_companions(space)], dict(space.domains)
    for knob in space.domains.keys() - {"micro_batch_size"}:
        found = {value: _is_said(space, companions, export, knob, value) for value in space.domains[knob]}
        # What is legal nowhere that was looked at goes with the other values.
        said = any(found[value] for value in found if value != getattr(space.base, knob))
        kept = tuple(value for value, is_said in found.items() if (said if is_said is None else is_said))
        if not kept and knob in pinned:
            problem = f"{target} has no place for {knob}={','.join(map(value_text, found))}"
            raise RequestError("simple", problem, "leave that pin out, or --simple")
        domains[knob] = kept
    return dataclasses.replace(space, domains={knob: values for knob, values in domains.items() if values})


def _companions(space: SearchSpace) -> Iterator[TrialConfig]:
    """The base beside the values of other knobs, the simplest first."""
    choices = [
        [(name, value) for value in space.domains.get(name, (getattr(space.base, name),))[: MOST_VALUES.get(name)]]
        for name in COMPANIONS
    ]
    for chosen in itertools.product(*choices):
        yield space.base.replace(dict(chosen))


def _is_said(
    space: SearchSpace, companions: list[TrialConfig], export: Callable[[Winner], Export], knob: str, value: Value
) -> bool | None:
    """Whether some legal configuration with the value is exported without a note about the knob; None: none is legal."""
    looked_at = False
    # Where blocks are compiled by default alone, they are not beside what excludes them.
    asked = () if knob != COMPILED and False in space.domains.get(COMPILED, ()) else (COMPILED,)
    for companion in companions:
        config = space.canonical(settled(companion.replace({knob: value}), space.context, asked))
        if getattr(config, knob) != value or space.check(config):
            continue
        looked_at = True
        noted = _noted(space, config, export)
        if noted is not None and knob not in noted:
            return True
    return False if looked_at else None


def is_lossless(space: SearchSpace, target: str, config: TrialConfig) -> bool:
    """Whether the configuration's export has no note about any knob that is searched: also none about two of them together."""
    noted = _noted(space, config, MAKERS[target])
    return noted is not None and not noted & (space.domains.keys() - {"micro_batch_size"})


def _noted(space: SearchSpace, config: TrialConfig, export: Callable[[Winner], Export]) -> set[str] | None:
    """Knobs that the export of a configuration has a note about; None: it is refused."""
    winner = Winner(
        job="", config=config, baseline=None, model=space.model, workload=space.workload, engine="native",
        world_size=space.world_size, ranks_per_node=min(space.cluster.devices_per_node, space.world_size),
        on_gpus=space.cluster.device.kind == "cuda", verified="native-only", env={}, answer_for=None,
        stated=Stated(), script=(), launch="",
    )  # fmt: skip
    try:
        notes = export(winner).notes
    except ExportRefusedError:
        return None
    return {knob for note in notes for knob in _NAMED.findall(note.partition(":")[0])}
