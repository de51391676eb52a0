"""Files of a way of fine-tuning that `autotune fit` answers with: what people give to TRL, Axolotl, LLaMA-Factory, torchtune,
Accelerate and DeepSpeed (TRL 1.10, transformers 5.24, Axolotl 067b021c, LLaMA-Factory ff6d4d12, torchtune 0.6.1)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import ExportRefusedError
from autotune.frameworks.export import STARTED_BY, Export, yaml_text
from autotune.frameworks.peft import TRANSFORMERS
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.deepspeed import deepspeed_config
from search_spaces.models.model import ModelSpec
from search_spaces.training.adapters import ALPHA_PER_RANK
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning:
    """What is trained, how, and what else a file needs."""

    method: str
    """One of `autotune.question.question.METHODS`."""
    shape: ModelSpec
    """The model, with adapters and the bits of frozen matrices if the method has some."""
    model_name: str
    """As the user named it."""
    config: TrialConfig
    cluster: ClusterSpec
    with_fsdp: bool
    """Whether FSDP2 divides the states; otherwise DeepSpeed, if they are divided."""
    workload: Workload
    dataset: str
    epochs: float | None
    steps: int | None
    measured: str = ""
    """What a sweep measured of it; empty: nothing did."""

    @property
    def ranks(self) -> int:
        """Cards, each with a process."""
        return self.cluster.world_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step on each card."""
        return self.config.gradient_accumulation_steps(self.workload.global_batch_size, self.ranks)

    @property
    def recomputes(self) -> bool:
        """Whether activations are recomputed."""
        return self.config.activation_checkpointing != "none"

    @property
    def bits(self) -> int:
        """Of frozen matrices."""
        return self.shape.frozen_bits if self.shape.adapts else 16

    @property
    def loaded(self) -> str:
        """The type in which parameters are loaded."""
        if not self.shape.adapts and self.method not in ("full-bf16", "full-8bit"):
            return "float32"
        return {"bf16": "bfloat16", "fp16": "float16"}.get(self.config.precision, "float32")

    @property
    def precision(self) -> dict[str, bool]:
        """The switch of mixed precision, by the Trainer's names; empty: all is in fp32."""
        if self.config.precision not in ("bf16", "fp16", "fp32"):
            problem = f"{self.config.precision} is a precision that these programs do not have"
            raise ExportRefusedError("precision", problem, "pin bf16, fp16 or fp32")
        return {} if self.config.precision == "fp32" else {self.config.precision: True}

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are divided: quantised ones are then stored in a floating type."""
        return self.config.zero_stage == 3

    @property
    def learning_rate(self) -> float:
        """A usual one, of Axolotl's examples with adapters and TRL's default without: nobody states it to `autotune fit`."""
        return 2e-4 if self.shape.adapts else 2e-5

    @property
    def packs(self) -> bool:
        """Whether documents are packed into samples."""
        return self.config.pack_sequences

    @property
    def targets(self) -> list[str]:
        """Modules with adapters, by their names in Transformers."""
        names = TRANSFORMERS.get(self.shape.family, {})
        missing = [matrix for matrix in self.shape.lora_targets if matrix not in names]
        if missing:
            problem = f"the names of {', '.join(missing)} in {self.shape.family} are not known here"
            raise ExportRefusedError("lora_targets", problem, "choose others, or write the file yourself")
        return list(dict.fromkeys(names[matrix] for matrix in self.shape.lora_targets))

    @property
    def by_deepspeed(self) -> bool:
        """Whether DeepSpeed divides the states."""
        return self.config.zero_stage > 0 and not self.with_fsdp

    @property
    def optimizer(self) -> str:
        """The Trainer's name; bitsandbytes' 8-bit states are divided by neither version of FSDP, torchao's are."""
        if self.config.optimizer != "adamw8bit":
            return "adamw_torch_fused"
        return "adamw_torch_8bit" if self.with_fsdp else "adamw_bnb_8bit"


FSDP_CONFIG = {"fsdp_version": 2, "reshard_after_forward": True}
WRAPS = "TRANSFORMER_BASED_WRAP"


