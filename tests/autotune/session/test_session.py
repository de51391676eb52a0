"""Sessions: what is resolved and refused before anything runs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import table

from autotune.errors import DoesNotFitError, NothingFeasibleError, RequestError
from autotune.request import engines
from autotune.request.engines import capability_of
from autotune.request.rows import request_from_fields, request_from_row, request_to_row
from autotune.session.baselines import baselines_of
from autotune.session.resolve import prepare, session_of
from autotune.session.session import Session
from autotune.session.trial_requests import notes_of, trial_request
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.errors import SearchSpaceError
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import FactoryModel
from search_spaces.models.module_profile import LossTrait
from search_spaces.spaces import device_defaults, resolve_space
from search_spaces.trial import Workload, reference_name
from search_spaces.trial_config import TrialConfig
from storage.store import Store


def test_the_baseline_is_the_defaults_from_the_lowest_stage_up(tmp_path: Path) -> None:
    session = table.session(tmp_path)
    assert [config.zero_stage for config in session.baselines] == [0, 1, 2, 3]
    assert all(config in session.space for config in session.baselines)


@pytest.mark.parametrize(("engine", "stages"), [("ddp", [0]), ("fsdp2", [2, 3])])
def test_another_engine_begins_at_the_lowest_stage_that_it_honours(tmp_path: Path, engine: str, stages: list[int]) -> None:
    session = table.session(tmp_path, engine=engine)
    assert [config.zero_stage for config in session.baselines] == stages
    pinned = table.session(tmp_path, engine=engine, pins={"zero_stage": stages[-1]})
    assert [config.zero_stage for config in pinned.baselines] == stages[-1:]
    assert session_of_row(session).space.hash == session.space.hash


def test_an_engine_whose_package_is_missing_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "installed_version", lambda: "0.19.8")
    assert table.session(tmp_path, engine="deepspeed").request.engine == "deepspeed"
    monkeypatch.setattr(engines, "installed_version", lambda: None)
    with pytest.raises(RequestError) as refused:
        table.session(tmp_path, engine="deepspeed")
    assert str(refused.value) == "engine deepspeed: the package is not installed; pip install 'autotune-parallel[deepspeed]'"


def session_of_row(session: Session) -> Session:
    return prepare(request_from_row(json.loads(json.dumps(request_to_row(session.request)))))


def test_stages_that_cannot_fit_are_no_baseline(tmp_path: Path) -> None:
    parameters = table.session(tmp_path).model.parameter_count
    session = table.session(tmp_path, memory_limit=parameters * 14)
    assert [config.zero_stage for config in session.baselines] == [1, 2, 3]


def test_a_reference_holds_for_what_trains_the_same_parameters(tmp_path: Path) -> None:
    """With adapters and without, the first loss is one: the second factors are zero. Then they are other models."""

    def held(**pins: str) -> tuple[float, ...]:
        session = table.session(tmp_path, pins=pins)
        return trial_request(session, "one", session.baselines[0], (4.0, 3.0, 2.0)).reference_losses

    assert held() == held(lora_rank="4") == held(lora_rank="4", lora_targets="mlp") == (4.0, 3.0, 2.0)
    assert held(lora_rank="0,4") == held(lora_rank="4", lora_targets="mlp,both") == (4.0,)
    assert held(lora_rank="4", frozen_dtype="nf4") == (4.0, 3.0, 2.0)
    assert held(lora_rank="4", frozen_dtype="same,nf4") == ()
    assert held(adapter_size="0,4") == (4.0,)
    assert held(prefix_length="4") == held(prompt_length="4") == (4.0, 3.0, 2.0)
    assert held(prefix_length="0,4") == held(prompt_length="2,4") == ()
    assert held(attention_window="8") == (4.0, 3.0, 2.0)
    assert held(attention_window="0,8") == held(attention_window="8", attention_global_tokens="0,4") == ()
    assert held(reduce_dtype="bf16") == (4.0, 3.0, 2.0)
    assert held(reduce_dtype="int8") == held(reduce_dtype="fp32,int8") == held(optimizer="adamw,onebit_adam") == (4.0,)
    assert held(zero_stage="3", gather_dtype="same,int8") == ()
    documents = table.session(tmp_path, pins={"pack_sequences": "false,true"}, document_lengths=(64, 17))
    assert trial_request(documents, "one", documents.baselines[0], (4.0, 3.0)).reference_losses == ()


def test_the_users_configuration_comes_first(tmp_path: Path) -> None:
    session = table.session(tmp_path, baseline={"zero_stage": 2, "micro_batch_size": 2})
    assert session.baselines[0].micro_batch_size == 2


def test_baselines_on_gpus_are_compiled_but_the_users_and_those_that_exclude_it() -> None:
    def chain(values: dict[str, Any] | None, **pins: Any) -> list[bool]:
        work = Workload(global_batch_size=64, sequence_length=128)
        model, cluster = resolve_model("llama-3-8b"), resolve_cluster("dgx-h100")
        native = capability_of("native")
        space = resolve_space("zero", model, cluster, work, native, pins, base=device_defaults(cluster, native))
        return [config.compile_blocks for config in baselines_of(values, space, None)]

    default = chain(None)
    assert default and all(default)
    assert chain({"zero_stage": 3}) == [False, *default]
    assert chain({"zero_stage": 3, "compile_blocks": True}) == default
    offloaded = chain(None, offload_activations=True)
    assert len(offloaded) == len(default) and not any(offloaded)


LOSSES = (5.0, 4.5, 4.0)


def _compared(session: Session) -> tuple[float, ...]:
    return trial_request(session, "a", session.baselines[0], LOSSES).reference_losses


def test_the_optimizer_of_the_users_configuration_is_the_jobs(tmp_path: Path) -> None:
    session = table.session(tmp_path, baseline={"optimizer": "lamb"})
    assert {config.optimizer for config in (session.space.base, *session.baselines)} == {"lamb"}
    assert _compared(session) == LOSSES
    assert session_of_row(session).space.base.optimizer == "lamb"


@pytest.mark.parametrize(
    ("pins", "baseline"), [({"optimizer": "adamw,sgd"}, None), ({"optimizer": "adamw"}, {"optimizer": "lamb"})]
)
def test_where_optimizers_differ_losses_are_compared_before_the_first_update(
    tmp_path: Path, pins: dict[str, Any], baseline: dict[str, Any] | None
) -> None:
    assert _compared(table.session(tmp_path, pins=pins, baseline=baseline)) == LOSSES[:1]


def test_an_illegal_baseline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="batch-divides"):
        table.session(tmp_path, baseline={"micro_batch_size": 3})


@pytest.mark.parametrize(("batch", "nearest"), [(8, 9), (10, 9), (1, 3)])
def test_a_batch_that_no_layout_divides_is_refused_with_the_nearest_that_does(tmp_path: Path, batch: int, nearest: int) -> None:
    with pytest.raises(RequestError, match=rf"{batch} is not a multiple of 3 .*, the nearest is {nearest}; .*the global batch"):
        table.session(tmp_path, ranks=3, global_batch_size=batch)


def test_a_script_that_is_not_there_is_found_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    words = "--batch {micro_batch_size}"

    def begin(command: str) -> None:
        prepare(request_from_fields({"command": f"{command} {words}", "ranks": 2, "runner": "local"}))

    with pytest.raises(RequestError, match=r"command: there is no trian\.py in .*; did you mean train\.py\?"):
        begin("python -u trian.py")
    with pytest.raises(RequestError, match=r"command: there is no jobs/other\.sh in .*; give its path"):
        begin("bash jobs/other.sh")
    for right in ("python train.py", "python -m package.train", "enter-container image python /in/there.py"):
        begin(right)


def test_a_model_that_cannot_fit_the_host_is_refused(tmp_path: Path) -> None:
    huge = table.MODEL_CONFIG.replace(
        '"num_hidden_layers": 2, "hidden_size": 64', '"num_hidden_layers": 96, "hidden_size": 65536'
    )
    path = tmp_path / "huge.json"
    path.write_text(huge)
    with pytest.raises(DoesNotFitError, match="the host has"):
        table.session(tmp_path, model=str(path))


def test_a_limit_below_every_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NothingFeasibleError, match="needs at least"):
        table.session(tmp_path, memory_limit=1_000)


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "none"},
        {"data_path": "/no/such/folder"},
        {"data_path": "/no/such/folder", "model": "hf:tiny"},
        {"space": "unheard"},
        {"pins": {"zero_stage": 7}},
        {"ranks": 10_000},
    ],
)
def test_what_cannot_be_resolved_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises((RequestError, SearchSpaceError)):
        table.session(tmp_path, **changes)


def test_a_job_is_resumed_from_its_row_alone(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path)
    (tmp_path / "config.json").unlink()
    row = json.loads(json.dumps(request_to_row(session.request)))
    again = session_of(store.jobs.create(row))
    assert again.model == session.model
    assert again.space.hash == session.space.hash
    assert again.baselines == session.baselines
    assert prepare(again.request).request == session.request


def test_a_users_module_has_a_reference_for_each_micro_batch_size(tmp_path: Path) -> None:
    def first_of(traits: tuple[LossTrait, ...] = (), losses: tuple[float, ...] = (), **pins: str) -> tuple[int, int]:
        """Steps that the first trial runs without an engine, and losses that it is compared with."""
        session = table.session(tmp_path, pins=pins)
        model = FactoryModel(reference="a:b", parameter_count=9, loss_traits=traits)
        request = trial_request(dataclasses.replace(session, model=model), "one", session.baselines[0], losses)
        return request.plain_steps, len(request.reference_losses)

    assert first_of() == (3, 0)
    assert first_of(losses=LOSSES) == (0, 3)
    assert first_of((LossTrait.TOGETHER,)) == first_of((LossTrait.RANDOM,)) == (3, 0)
    assert first_of((LossTrait.RANDOM,), compile_blocks="true") == (0, 0)
    assert first_of((LossTrait.IRREPRODUCIBLE,), LOSSES) == first_of((LossTrait.IRREPRODUCIBLE,)) == (0, 0)
    assert first_of(optimizer="lamb") == first_of(precision="fp16") == (1, 0)
    assert trial_request(table.session(tmp_path), "one", TrialConfig(), ()).plain_steps == 0
    model = FactoryModel(reference="a:b", parameter_count=9)
    sizes = {reference_name(model, TrialConfig(micro_batch_size=size, zero_stage=stage)) for size in (1, 2) for stage in (0, 3)}
    assert len(sizes) == 2


def test_what_a_loss_depends_on_is_printed_unless_it_is_meant(tmp_path: Path) -> None:
    model = FactoryModel(reference="a:b", parameter_count=9, loss_traits=(LossTrait.PADDED, LossTrait.DROPOUT))
    session = dataclasses.replace(table.session(tmp_path), model=model)
    padded, dropout = (note for note in notes_of(session) if note.startswith("loss: "))
    assert "depends on micro_batch_size (a mean over targets" in padded
    assert padded.endswith("--loss-depends-on-batch")
    request = dataclasses.replace(session.request, loss_depends_on_batch=True)
    assert [note for note in notes_of(dataclasses.replace(session, request=request)) if "loss: " in note] == [dropout]
