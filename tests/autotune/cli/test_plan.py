"""`autotune plan`: why a faster plan may stand below a slower one."""

import json
import re
from pathlib import Path

from called import Command


def test_the_fastest_plan_is_first_and_values_that_are_rarely_used_are_named(command: Command) -> None:
    words = ("plan", "llama-3-70b", "--cluster", "dgx-h100:4", "--global-batch-size", "512", "--sequence-length", "8192")
    offloaded = command(*words).out
    first, *others = (float(found) for found in re.findall(r"^ *\d+  ([\d.]+) samples/s", offloaded, re.MULTILINE))
    assert max(others) < first
    assert (
        "the first plan has values that published recipes rarely use (offload_optimizer, pipeline_schedule); plan " in offloaded
    )
    plain = command("plan", "llama-3-8b", "--cluster", "8xh100").out
    assert "rarely use (pipeline_schedule); the simplest that ties with it has none of them and is 0." in plain
    title, *lines = plain.splitlines()[:4]
    assert title == "assumed, because it was not stated:"
    assert [line.partition(":")[0].strip() for line in lines] == [
        "sequence_length=4096 (--sequence-length)",
        "NVLink, 450 GB/s between the cards of a machine (--cluster FILE.toml)",
        "global_batch_size=8 (--global-batch-size)",
    ]


def test_a_plan_for_one_device_names_no_knob_of_traffic_between_devices(command: Command) -> None:
    words = ("plan", "gpt2", "--sequence-length", "512", "--global-batch-size", "8", "--pin", "offload_param=none")
    words = (*words, "--pin", "offload_optimizer=none", "--cluster")
    alone, several = command(*words, "1xh100").out, command(*words, "2xh100").out
    for name in ("zero_stage=", "reduce_bucket_size="):
        assert name not in alone and name in several


def test_a_plan_is_for_shorter_samples_if_nothing_fits_with_those_that_nobody_stated(command: Command) -> None:
    words = ("plan", "llama-3-8b", "--cluster", "1x24GB", "--lora-rank", "16", "--pin", "offload_param=none")
    words = (*words, "--pin", "offload_optimizer=none", "--top", "1")
    assumed, stated = command(*words), command(*words, "--sequence-length", "4096")
    assert (assumed.status, stated.status) == (0, 3)
    assert assumed.out.startswith("nothing fits with samples of 4,096 tokens, which nobody stated: planned for the longest")
    assert "sequence_length=1024 (--sequence-length): with sequence_length=" in assumed.out


def test_the_first_plan_of_a_file_is_exported_as_what_nobody_measured(command: Command, folder: Path) -> None:
    words = ("plan", "llama-3-8b", "--cluster", "8xh100", "--sequence-length", "4096", "--global-batch-size", "64")
    planned = command(*words, "--simple", "transformers", "--json").out
    (folder / "plan.json").write_text(planned)
    exported = command("export", "plan.json", "--format", "transformers")
    first = json.loads(planned)["plans"][0]["config"]
    values = json.loads(exported.out)
    assert values["per_device_train_batch_size"] == first["micro_batch_size"]
    assert values["deepspeed"]["zero_optimization"]["stage"] == first["zero_stage"] > 0
    assert "learning_rate" not in values and "note: not stated: lr, weight_decay" in exported.err
    assert "verified: no, predicted and not measured anywhere" in exported.err
    (folder / "plan.json").write_text(json.dumps({**json.loads(planned), "plans": []}))
    refused = command("export", "plan.json")
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert "plan.json: nothing fits, so there is no plan" in refused.err
    refused = command("export", "missing.json")
    assert (refused.status, "missing.json: cannot be read (No such file or directory)" in refused.err) == (2, True)


def test_a_plan_and_a_prediction_are_printed_in_a_format(command: Command) -> None:
    asked = ("llama-tiny", "--cluster", "dgx-h100:1", "--ranks", 8, "--global-batch-size", 64)
    for name, simple in (("plan", ("--space", "zero", "--simple", "transformers")), ("predict", ("--pin", "zero_stage=3"))):
        answer = command(name, *asked, *simple, "--export", "transformers")
        assert (answer.status, json.loads(answer.out)["bf16"]) == (0, True)
        assert "note: verified: no, predicted and not measured anywhere" in answer.err
    refused = command("predict", *asked, "--export", "keras")
    assert (refused.status, refused.out) == (2, "")
    assert "'keras' is not known; use one of json, " in refused.err
