"""Programs of a way of fine-tuning that `autotune fit` answers with: Transformers' Trainer, and Lightning around the same model
(transformers 5.24, PEFT 0.19, Lightning 2.6)."""

import json
from collections.abc import Sequence

from autotune.errors import ExportRefusedError
from autotune.frameworks.export import Export, python_text
from autotune.frameworks.fine_tuning import FineTuning, amount_of, arguments_of, deepspeed_content, notes_of
from search_spaces.training.adapters import ALPHA_PER_RANK

TRAINER = '''"""Fine-tuning with Transformers' Trainer{with_peft}. Start it by: {launch}"""

import torch
from datasets import load_dataset
{imports}

LENGTH = {length}
arguments = TrainingArguments(**{arguments}){joined}
tokenizer = AutoTokenizer.from_pretrained({model})
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained{loading}
{adapters}
{rows}Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=collator).train()
'''
LIGHTNING = '''"""Fine-tuning with Lightning{with_peft}. Start it by: {launch}"""

import lightning
import torch
from datasets import load_dataset
{imports}

LENGTH = {length}
arguments = {arguments}
tokenizer = AutoTokenizer.from_pretrained({model})
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token


class FineTuning(lightning.LightningModule):
    def configure_model(self):
        """Build the model once, on the device of this process."""
        if hasattr(self, "model"):
            return
        model = AutoModelForCausalLM.from_pretrained{loading}
{adapters}        self.model = model.train()

    def training_step(self, batch):
        return self.model(**batch).loss

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return {optimizer}


{rows}loader = torch.utils.data.DataLoader(dataset, batch_size={micro_batch}, shuffle=True, drop_last=True, collate_fn=collator)
lightning.Trainer({strategy}**arguments).fit(FineTuning(), loader)
'''
ROWS = '''
def tokens_of(rows):
    """Rows with a column `text`, cut to the length."""
    return tokenizer(rows["text"], truncation=True, max_length=LENGTH)


dataset = load_dataset({dataset}, split="train")
dataset = dataset.map(tokens_of, batched=True, remove_columns=dataset.column_names)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
'''
NAMES = ("AutoModelForCausalLM", "AutoTokenizer", "DataCollatorForLanguageModeling")


def trainer_file(run: FineTuning) -> Export:
    """A program with Transformers' Trainer, and PEFT where adapters are trained."""
    arguments = {"output_dir": "output", **arguments_of(run)}
    imports, loading, adapters = _model(run, ("Trainer", "TrainingArguments"))
    joined = ""
    if run.by_deepspeed and run.cluster.device.kind == "cpu":
        # On devices the arguments do so; DeepSpeed divides weights among the ranks that it knows.
        imports, joined = f"import deepspeed\n{imports}", '\ndeepspeed.init_distributed("gloo")'
    launch = _launch(run)
    text = TRAINER.format(
        with_peft=" and PEFT" * run.shape.adapts, launch=launch, length=run.workload.sequence_length, imports=imports,
        arguments=python_text(arguments), joined=joined, model=json.dumps(run.model_name), loading=loading, adapters=adapters,
        rows=ROWS.format(dataset=json.dumps(run.dataset)),
    )  # fmt: skip
    return Export(text=text, notes=notes_of(run, launch))


