"""Files that `autotune fit --for` writes, run: they start, train, and a trial of a sweep has the losses of a run by hand.

    python -m benchmarks.frameworks.fit_files --python PYTHON [--only NAME ...] [--markdown docs/results/fit-files.md]

PYTHON is that of an environment with transformers, trl, peft, bitsandbytes, deepspeed, datasets and lightning. Each file is
written for a tiny Llama, a dataset of its own and this machine's CPUs, and runs unchanged on two ranks. Programs are swept and
run by hand as in `real_scripts`.
"""

import contextlib
import io
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.cli.app import run
from benchmarks.common.written_page import give, page_parser, table
from benchmarks.frameworks.real_scripts import Program

TINY = """
import json, random, sys
from pathlib import Path
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder, letters = Path(sys.argv[1]), sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate([*letters, "<pad>", "<eos>"])}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder / "model")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, pad_token_id=256, eos_token_id=257, bos_token_id=None,
)
LlamaForCausalLM(config).save_pretrained(folder / "model")
random.seed(0)
(folder / "data").mkdir()
rows = ({"text": "".join(random.choices("abcdefghij ", k=63))} for _ in range(4096))
(folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""
CASES: Mapping[str, tuple[str, str]] = {
    "TRL, LoRA": ("trl", "--methods lora --pin zero_stage=0"),
    "TRL, QLoRA": ("trl", "--methods qlora --pin zero_stage=0"),
    "TRL, full in fp32": ("trl", "--methods full --pin zero_stage=0"),
    "TRL, FSDP2": ("trl", "--methods full-bf16 --pin zero_stage=3"),
    "Trainer, all in bf16": ("trainer", "--methods full-bf16 --pin zero_stage=0"),
    "Trainer, LoRA, recomputed": ("trainer", "--methods lora --pin zero_stage=0 --pin activation_checkpointing=full"),
    "Trainer, QLoRA": ("trainer", "--methods qlora --pin zero_stage=0"),
    "Trainer, DeepSpeed ZeRO-2": ("trainer", "--methods full --pin zero_stage=2 --pin offload_optimizer=none"),
    "Trainer, DeepSpeed ZeRO-3": ("trainer", "--methods lora --pin zero_stage=3 --pin offload_param=cpu"),
    "Lightning, full in fp32": ("lightning", "--methods full --pin zero_stage=0"),
    "Lightning, LoRA, recomputed": ("lightning", "--methods lora --pin zero_stage=0 --pin activation_checkpointing=full"),
}
"""Name -> program, and what `fit` is asked."""
ON_CPU = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
BATCH = 16
INTRODUCTION = """# Files of fit, run

Written by `python -m benchmarks.frameworks.fit_files --python PYTHON --markdown docs/results/fit-files.md`. Each file of
`autotune fit --for PROGRAM` was written for a tiny Llama, and started unchanged on two CPU ranks by a sweep of one trial and
by hand. **losses equal**: of the first steps that both runs have, how many have the same losses to the bit. **rate**: samples/s
of the trial, beside those that an observer of its own saw in the same steps. **bytes**: of all tensors of rank 0 after its
third update (weights, gradients, states, data), in the trial and by hand. What runs on GPUs alone (fused kernels, Axolotl,
LLaMA-Factory, Lightning's strategy of DeepSpeed, torchtune's recipes for several cards) is not here. torchtune 0.6.1 validates
its files for full fine-tuning, LoRA and QLoRA, and trained from those for one card, full and LoRA, on a CPU."""


def written(name: str, folder: Path) -> str:
    """Write the file of a case; return the command that starts it on a rank."""
    program, words = CASES[name]
    path = folder / ("sft.yaml" if program == "trl" else "train.py")
    model, data = str(folder / "model" / "config.json"), str(folder / "data")
    asked = [
        "fit",
        model,
        "--on",
        "local",
        "--ranks",
        "2",
        "--sequence-length",
        "64",
        "--global-batch-size",
        str(BATCH),
        *words.split(),
    ]
    sys.argv = ["autotune", *asked, "--dataset", data, "--training-steps", "100000", "--for", program, "--out", str(path)]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = run()
    if status:
        raise SystemExit(f"{name}: {said.getvalue()}")
    further = "--report_to none --save_strategy no --logging_steps 1 --disable_tqdm true"
    return f"PYTHON -m trl.scripts.sft --config {path} {further}" if program == "trl" else f"PYTHON {path}"


def measured(name: str, python: str) -> dict[str, Any]:
    """The result of a case, as `Program.measure` gives it."""
    with tempfile.TemporaryDirectory(prefix="fit-files-") as text:
        folder = Path(text)
        subprocess.run([python, "-c", TINY, str(folder)], check=True, capture_output=True)
        command = written(name, folder)
        options = f"--global-batch-size {BATCH} --trials 1 --trial-seconds 2 --confirm-repeats 0"
        options += " --trial-timeout 300 --report-seconds 280"
        entry = {
            "name": name, "folder": ".", "command": command, "samples": str(BATCH), "environment": ON_CPU, "options": options,
        }  # fmt: skip
        return Program(entry, {}, folder, python).measure()


def main() -> int:
    """Write, run, compare, print."""
    parser = page_parser(__doc__)
    parser.add_argument("--python", required=True)
    parser.add_argument("--only", nargs="+", default=[*CASES])
    options = parser.parse_args()
    rows, failed = [], 0
    for name in options.only:
        result = measured(name, options.python)
        words = CASES[name][1]
        rate = f"{result['sweep']:.4g} / {result['true']:.4g}" if "true" in result else "–"
        failed += not math.isfinite(result.get("true", math.nan))
        held = " / ".join("–" if count is None else f"{count:,}" for count in result.get("bytes", ()))
        rows.append([name, f"`{words}`", rate, result.get("losses_equal", "–"), held or "–", result["said"].replace("|", "/")])
        sys.stderr.write(f"{rows[-1]}\n")
    lines = [
        *INTRODUCTION.splitlines(),
        "",
        *table(["file", "asked", "rate / observed", "losses equal", "bytes", "the trial says"], rows),
    ]
    give(lines, options.markdown)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
