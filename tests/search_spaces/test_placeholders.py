"""What a user's command says, and which knobs it carries."""

import dataclasses

import pytest

from search_spaces.errors import ModelFormatError, SearchSpaceError, UnknownNameError
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel
from search_spaces.placeholders import (
    accelerate_accumulation,
    environment_of,
    expressible_values,
    names_in,
    require_known,
    samples_of_step,
    stated_batch,
    template_of,
    words_of,
)
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

WORK = Workload(global_batch_size=16, sequence_length=32, seed=7)
COMMAND = CommandModel(
    arguments=("python", "train.py", "--mbs={micro_batch_size}", "{gradient_accumulation_steps}", "{bf16}", "{workers}"),
    script_knobs={"workers": [0, 2], "pin": [True]},
    environment_knobs={"OMP_NUM_THREADS": (1, 2)},
)


def test_every_placeholder_is_filled_in() -> None:
    config = TrialConfig(micro_batch_size=4, precision="bf16", script=COMMAND.variants[-1])
    assert config.script == "workers=2 pin=true OMP_NUM_THREADS=2"
    assert words_of(COMMAND, config, WORK, 2, {}) == ("python", "train.py", "--mbs=4", "2", "true", "2")
    assert environment_of(COMMAND, config) == {"OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    ("words", "plugin", "steps"),
    [
        ("--batch {micro_batch_size}", "", 4),
        ("--config {config}", "", 4),
        ("--epochs 3", "", 1),
        ("--accumulate {gradient_accumulation_steps}", "", 4),
        ("--epochs 3", "deepspeed", 4),
    ],
)
def test_accelerate_accumulates_only_micro_batches_that_the_script_is_told_of(words: str, plugin: str, steps: int) -> None:
    command = CommandModel(arguments=("python", "train.py", *words.split()), launcher="accelerate", plugin=plugin)
    assert accelerate_accumulation(command, TrialConfig(micro_batch_size=4), 32, 2) == steps


@pytest.mark.parametrize(
    ("words", "samples"),
    [
        ("-b {micro_batch_size}", 8),
        ("-b {micro_batch_size} --gradient_accumulation_steps 2", 16),
        ("-b {micro_batch_size} trainer.accumulate_grad_batches=4", 32),
        ("-b {micro_batch_size} --update-freq 4", 32),
        ("-b {micro_batch_size} --log_accumulated_loss 50 --accumulate-grad-dtype 32", 8),
        ("-b {micro_batch_size} --total_batch_size 524288", 8),
        ("-b {micro_batch_size} --grad-accum={gradient_accumulation_steps}", 32),
        ("-b {micro_batch_size} --grad-accum={total_gradient_accumulation_steps}", 32),
        ("-b {micro_batch_size} --global-batch-size {global_batch_size}", 32),
        ("-b {micro_batch_size} --global-batch-size 64", 64),
        ("--deepspeed_config {config} --steps 9", 32),
        ("--per_device_train_batch_size {micro_batch_size} --deepspeed {config}", 8),
        ("--lr 0.1", 32),
    ],
)
def test_a_step_trains_the_samples_that_the_command_says(words: str, samples: int) -> None:
    """Two replicas of four samples; the job's batch is 32."""
    command = CommandModel(arguments=("python", "train.py", *words.split()))
    work = Workload(global_batch_size=32, sequence_length=32)
    assert samples_of_step(command, TrialConfig(micro_batch_size=4), work, 2) == samples
    tensor = TrialConfig(micro_batch_size=4, tensor_parallel_size=2)
    assert samples_of_step(command, tensor, work, 4) == samples
    assert stated_batch(command) == (64 if samples == 64 else None)
    assert words_of(CommandModel(arguments=("t", "{total_gradient_accumulation_steps}")), tensor, work, 4, {})[1] == "8"


