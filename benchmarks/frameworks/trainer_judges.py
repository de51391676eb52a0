"""What Axolotl, LLaMA-Factory and TRL say of a recipe."""

import os
import sys
import tempfile
from pathlib import Path

from judge_tools import Request, UnjudgedError, Values
from launched_words import launched, root_of

OLDER = {
    "torch_dtype": "dtype",
    "max_seq_length": "max_length",
    "warmup_ratio": "",
    "overwrite_output_dir": "",
    "max_prompt_length": "",
    "hub_model_revision": "",
    "logging_dir": "",
    "save_safetensors": "",
    "group_by_length": "",
}
"""Arguments of transformers 4 and TRL 0 that those installed here have no more -> their names there. Programs that allow these
versions (LLaMA-Factory: transformers 4.55 to 5.8; alignment-handbook: from TRL 0.19) still have them in their recipes."""


OLDER_KEYS: list[str] = []
"""Keys that `without_older` replaced, in the process of one file."""


def without_older(content: Values) -> Values:
    """The content with today's names; what was renamed or left out is listed under `older`."""
    kept = {OLDER.get(key, key): value for key, value in content.items() if OLDER.get(key, key)}
    OLDER_KEYS.extend(key for key in content if key in OLDER)
    return kept


def judge_axolotl(request: Request) -> Values:
    """Axolotl's `validate_config` with the capabilities of 8 H100s, as its `load_cfg` calls it."""
    import yaml

    os.chdir(request.tree)
    from axolotl.utils.config import prepare_plugins, validate_config
    from axolotl.utils.dict import DictDefault

    content = DictDefault(yaml.safe_load(request.path.read_text(encoding="utf-8")))
    content.axolotl_config_path = str(request.path)
    prepare_plugins(content)
    gpu = {"bf16": True, "fp8": True, "tf32": True, "n_gpu": request.ranks, "n_node": 1, "compute_capability": "sm_90"}
    config = validate_config(content, capabilities=gpu, env_capabilities={"torch_version": "2.13.0"})
    values: Values = {"micro_batch_size": config.micro_batch_size, "sequence_length": config.sequence_len}
    if config.gradient_accumulation_steps and config.micro_batch_size:
        values["samples_per_rank"] = config.gradient_accumulation_steps * config.micro_batch_size
    sharding = config.fsdp_config or {}
    recomputes = config.gradient_checkpointing or sharding.get("activation_checkpointing")
    values["activation_checkpointing"] = "full" if recomputes else "none"
    values["precision"] = "bf16" if config.bf16 else "fp16" if config.fp16 else "fp32"
    for ours, theirs in (("tensor_parallel_size", "tensor_parallel_size"), ("context_parallel_size", "context_parallel_size")):
        values[ours] = config[theirs] or 1
    if config.adapter:
        values["lora_rank"] = config.lora_r
    return values


def judge_llama_factory(request: Request) -> Values:
    """LLaMA-Factory's `get_train_args`, as `llamafactory-cli train FILE` calls it."""
    from omegaconf import OmegaConf

    os.chdir(request.tree)
    from llamafactory.hparams import parser
    from transformers.training_args import ParallelMode, TrainingArguments

    TrainingArguments.parallel_mode = property(lambda _: ParallelMode.DISTRIBUTED)
    parser._check_extra_dependencies = lambda *_: None
    content = without_older(OmegaConf.to_container(OmegaConf.load(request.path)))
    if content.keys() & {"kt_config", "tensor_model_parallel_size"}:
        raise UnjudgedError("is for KTransformers or Megatron, whose packages are not installed")
    model, data, training, finetuning, _ = parser.get_train_args(content)
    values: Values = {
        "micro_batch_size": training.per_device_train_batch_size,
        "samples_per_rank": training.per_device_train_batch_size * training.gradient_accumulation_steps,
        "sequence_length": data.cutoff_len,
        "precision": "fp8"
        if training.fp8
        else "bf16"
        if training.bf16 or finetuning.pure_bf16
        else "fp16"
        if training.fp16
        else "fp32",
        "activation_checkpointing": "none" if model.disable_gradient_checkpointing else "full",
    }
    if finetuning.finetuning_type == "lora":
        values["lora_rank"] = finetuning.lora_rank
    return values


def judge_trl(request: Request) -> Values:
    """`TrlParser` with the classes of the recipe's program: of alignment-handbook, or TRL's own."""
    os.chdir(request.tree)
    import trl

    kind, arguments = trl_arguments(request.path)
    classes = {"sft": "SFTConfig", "dpo": "DPOConfig", "grpo": "GRPOConfig", "reward": "RewardConfig", "kto": "KTOConfig"}
    script, configuration = trl.ScriptArguments, getattr(trl, classes.get(kind, ""), None)
    if configuration is None:
        raise UnjudgedError(f"TRL {trl.__version__} has no program of {kind}")
    if (request.tree / "src" / "alignment").is_dir():
        trl.ORPOConfig = getattr(trl, "ORPOConfig", trl.SFTConfig)  # of a module that is imported with the others
        sys.path.insert(0, str(request.tree / "src" / "alignment"))
        import configs

        script, configuration = configs.ScriptArguments, configs.SFTConfig if kind == "sft" else configuration
    parser = trl.TrlParser((script, configuration, trl.ModelConfig))
    _, training, model = parser.parse_args_and_config(args=arguments)
    micro = training.per_device_train_batch_size
    values: Values = {
        "micro_batch_size": micro,
        "samples_per_rank": micro * training.gradient_accumulation_steps,
        "precision": "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32",
        "activation_checkpointing": "full" if training.gradient_checkpointing else "none",
    }
    if getattr(training, "max_length", None):
        values["sequence_length"] = training.max_length
    if model.use_peft:
        values["lora_rank"] = model.lora_r
    return values


def trl_arguments(path: Path) -> tuple[str, list[str]]:
    """The method of a recipe, and the arguments of its program."""
    if path.suffix in (".yaml", ".yml"):
        import yaml

        with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
            yaml.safe_dump(without_older(yaml.safe_load(path.read_text(encoding="utf-8"))), file)
        return path.parent.name, ["--config", file.name]
    words, _ = launched(path, root_of(path), [])
    at = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        if words[:1] == ["trl"]:
            return words[1], words[2:]
        raise UnjudgedError("the command starts no program of TRL")
    return Path(words[at]).stem.split("_")[0], words[at + 1 :]
