"""`autotune plan`: why a faster plan may stand below a slower one."""

import re

from called import Command


def test_a_faster_plan_with_rarely_used_values_is_explained(command: Command) -> None:
    held_back = command("plan", "llama-3-70b", "--cluster", "dgx-h100:8", "--memory-limit", "40GB").out
    first, *others = (float(found) for found in re.findall(r"^ *\d+  ([\d.]+) samples/s", held_back, re.MULTILINE))
    assert max(others) > first
    assert "rarely use (offload_optimizer) lead only if they are more than 29 % faster" in held_back
    assert "rarely use" not in command("plan", "llama-3-8b", "--cluster", "dgx-h100:1").out