def deepspeed_content(run: FineTuning) -> dict[str, Any]:
    """DeepSpeed's configuration beside a Trainer, which fills in sizes, types and the optimizer."""
    content = deepspeed_config(run.config, run.workload, run.ranks, run.shape.parameter_count)
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    filled: dict[str, Any] = dict.fromkeys(batch, "auto") | {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    sections = {key: value for key, value in content.items() if key in ("zero_optimization", "communication_data_type")}
    untested = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return {**sections, **filled, **untested}


def arguments_of(run: FineTuning) -> dict[str, Any]:
    """What `TrainingArguments`, and the programs that take them, are given."""
    content: dict[str, Any] = {
        "per_device_train_batch_size": run.config.micro_batch_size,
        "gradient_accumulation_steps": run.accumulation,
        **run.precision,
        "optim": run.optimizer,
        "learning_rate": run.learning_rate,
        "gradient_checkpointing": run.recomputes,
        **({"use_cpu": True} if run.cluster.device.kind == "cpu" else {}),
        **amount_of(run, "num_train_epochs"),
    }
    if run.by_deepspeed:
        content["deepspeed"] = deepspeed_content(run)
    elif run.with_fsdp:
        content |= {"fsdp": "full_shard auto_wrap", "fsdp_config": FSDP_CONFIG}
    return content


def amount_of(run: FineTuning, epochs: str) -> dict[str, Any]:
    if run.steps is not None:
        return {"max_steps": run.steps}
    return {} if run.epochs is None else {epochs: run.epochs}


def _adapters(run: FineTuning, names: Mapping[str, str]) -> dict[str, Any]:
    """Rank, scale, dropout and matrices of adapters, by a program's names; empty: the whole model is trained."""
    rank = run.shape.lora_rank
    values = {"rank": rank, "alpha": ALPHA_PER_RANK * rank, "dropout": 0.0, "targets": run.targets} if rank else {}
    return {names[name]: value for name, value in values.items()}


def trl_file(run: FineTuning) -> Export:
    """The YAML of `trl sft --config`."""
    content: dict[str, Any] = {
        "model_name_or_path": run.model_name,
        "dataset_name": run.dataset,
        "output_dir": "output",
        "max_length": run.workload.sequence_length,
        "packing": run.packs,
        "dtype": run.loaded,
        **({"use_peft": True} if run.shape.adapts else {}),
        **_adapters(
            run, {"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target_modules"}
        ),
        **_bits(run),
        **arguments_of(run),
    }
    if run.bits == 4:
        content |= {"bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
        content |= {"bnb_4bit_quant_storage": run.loaded} if run.is_sharded else {}
    content = {key: json.dumps(value) if isinstance(value, Mapping) else value for key, value in content.items()}
    flash = "packed: TRL asks for attn_implementation=flash_attention_2, which is faster than what was predicted"
    launch = f"trl sft --config FILE{f' --num_processes {run.ranks}' if run.ranks > 1 else ''}"
    return _yaml(run, content, launch, *[flash] * run.packs)


def llama_factory_file(run: FineTuning) -> Export:
    """The YAML of `llamafactory-cli train`."""
    content: dict[str, Any] = {
        "model_name_or_path": run.model_name,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora" if run.shape.adapts else "full",
        **_adapters(run, {"rank": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target"}),
        "dataset": run.dataset,
        "template": "default",
        "cutoff_len": run.workload.sequence_length,
        "packing": run.packs,
        "output_dir": "output",
        **arguments_of(run),
    }
    if run.shape.adapts:
        content["lora_target"] = ",".join(run.targets)
    if run.bits != 16:
        content |= {"quantization_bit": run.bits, "quantization_method": "bnb"}
    if run.method in ("full-bf16", "full-8bit"):
        content |= {"bf16": False, "pure_bf16": True}
    content["disable_gradient_checkpointing"] = not content.pop("gradient_checkpointing")
    forced = "FORCE_TORCHRUN=1 " if run.ranks > 1 or run.by_deepspeed else ""
    names = "dataset is a name of its dataset_info.json, and template is `default`: set those of your data and model"
    return _yaml(run, content, f"{forced}llamafactory-cli train FILE", names)


def axolotl_file(run: FineTuning) -> Export:
    """The YAML of `axolotl train`."""
    if run.method == "full" and not (run.by_deepspeed or run.with_fsdp):
        problem = "Axolotl loads parameters in bf16, and has fp32 masters with DeepSpeed or FSDP only"
        raise ExportRefusedError("program", problem, "give --methods full-bf16, or use trl")
    arguments = arguments_of(run)
    content: dict[str, Any] = {
        "base_model": run.model_name,
        "datasets": [{"path": run.dataset, "type": "alpaca"}],
        "output_dir": "output",
        "sequence_len": run.workload.sequence_length,
        "sample_packing": run.packs,
        **({"adapter": "qlora" if run.bits == 4 else "lora"} if run.shape.adapts else {}),
        **_adapters(
            run, {"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target_modules"}
        ),
        **_bits(run),
        "micro_batch_size": arguments["per_device_train_batch_size"],
        "gradient_accumulation_steps": arguments["gradient_accumulation_steps"],
        **amount_of(run, "num_epochs"),
        "optimizer": run.optimizer,
        "learning_rate": run.learning_rate,
        **run.precision,
        "gradient_checkpointing": run.recomputes,
        **({"deepspeed": arguments["deepspeed"]} if run.by_deepspeed else {}),
    }
    if run.with_fsdp:
        content |= {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True, "auto_wrap_policy": WRAPS}}
    columns = "the dataset's type is alpaca (columns instruction, input and output): set that of yours, chat_template for chats"
    return _yaml(run, content, "axolotl train FILE", columns)


def accelerate_file(run: FineTuning) -> Export:
    """The YAML of `accelerate launch --config_file`, for a program of one's own."""
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "mixed_precision": next(iter(run.precision), "no"),
        "num_machines": run.cluster.nodes,
        "num_processes": run.ranks,
        "distributed_type": "NO" if run.ranks == 1 else "MULTI_GPU",
    }
    if run.by_deepspeed:
        content |= {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "zero_stage": run.config.zero_stage,
                "offload_optimizer_device": run.config.offload_optimizer,
                "offload_param_device": run.config.offload_param,
                "gradient_accumulation_steps": run.accumulation,
                "zero3_init_flag": run.config.zero_stage == 3,
            },
        }
    elif run.with_fsdp:
        settings = {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_auto_wrap_policy": WRAPS}
        content |= {"distributed_type": "FSDP", "fsdp_config": settings}
    sizes = f"give your program micro-batches of {run.config.micro_batch_size} and {run.accumulation} of them a step"
    return _yaml(run, content, "accelerate launch --config_file FILE train.py", sizes, states_rate=False)


def deepspeed_file(run: FineTuning) -> Export:
    """DeepSpeed's JSON for a program with the Trainer."""
    if not run.by_deepspeed:
        problem = "this way of training does not use DeepSpeed"
        raise ExportRefusedError("program", problem, "pin zero_stage=2 or 3, or use another format")
    sizes = f"{run.config.micro_batch_size} per card and {run.accumulation} micro-batches a step"
    notes = (f"give the Trainer {sizes}, and this file as `deepspeed`", run.measured or NOT_MEASURED)
    return Export(text=json.dumps(deepspeed_content(run), indent=2) + "\n", notes=notes)


NOT_MEASURED = "predicted and not measured anywhere: measure it with --measure before you rely on it"


def notes_of(run: FineTuning, launch: str, *further: str, states_rate: bool = True) -> tuple[str, ...]:
    stand_ins = {"your dataset": DATASET if run.dataset == DATASET else ""}
    stand_ins["the model's Hugging Face id or folder"] = "" if "/" in run.model_name else run.model_name
    missing = [f"put {thing} in the place of {name}" for thing, name in stand_ins.items() if name]
    trained = "adapters" if run.shape.adapts else "whole models"
    rate = f"the learning rate of {run.learning_rate:g} is a usual one of {trained}, because none was stated: set yours"
    if run.shape.adapts:
        rate += f"; so are alpha={ALPHA_PER_RANK * run.shape.lora_rank} (twice the rank) and no dropout"
    return (f"{STARTED_BY}{launch}", *[rate] * states_rate, *further, *missing, run.measured or NOT_MEASURED)


def _yaml(run: FineTuning, content: Mapping[str, Any], launch: str, *further: str, states_rate: bool = True) -> Export:
    notes = notes_of(run, launch, *further, states_rate=states_rate)
    return Export(text="".join(f"# {note}\n" for note in notes) + yaml_text(content), notes=notes)


def _bits(run: FineTuning) -> dict[str, bool]:
    return {} if run.bits == 16 else {f"load_in_{run.bits}bit": True}


DATASET = "DATASET"
"""Stands for the dataset where none is stated."""


TORCHTUNE = {"llama": ("llama3", "LLAMA3"), "qwen2": ("qwen2", "QWEN2"), "mistral": ("mistral", "MISTRAL")}
"""Family -> torchtune's package of it, and the type of its checkpoints."""
ATTENTION_MODULES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
"""Transformers' name -> torchtune's."""


def torchtune_file(run: FineTuning) -> Export:
    """The YAML of `tune run` (torchtune 0.6.1): a model of this shape, built from its components."""
    shape, recipe = run.shape, "lora_finetune" if run.shape.adapts else "full_finetune"
    if shape.family not in TORCHTUNE or (shape.family == "llama" and shape.rope_theta == 10_000.0):
        raise ExportRefusedError("program", f"this shape of {shape.family} is not torchtune's", "use trl or another program")
    if run.method not in ("full-bf16", "full-8bit", "lora", "qlora") or run.config.precision not in ("bf16", "fp32"):
        problem = f"torchtune trains with parameters of one type, and not as {run.method} in {run.config.precision}"
        raise ExportRefusedError("program", problem, "give --methods full-bf16, lora or qlora")
    if run.ranks > 1 and not run.with_fsdp:
        raise ExportRefusedError("program", "torchtune divides states by FSDP2 alone", "let fit choose, or use trl")
    family, kind = TORCHTUNE[shape.family]
    package = "llama3_1" if family == "llama3" and shape.rope_scaling is not None else family
    tokenizer = {"path": f"{run.model_name}/{'vocab.json' if family == 'qwen2' else 'tokenizer.model'}"}
    if family == "qwen2":
        tokenizer["merges_file"] = f"{run.model_name}/merges.txt"
    model: dict[str, Any] = {
        "_component_": f"torchtune.models.{package}.{'lora_' * shape.adapts}{package}",
        "vocab_size": shape.vocab_size,
        "num_layers": shape.num_layers,
        "num_heads": shape.num_attention_heads,
        "num_kv_heads": shape.num_key_value_heads,
        "embed_dim": shape.hidden_size,
        "intermediate_dim": shape.ffn_hidden_size,
        "max_seq_len": max(shape.sequence_length, run.workload.sequence_length),
        "norm_eps": shape.norm_epsilon,
        "rope_base": int(shape.rope_theta),
    }
    if shape.rope_scaling is not None:
        model["scale_factor"] = int(shape.rope_scaling.factor)
    if family == "qwen2":
        model["tie_word_embeddings"] = shape.tied_embeddings
    elif shape.tied_embeddings:
        raise ExportRefusedError("program", "torchtune has no tied tables of this family", "use trl")
    if shape.adapts:
        model |= {
            "lora_attn_modules": [ATTENTION_MODULES[name] for name in run.targets if name in ATTENTION_MODULES],
            "apply_lora_to_mlp": "down_proj" in run.targets,
            "lora_rank": shape.lora_rank,
            "lora_alpha": ALPHA_PER_RANK * shape.lora_rank,
            "lora_dropout": 0.0,
            "quantize_base": run.bits == 4,
        }
    folder = Path(run.model_name)
    weights = sorted(path.name for path in folder.glob("*.safetensors")) if folder.is_dir() else []
    optimizer = {"_component_": "torch.optim.AdamW", "fused": True}
    if run.optimizer != "adamw_torch_fused":
        optimizer = {"_component_": "torchao.optim.AdamW8bit" if run.with_fsdp else "bitsandbytes.optim.AdamW8bit"}
    content: dict[str, Any] = {
        "output_dir": "output",
        "tokenizer": {"_component_": f"torchtune.models.{family}.{family}_tokenizer", **tokenizer,
                      "max_seq_len": run.workload.sequence_length},
        "dataset": {"_component_": "torchtune.datasets.alpaca_dataset", "source": run.dataset, "packed": run.packs},
        "model": model,
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": run.model_name,
            "checkpoint_files": weights or ["model.safetensors"], "output_dir": "output", "model_type": kind,
        },
        "resume_from_checkpoint": False,
        "seed": None,
        "shuffle": True,
        "epochs": 1 if run.epochs is None else max(round(run.epochs), 1),
        "max_steps_per_epoch": run.steps,
        "batch_size": run.config.micro_batch_size,
        "gradient_accumulation_steps": run.accumulation,
        "optimizer": {**optimizer, "lr": run.learning_rate},
        **({"lr_scheduler": {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                             "num_warmup_steps": 100}} if shape.adapts else {"optimizer_in_bwd": False}),
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "compile": False,
        "device": "cpu" if run.cluster.device.kind == "cpu" else "cuda",
        "dtype": run.config.precision,
        "enable_activation_checkpointing": run.recomputes,
        "enable_activation_offloading": False,
        "fsdp_cpu_offload": run.config.offload_param == "cpu",
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "output/logs"},
        "log_every_n_steps": 1,
        "log_peak_memory_stats": run.cluster.device.kind != "cpu",
        "log_level": "INFO",
        "clip_grad_norm": None,
    }  # fmt: skip
    name = f"{recipe}_{'distributed' if run.ranks > 1 else 'single_device'}"
    launch = f"tune run {f'--nproc_per_node {run.ranks // run.cluster.nodes} ' * (run.ranks > 1)}{name} --config FILE"
    download = f"tune download {run.model_name} --output-dir {run.model_name}"
    downloaded = () if weights else (f"download the model by: {download}; list its *.safetensors as checkpoint_files",)
    notes = (
        *downloaded,
        "the dataset has alpaca's columns (instruction, input and output): set torchtune's class for yours",
        "predicted as Transformers trains this model; torchtune keeps adapters in the model's type, and chunks the loss",
    )
    return _yaml(run, content, launch, *notes)
