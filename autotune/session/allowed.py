"""What jobs from outside may run here: the factories and commands that the operator of the service allows.

A job is checked when it is submitted, and again when it is cloned, resumed and claimed: the allow-list may have become shorter,
and a job file may come from anyone. Jobs that were written directly into the database (`autotune submit` without a service) are
not checked: anyone who can write there can run any code.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotune.errors import RequestError
from autotune.request.field_forms import parse_allowed
from autotune.request.request import RUNNERS, JobRequest
from search_spaces.models.command import CommandModel
from search_spaces.models.huggingface import is_factory_reference
from search_spaces.models.model import FactoryModel
from search_spaces.preset_files import preset_tables
from storage.records import ORIGIN, JobRecord

SAFE_VARIABLES = frozenset({
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM", "NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NTHREADS",
    "NCCL_BUFFSIZE", "TORCH_NCCL_AVOID_RECORD_STREAMS",
})  # fmt: skip
"""Environment variables that only tune and load no code. With others (LD_PRELOAD, PYTHONPATH), a request could run anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowList:
    """What jobs from outside may run."""

    factories: Sequence[str] = ()
    """`module:factory` models. Nothing else in a request makes a worker import code."""
    commands: Sequence[str] = ()
    """`FOLDER:COMMAND`: the folder in which a user's command runs, and the words that it must begin with."""
    runners: Sequence[str] = RUNNERS

    def require(self, request: JobRequest) -> None:
        """Check that everything that the request runs is allowed.

        Raises:
            RequestError: it is not allowed; the message names the option that would allow it.
        """
        if request.runner not in self.runners:
            raise RequestError("runner", f"{request.runner!r} is not known", f"use one of {', '.join(self.runners)}")
        for name in ("data_path", "nvme_path", "python_path", "ray_address"):
            if getattr(request, name):
                raise RequestError(name, "a job from outside must not name a path or host of this machine", "leave it out")
        models = (request.command, request.resolved_model)
        factories = [model for model in models if isinstance(model, FactoryModel)]
        if is_factory_reference(request.model) or factories:
            self.require_factory(request.model)
            for factory in factories:
                self.require_factory(factory.reference)
                if factory.python_path:
                    raise RequestError("model", "a job from outside must not name folders to import from", "leave them out")
        commands = [model for model in models if isinstance(model, CommandModel)]
        for command in commands:
            self.require_words(command.folder, command.arguments, command.environment_knobs)
        if request.resolved_model is None and not commands and request.model not in preset_tables("models"):
            raise RequestError("model", f"{request.model!r} is not a preset", "give a preset or a config.json")

    def require_factory(self, reference: str) -> None:
        """Check that this factory is allowed. Raises what `require` raises."""
        if reference not in self.factories:
            problem = f"{reference!r} is not among the factories that are allowed here"
            raise RequestError(
                "model", problem, "give a preset or a config.json, or ask the operator of the server (--allow-factory)"
            )

    def require_words(self, folder: str, arguments: Sequence[str], variables: Iterable[str]) -> None:
        """Check that this command may run in this folder with these tuned variables. Raises what `require` raises."""
        folder = folder.rstrip("/") or "/"
        prefixes = [words for allowed_folder, words in map(parse_allowed, self.commands) if allowed_folder == folder]
        if not any(tuple(arguments[: len(words)]) == words for words in prefixes):
            problem = "is not among the commands and folders that are allowed here"
            raise RequestError("command", problem, "ask the operator of the server (--allow-command)")
        unsafe = sorted(set(variables) - SAFE_VARIABLES)
        if unsafe:
            remedy = f"use some of {', '.join(sorted(SAFE_VARIABLES))}"
            raise RequestError(f"command.environment_knobs.{unsafe[0]}", "is not a variable that a submission may set", remedy)


def is_from_outside(job: JobRecord) -> bool:
    """Whether the job came over HTTP or from a file."""
    return bool(job.request.get(ORIGIN))
