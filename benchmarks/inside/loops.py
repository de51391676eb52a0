"""Training loops of eight libraries, each as its users write it, with the lines that tune the run from inside."""

import importlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import autotune.inside.tuner as inside
from benchmarks.inside.models import VOCABULARY, Language, make_batches, rank_number, wrapped

ENVIRONMENT = dict(os.environ)
WORLD = int(ENVIRONMENT.get("WORLD_SIZE", "1"))
NANOGPT = "NANOGPT"
"""Environment variable: a folder with nanoGPT's `model.py`."""
RATE, ZERO_STAGE, BUCKET = 0.1, 2, 50_000_000


class WithLoss(nn.Module):
    """A language model of this benchmark whose result is read as that of a model of Transformers."""

    def __init__(self, model: Language) -> None:
        super().__init__()
        self.model = model

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks."""
        return self.model.layers

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean loss, by name."""
        return {"loss": self.model(input_ids, labels)}


@dataclass(frozen=True)
class Run:
    """One training run of this rank, on batches that each are a micro-batch."""

    model: nn.Module
    batches: list[dict[str, torch.Tensor]]
    per_step: int
    """Batches of an optimizer step."""
    is_tuned: bool

    @property
    def rows(self) -> int:
        """Samples of a batch."""
        return len(self.batches[0]["input_ids"])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Plain, so that differences of gradients are differences of weights."""
        return torch.optim.SGD(model.parameters(), RATE)

    def tuner(self, model: Any, optimizer: Any, **options: Any) -> inside.InRunTuner:
        """The tuner of a loop of one's own."""
        steps = len(self.batches) // self.per_step
        rows = self.rows * self.per_step * WORLD
        return inside.InRunTuner(model, optimizer, global_batch_size=rows, steps=steps, headroom=0.0, **options)


def tuned(run: Run, tuner: inside.InRunTuner, model: Any, optimizer: Any, backward: Callable[[Any], Any] | None = None) -> Any:
    """The loop that docs/tune-inside-the-run.md shows."""
    for batch in tuner.batches(run.batches):
        with tuner:
            tuner.backward(model(**batch)["loss"], backward)
            optimizer.step()
            optimizer.zero_grad()
    tuner.close()
    return model


