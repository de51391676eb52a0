"""Trains a small Llama with the real libraries on CPU tensors and counts the storages that live: run by `stacks` in an
environment with torch, transformers, peft, trl, accelerate, datasets, bitsandbytes, torchao, deepspeed, liger-kernel,
cut-cross-entropy and triton.

Reads a list of cases as JSON and prints a line of JSON for each: the highest bytes of the second optimizer step. Where a
library has another branch on CUDA, that branch runs: kernels of Triton are not started (their results are allocated by torch),
dropout keeps a mask of bytes, TRL's head takes its tiles, torchao's update is not compiled.
"""

import contextlib
import itertools
import json
import logging
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from typing import Any

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402  # after the environment is set
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from executor.dry.ledger import BACKENDS, Ledger  # noqa: E402
from executor.dry.mode import DryMode  # noqa: E402

NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"}  # fmt: skip  # noqa: E501
STEPS = 2


def take_branches_of_cuda() -> None:
    """Replace what libraries do on CPUs only."""
    import triton.runtime.autotuner
    import triton.runtime.jit
    import trl.kernels.chunked_logprob as head
    import trl.trainer.utils

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, *_: Any) -> torch.Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p > 0 else x

    nn.functional.dropout = dropout  # type: ignore[assignment]
    torch.compile = lambda function=None, *_, **__: function or (lambda inner: inner)  # type: ignore[assignment,misc]
    for kind in (triton.runtime.jit.JITFunction, triton.runtime.autotuner.Autotuner, triton.runtime.autotuner.Heuristics):
        kind.run = lambda *_, **__: None
    head._use_triton = trl.trainer.utils._use_triton = lambda _: True
    head._addmm_fp32 = lambda *_: None


def model_of(case: dict[str, Any]) -> Any:
    """A Llama in the type that it is loaded in."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = case["model"]
    config = LlamaConfig(
        hidden_size=sizes["hidden"], intermediate_size=sizes["ffn"], num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"], num_key_value_heads=sizes["kv"], vocab_size=sizes["vocab"],
        tie_word_embeddings=sizes.get("tied", False), attn_implementation=case.get("attention", "sdpa"), use_cache=False,
    )  # fmt: skip
    kind = torch.float32 if case.get("load") == "fp32" else torch.bfloat16
    if "tower" not in case:
        return LlamaForCausalLM(config).to(kind)
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    width = case["tower"]
    eyes = CLIPVisionConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4, num_attention_heads=4, image_size=64, patch_size=16
    )
    seeing = LlavaForConditionalGeneration(LlavaConfig(vision_config=eyes, text_config=config, image_token_index=1)).to(kind)
    seeing.model.vision_tower.requires_grad_(False)
    return seeing


def quantise(model: Any, case: dict[str, Any]) -> Any:
    """Replace all matrices but the output projection by bitsandbytes', as loading a model does, and prepare it as PEFT does."""
    import bitsandbytes as bnb
    from peft import prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    four = case["bits"] == "nf4"
    for name in [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]:
        matrix = model.get_submodule(name)
        if four:
            packed = bnb.nn.Linear4bit(
                matrix.in_features, matrix.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
                compress_statistics=case.get("double", False), device="meta",
            )  # fmt: skip
            weight = bnb.nn.Params4bit(
                matrix.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=case.get("double", False),
                module=packed,
            )  # fmt: skip
            packed.weight = weight._quantize("cpu")
        else:
            packed = bnb.nn.Linear8bitLt(
                matrix.in_features, matrix.out_features, bias=False, has_fp16_weights=False, threshold=6.0, device="meta"
            )
            weight = bnb.nn.Int8Params(matrix.weight.data, requires_grad=False, has_fp16_weights=False)
            weight.data, weight.SCB, _ = bnb.functional.int8_vectorwise_quant(matrix.weight.data.to(torch.float16))
            weight.CB, packed.weight = weight.data, weight
        packed.requires_grad_(False)
        model.set_submodule(name, packed)
    model.is_loaded_in_4bit, model.is_loaded_in_8bit, model.is_quantized = four, not four, True
    model.quantization_method = "bitsandbytes"
    model.hf_quantizer = types.SimpleNamespace(
        is_trainable=True,
        is_qat_trainable=False,
        quantization_config=BitsAndBytesConfig(load_in_4bit=four, load_in_8bit=not four),
    )
    checkpointing = case.get("checkpointing", "none")
    if not case.get("prepared", True):
        return model
    return prepare_model_for_kbit_training(
        model, use_gradient_checkpointing=checkpointing != "none",
        gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"},
    )  # fmt: skip