def test_other_braces_are_left_alone() -> None:
    command = CommandModel(arguments=("python", "t.py", '{"zero": {"stage": 1}}', "{{seed}}", "{seed}", "{config}"))
    words = words_of(command, TrialConfig(), WORK, 2, {"config": "/tmp/c.json"})
    assert words[2:] == ('{"zero": {"stage": 1}}', "{seed}", "7", "/tmp/c.json")
    assert names_in(command) == ("seed", "config")


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("{micro_batch_size*sequence_length}", "128"),
        ("{(micro_batch_size + 2) * 3 - 1}", "17"),
        ("--n={2*workers//3}", "--n=4"),
        ("{{micro_batch_size*2}}", "{micro_batch_size*2}"),
        ('{"a": [1-2]}', '{"a": [1-2]}'),
        ("{8}", "{8}"),
    ],
)
def test_placeholders_compute_with_whole_numbers(word: str, filled: str) -> None:
    command = CommandModel(arguments=("t", word, "{workers}"), script_knobs={"workers": [6, 2]})
    require_known(command)
    assert words_of(command, TrialConfig(micro_batch_size=4, script="workers=6"), WORK, 2, {})[1] == filled


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("{micro_batch_size/2}", r"cannot be computed; use whole numbers"),
        ("{micro_batch_size**2}", "cannot be computed"),
        ("{micro_batch_size//(seed-seed)}", "cannot be computed"),
        ("{2*precision}", "precision is no whole number"),
        ("{2*bf16}", "bf16 is no whole number"),
        ("{learning-rate}", "learning"),
        ("{template}", "need each other; give the template's file"),
    ],
)
def test_what_cannot_be_computed_is_refused(word: str, told: str) -> None:
    with pytest.raises(SearchSpaceError, match=told):
        require_known(CommandModel(arguments=("t", word)))


def test_a_template_is_filled_like_the_words() -> None:
    text = '{"tokens": {micro_batch_size*sequence_length}, "steps": [{{x}}], "out": "{trial_folder}"}'
    command = CommandModel(arguments=("t", "--config={template}"), template=text, template_name="c.json")
    require_known(command)
    assert expressible_values(command) == {"micro_batch_size": None}
    paths = {"template": "/tmp/c.json", "trial_folder": "/tmp/run"}
    assert words_of(command, TrialConfig(), WORK, 2, paths) == ("t", "--config=/tmp/c.json")
    filled = template_of(command, TrialConfig(micro_batch_size=2), WORK, 2, paths)
    assert filled == '{"tokens": 64, "steps": [{x}], "out": "/tmp/run"}'
    with pytest.raises(SearchSpaceError, match=r"write \{template\} in it for the path"):
        require_known(dataclasses.replace(command, arguments=("t",)))


def test_what_the_words_carry_is_what_can_be_turned() -> None:
    assert expressible_values(COMMAND) == {"micro_batch_size": None, "precision": ("fp32", "bf16"), "script": COMMAND.variants}
    both = CommandModel(arguments=("t", "{bf16}", "{fp16}", "{gradient_checkpointing}"))
    assert expressible_values(both) == {"precision": ("fp32", "bf16", "fp16"), "activation_checkpointing": ("none", "full")}


FLAGS = CommandModel(
    arguments=(
        "t", "{sequence_parallel=true:--sequence-parallel}", "{overlap_comm=True:--overlap}",
        "{zero_stage=0:--copies={world_size}}", "{zero_stage=3:--whole}", "{fused=yes:--fused}",
    ),
    script_knobs={"fused": ["yes", "no"]},
)  # fmt: skip


def test_a_flag_is_there_where_its_knob_has_the_value() -> None:
    require_known(FLAGS)
    config = TrialConfig(script="fused=no")
    assert words_of(FLAGS, config, WORK, 2, {}) == ("t", "--overlap", "--copies=2")
    other = config.replace({"sequence_parallel": True, "overlap_comm": False, "zero_stage": 3, "script": "fused=yes"})
    assert words_of(FLAGS, other, WORK, 2, {}) == ("t", "--sequence-parallel", "--whole", "--fused")