def accelerate(run: Run) -> Any:
    """Accelerate's loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=run.per_step)
    model, optimizer = accelerator.prepare(run.model, run.optimizer(run.model))
    if run.is_tuned:
        return tuned(run, run.tuner(model, optimizer.optimizer), model, optimizer, accelerator.backward)
    for batch in run.batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    return model


def plain(run: Run, wrapper: str) -> Any:
    """A loop of torch, with DistributedDataParallel or `fully_shard`."""
    model = wrapped(run.model, wrapper)
    optimizer = run.optimizer(model)
    if run.is_tuned:
        return tuned(run, run.tuner(model, optimizer), model, optimizer)
    for number, batch in enumerate(run.batches, 1):
        (model(**batch)["loss"] / run.per_step).backward()
        if number % run.per_step == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def deepspeed(run: Run, stage: int = ZERO_STAGE, bucket: int = BUCKET) -> Any:
    """DeepSpeed's loop."""
    settings = {
        "train_micro_batch_size_per_gpu": run.rows, "gradient_accumulation_steps": run.per_step,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    warnings.filterwarnings("ignore")
    library = importlib.import_module("deepspeed")
    engine, *_ = library.initialize(model=run.model, optimizer=run.optimizer(run.model), config=settings)
    if run.is_tuned:
        tuner = run.tuner(engine, None)
        for batch in tuner.batches(run.batches):
            with tuner:
                tuner.backward(engine(**batch)["loss"])
                engine.step()
        tuner.close()
        return engine
    for batch in run.batches:
        engine.backward(engine(**batch)["loss"])
        engine.step()
    return engine


def lightning(run: Run) -> Any:
    """Lightning's Trainer, which clips gradients."""
    import lightning.pytorch as library

    from autotune.integrations.lightning import AutotuneCallback

    class Module(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch)

        def configure_optimizers(self) -> Any:
            return run.optimizer(self)

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ.update(ENVIRONMENT)  # the end of a Trainer removes WORLD_SIZE
    module = Module()
    trainer = library.Trainer(
        max_epochs=1, accelerator="cpu", devices=WORLD, strategy="ddp" if WORLD > 1 else "auto", gradient_clip_val=0.5,
        accumulate_grad_batches=run.per_step, use_distributed_sampler=False, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[AutotuneCallback(tune=True, headroom=0.0)] if run.is_tuned else [],
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(run.batches, batch_size=None))  # type: ignore[arg-type]
    return module


def trainer(run: Run) -> Any:
    """The Trainer of Hugging Face."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        _train(Trainer, TrainingArguments(**_arguments(run, folder)), run)
    return run.model


def trl(run: Run) -> Any:
    """TRL's SFTTrainer."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"<{number}>": number for number in range(256)}
    made = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<0>", pad_token="<0>", eos_token="<0>")
    rows = Dataset.from_list([{"input_ids": row.tolist()} for batch in run.batches for row in batch["input_ids"]])
    for batch in run.batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(**_arguments(run, folder), dataset_kwargs={"skip_prepare_dataset": True}, bf16=False)
        _train(SFTTrainer, arguments, run, train_dataset=rows, processing_class=tokenizer)
    return run.model


def _arguments(run: Run, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder, "per_device_train_batch_size": run.rows, "gradient_accumulation_steps": run.per_step,
        "learning_rate": RATE, "optim": "sgd", "lr_scheduler_type": "constant", "num_train_epochs": 1, "report_to": "none",
        "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no",
        "remove_unused_columns": False, "gradient_checkpointing": False,
    }  # fmt: skip


def _train(kind: Any, arguments: Any, run: Run, **options: Any) -> None:
    from autotune.integrations.transformers import AutotuneCallback

    class Ordered(kind):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(run.batches, batch_size=None)  # type: ignore[arg-type]

    options = {"train_dataset": run.batches, **options}
    callbacks = [AutotuneCallback(tune=True, headroom=0.0)] if run.is_tuned else []
    Ordered(run.model, arguments, callbacks=callbacks, **options).train()


def nanogpt(run: Run) -> Any:
    """The loop of nanoGPT's `train.py`, with its model."""
    model = wrapped(run.model, "ddp" if WORLD > 1 else "none")
    optimizer = run.optimizer(model)
    if run.is_tuned:
        tuner = run.tuner(model, optimizer, count=lambda batch: batch["labels"].numel())
        for batch in tuner.batches(run.batches):
            with tuner:
                _, loss = model(batch["input_ids"], batch["labels"])
                tuner.backward(loss)
                if tuner.step_ends:
                    clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        tuner.close()
        return model
    batches = iter(run.batches)
    for _ in range(len(run.batches) // run.per_step):
        for micro_step in range(run.per_step):
            if WORLD > 1:
                model.require_backward_grad_sync = micro_step == run.per_step - 1
            batch = next(batches)
            _, loss = model(batch["input_ids"], batch["labels"])
            (loss / run.per_step).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


def model_of(loop: str, width: int, layers: int, length: int) -> nn.Module:
    """The model that a loop trains: TRL needs one of Transformers, and nanoGPT has its own."""
    torch.manual_seed(0)
    if loop == "trl":
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": width, "n_layer": layers, "n_head": 2, "n_positions": length, "vocab_size": VOCABULARY}
        return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))  # type: ignore[no-any-return]
    if loop == "nanogpt":
        sys.path.insert(0, os.environ[NANOGPT])
        theirs = importlib.import_module("model")
        sizes = {"n_embd": width, "n_layer": layers, "n_head": 2, "block_size": length, "vocab_size": VOCABULARY}
        return theirs.GPT(theirs.GPTConfig(**sizes))  # type: ignore[no-any-return]
    return WithLoss(Language(width, layers))


def note_samples(model: nn.Module, seen: list[int]) -> None:
    """Have the model note a number of each sample that it trains on."""

    def note(_: nn.Module, positions: tuple[Any, ...], words: dict[str, Any]) -> None:
        tokens = words["input_ids"] if "input_ids" in words else positions[0]
        seen.extend((tokens * torch.arange(1, tokens.shape[1] + 1)).sum(1).tolist())

    model.register_forward_pre_hook(note, with_kwargs=True)


LOOPS: dict[str, Callable[[Run], Any]] = {
    "trainer": trainer,
    "trl": trl,
    "accelerate": accelerate,
    "lightning": lightning,
    "fsdp2": lambda run: plain(run, "fsdp2"),
    "ddp": lambda run: plain(run, "ddp"),
    "deepspeed": deepspeed,
    "nanogpt": nanogpt,
}


def missing(loop: str) -> str | None:
    """What is not installed that a loop needs; None: nothing."""
    packages = {"trainer": "transformers", "fsdp2": "torch", "ddp": "torch", "nanogpt": "torch"}
    package = packages.get(loop, loop.partition("-")[0])
    if find_spec(package) is None:
        return f"{package} is not installed"
    return (
        f"{NANOGPT} does not name a folder with nanoGPT's model.py" if loop == "nanogpt" and NANOGPT not in os.environ else None
    )


def collect_tuners(kind: type[inside.InRunTuner]) -> list[Any]:
    """Have loops and integrations tune with this class; return the list of the tuners that they will make."""
    tuners: list[Any] = []

    class Collected(kind):  # type: ignore[misc,valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            tuners.append(self)

    inside.InRunTuner = Collected  # type: ignore[misc]
    return tuners


def micro_batches(count: int, rows: int, seed: int, **options: Any) -> list[dict[str, torch.Tensor]]:
    """This rank's, without the numbers of samples, which models of libraries do not take."""
    made = make_batches(count, rows, seed + rank_number(), **options)
    return [{name: value for name, value in batch.items() if name != "ids"} for batch in made]