def adapt(model: Any, case: dict[str, Any]) -> Any:
    """The model with PEFT's adapters."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        r=case["rank"], lora_alpha=16, lora_dropout=case.get("dropout", 0.0), task_type="CAUSAL_LM",
        target_modules=[NAMES[target] for target in case["targets"].split()],
    )  # fmt: skip
    adapted = get_peft_model(model, adapters, autocast_adapter_dtype=case.get("wide_adapters", True))
    if case.get("checkpointing") == "reentrant":
        adapted.enable_input_require_grads()
    return adapted


def cut_loss(model: Any) -> None:
    """Let cut cross-entropy compute the loss from the last hidden states."""
    from cut_cross_entropy.linear_cross_entropy import linear_cross_entropy
    from transformers.modeling_outputs import CausalLMOutputWithPast

    base = model.get_base_model() if hasattr(model, "get_base_model") else model

    def forward(self: Any, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        others.pop("num_items_in_batch", None)
        hidden = self.model(input_ids=input_ids, **others).last_hidden_state.to(self.lm_head.weight.dtype)
        return CausalLMOutputWithPast(loss=linear_cross_entropy(hidden, self.lm_head.weight, labels, shift=True, impl="cce"))

    base.forward = types.MethodType(forward, base)


def train(model: Any, case: dict[str, Any], ledger: Ledger) -> Iterator[int]:
    """Train by the Trainer, or by TRL's; yields the ledger's positions as the second step begins and ends."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    positions: list[int] = []

    class Positions(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            positions.append(ledger.position())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            positions.append(ledger.position())

    checkpointing, length = case.get("checkpointing", "none"), case["length"]
    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": case["micro_batch"], "max_steps": STEPS,
        "gradient_accumulation_steps": case.get("accumulation", 1), "bf16": case.get("autocast", True), "use_cpu": True,
        "report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
        "gradient_checkpointing": checkpointing != "none", "optim": case.get("optim", "adamw_torch"),
        "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing == "reentrant"},
        "use_liger_kernel": case.get("liger", False),
    }  # fmt: skip
    optimizer = None
    if "optim" not in case:  # on CPUs torch takes another implementation than on devices
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-5, foreach=True)
    samples = case["micro_batch"] * case.get("accumulation", 1) * (STEPS + 1)
    callbacks: Any = {"callbacks": [Positions()], "optimizers": (optimizer, None)}
    if case.get("trainer") is None:
        tokens = torch.randint(0, case["model"]["vocab"], (samples, length))
        rows = [{"input_ids": row, "labels": row.clone()} for row in tokens]
        if "tower" in case:  # 16 patches of an image
            tokens[:] = tokens.clamp(min=2)
            tokens[:, :16] = 1
            rows = [{**row, "pixel_values": torch.rand(3, 64, 64).to(next(model.parameters()).dtype)} for row in rows]
        Trainer(model=model, args=TrainingArguments(**settings), train_dataset=rows, **callbacks).train()  # type: ignore[arg-type]
    else:
        train_by_trl(model, case, settings, samples, callbacks)
    yield from positions[-2:]


def train_by_trl(model: Any, case: dict[str, Any], settings: dict[str, Any], samples: int, callbacks: Any) -> None:
    """Train by SFTTrainer or DPOTrainer, whose rows have all the same length."""
    import copy

    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(index): index for index in range(200)} | {"<unk>": 200, "<pad>": 201, "<eos>": 202}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
    length = case["length"]
    if case["trainer"] == "sft":
        rows = Dataset.from_dict({"input_ids": torch.randint(0, 200, (samples, length)).tolist()})
        config = trl.SFTConfig(**settings, max_length=length)
        trl.SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer, **callbacks).train()
        return
    chosen, rejected = ([" " + f"{token} " * (length - 5)] * samples for token in (5, 6))
    rows = Dataset.from_dict({"prompt": ["1 2 3 4"] * samples, "chosen": chosen, "rejected": rejected})
    reference = copy.deepcopy(model) if case.get("reference") == "copy" else None
    config = trl.DPOConfig(**settings, max_length=length)
    trl.DPOTrainer(
        model=model, ref_model=reference, args=config, train_dataset=rows, processing_class=tokenizer, **callbacks
    ).train()


