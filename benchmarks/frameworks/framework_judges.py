"""What a framework itself says of a file: whether it accepts it, and the values that it reads. Run by `public_recipes`.

    PYTHON framework_judges.py FRAMEWORK < requests > verdicts

PYTHON has the frameworks installed. A request is a line of JSON with the fields of `Request`, with the same tree in all. A
verdict is a line of JSON: `verdict` (accepted, refused, or unjudged: the parser could not be asked), `reason`, `values`.
Each file is judged in a process of its own, because frameworks
change global state. What needs a GPU is answered for an H100: its compute capability, and that it computes in bf16.
"""

import contextlib
import importlib
import io
import json
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from deepspeed_judges import judge_accelerate, judge_deepspeed
from judge_tools import Request, UnjudgedError, claim_gpu, stand_in
from launched_words import NotLaunchedError
from pretraining_judges import judge_megatron, judge_torchtitan
from trainer_judges import OLDER_KEYS, judge_axolotl, judge_llama_factory, judge_trl

JUDGES = {
    "deepspeed": judge_deepspeed,
    "accelerate": judge_accelerate,
    "torchtitan": judge_torchtitan,
    "megatron": judge_megatron,
    "axolotl": judge_axolotl,
    "llama-factory": judge_llama_factory,
    "trl": judge_trl,
}


SOURCES = {"axolotl": "src", "llama-factory": "src", "torchtitan": "", "megatron": ""}
"""Framework that is imported from the tree -> its folder there."""


IMPORTS = {
    "deepspeed": ("deepspeed.runtime.config", "transformers.integrations.deepspeed"),
    "accelerate": ("accelerate.commands.launch", "deepspeed.runtime.config", "transformers.integrations.deepspeed"),
    "torchtitan": ("torchtitan.distributed", "torchtitan.config_manager", "torchtitan.config"),
    "megatron": ("megatron.training.arguments",),
    "axolotl": ("transformers", "axolotl.utils.config"),
    "llama-factory": ("omegaconf", "llamafactory.hparams.parser"),
    "trl": ("trl", "trl.scripts.utils", "trl.trainer.sft_config"),
}
"""Modules that are imported once, before the processes fork."""


ABSENT = (
    "torchdata",
    "tiktoken",
    "tensorboard",
    "torchao",
    "torchvision",
    "multiprocess",
    "triton",
    "einops",
    "transformer_engine",
    "apex",
    "flash_attn",
    "modelopt",
    "mistral_common",
    "ring_flash_attn",
    "bitsandbytes",
    "colorama",
    "xformers",
    "kernels",
    "posthog",
    "cut_cross_entropy",
    "art",
    "optimum",
    "numba",
    "fla",
    "mamba_ssm",
    "librosa",
    "av",
    "galore_torch",
    "apollo_torch",
    "badam",
    "adam_mini",
    "hqq",
    "eetq",
)
"""Packages that parsers import and do not use; they stand in where they are not installed."""


def prepare(framework: str, tree: Path) -> None:
    """Import a framework's parser; what is absent is reported when a file is judged."""
    claim_gpu()
    if framework in ("torchtitan", "megatron", "axolotl", "llama-factory"):
        # transformers asks which packages there are: torchvision's names would be used.
        stand_in(*(name for name in ABSENT if framework in ("torchtitan", "megatron") or name != "torchvision"))
        sys.path.insert(0, str(tree / SOURCES[framework]))
    if framework in ("llama-factory", "trl", "axolotl"):
        import transformers.training_args
        import transformers.utils

        for module in (transformers.training_args, transformers.utils, transformers.utils.import_utils):
            module.is_torch_bf16_gpu_available = lambda: True
    for name in IMPORTS[framework]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def verdict(framework: str, request: Request) -> dict[str, Any]:
    """The framework's verdict of one file."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            values = JUDGES[framework](request)
    except (UnjudgedError, NotLaunchedError) as error:
        return {"verdict": "unjudged", "reason": str(error), "values": {}}
    except ImportError as error:
        return {"verdict": "unjudged", "reason": f"{type(error).__name__}: {error}", "values": {}}
    except SystemExit:
        lines = [line for line in printed.getvalue().splitlines() if "rror" in line] or printed.getvalue().splitlines() or [""]
        if re.search(r"'argument-\d'|expected one argument", lines[-1]):
            return {"verdict": "unjudged", "reason": f"the script takes arguments: {lines[-1][:200]}", "values": {}}
        return {"verdict": "refused", "reason": lines[-1][:400], "values": {}}
    except Exception as error:
        text = " ".join(str(error).split()) or (traceback.extract_tb(error.__traceback__)[-1].line or "")
        return {"verdict": "refused", "reason": f"{type(error).__name__}: {text[:400]}", "values": {}}
    reason = f"with older names: {', '.join(OLDER_KEYS)}" if OLDER_KEYS else ""
    return {"verdict": "accepted", "reason": reason, "values": values}


def main() -> int:
    framework = sys.argv[1]
    lines = [json.loads(line) for line in sys.stdin]
    requests = [Request(path=Path(line["path"]), tree=Path(line["tree"]), ranks=line["ranks"]) for line in lines]
    with contextlib.redirect_stdout(sys.stderr):
        prepare(framework, requests[0].tree)
    for request in requests:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            with os.fdopen(writer, "w") as stream:
                answer = verdict(framework, request)
                stream.write(json.dumps(answer, default=str))
                stream.flush()
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as stream:
            text = stream.read()
        os.waitpid(child, 0)
        print(text or json.dumps({"verdict": "unjudged", "reason": "the parser's process ended", "values": {}}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
