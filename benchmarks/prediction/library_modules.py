"""Modules of public libraries, small, as their users make them: `benchmarks.prediction.library_modules:NAME` makes each.

Needs transformers, peft, timm, torchvision, diffusers, torch_geometric and x_transformers, which its factories import.
"""

import copy
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

WORDS, TOKENS, SIDE, CLASSES = 512, 32, 32, 10
Batch = Callable[[int, torch.Generator], Mapping[str, Any]]


class WithLoss(nn.Module):
    """A module whose result has no loss, with a loss of it."""

    def __init__(self, module: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, *, labels: Tensor, **inputs: Any) -> Tensor:
        """The loss of the module's result for `labels`."""
        return self.loss(self.module(*inputs.values()), labels)


class Recurrent(nn.Module):
    """A language model with recurrent layers."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 64)
        self.layers = getattr(nn, kind)(64, 96, batch_first=True, **options)
        self.head = nn.Linear(96 * (1 + self.layers.bidirectional), WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Logits; `words`: [size, tokens]."""
        return self.head(self.layers(self.table(words))[0])  # type: ignore[no-any-return]


class CellLoop(nn.Module):
    """An LSTM cell that the module calls for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.head = nn.Embedding(WORDS, 64), nn.LSTMCell(64, 64), nn.Linear(64, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Logits; `words`: [size, tokens]."""
        state, outputs = None, []
        for x in self.table(words).unbind(1):
            state = self.cell(x, state)
            outputs.append(self.head(state[0]))
        return torch.stack(outputs, 1)


