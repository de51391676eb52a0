"""Requests that are resolved once: the same answers, and nothing that could have changed."""

import dataclasses

import pytest

from autotune.errors import AutotuneError
from autotune.request.rows import request_from_fields
from autotune.session import resolved
from autotune.session.resolve import resolve
from autotune.session.resolved import INDEPENDENT, KEPT, KEPT_SECONDS, Resolver
from search_spaces.errors import SearchSpaceError
from search_spaces.models.huggingface import resolve_model

FIELDS = {"model": "llama-tiny", "ranks": 2, "global_batch_size": 8, "sequence_length": 64}
OTHERS = {
    "objective": "memory", "strategy": "random", "seed": 7, "trials": 3, "max_seconds": 9.0, "trial_timeout": 8.0,
    "headroom": 0.2, "runner": "local", "confirm_repeats": 1, "control_every": 3,
    "fidelity": {"max_steps": 11}, "allow_unstable": True, "loss_depends_on_batch": True, "racing": False,
    "stop_at_first": True, "name": "first", "tags": ("a", "b"), "note": "n",
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    made: list[object] = []
    monkeypatch.setattr(resolved, "resolve", lambda *asked: made.append(asked[0]) or resolve(*asked))
    return made


def test_what_is_remembered_is_what_resolving_gives(calls: list[object]) -> None:
    assert set(OTHERS) == set(INDEPENDENT)
    resolver = Resolver()
    for name, value in ({"seed": 0} | OTHERS).items():
        request = request_from_fields(FIELDS | {name: value})
        assert resolver.resolved(request) == resolve(request).request, name
    assert len(calls) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"model": "llama-mini"}, {"cluster": "dgx-a100:1", "ranks": 8}, {"ranks": 1}, {"space": "zero-buckets"},
        {"pins": {"zero_stage": 1}}, {"global_batch_size": 16}, {"sequence_length": 32}, {"memory_limit": 10**9},
        {"baseline": {"zero_stage": 1}}, {"engine": "ddp", "pins": {"zero_stage": 0}},
    ],
)  # fmt: skip
def test_what_else_is_asked_is_resolved_by_itself(calls: list[object], change: dict[str, object]) -> None:
    resolver = Resolver()
    resolver.resolved(request_from_fields(FIELDS))
    request = request_from_fields(FIELDS | change)
    assert resolver.resolved(request) == resolve(request).request
    assert len(calls) == 2


def test_refusals_are_not_remembered_and_none_is_missed(calls: list[object]) -> None:
    resolver = Resolver()
    resolver.resolved(request_from_fields(FIELDS))
    bad = request_from_fields(FIELDS | {"model": "gpt2", "sequence_length": 10**6})
    for _ in range(2):
        with pytest.raises((AutotuneError, SearchSpaceError)):
            resolver.resolved(bad)
    assert len(calls) == 3


def test_a_remembered_request_has_the_defaults_of_its_model(calls: list[object]) -> None:
    short = dataclasses.replace(resolve_model("llama-tiny"), sequence_length=32)
    request = request_from_fields({"model": "short", "ranks": 2})
    resolver = Resolver()
    first, second = (resolver.resolved(request, short) for _ in range(2))
    assert first == second
    assert (second.global_batch_size, second.sequence_length) == (8, 32)
    assert len(calls) == 1


@pytest.mark.prove
def test_the_machine_is_looked_at_again_after_a_while_and_old_requests_are_forgotten(calls: list[object]) -> None:
    now = [0.0]
    resolver = Resolver(lambda: now[0])
    request = request_from_fields(FIELDS)
    resolver.resolved(request)
    now[0] = KEPT_SECONDS + 1
    assert resolver.known(request) is None
    resolver.resolved(request)
    assert len(calls) == 2
    for batch in range(1, KEPT + 1):
        resolver.resolved(dataclasses.replace(request, global_batch_size=8 * batch + 8))
    assert resolver.known(request) is None
