"""Entries for the functions with branches that only CUDA executes; read by `benchmarks/gpu/readiness.py`."""

from collections.abc import Iterator
from dataclasses import dataclass

PARTS = {
    "correctness": (
        "collectives over NCCL on one rank, two ranks on one GPU, the memory account against the allocator, "
        "out of memory and the recovery from it"
    ),
    "grid": "a 1B model: micro-batch, checkpointing, attention, compile, offload, optimizer and graphs, predicted and measured",
    "sweep": "`autotune calibrate`, and a guided `autotune sweep` against the best of the grid",
    "by-hand": "the tuned configuration against a model written by hand; float8, flex attention, fused kernels",
}
"""Part of `make gpu` -> what it proves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One function with a branch that only CUDA executes, or that checks for CUDA."""

    file: str
    function: str
    """A method is `Class.method`; `(module)`: lines of the module itself."""
    tests: tuple[str, ...] = ()
    """Tests that replace it on the CPU, `tests/….py::name`; empty: there are none."""
    proves: str
    """What only a GPU can prove; "nothing": the tests suffice."""
    parts: tuple[str, ...] = ()
    """Parts of `make gpu` that prove it; empty: none."""


_REQUIRED = "tests/autotune/test_required_device.py::test_"
_PLACES = "tests/executor/runners/test_devices.py::test_"
_CUDA = "tests/executor/test_cuda_branches.py::test_"
_PARALLEL = "tests/executor/parallel/"
_STREAMS = f"{_PARALLEL}test_streams.py::test_"
_STREAMED = (
    f"{_STREAMS}the_engine_orders_all_that_it_does",
    f"{_STREAMS}a_planted_fault_is_found",
    f"{_CUDA}streams_are_asked_for_where_there_is_a_device",
)
_PINNED = (
    f"{_CUDA}pinned_memory_takes_no_more_than_its_size_and_is_registered_as_long_as_a_tensor_has_it",
    f"{_CUDA}memory_that_the_driver_does_not_pin_is_refused",
)
_FUSED = (
    "tests/executor/engines/native/test_fused_update.py::test_the_kernel_updates_weights_and_moments_as_the_operators_do",
)
_RECOVERED = "a run goes on after a step that ran out of the device's memory"
_FLEX = f"{_PARALLEL}test_windowed.py::test_attention_of_a_device_takes_its_kernels_forms"
_PARTS = f"{_PARALLEL}test_cudnn_parts.py::test_"
_SCORES = f"{_PARALLEL}test_scores.py::test_flex_attention_changes_scores_alike"
_DEVICE = "tests/executor/measurement/test_device.py::test_"
_ANSWERS = (f"{_DEVICE}the_answers_of_cuda",)
_FLOPS = "tests/executor/measurement/test_flop_counter.py::test_"
_WINDOWS = ("tests/executor/test_step_windows.py::test_the_host_waits_once_a_window",)
_TIMED = (f"{_CUDA}steps_and_samples_are_timed_by_the_devices_clock",)
_ASKED = (f"{_CUDA}a_measurement_asks_the_device_what_it_has",)
_READY = (f"{_CUDA}a_rank_tells_its_devices_and_gives_memory_back",)
_GRAPHED = (f"{_CUDA}blocks_are_captured_in_one_pool_whose_segments_are_counted",)
_FOR_CUDA = ("tests/executor/dry/test_for_cuda.py::test_a_norm_keeps_its_input_and_libraries_their_workspaces",)
_BIAS = (f"{_PARALLEL}test_attention_kernel.py::test_a_causal_bias_is_made_while_flops_are_counted",)
_DRY = ("tests/autotune/cli/test_dry_run.py::test_a_pipeline_on_a_cluster_that_is_not_here",)
_PAIR = ("tests/executor/runners/test_on_node.py::test_a_pair_of_devices_is_timed_to_its_end",)
_REPLAYED = "results equal those of eager blocks, and the pool's segments match the allocator's"

