"""What the Trainer and TRL do with the settings of a recipe, and what all programs that train with the Trainer share."""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from typing import Any

from autotune.frameworks.framework import Check, Framework, LintCase, Option, Settings, closest, unknown
from autotune.frameworks.imported import AUTO, Imported, switch_of
from autotune.frameworks.shell import ENVIRONMENT, LAUNCHER
from autotune.frameworks.trainer import read_trainer
from autotune.frameworks.trainer_table import STARTED, TrainerTable, TrainingProgram, memory_arguments
from search_spaces.errors import Effect, Finding
from search_spaces.knob import Value
from search_spaces.trial_config import TrialConfig

RULES = frozenset({"world-divides", "tensor-divides", "sequence-divides"})
"""The rules that hold for every program that trains with the Trainer."""
STEPS = "gradient_accumulation_steps"
OF_TRAINER = (
    Option("per_device_train_batch_size", "micro_batch_size"),
    Option("per_gpu_train_batch_size", "micro_batch_size"),
    Option(STEPS, field=STEPS),
    Option("model_name_or_path", field="model"),
    Option("bf16", field="bf16"), Option("fp16", field="fp16"),
    Option("torch_dtype", field="dtype"), Option("dtype", field="dtype"),
    Option("deepspeed", field="deepspeed"), Option("fsdp", field="fsdp"), Option("fsdp_config", field="fsdp_config"),
    Option("optim", "optimizer", changes=False), Option("torch_compile", "compile_blocks"),
    Option("learning_rate", field="lr"), Option("weight_decay", field="weight_decay"), Option("max_grad_norm", field="clip"),
)  # fmt: skip
"""Arguments of the Trainer, which TRL and LLaMA-Factory have too."""
OPTIONS = (
    *OF_TRAINER,
    Option("gradient_checkpointing", "activation_checkpointing", words={"none": False, "full": True}),
    Option("activation_checkpointing", "activation_checkpointing", words={"none": False, "full": True}),
    *(Option(key, field="sequence_length") for key in (
        "max_length", "max_seq_length", "block_size", "max_seq_len", "model_max_length", "max_source_length",
    )),
    Option("use_liger_kernel", "fused_kernels", words={"none": False, "liger": True}),
    Option("attn_implementation", "attention_backend", words={"best": "sdpa", "flash": "flash_attention_2", "math": "eager"}),
    Option("packing", "pack_sequences"),
    *(Option(key, field="adapter") for key in (
        "use_peft", "use_lora", "use_peft_lora", "lora_enable", "apply_lora", "tuner_type", "train_type",
    )),
    *(Option(key, field="load_in_4bit") for key in ("use_qlora", "q_lora", "use_4bit_quantization")),
    Option("use_8bit_quantization", field="load_in_8bit"), Option("bits", field="frozen_bits"),
    Option("quant_bits", field="frozen_bits"), Option("target_modules", "lora_targets", changes=False),
    Option("attn_impl", "attention_backend", words={"best": "sdpa", "flash": "flash_attn", "math": "eager"}),
    Option("model", field="model"),
    Option("lora_r", "lora_rank"), Option("lora_rank", "lora_rank"),
    Option("lora_target_modules", "lora_targets", changes=False),
    Option("load_in_4bit", field="load_in_4bit"), Option("load_in_8bit", field="load_in_8bit"),
    Option("zero_stage", "zero_stage", changes=False), Option("activation_offloading", "offload_activations"),
    Option("accelerate_config", field="accelerate_config"),
    Option("dataset_name", field="dataset"), Option("datasets", field="dataset"),
)  # fmt: skip
NOTED = (
    "auto_find_batch_size", "use_dora", "lora_modules_to_save", "lora_target_parameters", "padding_free", "vision_tower",
    "use_unsloth",
)  # fmt: skip
"""Those that are not read, of TRL and of the Trainer."""
DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8, STEPS: 1, "gradient_checkpointing": False, "bf16": False,
    "optim": "adamw_torch_fused",
}  # fmt: skip
TRANSFORMERS = TrainingProgram(
    title="transformers 5.23.0",
    options=OPTIONS,
    noted=NOTED,
    methods=("parallelism_config", "tune_mm_mlp_adapter", "freeze_backbone"),
    defaults=DEFAULTS,
    adapter_signs=("lora_r", "lora_rank", "lora_alpha"),
    launches=False,
)
TRL = replace(
    TRANSFORMERS,
    title="TRL 1.16.0",
    defaults={**DEFAULTS, "gradient_checkpointing": True, "bf16": True, "max_length": 1024, "lora_r": 16},
    quantised_words={**TRANSFORMERS.quantised_words, "adapter_width": "2"},
    adapter_signs=(),
)
COMMAND = "launcher.command"
"""The command of TRL that a script starts, as a setting."""
METHODS = re.compile(r"(?<![a-z])(?:dpo|kto|grpo|rloo|orpo|cpo|ppo|gkd|nash|xpo|reward|rm)(?![a-z])")
"""Names of methods in TRL's commands and in names of programs."""
OF_PREFERENCES: Mapping[str, str] = {
    "beta": "dpo", "rpo_alpha": "dpo", "max_prompt_length": "dpo", "max_completion_length": "grpo", "num_generations": "grpo",
    "dpo_loss_type": "dpo", "ref_model": "dpo",
}  # fmt: skip
"""Settings that only methods with a second model or with generated samples have -> such a method."""