class Ranking(nn.Module):
    """DLRM: bags of categories and numbers, their products, and a click's logit."""

    def __init__(self, tables: int = 6, sparse: bool = False) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(1000, 16, mode="sum", sparse=sparse) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + tables * (tables + 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """[size]; `numbers` [size, 13], `categories` [size, tables, 3]."""
        dense = self.bottom(numbers)
        rows = torch.stack([dense, *(bag(categories[:, index]) for index, bag in enumerate(self.bags))], 1)
        products = rows @ rows.mT
        first, second = torch.tril_indices(rows.shape[1], rows.shape[1], -1)
        return self.top(torch.cat([dense, products[:, first, second]], 1)).squeeze(1)  # type: ignore[no-any-return]


class Teacher(nn.Module):
    """A network that follows a slowly moving copy of itself, as BYOL and DINO do."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """The mean distance."""
        with torch.no_grad():
            target = self.teacher(x)
            for mean, value in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mean.lerp_(value.detach(), 0.01)
        return (self.student(x) - target).square().mean()


class Repeated(nn.Module):
    """One layer that runs four times, as in a universal transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(WORDS, 64), nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        """Logits; `words`: [size, tokens]."""
        x = self.table(words)
        for _ in range(4):
            x = self.layer(x)
        return x @ self.table.weight.T


class Reversed(torch.autograd.Function):
    """Multiplies, and reverses the gradient (DANN)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradients[0], None


class Adversarial(nn.Module):
    """Features whose gradient is reversed by an autograd function of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Sequential(nn.Linear(64, 128), nn.ReLU()), nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(Reversed.apply(self.features(x), 0.5))  # type: ignore[no-untyped-call, no-any-return]


class Sequences(nn.Module):
    """torch's own transformers, encoder alone or both."""

    def __init__(self, decodes: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=not decodes)
        self.table, self.head = nn.Embedding(WORDS, 64), nn.Linear(64, WORDS)
        self.decodes = decodes
        self.layers = nn.Transformer(64, 4, 2, 2, 128, batch_first=True) if decodes else nn.TransformerEncoder(layer, 3)

    def forward(self, words: Tensor) -> Tensor:
        """Logits; `words`: [size, tokens]."""
        x = self.table(words)
        return self.head(self.layers(x, x) if self.decodes else self.layers(x))  # type: ignore[no-any-return]


class Detector(nn.Module):
    """DETR in its short form: a convolutional network, a transformer and queries."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 32, 3, 4, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 1))
        self.transformer = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
        self.queries, self.places = nn.Parameter(torch.rand(16, 64)), nn.Parameter(torch.rand(64, 64))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the mean query."""
        hidden = self.backbone(x).flatten(2).mT + self.places
        return self.head(self.transformer(hidden, self.queries.expand(len(x), -1, -1)).mean(1))  # type: ignore[no-any-return]


class Graph(nn.Module):
    """A graph network on the joined graphs of a micro-batch."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.layers = getattr(importlib.import_module("torch_geometric.nn"), kind)(16, 32, 3, CLASSES, **options)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """The mean logits of each graph of 8 nodes; `x` [size, 8, 16], `edges` [size, 2, 20]."""
        offset = 8 * torch.arange(len(x), device=x.device)[:, None, None]
        nodes = self.layers(x.flatten(0, 1), (edges + offset).transpose(0, 1).flatten(1))
        return nodes.view(len(x), 8, -1).mean(1)  # type: ignore[no-any-return]


def words_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [size, tokens, words]."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def click_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of logits [size]."""
    return functional.binary_cross_entropy_with_logits(logits, labels)


def noise_loss(output: Any, labels: Tensor) -> Tensor:
    """Squared distance of a sample that a model of diffusers returns."""
    return functional.mse_loss(output.sample, labels)


def words(length: int = TOKENS, **entries: str) -> Batch:
    """Tokens, under the name that a module calls them by."""
    names = entries or {"words": "labels"}

    def batch(size: int, generator: torch.Generator) -> Mapping[str, Any]:
        drawn = torch.randint(3, WORDS, (size, length), generator=generator)
        return {name: drawn.clone() for pair in names.items() for name in pair}

    return batch


def tensors(labels: str = "classes", **shapes: tuple[int, ...]) -> Batch:
    """Noise of these shapes, and classes, clicks, or noise of the first shape as `labels`."""

    def batch(size: int, generator: torch.Generator) -> Mapping[str, Any]:
        entries = {name: torch.randn(size, *shape, generator=generator) for name, shape in shapes.items()}
        match labels:
            case "classes":
                entries["labels"] = torch.randint(0, CLASSES, (size,), generator=generator)
            case "clicks":
                entries["labels"] = torch.rand(size, generator=generator)
            case "noise":
                entries["labels"] = torch.randn_like(next(iter(entries.values())))
        return entries

    return batch


def _joined(*batches: Batch) -> Batch:
    return lambda size, generator: {name: value for batch in batches for name, value in batch(size, generator).items()}


def _integers(name: str, most: int, *shape: int) -> Batch:
    return lambda size, generator: {name: torch.randint(0, most, (size, *shape), generator=generator)}


IMAGES = tensors(x=(3, SIDE, SIDE))
CLICKS = _joined(tensors("clicks", numbers=(13,)), _integers("categories", 1000, 6, 3))
GRAPHS = _joined(tensors(x=(8, 16)), _integers("edges", 8, 2, 20))
CAUSAL, SIZES = words(input_ids="labels"), {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2}  # fmt: skip


def _modelled(kind: str, task: str = "CausalLM", **changes: Any) -> nn.Module:
    """A model of transformers from its configuration, with random weights."""
    transformers = importlib.import_module("transformers")
    sizes = {name: value for name, value in {**SIZES, **changes}.items() if value != -1}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model: nn.Module = getattr(transformers, f"AutoModelFor{task}").from_config(config)
    return model


def _adapted(config: str, base: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    peft = importlib.import_module("peft")
    model: nn.Module = peft.get_peft_model(_modelled(base).to(dtype), getattr(peft, config)(task_type="CAUSAL_LM", **options))
    return model


def _classified(library: str, name: str, **options: Any) -> nn.Module:
    make = importlib.import_module("timm").create_model if library == "timm" else None
    if make is not None:
        return WithLoss(make(name, num_classes=CLASSES, **options), functional.cross_entropy)
    models = importlib.import_module("torchvision.models")
    return WithLoss(models.get_model(name, num_classes=CLASSES, weights=None, **options), functional.cross_entropy)


def _diffused(name: str, **options: Any) -> nn.Module:
    return WithLoss(getattr(importlib.import_module("diffusers"), name)(**options), noise_loss)


def _worded(module: nn.Module) -> nn.Module:
    return WithLoss(module, words_loss)


def _x_decoder(**options: Any) -> nn.Module:
    library = importlib.import_module("x_transformers")
    layers = library.Decoder(dim=64, depth=2, heads=4, **options)
    return _worded(library.TransformerWrapper(num_tokens=WORDS, max_seq_len=TOKENS, attn_layers=layers))


def _normed(normalise: Callable[[nn.Module], nn.Module]) -> nn.Module:
    layers = (normalise(nn.Conv2d(first, 32, 3, 2, 1)) for first in (3, 32, 32))
    parts = [part for layer in layers for part in (layer, nn.LeakyReLU(0.2))]
    return WithLoss(nn.Sequential(*parts, nn.Flatten(), normalise(nn.Linear(512, CLASSES))), functional.cross_entropy)


MAMBA = {"state_size": 8, "expand": 2, "conv_kernel": 4}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
VISION = {"image_size": SIDE, "patch_size": 8, "num_labels": CLASSES}
PIXELS = tensors(pixel_values=(3, SIDE, SIDE))
UNET = {"sample_size": 16, "block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}
LATENT = _joined(tensors("noise", sample=(4, 16, 16)), _integers("timestep", 1000))
SEQ2SEQ = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "decoder_start_token_id": 1}  # fmt: skip

ZOO: Mapping[str, tuple[str, Callable[[], nn.Module], Batch]] = {
    "encoder": ("torch", lambda: _worded(Sequences(decodes=False)), words()),
    "transformer": ("torch", lambda: _worded(Sequences(decodes=True)), words()),
    "lstm": ("torch", lambda: _worded(Recurrent("LSTM", num_layers=2)), words()),
    "gru": ("torch", lambda: _worded(Recurrent("GRU", bidirectional=True)), words()),
    "rnn": ("torch", lambda: _worded(Recurrent("RNN", num_layers=2)), words()),
    "lstm_cells": ("torch", lambda: _worded(CellLoop()), words()),
    "weight_norm": ("torch", lambda: _normed(parametrizations.weight_norm), IMAGES),
    "spectral_norm": ("torch", lambda: _normed(parametrizations.spectral_norm), IMAGES),
    "ema_teacher": ("torch", Teacher, tensors("none", x=(64,))),
    "dlrm": ("torch", lambda: WithLoss(Ranking(), click_loss), CLICKS),
    "dlrm_sparse": ("torch", lambda: WithLoss(Ranking(sparse=True), click_loss), CLICKS),
    "repeated_layer": ("torch", lambda: _worded(Repeated()), words()),
    "reversed_gradient": ("torch", lambda: WithLoss(Adversarial(), functional.cross_entropy), tensors(x=(64,))),
    "detr_like": ("torch", lambda: WithLoss(Detector(), functional.cross_entropy), IMAGES),
    "resnet18": ("torchvision", lambda: _classified("torchvision", "resnet18"), IMAGES),
    "mobilenet_v3": ("torchvision", lambda: _classified("torchvision", "mobilenet_v3_small"), IMAGES),
    "shufflenet": ("torchvision", lambda: _classified("torchvision", "shufflenet_v2_x0_5"), IMAGES),
    "squeezenet": ("torchvision", lambda: _classified("torchvision", "squeezenet1_1"), IMAGES),
    "regnet": ("torchvision", lambda: _classified("torchvision", "regnet_y_400mf"), IMAGES),
    "vit_torchvision": ("torchvision", lambda: WithLoss(importlib.import_module("torchvision.models").VisionTransformer(
        SIDE, 8, 3, 4, 64, 128, num_classes=CLASSES), functional.cross_entropy), IMAGES),
    "swin_torchvision": ("torchvision", lambda: WithLoss(importlib.import_module("torchvision.models").SwinTransformer(
        [2, 2], 32, [2, 2], [2, 4], [4, 4], num_classes=CLASSES), functional.cross_entropy), IMAGES),
    "vit_tiny": ("timm", lambda: _classified("timm", "vit_tiny_patch16_224", img_size=SIDE, depth=4), IMAGES),
    "convnext_atto": ("timm", lambda: _classified("timm", "convnext_atto"), IMAGES),
    "mixer": ("timm", lambda: _classified("timm", "mixer_s32_224", img_size=SIDE), IMAGES),
    "resnetv2": ("timm", lambda: _classified("timm", "resnetv2_50", layers=(1, 1, 1, 1)), IMAGES),
    "nfnet": ("timm", lambda: _classified("timm", "nf_resnet26"), IMAGES),
    "efficientnet": ("timm", lambda: _classified("timm", "efficientnet_lite0"), IMAGES),
    "levit": ("timm", lambda: _classified("timm", "levit_128s", img_size=64), tensors(x=(3, 64, 64))),
    "eva02": ("timm", lambda: _classified("timm", "eva02_tiny_patch14_224", img_size=28, depth=3), tensors(x=(3, 28, 28))),
    "edgenext": ("timm", lambda: _classified("timm", "edgenext_xx_small"), tensors(x=(3, 64, 64))),
    "x_decoder": ("x_transformers", _x_decoder, words()),
    "x_rotary": ("x_transformers", lambda: _x_decoder(rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True, attn_flash=True),
        words()),
    "gcn": ("torch_geometric", lambda: WithLoss(Graph("GCN"), functional.cross_entropy), GRAPHS),
    "gat": ("torch_geometric", lambda: WithLoss(Graph("GAT", heads=2), functional.cross_entropy), GRAPHS),
    "sage": ("torch_geometric", lambda: WithLoss(Graph("GraphSAGE"), functional.cross_entropy), GRAPHS),
    "unet": ("diffusers", lambda: _diffused("UNet2DModel", in_channels=4, out_channels=4, **UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")), LATENT),
    "unet_text": ("diffusers", lambda: _diffused("UNet2DConditionModel", **UNET, cross_attention_dim=32,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")), _joined(LATENT, tensors("none", text=(7, 32)))),
    "autoencoder": ("diffusers", lambda: _diffused("AutoencoderKL", block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4),
        tensors("noise", sample=(3, SIDE, SIDE))),
    "dit": ("diffusers", lambda: _diffused("DiTTransformer2DModel", num_attention_heads=4, attention_head_dim=16, num_layers=2,
        sample_size=16, patch_size=4, in_channels=4, num_embeds_ada_norm=1000, norm_type="ada_norm_zero"),
        _joined(LATENT, _integers("classes", 1000))),
    "llama": ("transformers", lambda: _modelled("llama", num_key_value_heads=2), CAUSAL),
    "gpt2": ("transformers", lambda: _modelled("gpt2", n_embd=64, n_layer=2, n_head=4), CAUSAL),
    "gpt_neox": ("transformers", lambda: _modelled("gpt_neox"), CAUSAL),
    "gemma3_text": ("transformers", lambda: _modelled("gemma3_text", num_key_value_heads=2, head_dim=16), CAUSAL),
    "gemma3n_text": ("transformers", lambda: _modelled("gemma3n_text", num_key_value_heads=2, head_dim=16,
        vocab_size_per_layer_input=WORDS, hidden_size_per_layer_input=16, num_kv_shared_layers=0, altup_num_inputs=2,
        intermediate_size=[128, 128], activation_sparsity_pattern=[0.0, 0.0], laurel_rank=8), CAUSAL),
    "phi3": ("transformers", lambda: _modelled("phi3", num_key_value_heads=2), CAUSAL),
    "falcon": ("transformers", lambda: _modelled("falcon"), CAUSAL),
    "bloom": ("transformers", lambda: _modelled("bloom", n_layer=2, n_head=4), CAUSAL),
    "gpt_oss": ("transformers", lambda: _modelled("gpt_oss", num_key_value_heads=2, head_dim=16, **EXPERTS), CAUSAL),
    "mixtral": ("transformers", lambda: _modelled("mixtral", num_key_value_heads=2, **EXPERTS), CAUSAL),
    "qwen3_moe": ("transformers", lambda: _modelled("qwen3_moe", num_key_value_heads=2, head_dim=16, **EXPERTS), CAUSAL),
    "deepseek_v3": ("transformers", lambda: _modelled("deepseek_v3", num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4, n_group=1, topk_group=1,
        first_k_dense_replace=1, **EXPERTS), CAUSAL),
    "mamba": ("transformers", lambda: _modelled("mamba", **MAMBA), CAUSAL),
    "mamba2": ("transformers", lambda: _modelled("mamba2", **MAMBA, num_heads=8, head_dim=16, n_groups=1, chunk_size=16),
        CAUSAL),
    "bert": ("transformers", lambda: _modelled("bert", "MaskedLM"), CAUSAL),
    "albert": ("transformers", lambda: _modelled("albert", "MaskedLM", embedding_size=32), CAUSAL),
    "deberta": ("transformers", lambda: _modelled("deberta-v2", "MaskedLM", relative_attention=True), CAUSAL),
    "modernbert": ("transformers", lambda: _modelled("modernbert", "MaskedLM"), CAUSAL),
    "longformer": ("transformers", lambda: _modelled("longformer", "MaskedLM", attention_window=8), CAUSAL),
    "xlnet": ("transformers", lambda: _modelled("xlnet", d_model=64, n_layer=2, n_head=4, d_inner=128,
        max_position_embeddings=-1), CAUSAL),
    "t5": ("transformers", lambda: _modelled("t5", "Seq2SeqLM", d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16,
        decoder_start_token_id=0), CAUSAL),
    "bart": ("transformers", lambda: _modelled("bart", "Seq2SeqLM", **SEQ2SEQ), CAUSAL),
    "switch": ("transformers", lambda: _modelled("switch_transformers", "Seq2SeqLM", d_model=64, d_ff=128, num_layers=2,
        num_heads=4, d_kv=16, num_experts=4, decoder_start_token_id=0), CAUSAL),
    "vit": ("transformers", lambda: _modelled("vit", "ImageClassification", **VISION), PIXELS),
    "swin": ("transformers", lambda: _modelled("swin", "ImageClassification", **{**VISION, "patch_size": 2}, embed_dim=16,
        depths=[2, 2], num_heads=[2, 4], window_size=4, num_hidden_layers=-1, num_attention_heads=-1), PIXELS),
    "convnextv2": ("transformers", lambda: _modelled("convnextv2", "ImageClassification", hidden_sizes=[16, 32],
        depths=[1, 1], num_stages=2, num_labels=CLASSES), PIXELS),
    "wav2vec2": ("transformers", lambda: _modelled("wav2vec2", "AudioClassification", num_labels=CLASSES,
        conv_dim=[32, 32], conv_stride=[5, 4], conv_kernel=[10, 8], num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4), tensors(input_values=(1600,))),
    "lora": ("peft", lambda: _adapted("LoraConfig", r=4), CAUSAL),
    "lora_on_bf16": ("peft", lambda: _adapted("LoraConfig", dtype=torch.bfloat16, r=4), CAUSAL),
    "dora": ("peft", lambda: _adapted("LoraConfig", r=4, use_dora=True), CAUSAL),
    "ia3": ("peft", lambda: _adapted("IA3Config"), CAUSAL),
    "prompt_tuning": ("peft", lambda: _adapted("PromptTuningConfig", num_virtual_tokens=4), CAUSAL),
}  # fmt: skip
"""Name -> library, module and batches."""


def __getattr__(name: str) -> Callable[[], tuple[nn.Module, Batch]]:
    """The factory of a module of `ZOO`."""
    if name not in ZOO:
        raise AttributeError(name)
    _, make, batch = ZOO[name]
    return lambda: (make(), batch)
