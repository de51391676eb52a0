"""`autotune plan`: why a faster plan may stand below a slower one."""

import re

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
