"""What jobs from outside may run here: factories and commands that whoever runs the service allows today.

A job is checked when it is submitted, and again when it is cloned, resumed and claimed: lists become shorter, and a job's file
may come from anybody. Jobs that were written into the database directly (`autotune submit` without a service) are not: who can
write there can have any code run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotune.errors import RequestError
from autotune.request.command_field import parse_allowed
from autotune.request.request import RUNNERS, JobRequest
from search_spaces.command import CommandModel
from search_spaces.huggingface import is_factory_reference
from search_spaces.model import FactoryModel
from search_spaces.preset_files import preset_tables
from storage.records import ORIGIN, JobRecord

SAFE_VARIABLES = frozenset({
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM", "NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NTHREADS",
    "NCCL_BUFFSIZE", "TORCH_NCCL_AVOID_RECORD_STREAMS",
})  # fmt: skip
"""Environment variables that turn knobs and load no code: by others (LD_PRELOAD, PYTHONPATH) a request could run anything."""
_OWN = ("data_path", "nvme_path", "python_path", "ray_address")
"""Fields that name folders and hosts of who runs the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowList:
    """What jobs from outside may run."""

    factories: Sequence[str] = ()
    """`module:factory` models: nothing else of a request makes a worker import anything."""
    commands: Sequence[str] = ()
    """`FOLDER:COMMAND`: what a user's command must begin with, and where it runs."""
    runners: Sequence[str] = RUNNERS

    def require(self, request: JobRequest) -> None:
        """Pass where all that the request has run is allowed.

        Raises:
            RequestError: it is not; the message names the option that would allow it.
        """
        if request.runner not in self.runners:
            raise RequestError("runner", f"{request.runner!r} is not known", f"use one of {', '.join(self.runners)}")
        for name in _OWN:
            if getattr(request, name):
                raise RequestError(name, "names what is this machine's own, which no job from outside may", "leave it out")
        models = (request.command, request.resolved_model)
        factories = [model for model in models if isinstance(model, FactoryModel)]
        if is_factory_reference(request.model) or factories:
            self.require_factory(request.model)
            for factory in factories:
                self.require_factory(factory.reference)
                if factory.python_path:
                    raise RequestError("model", "names folders to import from, which no job from outside may", "leave them out")
        commands = [model for model in models if isinstance(model, CommandModel)]
        for command in commands:
            self.require_words(command.folder, command.arguments, command.environment_knobs)
        if request.resolved_model is None and not commands and request.model not in preset_tables("models"):
            raise RequestError("model", f"{request.model!r} is no preset", "give a preset or a config.json")

    def require_factory(self, reference: str) -> None:
        """Pass where a model of this name may be built. Raises what `require` raises."""
        if reference not in self.factories:
            problem = f"{reference!r} is not among the factories that are allowed here"
            raise RequestError("model", problem, "give a preset or a config.json, or ask who runs the server (--allow-factory)")

    def require_words(self, folder: str, arguments: Sequence[str], variables: Iterable[str]) -> None:
        """Pass where this command may run there with these of its variables tuned. Raises what `require` raises."""
        folder = folder.rstrip("/") or "/"
        beginnings = [words for place, words in map(parse_allowed, self.commands) if place == folder]
        if not any(tuple(arguments[: len(words)]) == words for words in beginnings):
            problem = "is not among the commands and folders that are allowed here"
            raise RequestError("command", problem, "ask who runs the server (--allow-command)")
        unsafe = sorted(set(variables) - SAFE_VARIABLES)
        if unsafe:
            remedy = f"use some of {', '.join(sorted(SAFE_VARIABLES))}"
            raise RequestError(f"command.environment_knobs.{unsafe[0]}", "is no variable that a submission may set", remedy)


def is_from_outside(job: JobRecord) -> bool:
    """Whether the job came over HTTP or from a file: who has a name came over HTTP, also before this was written down."""
    return bool(job.request.get(ORIGIN)) or bool(job.submitter)
