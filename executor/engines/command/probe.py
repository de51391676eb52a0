"""Counts the work of a training script from inside of its processes, without any change of the script.

Each trial copies this file as `sitecustomize.py` into a folder that is first on PYTHONPATH, so every Python process of the
script runs it at its start (`python -I` and `-E` do not). It uses only the standard library of Python 3.9:

1. It runs the `sitecustomize` that it hides, if there is one, and waits for the script to import torch.
2. A wrapper of `torch.autograd.backward` counts micro-batches, without backward passes inside a backward pass (reentrant
   activation checkpointing). A second pass on the same input with moved parameters (SAM) is no other micro-batch.
3. At the first backward pass it looks for the modules that train: no other module contains them, and they have trainable
   parameters. A forward pre-hook on them notes the shapes of their inputs. If none is called before a backward pass (Lightning
   calls a method of its module instead), their children take their place. Modules below have no hook, so nothing that torch
   compiles is changed.
4. torch's hook on optimizer steps writes a line of JSON for each step. Of several optimizers the one with the most parameters
   decides, of equals the first. Calls without a backward pass in between (one per parameter group, as in DeepSpeed) are one
   step.
5. Calls that write checkpoints, forward passes in evaluation mode and compilations are timed. If a trial asks for it, torch's
   profiler records some steps.
6. Where links in a trial's folder stand for files of the user, one that is opened for writing first becomes the trial's.

The script's numbers stay the same to the bit, and no device is waited for: on CUDA the times of steps are those of events, and
a line is written when its event has passed. No error of the probe reaches the script: the first is written to the file, and the
probe stops.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import io
import itertools
import json
import os
import shutil
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VARIABLE = "AUTOTUNE_PROBE"
"""Environment variable: the folder of this file's copy, into which each training process writes `steps-PID.jsonl`."""
PROFILED = "AUTOTUNE_PROFILED"
"""Environment variable: how many steps the profiler records, after the first FIRST_STEPS, into `profile-PID.json`."""
FIRST_STEPS = 4
INSIDE = "AUTOTUNE_INSIDE"
"""Environment variable: the file or database of a run whose Trainer tunes itself, instead of being observed."""
LINKED = "AUTOTUNE_LINKED"
"""Environment variable: a folder in which links stand for files that the script must not change."""
DEEPEST = 12
"""Most times that children take the place of modules that are not called."""
COMPARED = 4
"""Micro-batches and steps whose inputs and parameters get a checksum, with which ranks are compared."""
SAMPLED = 16_384
"""Elements of a tensor in its checksum."""
TRAINED_TOGETHER = frozenset({
    "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "ReplicateModule", "DeepSpeedEngine", "PipelineEngine",
    "LightningDistributedDataParallel", "HybridParallelPlugin",
})  # fmt: skip
"""Classes that combine the gradients of ranks."""
EXCHANGES = ("allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base", "reduce", "reduce_scatter",
             "_reduce_scatter_base")  # fmt: skip
"""Methods of process groups by which a script can combine parameters or gradients itself."""
DIRECT_EXCHANGES = ("send", "recv", "recv_anysource", "alltoall", "alltoall_base")
"""Methods of process groups by which ranks pass on activations."""
OTHER_COMMUNICATION = ("horovod", "mpi4py", "hivemind", "bagua", "oneccl_bindings_for_pytorch", "jax", "tensorflow", "mlx")
"""Packages with which a script can train without torch, or combine gradients without torch's process groups."""


class Guard:
    """Calls a function of the probe; after its first error nothing of the probe runs any more."""

    def __init__(self, probe: Probe, function: Callable[..., Any]) -> None:
        self._probe, self._function = probe, function
        self._torchdynamo_disable = True

    def __call__(self, *arguments: Any) -> None:
        probe = self._probe
        if probe.problem:
            return
        try:
            if probe.pid != os.getpid():  # a fork, such as a worker of a data loader, or of a script that starts ranks itself
                probe.reset()
            self._function(*arguments)
        except Exception as error:  # nothing may reach the script
            probe.stop(f"the probe stopped: {type(error).__name__}: {error}")