SWIFT = replace(
    TRANSFORMERS,
    title="ms-swift 4.6",
    methods=(*TRANSFORMERS.methods, "use_galore", "sequence_parallel_size", "freeze_llm", "lisa_activated_layers"),
    defaults={
        **DEFAULTS, "per_device_train_batch_size": 1, "gradient_checkpointing": True, "torch_dtype": "bfloat16",
        "tuner_type": "lora", "lora_rank": 8, "target_modules": "all-linear",
    },
    adapter_signs=(),
    loads_in_precision=True,
)  # fmt: skip


@cache
def fields_of(*programs: str) -> frozenset[str]:
    """The settings that some version of each of the programs has."""
    tables = {**_classes(), **_classes()["commands"]}
    return frozenset(name for program in programs for name in tables[program].split())


@cache
def _classes() -> dict[str, Any]:
    return tomllib.loads(files("autotune.frameworks").joinpath("trainer_keys.toml").read_text(encoding="utf-8"))


def set_aside(key: str) -> bool:
    """Whether a setting is not the program's own: the launcher's, or an exported variable."""
    return key.startswith((LAUNCHER, ENVIRONMENT))


def method_of(settings: Mapping[str, Any]) -> str:
    """The method of training that TRL's command or the settings name; empty: next tokens of given samples."""
    if named := METHODS.search(str(settings.get("rlhf_type") or settings.get(COMMAND, settings.get(STARTED, "")))):
        return named[0]
    return (
        ""
        if COMMAND in settings
        else next((method for key, method in OF_PREFERENCES.items() if settings.get(key) is not None), "")
    )


def from_trainer(content: Mapping[str, Any], source: str) -> Imported:
    """Read a command line or a YAML file of the Trainer or of TRL.

    Raises:
        RequestError: a value is not valid.
    """
    table = TrainerTable(content, source, _program(content))
    for name in () if COMMAND in content else {key.partition(".")[0]: "" for key in table.settings if not set_aside(key)}:
        # Another program may have arguments of its own.
        if (close := closest(name, _names(), 0.9)) and name not in close:
            table.notes.append(f"{name}: {table.program.title} has no such setting; did you mean {close[0]}?")
    if method := method_of(table.settings):
        refuse_method(table, next((key for key in OF_PREFERENCES if key in table.settings), "model_name_or_path"), method)
    if table.program is SWIFT and STEPS not in table.settings:
        table.unpredicted(STEPS, "ms-swift chooses it, for 16 samples a step on all ranks", "state it")
    if _has_chunked_loss(table.settings):
        table.notes.append(f"the loss never has all logits, as of {TRL.title}: before 1.7 it takes their memory too")
    return read_trainer(table)


