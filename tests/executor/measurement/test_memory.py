"""The memory account against the allocator's own total, and on a step whose allocations are known."""

import mmap
import subprocess
import sys

import pytest
import torch

from executor.engine import HOST, TAGS, RankContext
from executor.engines.native.engine import NativeEngine
from executor.measurement.memory import account_step, peak_resident_set, reset_peak_resident_set
from executor.parallel.collectives import mark
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

CPU = torch.device("cpu")
MEBI = 1 << 20

AGAINST_THE_ALLOCATOR = """
import os, sys
import torch
import torch._dynamo  # as the first update does
from torch.profiler import ProfilerActivity, profile, record_function
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.measurement.memory import account_step
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig
spec = ModelSpec(name="m", family="llama", num_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
                 head_dim=16, ffn_hidden_size=96, vocab_size=256, sequence_length=32)
workload = Workload(global_batch_size=8, sequence_length=32)
context = RankContext(rank=0, world_size=1, device=torch.device("cpu"))

def peaks(knobs):
    def build():
        session = NativeEngine().build(context, spec, TrialConfig(micro_batch_size=2).replace(knobs), workload)
        session.prepare(0)
        return session

    session = build()
    session.train_step(); session.train_step()
    ours = account_step(session.train_step, session.tagged_storages, context.device)
    assert sum(ours.by_tag.values()) == ours.peak
    del session
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorder:
        session = build()
        session.train_step(); session.train_step()
        with record_function("last"):
            session.train_step()
    totals = []
    def walk(node, inside):
        inside = inside or node.name == "last"
        if inside and node.typed[0].name == "Allocation":
            totals.append(node.extra_fields.total_allocated)
        for child in node.children:
            walk(child, inside)
    for node in recorder.profiler.kineto_results.experimental_event_tree():
        walk(node, False)
    print(ours.peak, max(totals), flush=True)

# Each in a process whose allocator has counted nothing yet; one alone imports torch.
for knobs in KNOBS:
    child = os.fork()
    if child == 0:
        peaks(knobs)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "knobs",
    [
        [{"zero_stage": 3, "activation_checkpointing": "full"}],
        [{}, {"precision": "bf16"}],
    ],
    ids=("stage 3", "stage 0"),
)
def test_the_account_equals_the_allocators_own_total(knobs: list[dict[str, object]]) -> None:
    """The allocator counts from before the model is built; the account knows one step and the engine's names."""
    script = AGAINST_THE_ALLOCATOR.replace("KNOBS", repr(knobs))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    peaks = [tuple(map(int, line.split())) for line in done.stdout.splitlines()[-len(knobs) :]]
    assert len(peaks) == len(knobs)
    assert all(ours == allocators for ours, allocators in peaks), peaks


def test_marks_and_the_rest_on_a_known_step() -> None:
    kept = torch.zeros(MEBI // 4)

    def step() -> None:
        buffer = torch.empty(2 * MEBI // 4)
        mark("buffers", buffer)
        gradient = torch.empty(MEBI // 4)
        mark("gradients", gradient)
        del buffer
        torch.empty(MEBI // 8)

    account = account_step(step, lambda: [("parameters", kept)], CPU)
    assert account.peak == 4 * MEBI
    assert account.by_tag == {
        "parameters": MEBI, "gradients": MEBI, "optimizer_state": 0, "activations": 0, "buffers": 2 * MEBI,
    }  # fmt: skip
    assert account.tag_peaks["activations"] == MEBI // 2
    assert tuple(account.by_tag) == TAGS


def test_the_host_pool_is_counted_apart_and_each_storage_once() -> None:
    on_device, pooled = torch.zeros(MEBI // 4), torch.zeros(MEBI)
    account = account_step(lambda: None, lambda: [("parameters", on_device), (HOST, pooled), (HOST, pooled[:3])], CPU)
    assert account.host_peak == 4 * MEBI
    assert account.peak == sum(account.by_tag.values()) == MEBI


def test_what_a_step_leaves_to_the_next_one_is_in_the_peak() -> None:
    made = []
    account = account_step(lambda: made.append(torch.zeros(MEBI // 4)), list, CPU)
    assert account.peak == MEBI
    assert sum(account.at_start.values()) == 0


def test_storages_that_shrink_and_grow_in_place_are_followed() -> None:
    value = torch.zeros(MEBI // 4)

    def step() -> None:
        storage = value.untyped_storage()
        storage.resize_(MEBI)
        mark("parameters", value)
        storage.resize_(0)

    account = account_step(step, list, CPU)
    assert account.tag_peaks["parameters"] == MEBI
    assert account.at_start["parameters"] == 0


def test_a_chunked_loss_never_holds_all_logits() -> None:
    spec = ModelSpec(
        name="wide", family="llama", num_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        ffn_hidden_size=16, vocab_size=4096, sequence_length=32,
    )  # fmt: skip
    workload = Workload(global_batch_size=4, sequence_length=32)
    logits = 4 * 32 * 4096 * 4

    def activations(chunk: int) -> int:
        config = TrialConfig(micro_batch_size=4, loss_chunk_size=chunk)
        session = NativeEngine().build(RankContext(rank=0, world_size=1, device=CPU), spec, config, workload)
        session.prepare(0)
        peak = account_step(session.train_step, session.tagged_storages, CPU).tag_peaks["activations"]
        session.close()
        return peak

    # Unchunked: the logits, their log-softmax and their gradient at once. In 8 chunks: an eighth of each, and little else.
    assert activations(0) >= 2 * logits
    assert activations(16) <= logits


def test_the_resident_set_peak_starts_anew() -> None:
    # Pages of its own, not malloc's: what malloc kept of earlier tests may serve a tensor, and stay after it.
    with mmap.mmap(-1, 64 * MEBI) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        high = peak_resident_set()
    reset_peak_resident_set()
    assert 0 < peak_resident_set() < high