def test_flags_tell_their_values_and_one_other_apart() -> None:
    switches = {"sequence_parallel": (False, True), "overlap_comm": (True, False)}
    assert expressible_values(FLAGS) == {**switches, "zero_stage": (0, 3), "script": FLAGS.variants}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("{zero_stag=1:--x}", "did you mean zero_stage"),
        ("{bf16=true:--x}", "no placeholder has this name"),
        ("{zero_stage=4:--x}", "zero_stage"),
        ("{fused=maybe:--x}", "command.script_knobs.fused: has no value 'maybe'"),
    ],
)
def test_a_flag_that_could_never_be_is_refused(word: str, told: str) -> None:
    with pytest.raises(SearchSpaceError, match=told):
        require_known(CommandModel(arguments=("t", word, "{fused}"), script_knobs={"fused": ["yes"]}))


def test_an_unknown_placeholder_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"\{micro_batch\}: no placeholder.*did you mean micro_batch_size"):
        require_known(CommandModel(arguments=("t", "{micro_batch}")))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"arguments": ()}, "is not a command"),
        ({"arguments": ("torchrun", "t.py")}, "torchrun would start its own ranks"),
        ({"arguments": ("python", "-m", "torch.distributed.run", "t.py")}, "would start its own ranks"),
        ({"launcher": "mpi"}, "use one of torchrun"),
        ({"plugin": "fsdp"}, "with --launcher accelerate"),
        ({"plugin": "ddp", "launcher": "accelerate"}, "use deepspeed or fsdp"),
        ({"pattern": "("}, "not a regular expression"),
        ({"pattern": "(?P<rate>1)"}, "the group rate is not known"),
        ({"pattern": "(?P<loss>1)"}, "for the speed of a step"),
        ({"script_knobs": {"workers": ["a b"]}}, "without spaces"),
        ({"script_knobs": {"workers": []}}, "are not valid values"),
        ({"script_knobs": {"a": range(20), "b": range(20)}}, "are not valid values"),
        ({"script_knobs": {"a": list(range(20)), "b": list(range(20))}}, "400 combinations"),
        ({"script_knobs": {"A": [1]}, "environment_knobs": {"A": [1]}}, "is a script knob too"),
        ({"parameter_count": -1}, "not a number of parameters"),
        ({"report_seconds": 0}, "not a positive number"),
    ],
)
def test_a_command_that_cannot_be_used_is_told_in_one_line(fields: dict[str, object], told: str) -> None:
    with pytest.raises(ModelFormatError, match=told) as caught:
        CommandModel(**{"arguments": ("python", "t.py"), **fields})
    assert str(caught.value).startswith("command.")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("knobs", "told"), [({"lost": [1]}, "has no {lost}"), ({"seed": [1]}, "is a placeholder already")])
def test_a_knob_of_the_scripts_own_needs_a_place(knobs: dict[str, list[int]], told: str) -> None:
    with pytest.raises(SearchSpaceError, match=told):
        require_known(CommandModel(arguments=("t", "{seed}"), script_knobs=knobs))


def test_a_command_is_called_by_its_script() -> None:
    assert COMMAND.name == "train.py"
    assert CommandModel(arguments=("python", "-u", "-m", "my.train")).name == "my.train"
    assert CommandModel(arguments=("/bin/other",)).name == "other"
    assert CommandModel(arguments=("python", "train.py", "-m", "torchrun")).name == "train.py"  # the script's own -m


def test_requests_of_every_kind_of_model_cross_a_border() -> None:
    factory = FactoryModel(reference="m:f", parameter_count=1)
    for model in (COMMAND, factory):
        request = TrialRequest(
            attempt="a", model=model, config=TrialConfig(script="a=1"), workload=WORK, world_size=2, files=(("c.json", "{}"),)
        )
        assert from_plain(TrialRequest, to_plain(request)) == request


def test_configurations_without_a_script_are_written_as_before() -> None:
    """Hashes of the version before there was the knob: stored jobs go on with their trials."""
    assert TrialConfig(reduce_bucket_size=500_000_000).hash == "48a0c06379ffd4f1"
    assert "script" not in TrialConfig().values()
    assert TrialConfig(script="a=1").hash != TrialConfig().hash
    assert TrialConfig(script="a=1").differences(TrialConfig()) == {"script": "a=1"}
    assert TrialConfig().differences(TrialConfig(script="a=1")) == {"script": ""}
    assert TrialConfig().every_value()["script"] == ""
