"""Usage: transformers_arguments.py FILE FOLDER: TrainingArguments made from the file, and a step of a Trainer with them."""

import importlib
import json
import os
import sys
from pathlib import Path

import torch

content = json.loads(Path(sys.argv[1]).read_text())
if "deepspeed" in content:
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29502", "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    # The op that shares memory between ranks is compiled where it is first asked for; nothing needs it here.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = torch.arange(8) + index
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    content["output_dir"] = sys.argv[2] + "/output"
    arguments = TrainingArguments(**content, max_steps=1, report_to=[], save_strategy="no", logging_strategy="no")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    trainer = Trainer(model=model, args=arguments, train_dataset=Samples())
    ran = trainer.train()
    told = {
        "micro_batch": arguments.per_device_train_batch_size, "accumulation": arguments.gradient_accumulation_steps,
        "checkpointing": arguments.gradient_checkpointing, "optim": str(getattr(arguments.optim, "value", arguments.optim)),
        "steps": ran.global_step,
    }  # fmt: skip
    if "deepspeed" in content:
        told["deepspeed_stage"] = trainer.model_wrapped.zero_optimization_stage()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