def train_sharded(model: Any, case: dict[str, Any], ledger: Ledger) -> Iterator[int]:
    """Two steps of one rank of FSDP1 or FSDP2, as Accelerate divides a model, among ranks that send nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case["ranks"])
    if (checkpointing := case.get("checkpointing", "none")) != "none":
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    model.train()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    mesh = init_device_mesh("cpu", (case["ranks"],))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    if case.get("fsdp1"):
        model = flattened(model, type(base.model.layers[0]), apart=not case.get("mixed_units"))
    for module in () if case.get("fsdp1") else (*base.model.layers, model):
        offload = CPUOffloadPolicy(pin_memory=False) if case.get("offload_param") else OffloadPolicy()
        fully_shard(module, mesh=mesh, mp_policy=half, reshard_after_forward=True, offload_policy=offload)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], fused=True)
    for step in range(STEPS):
        if step == STEPS - 1:
            yield ledger.position()
        for micro_batch in range(accumulation := case.get("accumulation", 1)):
            tokens = torch.randint(0, case["model"]["vocab"], (case["micro_batch"], case["length"]))
            with contextlib.ExitStack() as contexts:
                if micro_batch < accumulation - 1:
                    contexts.enter_context(model.no_sync())
                if case.get("autocast", True):
                    contexts.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()
    yield ledger.position()


def flattened(model: Any, block: type[nn.Module], *, apart: bool) -> Any:
    """The model in FSDP1's units: the blocks, and, as PEFT's policy has it, each trained matrix of adapters `apart`."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    def is_unit(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:  # noqa: ARG001  # FSDP passes it by name
        adapter = apart and isinstance(module, nn.Linear) and module.weight.requires_grad and hasattr(model, "peft_config")
        return recurse or isinstance(module, block) or adapter

    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=is_unit, use_orig_params=True, mixed_precision=half, device_id=torch.device("cpu"),
        limit_all_gathers=True,
    )  # fmt: skip


def train_by_deepspeed(model: Any, case: dict[str, Any], ledger: Ledger) -> Iterator[int]:
    """Two steps of one rank of DeepSpeed among ranks that send nothing."""
    import deepspeed

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case["ranks"])
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(case["ranks"])}
    deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=False)
    if (checkpointing := case.get("checkpointing", "none")) != "none":
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    bucket, live = case["bucket"], case["live"]
    division = {
        "stage": case["stage"], "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket, "stage3_prefetch_bucket_size": bucket // 2, "stage3_param_persistence_threshold": 1000,
        "stage3_max_live_parameters": live, "stage3_max_reuse_distance": live,
        **({"offload_optimizer": {"device": "cpu"}} if case.get("offload") else {}),
        **({"offload_param": {"device": "cpu"}} if case.get("offload_param") else {}),
    }  # fmt: skip
    settings = {
        "train_micro_batch_size_per_gpu": case["micro_batch"], "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
        "zero_optimization": division, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    for step in range(STEPS):
        tokens = torch.randint(0, case["model"]["vocab"], (case["micro_batch"], case["length"]))
        if step == STEPS - 1:
            yield ledger.position()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        del loss
    yield ledger.position()


def highest_bytes(case: dict[str, Any]) -> int:
    """Bytes at the fullest moment of the second step."""
    mode = DryMode(BACKENDS["nccl"])
    ledger = mode.ledger
    ledger.open([])
    with mode.running():
        model = model_of(case)
        if case.get("bits"):
            model = quantise(model, case)
        if case.get("rank"):
            model = adapt(model, case)
        if case.get("loss") == "cut":
            cut_loss(model)
        # DeepSpeed moves the parameters that it flattens to the host, below stage 3.
        moved = 2 * sum(parameter.numel() for parameter in model.parameters()) if case.get("stage", 3) < 3 else 0
        steps = train_by_deepspeed if case.get("stage") else train_sharded if case.get("ranks") else train
        begin, end = steps(model, case, ledger)
    return max(itertools.islice(itertools.accumulate(ledger.changes), begin, end)) - moved


def main() -> None:
    """Train all cases."""
    take_branches_of_cuda()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the libraries' own lines
    for case in json.load(sys.stdin):
        try:
            answer: dict[str, Any] = {"peak": highest_bytes(case)}
        except Exception as error:  # a library refuses the case: the page says why
            answer = {"refused": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps({"name": case["name"], **answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