def _has_chunked_loss(settings: Settings) -> bool:
    """Whether backward computes pieces of the logits again [trl 1.7.0, trainer/sft_config.py: the default loss of sft]."""
    has_nll = settings.get("loss_type") in (None, "nll", "chunked_nll")
    return _program(settings) is TRL and has_nll and not switch_of(settings.get("use_liger_kernel"))


def _memory_arguments(settings: Settings) -> dict[str, str] | None:
    words = memory_arguments(settings, _program(settings))
    return None if words is None else {**({"loss": "chunked"} if _has_chunked_loss(settings) else {}), **words}


@cache
def _names() -> tuple[str, ...]:
    """The settings of all programs that are read by the Trainer's options."""
    programs = ("transformers", "trl", "llama-factory", *_classes()["commands"])
    return tuple(sorted(fields_of(*programs) | {option.key for option in OPTIONS}))


def _program(settings: Settings) -> TrainingProgram:
    """ms-swift or TRL where their signs are there, else the Trainer alone. TRL's programs have the names of its commands."""
    if settings.get(STARTED) == "swift" or settings.keys() & {"tuner_type", "train_type"}:
        return SWIFT
    named = re.match(rf"sft|{METHODS.pattern}", str(settings.get(STARTED, "")))
    # Settings that TRL's commands have and the Trainer has not.
    of_trl = ("dataset_mixture", "use_peft", "completion_only_loss", "assistant_only_loss", "dataset_text_field", "packing")
    return TRL if named or COMMAND in settings or any(key in settings for key in of_trl) else TRANSFORMERS


def _without_data(case: LintCase) -> str | None:
    """Why TRL's commands, and alignment-handbook's programs, have nothing to train on; None: it is named, or may be.

    A program of the user's own may name it by an argument of its own.
    """
    settings = case.imported.settings
    # Settings by which earlier versions of alignment-handbook name their data.
    former_data = ("dataset_mixer", "dataset_splits", "dataset_configs")
    data_arguments = {
        key for key in settings if re.match(r"data|train_", key) and key.partition(".")[0] not in former_data
    } - fields_of("transformers", "trl", "sft")
    by_name = any(
        is_set(case, key) or key in case.imported.undecided for key in ("dataset_name", "datasets", "dataset_mixture")
    )
    if data_arguments or by_name or _program(settings) is not TRL or (STARTED in settings and COMMAND not in settings):
        return None
    former = next((name for key in settings if (name := key.partition(".")[0]) in former_data), "")
    return "neither dataset_name nor datasets is stated" + (f", and {former} is not read" if former else "")


def refuse_method(table: TrainerTable, key: str, method: str) -> None:
    """State that a method of training is not predicted."""
    needs = "scores pairs" if method in ("rm", "reward", "reward_model") else "has a second model or samples of its own"
    table.unpredicted(key, f"{method} {needs}, which predictions do not have", "predict pre-training or sft")


