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
    link = "NVLink, 450 GB/s between the cards of a machine (--cluster FILE.toml states another)"
    assumed = "samples of 4,096 tokens (--sequence-length); global batch of 8 (--global-batch-size)"
    assert plain.splitlines()[0] == f"assumed, since it was not stated: {assumed}; {link}"
