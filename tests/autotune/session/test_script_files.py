"""A user's command as the search sees it: what is searched, what each trial is given, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import RequestError
from autotune.frameworks.exporters import EXPORTERS
from autotune.request.rows import request_from_fields, request_from_row, request_to_row
from autotune.session import trial_requests
from autotune.session.resolve import prepare, resolve
from autotune.session.session import Session
from autotune.session.trial_requests import notes_of, trial_request
from autotune.strategies.guided.prior import setting_of
from search_spaces.errors import SearchSpaceError
from search_spaces.models.command import CommandModel
from search_spaces.trial_config import TrialConfig

PLAIN = ["python", "train.py", "--deepspeed_config", "{config}"]
TRAINER = ["python", "train.py", "--deepspeed", "{config}", "--per_device_train_batch_size", "{micro_batch_size}"]


def session(command: Any, **fields: Any) -> Session:
    return resolve(
        request_from_fields({"command": command, "ranks": 2, "global_batch_size": 8, "strategy": "random", **fields})
    )


def test_what_the_placeholders_carry_is_searched_and_the_rest_stays() -> None:
    found = session("python train.py --batch {micro_batch_size} --accumulate {gradient_accumulation_steps}")
    assert (found.model.name, found.request.engine) == ("train.py", "command")
    configs = list(found.space.enumerate())
    assert [config.micro_batch_size for config in configs] == [1, 2, 4]
    assert {config.zero_stage for config in configs} == {0}
    (note,) = notes_of(found)
    assert note.startswith("no placeholder of the command carries zero_stage, activation_checkpointing: left at zero_stage=0")


def test_a_command_runs_in_the_current_folder_unless_it_names_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    found = prepare(request_from_fields({"command": "python train.py", "ranks": 2, "strategy": "random"}))
    assert isinstance(found.model, CommandModel)
    assert found.model.folder == str(tmp_path)


def test_a_file_carries_what_its_format_expresses() -> None:
    found = session(PLAIN)
    assert {config.zero_stage for config in found.space.enumerate()} == {0, 1, 2, 3}
    config = TrialConfig(zero_stage=2, micro_batch_size=2)
    ((name, text),) = trial_request(found, "a", config, ()).files
    content = json.loads(text)
    assert (name, content["zero_optimization"]["stage"]) == ("config.json", 2)
    assert (content["train_batch_size"], content["gradient_accumulation_steps"]) == (8, 2)
    assert content["optimizer"]["params"]["torch_adam"] is True  # nothing is compiled on a processor


@pytest.mark.parametrize("words", ["PLAIN", "TRAINER"])
def test_the_exported_file_is_the_one_that_was_measured(words: str) -> None:
    found = session(globals()[words])
    best = found.space.base.replace({"zero_stage": 2, "micro_batch_size": 2})
    document = trial_requests.unmeasured_document(found, best, found.request)
    export = EXPORTERS["deepspeed"](document)
    assert export.text == _file(found, best)
    unstated = "not stated: optimizer, lr, weight_decay, clip; those of the trials are in the file as placeholders"
    assert any(note.startswith(unstated) for note in export.notes) is (words == "PLAIN")
    assert any("the trials' own optimizer, lr, weight_decay, clip" in note for note in notes_of(found)) is (words == "PLAIN")


def test_a_template_is_written_by_the_exported_script() -> None:
    template = {"template": "[data]\nmicro = {micro_batch_size}\n", "template_name": "run.toml"}
    found = session({"arguments": ["python", "train.py", "{template}"], **template})
    document = trial_requests.unmeasured_document(found, found.space.base.replace({"micro_batch_size": 4}), found.request)
    text = EXPORTERS["torchrun"](document).text
    assert "cat > run.toml <<'END OF FILE'\n[data]\nmicro = 4\nEND OF FILE\n" in text
    assert 'train.py run.toml "$@"' in text


def test_an_accelerate_file_carries_what_fsdp2_is_told() -> None:
    found = session(["python", "train.py", "{accelerate}", "{micro_batch_size}"])
    assert {config.zero_stage for config in found.space.enumerate()} == {0, 2, 3}
    ((name, text),) = trial_request(found, "a", TrialConfig(zero_stage=3, micro_batch_size=2), ()).files
    assert name == "accelerate.yaml"
    assert "distributed_type: FSDP\n" in text
    assert "fsdp_reshard_after_forward: true\n" in text


def test_a_part_is_offloaded_by_deepspeeds_own_adam() -> None:
    config = TrialConfig(zero_stage=3, offload_optimizer="cpu", offload_ratio=0.5)
    content = json.loads(_file(session(PLAIN), config))
    assert content["zero_optimization"]["offload_optimizer"]["ratio"] == 0.5
    assert "torch_adam" not in content["optimizer"]["params"]


def test_a_trainer_is_left_what_its_arguments_say() -> None:
    found = session(TRAINER)
    content = json.loads(trial_request(found, "a", TrialConfig(zero_stage=3, micro_batch_size=2), ()).files[0][1])
    assert content["zero_optimization"]["stage"] == 3
    assert content["train_micro_batch_size_per_gpu"] == content["train_batch_size"] == content["gradient_clipping"] == "auto"
    assert "optimizer" not in content
    assert any("does not receive {gradient_accumulation_steps}" in note for note in notes_of(found))
    assert not any("accumulation" in note for note in notes_of(session([*TRAINER, "{gradient_accumulation_steps}"])))


def test_every_knob_that_a_file_carries_changes_it() -> None:
    found = session(PLAIN)
    assert found.space.capability is not None
    base = TrialConfig(zero_stage=3, offload_optimizer="cpu", micro_batch_size=2)
    others: dict[str, Any] = {
        "zero_stage": 1, "micro_batch_size": 4, "overlap_comm": False, "contiguous_gradients": False, "reduce_dtype": "bf16",
        "precision": "bf16", "offload_ratio": 0.5, "offload_optimizer": "none", "offload_param": "cpu",
        "reshard_after_forward": False,
    }  # fmt: skip
    carried = found.space.capability.knobs.keys() - {"environment"}  # which the script has from the rank that starts it
    texts = {name: _file(found, base.replace({name: others.get(name, 1000)})) for name in carried}
    assert set(others) < set(texts)
    assert _file(found, base) not in texts.values()


def test_what_accelerate_is_told_reaches_the_script() -> None:
    command: dict[str, Any] = {"arguments": ["python", "train.py", "{micro_batch_size}"], "launcher": "accelerate"}
    assert session(command, pins={"precision": "bf16"}).space.count() == 3
    sharded = session({**command, "plugin": "fsdp"})
    assert {config.zero_stage for config in sharded.space.enumerate()} == {0, 2, 3}
    deepspeed = session({**command, "plugin": "deepspeed"})
    assert json.loads(_file(deepspeed, TrialConfig(zero_stage=1)))["zero_optimization"]["stage"] == 1


def _file(found: Session, config: TrialConfig) -> str:
    return trial_request(found, "a", config, ()).files[0][1]


def test_knobs_of_the_scripts_own_are_searched_together() -> None:
    command = {
        "arguments": ["python", "train.py", "{micro_batch_size}", "{workers}", "{gradient_accumulation_steps}"],
        "script_knobs": {"workers": [0, 2]}, "environment_knobs": {"OMP_NUM_THREADS": [1, 2]},
    }  # fmt: skip
    found = session(command, pins={"micro_batch_size": 2})
    configs = list(found.space.enumerate())
    assert [config.script for config in configs] == [
        "workers=0 OMP_NUM_THREADS=1",
        "workers=0 OMP_NUM_THREADS=2",
        "workers=2 OMP_NUM_THREADS=1",
        "workers=2 OMP_NUM_THREADS=2",
    ]
    assert found.baselines[0].script == "workers=0 OMP_NUM_THREADS=1"
    assert len({config.hash for config in configs}) == 4
    again = request_from_row(json.loads(json.dumps(request_to_row(found.request))))
    assert again == found.request


def test_guided_search_tells_settings_of_the_script_apart() -> None:
    command = {"arguments": ["python", "t.py", "{micro_batch_size}", "{workers}"], "script_knobs": {"workers": list(range(5))}}
    found = session(command, strategy="guided")
    proposed = found.strategy.propose(found.space, (), (), 15, 0)
    assert len({config.hash for config in proposed}) == 15
    assert {config.script for config in proposed} == {f"workers={number}" for number in range(5)}


def test_a_script_of_which_nothing_is_known_has_a_layer_for_each_stage() -> None:
    words = ["python", "t.py", "{micro_batch_size}", "{pipeline_parallel_size}"]
    found = session(words, space="3d", ranks=4)
    setting = setting_of(found.model, found.space, "command", found.ranking, found.request.fidelity)
    assert setting.model.num_layers == 4 * max(map(int, found.space.domains["virtual_stages"]))


def test_sizes_of_a_model_that_is_not_known_are_not_clipped() -> None:
    found = session(PLAIN, space="zero-buckets")
    assert len(found.space.domains["reduce_bucket_size"]) > 3
    stated = session({"arguments": PLAIN, "parameter_count": 1_000_000}, space="zero-buckets")
    assert max(stated.space.domains["reduce_bucket_size"]) == 1_000_000


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"command": ["python", "t.py"], "pins": {"zero_stage": 3}}, "carries zero_stage; write {zero_stage} or {config}"),
        ({"command": PLAIN, "pins": {"activation_checkpointing": "full"}}, "write {activation_checkpointing}"),
        ({"command": ["python", "t.py"], "baseline": {"zero_stage": 1}}, "carries zero_stage"),
        ({"command": ["python", "t.py", "{micro_batch}"]}, "did you mean micro_batch_size"),
        ({"command": ["python", "t.py"], "engine": "native"}, "native does not run a command"),
        ({"command": ["python", "t.py"], "model": "llama-tiny"}, "model: is determined by the command"),
        ({"command": {"arguments": ["a"], "batch": 1}}, "command.batch: is not known"),
        ({"command": {"arguments": ["a"], "launcher": "mpi"}}, "command.launcher"),
        ({"command": 7}, "command: 7 is not a command"),
        ({"command": "python 'train.py"}, "No closing quotation"),
        ({"model": "llama-tiny", "engine": "command"}, "command: is missing; write it after --"),
        ({"engine": "command"}, "model: is missing"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(fields: dict[str, Any], told: str) -> None:
    with pytest.raises((RequestError, SearchSpaceError)) as caught:
        resolve(request_from_fields(fields))
    line = str(caught.value)
    assert told in line
    assert "\n" not in line