def sizes_of(case: LintCase, config: TrialConfig, batch: int) -> Settings:
    """The micro-batch, the accumulation and the processes of a case whose layout is written."""
    steps, cluster = max(batch // (config.micro_batch_size * (case.replicas or 1)), 1), case.around.cluster
    settings: dict[str, Any] = {case.key_of("micro_batch_size"): config.micro_batch_size, STEPS: steps}
    counts = {"num_processes": case.ranks, "num_machines": cluster.nodes if cluster else None}
    counts |= {"num_nodes": cluster.nodes, "num_gpus": cluster.devices_per_node} if cluster else {}
    launch = {f"{LAUNCHER}{name}": count for name, count in counts.items()}
    return settings | {key: count for key, count in launch.items() if key in case.imported.settings}


def strategies_differ(case: LintCase) -> str | None:
    """Why the best checkpoint cannot be loaded at the end; None: it can."""
    evaluation = str(case.get("eval_strategy", case.get("evaluation_strategy", "no"))).lower()
    saving = str(case.get("save_strategy", "steps")).lower()
    if not case.on("load_best_model_at_end") or saving in (evaluation, "best"):
        return None
    return f"the best model is loaded, and eval_strategy={evaluation} differs from save_strategy={saving}"


def save_steps_differ(case: LintCase) -> str | None:
    """Why the best checkpoint is not among those saved; None: it is."""
    evaluation, saving = case.get("eval_steps", case.get("logging_steps", 500)), case.get("save_steps", 500)
    by_steps = str(case.get("eval_strategy", case.get("evaluation_strategy", "no"))).lower() == "steps"
    whole = all(isinstance(value, int) and value > 0 for value in (evaluation, saving))
    if not (case.on("load_best_model_at_end") and by_steps and whole) or strategies_differ(case) or saving % evaluation == 0:
        return None
    return f"save_steps={saving} is not a multiple of eval_steps={evaluation}, and the best model is loaded"


def _stated_otherwise(case: LintCase) -> str | None:
    """The first value of the DeepSpeed file that differs from the recipe's [transformers, integrations/deepspeed.py]."""
    table = TrainerTable(case.imported.settings, case.source, _program(case.imported.settings))
    deepspeed, finds_batch = table.inner_table("deepspeed") or {}, case.on("auto_find_batch_size")
    half = {name: table.on(name) or case.on(f"{name}_full_eval") for name in ("fp16", "bf16")}
    half["bf16"] = half["bf16"] and ("bf16" in table.keys or not half["fp16"])  # TRL's default yields to fp16
    expected = {
        "train_micro_batch_size_per_gpu": ("micro_batch_size", None if finds_batch else table.size("micro_batch_size")),
        STEPS: (STEPS, table.size(STEPS)), "gradient_clipping": ("clip", 1.0 if (rate := table.rate("clip")) is None else rate),
        **{f"{name}.enabled": (name, value) for name, value in half.items()},
        "optimizer.params.lr": ("lr", table.rate("lr")), "scheduler.params.warmup_max_lr": ("lr", table.rate("lr")),
        "optimizer.params.weight_decay": ("weight_decay", table.rate("weight_decay")),
    }  # fmt: skip
    for key, (name, value) in expected.items():
        stated_value = deepspeed.get(key)
        is_open = any(option.key in case.imported.undecided for option in table.program.options
                      if name in (option.field, option.knob))  # fmt: skip
        if None not in (stated_value, value) and stated_value != AUTO and not is_open and stated_value != value:
            return f"its {key}={str(stated_value).lower()} differs from the Trainer's {str(value).lower()}"
    return None


def refused(
    name: str, key: str, problem: str | Callable[[LintCase], str | None], holds: Callable[[LintCase], Any],
    fix: Settings | Callable[[LintCase], Settings], remedy: str = "change it",
) -> Check:  # fmt: skip
    """Something that a program refuses: where both hold and there is a problem; `remedy`: where no fix says it."""
    return Check(name=name, key=key, effect=Effect.REFUSED, problem=problem, holds=holds, fix=fix, remedy=remedy)


def exclude(first: str, second: str) -> Check:
    """Two settings of which a program takes one."""
    return refused(f"{first}-beside-{second}".replace("_", "-"), second, f"{first} and {second} exclude each other",
                   lambda case: is_set(case, first) and is_set(case, second), {second: None})  # fmt: skip


def needs(key: str, other: str) -> Check:
    """A setting that a program takes beside another one alone."""
    return refused(f"{key}-without-{other}".replace("_", "-"), key, f"it needs {other}",
                   lambda case: is_set(case, key) and not is_set(case, other), {key: None})  # fmt: skip


def one_of(key: str, words: Sequence[str], default: Any = None) -> Check:
    """A setting of which a program takes some words; `default`: where it is not stated."""
    name, choices = key.rpartition(".")[2].replace("_", "-"), ", ".join(words)
    return refused(f"word-of-{name}", key, lambda case: f"{case.get(key)!r} is not one of {choices}",
                   lambda case: case.get(key, default or words[0]) not in words, {}, f"use {words[0]}")  # fmt: skip


def is_set(case: LintCase, key: str) -> bool:
    """Whether a setting has a value, or is a table."""
    inside = any(name.startswith(f"{key}.") for name in case.imported.settings)
    value = case.get(key)
    return inside or (value not in (None, 0, "", []) and switch_of(value) is not False)


def word(key: str) -> Check:
    """A setting whose words are an enumeration of transformers."""

    def unknown_word(case: LintCase) -> str | None:
        words, value = _classes()["words"][key].split(), str(case.get(key, "")).lower()
        close = closest(value, tuple(words), 0.6)
        meant = f"; did you mean {close[0]}?" if close else ""
        # YAML reads `no` as false. An optimizer may have its arguments beside it, as in `torchao:…`.
        is_known = value in ("", "false", *words) or (key == "optim" and ":" in value)
        return None if is_known else f"{case.get(key)!r} is none of transformers' words{meant}"

    return refused(f"word-of-{key.replace('_', '-')}", key, unknown_word, bool, {}, "use one that it has")


def _on_cpus(case: LintCase) -> str | None:
    """What a run on CPUs changes; None: the cluster has no GPUs, or is not known."""
    on_gpus = case.around.cluster is not None and case.around.cluster.device.kind != "cpu"
    return "the program trains on CPUs, not on the cluster's GPUs" if on_gpus else None


OF_EVERY_TRAINER = (
    *map(word, _classes()["words"]),
    refused("two-precisions", "fp16", "bf16 and fp16 exclude each other",
            lambda case: case.on("bf16") and case.on("fp16"), {"fp16": False}),
    refused("best-model-strategies", "save_strategy", strategies_differ, bool, {}, "give it the value of eval_strategy"),
    refused("best-model-steps", "save_steps", save_steps_differ, bool, {}, "give a multiple of eval_steps"),
    refused("deepspeed-differs", "deepspeed", _stated_otherwise, lambda case: is_set(case, "deepspeed"), {},
            'write "auto" there'),
    refused("prefetch-without-workers", "dataloader_prefetch_factor", "it needs workers that load data",
            lambda case: is_set(case, "dataloader_prefetch_factor") and not is_set(case, "dataloader_num_workers"),
            {"dataloader_num_workers": 1}),
    refused("checkpointing-twice", "gradient_checkpointing", "FSDP's activation_checkpointing is on too",
            lambda case: case.on("gradient_checkpointing")
            and any(case.on(f"fsdp_config.{name}activation_checkpointing") for name in ("", "fsdp_")),
            {"gradient_checkpointing": False}),
    exclude("deepspeed", "fsdp"),
    *(Check(name=key.replace("_", "-"), key=key, effect=Effect.CHANGED, remedy="leave it out", fix={key: None},
            problem=_on_cpus, holds=partial(LintCase.on, key=key)) for key in ("use_cpu", "no_cuda")),
)  # fmt: skip
"""What transformers' TrainingArguments and Trainer raise for, that users meet."""


def unknown_fields(case: LintCase, known_fields: frozenset[str], effect: Effect) -> Iterator[Finding]:
    """A finding about each setting that the program does not know."""
    stated_keys = (key for key, value in case.imported.settings.items() if value is not None and not set_aside(key))
    for key in dict.fromkeys(key.partition(".")[0] for key in stated_keys):
        if key not in known_fields:
            yield unknown(case, key, known_fields, effect, cutoff=0.8)


def _unknown_fields(case: LintCase) -> Sequence[Finding]:
    """Of TRL's own commands alone: another program may have arguments of its own."""
    command = str(case.get(COMMAND, ""))
    if not command:
        return ()
    return [*unknown_fields(case, fields_of("transformers", "trl", command) | {"env"}, Effect.REFUSED)]


def _rewrite(case: LintCase, knob: str, value: Value) -> Settings | None:
    """The stage is an argument of programs that make DeepSpeed's configuration themselves."""
    return {knob: value} if knob == "zero_stage" and knob in case.imported.settings else None


TRAINER = Framework(
    name="trainer", title="the Trainer", checked="transformers 5.23.0, TRL 1.16.0", options=OPTIONS, read=from_trainer,
    checks=(*OF_EVERY_TRAINER, refused("no-dataset", "dataset_name", _without_data, bool, {}, "state one of them")),
    rules=RULES, sizes=sizes_of, rewrite=_rewrite, undeclared_findings=_unknown_fields,
    memory_arguments=_memory_arguments,
)  # fmt: skip