class RootHook:
    """The forward pre-hook of a module that trains. In a pickled module it is a call that does nothing, without this file."""

    def __init__(self, probe: Probe) -> None:
        self._note, self._is_compiling = Guard(probe, probe.begin_forward), probe.torch.compiler.is_compiling

    def __call__(self, module: Any, arguments: Any, keywords: Any) -> None:
        if not self._is_compiling():
            self._note(module, arguments, keywords)

    def __deepcopy__(self, memory: Any) -> RootHook:
        return self

    def __reduce__(self) -> Any:
        return functools.partial, (sys.audit, "autotune.forward")


class Probe:
    """Counts of one process."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.torch: Any = None
        self.reset()

    def reset(self) -> None:
        """Begin in a new process."""
        self.pid = os.getpid()
        self.problem = ""
        self.file: int | None = None
        self.steps = 0
        self.roots: dict[int, tuple[Callable[[], Any], Callable[[], None]]] = {}
        """Identity of a module that trains -> a weak reference to it, and a call that removes its hook."""
        self.outermost: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """The modules that no other contains, so far."""
        self.depth = -1
        self.in_backward = self.has_backward = False
        self.forwards: list[tuple[int, bool, list[str], tuple[Any, ...] | None]] = []
        """Of each forward pass since the last backward pass: module, whether it was in training mode, shapes of inputs, and
        `input_version`."""
        self.last_input: tuple[Any, ...] | None = None
        """`input_version` of the last backward pass."""
        self.repeats_input = False
        """Whether two passes of this step had the same input and parameters: more losses of its samples, or more samples."""
        self.micro_batches: list[tuple[int, int, tuple[str, ...]]] = []
        """Of each backward pass since the last step: forward passes, rows of all of them, shapes of the first one's inputs."""
        self.optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Optimizer -> elements of its parameters."""
        self.optimizer_calls: dict[int, int] = {}
        """Identity of an optimizer that does not decide -> backward passes before its call in this step."""
        self.seconds: dict[str, float] = {}
        """Kind of time since the last step -> seconds."""
        self.compilations = 0
        self.began: dict[str, float] = {}
        self.counted_inputs = 0
        self.exchanged = 0
        """Elements that the script exchanged between ranks since the last step."""
        self.facts: dict[str, Any] = {}
        self.waiting: list[tuple[dict[str, Any], list[Any]]] = []
        """Lines to be written, with the events of the device that must have passed."""
        self.base_event: Any = None
        self.profiler: Any = None

    # The script's calls.

    def install(self, torch: Any) -> None:
        """Observe torch, which has just been imported."""
        self.torch = torch
        original, begin, end = torch.autograd.backward, Guard(self, self.begin_backward), Guard(self, self.end_backward)

        @functools.wraps(original)
        def backward(*arguments: Any, **keywords: Any) -> Any:
            if self.in_backward:
                return original(*arguments, **keywords)
            begin()
            try:
                return original(*arguments, **keywords)
            finally:
                end()

        backward._torchdynamo_disable = True  # type: ignore[attr-defined]
        torch.autograd.backward = backward
        step = Guard(self, self.end_step)
        sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(step)
        self.time_calls(torch, "checkpoint", "save")
        group = getattr(getattr(torch._C, "_distributed_c10d", None), "ProcessGroup", None)
        for name in (*EXCHANGES, *DIRECT_EXCHANGES):
            if hasattr(group, name):
                setattr(group, name, self._counted(getattr(group, name), name))

    def time_calls(self, module: Any, kind: str, *names: str) -> None:
        """Time calls of functions of a module. The hooks of modules are removed meanwhile, so that no file contains them."""
        for name in names:
            original = getattr(module, name, None)
            if original is not None:
                setattr(module, name, self._timed(original, kind))

    def _timed(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        begin, end = Guard(self, self.begin_checkpoint), Guard(self, self.end_checkpoint)

        @functools.wraps(original)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            began = time.monotonic()
            begin()
            for argument in (*arguments, *keywords.values()):
                if isinstance(argument, (str, os.PathLike)):
                    make_own(argument, "w")
            try:
                return original(*arguments, **keywords)
            finally:
                end(kind, began)

        return timed

    def _counted(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        note = Guard(self, self.note_exchange)

        def counted(group: Any, *arguments: Any, **keywords: Any) -> Any:
            note(name, arguments)
            return original(group, *arguments, **keywords)

        counted.__code__ = counted.__code__.replace(co_name=name)  # by it pybind11 knows a method that overrides its own
        return counted

    def note_exchange(self, name: str, arguments: Any) -> None:
        """Note whether the script exchanges as much as its parameters after the first step, or activations."""
        if self.steps and not self.facts.get("exchanges"):
            self.exchanged += sum(tensor.numel() for tensor, _ in self.tensors(arguments[:1]) if tensor is not None)
            self.facts["exchanges"] = name in DIRECT_EXCHANGES or 2 * self.exchanged >= max(self.optimizers.values(), default=1)

    def begin_checkpoint(self) -> None:
        """Remove the hooks of the modules."""
        for _, remove in self.roots.values():
            remove()

    def end_checkpoint(self, kind: str, began: float) -> None:
        """Count the time of a checkpoint, and restore the hooks."""
        self.observe_all(self.root_modules())
        self.seconds[kind] = self.seconds.get(kind, 0.0) + time.monotonic() - began

    def begin_compilation(self, _: Any) -> None:
        """Called by torch's compiler."""
        self.began.setdefault("compilation", time.monotonic())

    def end_compilation(self, _: Any) -> None:
        """Called by torch's compiler."""
        self.compilations += 1
        self.seconds["compilation"] = self.seconds.get("compilation", 0.0) + time.monotonic() - self.began.pop("compilation")

    def begin_forward(self, module: Any, arguments: Any, keywords: Any) -> None:
        """Note the inputs of a module that trains."""
        if self.in_backward or id(module) not in self.roots:  # recomputed by activation checkpointing; a copy of the module
            return
        training = module.training
        if not self.torch.is_grad_enabled():
            if not training:
                self.began.setdefault("evaluation", time.monotonic())
            return
        if self.forwards and self.forwards[-1][1] != training:
            self.forwards.clear()  # an evaluation with gradients: no backward pass followed
        if training:
            self._end_evaluation()
        tensors = list(self.tensors([arguments, keywords]))
        self.forwards.append((id(module), training, [text for _, text in tensors], input_version(module, tensors)))
        if self.counted_inputs < COMPARED:
            self.counted_inputs += 1
            self.write_later({"inputs": self.counted_inputs}, [tensor for tensor, _ in tensors if tensor is not None])

    def _end_evaluation(self) -> None:
        if "evaluation" in self.began:
            self.seconds["evaluation"] = self.seconds.get("evaluation", 0.0) + time.monotonic() - self.began.pop("evaluation")

    def begin_backward(self) -> None:
        """Count a micro-batch."""
        self.in_backward = True
        if not self.has_backward:
            self.has_backward = True
            self.outermost.clear()  # modules may have been wrapped after a step that had no gradients
            self.find_roots()
        elif not self.forwards and self.depth < DEEPEST:
            self.find_roots()
        self.count_micro_batch()

    def count_micro_batch(self) -> None:
        """Count the forward passes since the last micro-batch as one, unless they are on the same input."""
        first = self.forwards[0] if self.forwards else None
        if first is None:
            self.micro_batches.append((0, 0, ()))
            return
        shapes = [texts for module, _, texts, _ in self.forwards if module == first[0]]
        self.forwards.clear()
        before, self.last_input = self.last_input, first[3]
        if self.micro_batches and before and first[3] and before[0]() is first[3][0]() and before[1] == first[3][1]:
            if before[2] != first[3][2]:
                return
            self.repeats_input = True
        self.micro_batches.append((len(shapes), sum(rows_of(texts) for texts in shapes), tuple(first[2])))
        if not self.steps and len(self.micro_batches) in (4, 8, 16, 32, 64, 128):
            self.write_later({"before_first_step": len(self.micro_batches)}, self.compared_parameters())
            self.flush()

    def end_backward(self) -> None:
        """Let forward passes count again."""
        self.in_backward = False

    def end_step(self, optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        """Write a line if this ends a step."""
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        deciding = max(self.optimizers, key=self.optimizers.__getitem__)
        if optimizer is not deciding:
            passes, size = len(self.micro_batches), self.optimizers[optimizer]
            if 0 < self.optimizer_calls.get(id(optimizer), passes) < passes and size == self.optimizers[deciding]:
                del self.optimizers[deciding]  # it takes no steps any more
            elif passes:
                self.optimizer_calls[id(optimizer)] = passes
            return
        if not self.micro_batches and not self.forwards:
            if not self.has_backward and not self.steps and self.depth < DEEPEST:
                self.find_roots()  # gradients may be those of torch.autograd.grad
            return
        if not self.micro_batches:  # gradients by torch.autograd.grad
            self.count_micro_batch()
        if type(optimizer).__name__ == "LBFGS":
            del self.micro_batches[1:]  # it evaluates the same samples several times
        alternating = self.repeats_input or any(count < len(self.micro_batches) for count in self.optimizer_calls.values())
        self._end_evaluation()
        self.steps += 1
        row: dict[str, Any] = {
            "step": self.steps, "clock": time.monotonic(), "alternating": alternating,
            "micro_batches": [[len([*group]), *counts] for counts, group in itertools.groupby(self.micro_batches)],
            "compilations": self.compilations, "exchanges": self.facts.get("exchanges", False), **self.seconds,
        }  # fmt: skip
        if self.steps <= 2:
            row.update(self.describe())
        self.micro_batches, self.seconds, self.compilations, self.exchanged = [], {}, 0, 0
        self.optimizer_calls.clear()
        self.repeats_input = False
        events = []
        cuda = self.torch.cuda
        if cuda.is_initialized():
            if cuda.is_current_stream_capturing():
                self.stop("the step is captured as a CUDA graph, whose replays the probe does not see")
                return
            event = cuda.Event(enable_timing=True)
            event.record()
            events = [event]
            if self.steps <= COMPARED or self.steps % 16 == 0:
                row.update(device_bytes=cuda.max_memory_allocated(), reserved_bytes=cuda.max_memory_reserved())
        self.waiting.append((row, events))
        if self.steps <= COMPARED:
            self.write_later({"parameters": self.steps}, self.compared_parameters())
        self.flush()
        last = FIRST_STEPS + int(os.environ.get(PROFILED, "0"))
        if FIRST_STEPS <= self.steps <= last > FIRST_STEPS:
            began = time.monotonic()
            with contextlib.suppress(RuntimeError):  # the script uses the profiler itself
                self.profile(self.steps == last)
            self.seconds["profile"] = time.monotonic() - began  # a step with such a time is no measurement

    def profile(self, ends: bool) -> None:
        """Start the profiler if it does not run, or end it and write its trace."""
        if self.profiler is None and not ends:
            self.profiler = self.torch.profiler.profile(record_shapes=True, acc_events=True)
            self.profiler.start()
        elif self.profiler is not None and ends:
            self.profiler.stop()
            unfinished = Path(self.folder, f"unfinished-{self.pid}.json")
            self.profiler.export_chrome_trace(str(unfinished))
            unfinished.rename(unfinished.with_name(f"profile-{self.pid}.json"))
            self.profiler = None

    # The modules that train.

    def find_roots(self) -> None:
        """Observe the outermost modules with trainable parameters, and where none of them is called, their children.

        A script may build a module only after others were trained.
        """
        kind = self.torch.nn.Module
        modules = [item for item in gc.get_objects() if issubclass(type(item), kind)]
        inner = {id(child) for module in modules for child in (vars(module).get("_modules") or {}).values()}
        outermost = {id(module): module for module in modules if id(module) not in inner and trains(module)}
        if outermost.keys() - self.outermost.keys():
            self.depth, roots = -1, [*outermost.values()]
            self.outermost.update(outermost)
            loader = sys.modules.get("torch.utils.data.dataloader")
            iterator = getattr(loader, "_BaseDataLoaderIter", None)
            iterators = [item for item in gc.get_objects() if iterator and issubclass(type(item), iterator)]
            sizes = {getattr(getattr(item, "_index_sampler", None), "batch_size", None) for item in iterators}
            self.facts["loader"] = sorted(size if type(size) is int else 0 for size in sizes)
        else:
            roots = [child for module in self.root_modules() for child in module.children() if trains(child)]
        if not roots:
            self.depth = DEEPEST
            return
        if self.depth < 0:
            together = {c.__name__ for root in roots for m in root.modules() for c in type(m).__mro__} & TRAINED_TOGETHER
            self.facts["together"] = sorted(together)
            parameters = (parameter for root in roots for parameter in root.parameters())
            self.facts["tensor_parallel"] = any(is_divided(parameter, "FSDPModule" in together) for parameter in parameters)
        for _, remove in self.roots.values():
            remove()
        self.depth += 1
        self.observe_all(roots)

    def root_modules(self) -> list[Any]:
        """The modules that train and still exist."""
        return [module for reference, _ in self.roots.values() if (module := reference()) is not None]

    def observe_all(self, modules: list[Any]) -> None:
        """Observe these modules that train."""
        self.roots = {id(module): (weakref.ref(module), self.observe(module)) for module in modules}

    def observe(self, module: Any) -> Callable[[], None]:
        """Call `begin_forward` before each call of a module; return what ends that."""
        compiled = getattr(module, "_compiled_call_impl", None)
        if compiled is None:
            removable: Callable[[], None] = module.register_forward_pre_hook(RootHook(self), with_kwargs=True).remove
            return removable
        note = Guard(self, self.begin_forward)  # `module.compile()` would compile a hook

        def call(*arguments: Any, **keywords: Any) -> Any:
            note(module, arguments, keywords)
            return compiled(*arguments, **keywords)

        module._compiled_call_impl = call
        return functools.partial(setattr, module, "_compiled_call_impl", compiled)

    def tensors(self, value: Any, depth: int = 0) -> Iterator[tuple[Any, str]]:
        """Tensors of a module's inputs, each with its shape as text, `i` at its end for whole numbers; at most 8.

        Lists inside of an argument are preceded by their length, as `#8`: each tensor may be a sample (detection), or one of
        several inputs.
        """
        torch = self.torch
        if issubclass(type(value), torch.Tensor):
            if value.dim() and not value.is_nested:
                whole = not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)
                yield value, "x".join(str(int(size)) for size in value.shape) + "i" * whole
            return
        graphs = getattr(value, "num_graphs", None) if type(value).__module__.startswith("torch_geometric") else None
        if graphs is not None:
            yield None, str(graphs)
            return
        parts = value if isinstance(value, (list, tuple)) else value.values() if hasattr(value, "values") else ()
        if isinstance(value, type) or callable(parts) or depth > 3:
            return
        count = 0
        if depth > 1 and isinstance(value, (list, tuple)):
            yield None, f"#{len(value)}"
        for part in parts:
            for tensor in self.tensors(part, depth + 1):
                yield tensor
                count += 1
                if count == 8:
                    return

    def describe(self) -> dict[str, Any]:
        """What is known of ranks that train together."""
        distributed = self.torch.distributed
        group = distributed.is_available() and distributed.is_initialized()
        shared = [name for name in OTHER_COMMUNICATION if name in sys.modules]
        return {**self.facts, "group": distributed.get_world_size() if group else 0, "others": shared}

    def compared_parameters(self) -> list[Any]:
        """Three of the parameters that train and are copies on every rank, as far as can be known."""
        roots = self.root_modules()
        wrapped = [module for root in roots for module in root.modules() if type(module).__name__ == "DistributedDataParallel"]
        parameters = [p for module in wrapped or roots for p in module.parameters() if p.requires_grad]
        plain = [p for p in parameters if p.numel() and type(p) is self.torch.nn.Parameter]
        divided = any(hasattr(p, "ds_id") or getattr(p, "tensor_model_parallel", False) for p in parameters)
        if divided or len(plain) < len(parameters) or not plain:
            return []
        return [plain[0], plain[len(plain) // 2], plain[-1]]

    # Lines.

    def write_later(self, row: dict[str, Any], tensors: list[Any]) -> None:
        """Write the row with a checksum of the tensors when the device has copied them."""
        torch = self.torch
        copies, events = [], []
        with torch.no_grad():
            for tensor in tensors[:4]:
                if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type not in ("cpu", "cuda"):
                    continue
                if tensor.layout is not torch.strided or not tensor.numel():
                    continue
                flat = tensor.detach().reshape(-1)
                sample = flat[:: max(flat.numel() // SAMPLED, 1)]
                if tensor.is_cuda:
                    host = torch.empty(sample.shape, dtype=sample.dtype, pin_memory=True)
                    host.copy_(sample, non_blocking=True)
                    event = torch.cuda.Event()
                    event.record()
                    events.append(event)
                    copies.append(host)
                else:
                    copies.append(sample.clone())
        if copies:
            self.waiting.append(({**row, "copies": copies}, events))

    def flush(self) -> None:
        """Write the lines whose events have passed."""
        lines = []
        while self.waiting and all(event.query() for event in self.waiting[0][1]):
            row, events = self.waiting.pop(0)
            if "copies" in row:
                checksum = 0
                for copy in row.pop("copies"):
                    checksum = zlib.crc32(ctypes.string_at(copy.data_ptr(), copy.numel() * copy.element_size()), checksum)
                row["checksum"] = checksum
            elif events:
                self.base_event = self.base_event or events[0]
                row["device_clock"] = self.base_event.elapsed_time(events[0]) / 1e3
            lines.append(json.dumps(row))
        if lines:
            self.append("\n".join(lines))

    def append(self, text: str) -> None:
        """Append lines to the file of this process."""
        if self.file is None:
            self.file = os.open(f"{self.folder}/steps-{self.pid}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(self.file, text.encode() + b"\n")

    def stop(self, problem: str) -> None:
        """Write why the probe stops."""
        self.problem, self.in_backward = problem, False
        with contextlib.suppress(OSError):
            self.append(json.dumps({"problem": problem}))


def trains(module: Any) -> bool:
    """Whether a module has a trainable parameter."""
    return any(parameter.requires_grad for parameter in module.parameters())


def input_version(module: Any, tensors: list[tuple[Any, str]]) -> tuple[Any, ...] | None:
    """A weak reference to a module's first input, its version, and that of the first trained parameter; None: unknown."""
    tensor = next((tensor for tensor, _ in tensors if tensor is not None), None)
    parameter = next((parameter for parameter in module.parameters() if parameter.requires_grad), None)
    if tensor is None or parameter is None or tensor.is_inference() or parameter.is_inference():
        return None
    return weakref.ref(tensor), tensor._version, parameter._version


def is_divided(parameter: Any, data_parallel: bool) -> bool:
    """Whether a parameter is a part of a layer: by Megatron's mark, or a DTensor that more than FSDP2 divides."""
    divisions = sum(placement.is_shard() for placement in getattr(parameter, "placements", ()))
    return getattr(parameter, "tensor_model_parallel", False) or divisions > data_parallel


def rows_of(shapes: list[str]) -> int:
    """First dimension of the first tensor; 0: there is none."""
    first = next((shape for shape in shapes if shape[0] != "#"), "0")
    return int(first.rstrip("i").split("x")[0])


def make_own(name: Any, mode: str) -> None:
    """Put a file of the trial in the place of a link to one of the user, which is about to be opened in `mode` for writing."""
    linked = os.environ.get(LINKED)
    with contextlib.suppress(OSError, TypeError, ValueError):
        path = Path(os.fsdecode(name)).absolute()
        if linked and path.is_symlink() and path.is_file() and path.parent.resolve().is_relative_to(Path(linked).resolve()):
            original = path.resolve()
            path.unlink()
            if "w" not in mode:
                shutil.copyfile(original, path)


def protect_links() -> None:
    """Have Python's `open` call `make_own` before it opens a file for writing."""
    original = io.open

    @functools.wraps(original)
    def opened(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        if not isinstance(file, int) and isinstance(mode, str) and set(mode) & set("wa+"):
            make_own(file, mode)
        return original(file, mode, *arguments, **keywords)

    builtins.open = io.open = opened


class Finder:
    """Finds the modules that the probe observes, and has them observed after their import."""

    def __init__(self, probe: Probe) -> None:
        self._imported: dict[str, Callable[[Any], None]] = {
            "torch": probe.install,
            "torch.distributed.checkpoint.state_dict_saver": lambda module: probe.time_calls(module, "checkpoint", "save"),
            "safetensors.torch": lambda module: probe.time_calls(module, "checkpoint", "save_file", "save_model"),
            "torch._dynamo.callback": self._observe_compiler,
        }
        if os.environ.get(INSIDE):
            self._imported = {"transformers.trainer": tune_inside}
        self._probe = probe

    def install(self) -> None:
        """Observe later imports, and the modules that are imported already, by a file ending with .pth."""
        sys.meta_path.insert(0, self)
        for name in self._imported.keys() & sys.modules.keys():
            Guard(self._probe, self._imported.pop(name))(sys.modules[name])

    def _observe_compiler(self, module: Any) -> None:
        module.callback_handler.register_start_callback(Guard(self._probe, self._probe.begin_compilation))
        module.callback_handler.register_end_callback(Guard(self._probe, self._probe.end_compilation))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The specification of a module that is observed, whose loader then calls the probe."""
        if name not in self._imported:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            specification = None if find is None else find(name, path, target)
            if specification is not None:
                return self._observed(specification, name)
        return None

    def _observed(self, specification: Any, name: str) -> Any:
        loader = specification.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return specification

        def exec_module(module: Any) -> None:
            execute(module)
            # Here, because programs also look for packages that they do not import then (`importlib.util.find_spec`).
            if name in self._imported:
                Guard(self._probe, self._imported.pop(name))(module)

        loader.exec_module = exec_module
        return specification


def tune_inside(_: Any) -> None:
    """Have the Trainers of this process tune themselves, if autotune can be imported."""
    importlib.import_module("autotune.integrations.transformers").tune_trainers()


def start() -> None:
    """Observe this process if a trial asks for it, and run the `sitecustomize` that this one hides."""
    folder = os.environ.get(VARIABLE)
    here = str(Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    if os.environ.get(LINKED):
        protect_links()
    if folder:
        Finder(Probe(folder)).install()  # before the script's `sitecustomize`, which may import torch
    mine = sys.modules.pop("sitecustomize", None)
    if importlib.util.find_spec("sitecustomize") is not None:
        importlib.import_module("sitecustomize")
    elif mine is not None:
        sys.modules["sitecustomize"] = mine


if __name__ == "sitecustomize":
    start()