def lightning_file(run: FineTuning) -> Export:
    """A program with Lightning's Trainer around a model of Transformers.

    Raises:
        ExportRefusedError: Lightning cannot train so.
    """
    if run.with_fsdp:
        raise ExportRefusedError("program", "Lightning has no FSDP2 for a model of Transformers", "let fit choose DDP or ZeRO")
    imports, loading, adapters = _model(run, ())
    precision = f"{next(iter(run.precision))}-mixed" if run.precision else "32-true"
    optimizer, strategy = f"torch.optim.AdamW(trained, lr={run.learning_rate:g}, fused=True)", ""
    if run.config.optimizer == "adamw8bit":
        imports = f"import bitsandbytes\n{imports}"
        optimizer = f"bitsandbytes.optim.AdamW8bit(trained, lr={run.learning_rate:g})"
    if run.by_deepspeed:
        # Lightning fills in sizes and types itself.
        content = {name: value for name, value in deepspeed_content(run).items() if "auto" not in str(value)}
        imports += "\nfrom lightning.pytorch.strategies import DeepSpeedStrategy"
        strategy = f"strategy=DeepSpeedStrategy(config={python_text(content)}), "
    elif run.ranks > 1:
        strategy = 'strategy="ddp", '
    per_node = run.ranks // run.cluster.nodes
    arguments = {
        "accelerator": "cpu" if run.cluster.device.kind == "cpu" else "gpu", "devices": per_node,
        "num_nodes": run.cluster.nodes, "precision": precision, "accumulate_grad_batches": run.accumulation,
        **amount_of(run, "max_epochs"), "enable_checkpointing": False, "logger": False,
    }  # fmt: skip
    if "max_epochs" in arguments:
        arguments["max_epochs"] = max(round(arguments["max_epochs"]), 1)
    launch = _launch(run)
    text = LIGHTNING.format(
        with_peft=" and PEFT" * run.shape.adapts, launch=launch, length=run.workload.sequence_length, imports=imports,
        arguments=python_text(arguments), model=json.dumps(run.model_name),
        loading=loading.replace("\n", "\n        "), micro_batch=run.config.micro_batch_size, optimizer=optimizer,
        adapters="".join(f"        {line}\n" for line in _enabled(run, adapters).splitlines()), strategy=strategy,
        rows=ROWS.format(dataset=json.dumps(run.dataset)).lstrip(),
    )  # fmt: skip
    saves = "the program saves nothing: call save_pretrained of its model where you want it"
    return Export(text=text, notes=notes_of(run, launch, saves))


def _enabled(run: FineTuning, adapters: str) -> str:
    """The lines about adapters, and recomputation, which the Trainer switches on by its arguments."""
    switch = 'model.gradient_checkpointing_enable({"use_reentrant": False})\n' if run.recomputes else ""
    return f"{adapters}{switch}"


def _model(run: FineTuning, further: Sequence[str]) -> tuple[str, str, str]:
    """Imports with `further` names of Transformers, arguments of `from_pretrained`, and the lines that add adapters."""
    quantised, names = run.bits != 16, [*NAMES, *further]
    loading = {"dtype": f"torch.{run.loaded}"}
    if quantised:
        names.append("BitsAndBytesConfig")
        words = ["load_in_8bit=True"] if run.bits == 8 else [
            "load_in_4bit=True", 'bnb_4bit_quant_type="nf4"', "bnb_4bit_use_double_quant=True",
            f"bnb_4bit_compute_dtype=torch.{run.loaded}",
            *([f"bnb_4bit_quant_storage=torch.{run.loaded}"] if run.is_sharded else []),
        ]  # fmt: skip
        loading["quantization_config"] = _call("BitsAndBytesConfig", words, "    ")
    imports, adapters = [_import("transformers", names)], ""
    if run.shape.adapts:
        prepares = ["prepare_model_for_kbit_training"] if quantised else []
        imports.insert(0, _import("peft", ["LoraConfig", "get_peft_model", *prepares]))
        if quantised:
            adapters = f"model = prepare_model_for_kbit_training(model, use_gradient_checkpointing={run.recomputes})\n"
        elif run.recomputes:
            adapters = "model.enable_input_require_grads()\n"
        rank, targets = run.shape.lora_rank, json.dumps(run.targets)
        words = [f"r={rank}", f"lora_alpha={ALPHA_PER_RANK * rank}", f"target_modules={targets}", 'task_type="CAUSAL_LM"']
        adapters += f"adapters = {_call('LoraConfig', words)}\nmodel = get_peft_model(model, adapters)\n"
    call = _call("", [json.dumps(run.model_name), *(f"{name}={value}" for name, value in loading.items())])
    return "\n".join(imports), call, adapters


def _launch(run: FineTuning) -> str:
    alone = run.ranks == 1 and not run.by_deepspeed
    return "python train.py" if alone else f"torchrun --nproc-per-node={run.ranks // run.cluster.nodes} train.py"


def _call(name: str, words: Sequence[str], indent: str = "") -> str:
    return f"{name}(\n{''.join(f'{indent}    {word},{chr(10)}' for word in words)}{indent})"


def _import(package: str, names: Sequence[str]) -> str:
    return f"from {package} import {_call('', sorted(names))}"