_Entry = tuple[str, tuple[str, ...], str, tuple[str, ...]]
"""Function, tests, what only a GPU can prove, parts."""

_ENTRIES: dict[str, tuple[_Entry, ...]] = {
    "detect.py": (
        (
            "local_gpus",
            (
                f"{_CUDA}the_driver_lists_devices_and_what_processes_hold",
                f"{_CUDA}without_the_drivers_command_there_are_no_devices",
            ),
            "the driver prints these columns",
            ("sweep",),
        ),
    ),
    "engines/torch_engines.py": (
        ("FullyShardedReplica._shard", (), "torch's offload works from pinned memory", ()),
    ),
    "parallel/quantised.py": (
        ("_multiply", (f"{_PARALLEL}test_float8.py::test_products_are_those_of_the_rounded_operands",),
         "the device's products are right, and faster; those of blocks too", ("by-hand",)),
    ),
    "parallel/summed_products.py": (
        ("can_add", (f"{_CUDA}products_of_16_bits_add_to_sums_in_fp32",),
         "products of bf16 add to an fp32 sum, in less time than a second pass takes", ("by-hand",)),
    ),
    "parallel/fused.py": (
        ("load_operators", (f"{_PARALLEL}test_fused.py::test_numbers_are_those_of_one_process_without_them",),
         "the packages' kernels compute the same, faster", ("by-hand",)),
    ),
    "user_module/originals.py": (
        ("problem_of_copying", ("tests/executor/user_module/test_originals.py::test_modules_without_data_are_not_copied",),
         "nothing", ()),
    ),
    "profile.py": (
        ("ModuleClock.stop", (f"{_CUDA}places_are_timed_by_the_devices_clock",), "module times sum to the step's time", ()),
        ("ModuleClock._now", (f"{_CUDA}places_are_timed_by_the_devices_clock",), "module times sum to the step's time", ()),
    ),
    "trial/process.py": (
        ("cores_near", ("tests/executor/trial/test_numa.py::test_a_gpu_tells_its_node",), "the NUMA node is the device's", ()),
        ("_pci_address", (f"{_CUDA}a_device_has_an_address_on_its_bus",), "the system has a device at this address", ()),
    ),
    "runners/gang.py": (
        ("assign_devices", (f"{_PLACES}ranks_of_a_host_take_its_devices_in_turn",
                    f"{_PLACES}ranks_that_share_a_device_are_joined_by_gloo"),
         "nothing", ("correctness",)),
        ("_accelerator", (f"{_PLACES}a_rank_that_cannot_provide_the_device_is_an_error_with_a_remedy",),
         "nothing", ()),
    ),
    "engines/native/optimizers/device_optimizer.py": (
        ("AdamW8bit.__init__", _FUSED, "the kernel is faster than the operators, and trains the same", ()),
    ),
    "engines/native/optimizers/fused_update.py": (
        ("(module)", _FUSED, "the installed Triton compiles the kernel", ()),
        ("update", _FUSED, "the installed Triton compiles the kernel", ()),
    ),
    "inside/recovery.py": tuple(
        (function, (), _RECOVERED, ())
        for function in ("release", "_copy", "device_peak", "standing_bytes", "reset_peak", "device_bytes", "_counts")
    ),
    "inside/steps.py": (
        ("synchronized", (), "times of steps are those of the device", ()),
        ("device_name", (), "nothing", ()),
    ),
    "inside/switches.py": (
        ("_compilation", (), "blocks are compiled and run eagerly again between two steps", ()),
    ),
    "measurement/timeline.py": (
        ("_part", ("tests/executor/measurement/test_timeline.py::test_with_a_device_only_its_kernels_compute",),
         "NCCL's kernels have these names", ()),
    ),
    "dry/mode.py": (
        ("DryMode.running", _FOR_CUDA,
         "the predicted peak equals the allocator's", ("correctness", "grid")),
    ),
    "dry/ledger.py": (
        ("(module)", ("tests/autotune/prediction/test_against_dry_run.py::test_allocated_memory",),
         "NCCL makes no hidden copies, and the allocator rounds as assumed", ("correctness",)),
    ),
    "runners/dry_trial.py": (
        ("dry_nccl", _DRY, "the predicted peak equals the allocator's", ("correctness",)),
        ("trial_nccl", (), "the predicted peak equals the allocator's", ("correctness",)),
    ),
    "engines/command/probe.py": (
        ("Probe.write_later", (), "checksums are copied without a wait of the device", ()),
    ),
    "trial/reference.py": (
        ("plain_losses", (), "the module alone leaves no memory behind, and is left out where it does not fit", ()),
    ),
    "engines/command/watch.py": (
        ("device_bytes", (f"{_CUDA}the_driver_lists_devices_and_what_processes_hold",),
         "the driver lists a script's processes by their process ids", ()),
    ),
    "engines/command/trial.py": (
        ("runs_on_cpu", (f"{_REQUIRED}a_script_is_started_for_the_device_of_the_job",),
         "a script starts on the devices", ()),
    ),
    "engines/deepspeed/engine.py": (
        ("DeepSpeedSession._settings", (), "DeepSpeed's fused and offloaded optimizers train the same", ()),
    ),
    "engines/deepspeed/package.py": (
        ("_set_environment", (f"{_CUDA}deepspeed_is_told_the_device_of_the_rank",), "DeepSpeed uses this device", ()),
    ),
    "parallel/context.py": (
        ("_causal_mask", _BIAS, "fused kernels accept the mask", ("correctness",)),
        ("_attend_from", (f"{_PARTS}a_device_calls_the_kernel_without_a_mask",), "cuDNN's kernel attends in two calls",
         ("correctness",)),
    ),
    "parallel/copies.py": (
        ("CopyEngine.start", _STREAMED, "copies overlap with computation, in both directions", ("correctness", "grid")),
        ("HostPool.__init__", _PINNED, "the memory is pinned", ("correctness",)),
        ("HostPool.zeros", _PINNED, "the memory is pinned, and the allocator takes the expected bytes", ("correctness",)),
        ("_PinnedPages.__init__", _PINNED, "the driver pins pages that are mapped", ("correctness",)),
        ("_PinnedPages.__del__", _PINNED, "the driver gives them back", ("correctness",)),
        ("make_stream", _STREAMED, "streams run concurrently", ("correctness", "grid")),
        ("working_stream", (f"{_STREAMS}gradients_may_come_on_another_stream", f"{_STREAMS}a_planted_fault_is_found"),
         "gradients of captured blocks are waited for", ("correctness",)),
        ("current_stream", _STREAMED, "backward's thread uses forward's stream", ("correctness",)),
        ("is_on_host", _STREAMED, "nothing beyond the stream checker", ("correctness",)),
    ),
    "parallel/graphs.py": (
        ("CudaCapture", (f"{_PARALLEL}test_graphs.py::test_a_device_without_graphs_is_refused",), _REPLAYED, ("grid",)),
        ("CudaCapture.graph",
         (*_GRAPHED, f"{_PARALLEL}test_graphs.py::test_two_ranks_train_as_plain_torch_does", _STREAMED[0]), _REPLAYED,
         ("grid",)),
        ("CudaCapture.held", _GRAPHED, _REPLAYED, ("grid", "correctness")),
    ),
    "parallel/attention.py": (
        ("documents_in", (_FLEX,), "flex attention skips blocks that no query attends to", ("by-hand",)),
        ("attend_in_documents", (_FLEX,), "the compiled kernel is right, forward and backward", ("by-hand",)),
        ("block_mask", (f"{_PARALLEL}test_packed.py::test_the_mask_of_flex_attention_is_of_documents",),
         "the mask is built without waiting for the device", ("by-hand",)),
        ("by_flex", (_SCORES,), "the compiled kernel with limited scores is right, forward and backward", ("by-hand",)),
        ("has_no_bias", (f"{_PARTS}only_the_kernel_that_lacks_the_bias_is_called_in_parts",), "nothing", ("correctness",)),
        ("needs_flash",
         tuple(f"{_PARTS}{name}" for name in ("flash_is_called_by_name_in_compiled_blocks_on_devices_only",
                                              "a_compiled_block_calls_flash_by_name")),
         "the kernel's causal is of the last query and key", ("correctness",)),
        ("_EarlierAndOwn.forward", (f"{_PARTS}parts_are_merged_to_what_a_mask_gives",),
         "the kernel's logarithms are as documented", ("correctness",)),
        ("_EarlierAndOwn.backward", (f"{_PARTS}parts_are_merged_to_what_a_mask_gives",),
         "the kernel's backward takes a logarithm of more keys than its own", ("correctness",)),
        ("can_flex", (_FLEX, _SCORES), "flex attention with a window is faster than a mask", ("by-hand",)),
        ("attend_by_flex", (_FLEX,), "the compiled kernel is right, forward and backward", ("by-hand",)),
        ("_plain_flex", (f"{_PARALLEL}test_windowed.py::test_flex_attention_is_attention_under_a_mask",),
         "the compiled kernel is right, forward and backward", ("by-hand",)),
        ("block_mask_of", (f"{_PARALLEL}test_windowed.py::test_flex_attention_is_attention_under_a_mask",),
         "the compiled kernel is right, forward and backward", ("by-hand",)),
    ),
    "parallel/checkpointing.py": (
        ("(module)", (f"{_PARALLEL}test_checkpointing.py::test_what_backward_runs_again_is_cheap",),
         "the results of these kernels are saved", ("by-hand",)),
    ),
    "engines/session.py": (
        ("ParallelSession._to_device", (), "a batch comes from pinned memory and is complete when read", ("correctness",)),
        ("ParallelSession.waited_seconds", (f"{_CUDA}the_host_does_not_wait_where_streams_do",), "nothing", ()),
    ),
    "engines/sources.py": (
        ("_Shape.__init__", ("tests/executor/engines/test_float8_layouts.py::test_other_types_than_nvidias_are_refused",),
         "nothing on NVIDIA devices", ()),
    ),
    "measurement/device.py": (
        ("(module)", (f"{_CUDA}segments_change_when_nothing_is_reserved",), "both names of torch's function work", ("grid",)),
        ("set_expandable_segments", (f"{_CUDA}segments_change_when_nothing_is_reserved",),
         "the setting takes effect in a running process", ("grid",)),
        ("DeviceCounters.release", (f"{_DEVICE}pinned_memory_is_given_back_with_the_devices",),
         "memory returns to its baseline after a trial", ("correctness",)),
        ("CudaCounters.synchronize", _ANSWERS, "nothing", ("grid",)),
        ("CudaCounters.reset_peaks", _ANSWERS, "the reserved bytes are the trial's own", ("correctness",)),
        ("CudaCounters.allocated_bytes", _ANSWERS, "the account's peak equals the allocator's", ("correctness",)),
        ("CudaCounters.peak_allocated_bytes", (*_ANSWERS, f"{_DEVICE}the_allocators_peak_is_the_peak"),
         "the account's peak is the allocator's", ("correctness",)),
        ("CudaCounters.peak_reserved_bytes", _ANSWERS, "the reserved bytes are the trial's own", ("correctness",)),
        ("CudaCounters.reserved_bytes", _ANSWERS, "memory returns to its baseline after a trial", ("correctness",)),
        ("CudaCounters.pinned_bytes", _ANSWERS, "memory returns to its baseline after a trial", ("correctness",)),
        ("CudaCounters.memory_in_use", (*_ANSWERS, f"{_DEVICE}a_device_that_answers_nothing_any_more_is_no_further_error"),
         "a device responds after it ran out of memory", ("correctness",)),
        ("CudaCounters.allocation_retries", _ANSWERS, "retries are counted from the first one", ("correctness",)),
        ("CudaCounters.clock", (f"{_DEVICE}the_drivers_library_tells_the_clock",),
         "the driver finds the device by this name", ("grid",)),
        ("DeviceClock.event", _TIMED, "events and the host's clock agree", ("grid",)),
        ("DeviceClock.wait", _WINDOWS, "events and the host's clock agree", ("grid",)),
        ("device_clock", (*_TIMED, *_WINDOWS), "events and the host's clock agree", ("grid",)),
        ("environment", (f"{_CUDA}an_environment_names_device_and_libraries",), "nothing", ("sweep",)),
    ),
    "measurement/flop_counter.py": (
        ("(module)", (f"{_FLOPS}attention_within_chunks_counts_the_pairs_of_each_chunk",), "nothing", ()),
    ),
    "measurement/memory.py": (
        ("host_bound", (f"{_DEVICE}what_bounds_the_hosts_memory_is_the_host",), "nothing", ()),
    ),
    "measurement/kernels.py": (
        ("compute_cases", _ASKED, "the cases fit into the device, and a law fits their times", ("sweep",)),
        ("_memory", _ASKED, "the cases fit into the device, and a law fits their times", ("sweep",)),
        ("host_copy", (f"{_CUDA}copies_that_are_timed_are_of_pinned_memory",), "copies reach the link's rate", ("sweep",)),
    ),
    "measurement/microbenchmark.py": (
        ("_Bench._weight", _ASKED, "nothing", ("sweep",)),
        ("_free_bytes", _ASKED, "nothing", ("sweep",)),
        ("_left_over", _ASKED, "the remaining bytes are libraries' workspaces", ("sweep",)),
        ("Stopwatch.measure", _TIMED, "samples are long enough for the device's clock", ("sweep",)),
        ("Stopwatch._sample", _TIMED, "samples are long enough for the device's clock", ("sweep",)),
        ("_on_host", _TIMED, "launches do not wait for the device", ("sweep",)),
        ("_by_events", _TIMED, "samples are long enough for the device's clock", ("sweep",)),
    ),
    "runners/rank_loop.py": (
        ("join", (f"{_CUDA}a_rank_joins_nccl_with_its_device",), "NCCL starts, ends and starts again in one process",
         ("correctness",)),
        ("_ready", _READY, "nothing", ("correctness",)),
    ),
    "runners/ray/checkup.py": (
        ("_check_up", (), "NCCL crosses the network", ()),
        ("_pairs", (), "NCCL crosses the network", ()),
        ("_measured", (), "NCCL crosses the network", ()),
    ),
    "runners/ray/on_node.py": (
        ("NodeProbe.facts", ("tests/executor/runners/test_on_node.py::test_a_node_tells_of_its_cards",),
         "the driver prints these columns", ()),
        ("NodeProbe.all_reduce", _PAIR, "NCCL crosses the network", ()),
        ("_median_seconds", _PAIR, "NCCL crosses the network", ()),
        ("_cuda_versions", ("tests/executor/runners/test_on_node.py::test_a_node_tells_of_its_cards",), "nothing", ()),
    ),
    "runners/ray/runner.py": (
        ("RayRunner.__init__", (), "gangs run concurrently on their devices", ()),
        ("_gpus", ("tests/executor/runners/test_on_node.py::test_ranks_ask_for_devices_where_the_job_does",), "nothing", ()),
    ),
}  # fmt: skip
"""File under `executor/` -> its functions."""


def _branches() -> Iterator[Branch]:
    for file, entries in _ENTRIES.items():
        for function, tests, proves, parts in entries:
            yield Branch(file=f"executor/{file}", function=function, tests=tests, proves=proves, parts=parts)


BRANCHES = tuple(_branches())
