"""Models: decoder-only transformers described by their shape, a user's module, or a user's script."""

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from search_spaces.errors import ModelFormatError
from search_spaces.models.command import CommandModel
from search_spaces.models.config_keys import RopeScaling
from search_spaces.models.module_profile import LossTrait, ModuleProfile

MOST_LAYERS = 10_000
"""Maximum layers of a model, a hundred times that of real models, so that a typo is an error instead of a long computation."""


CLAMPED = "clamped_silu"
"""The gate of GPT-OSS: (hidden + 1) x gate x sigmoid(1.702 gate), both limited to 7."""
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", CLAMPED)

LORA_TARGETS = (
    "query", "key", "value", "output", "query_down", "key_value_down", "key_value", "gate", "up", "down",
)  # fmt: skip
"""Matrices of a layer that can carry a low-rank adapter. Latent attention has no "key" and no "value", but projections to
narrow vectors (`…_down`) and "key_value", from one of these."""


class Norm(StrEnum):
    """Normalisation layer: RMSNorm has a weight, LayerNorm a weight and a bias."""

    RMSNORM = "rmsnorm"
    LAYERNORM = "layernorm"


class NormPlace(StrEnum):
    """Where a layer normalises, for each of its two sub-layers."""

    INPUT = "input"
    """The input of the sub-layer, and a final norm before the output projection."""
    SUM = "sum"
    """The sum of the sub-layer's output and its input, without a final norm (OPT-350M)."""
    OUTPUT = "output"
    """The output of the sub-layer, and a final norm (OLMo 2)."""
    BOTH = "both"
    """The input and the output of the sub-layer, and a final norm (Gemma 2 and 3)."""


class HeadNorm(StrEnum):
    """RMSNorm of projected queries and keys, before they are rotated unless a kind says otherwise."""

    NONE = "none"
    HEAD = "head"
    """Each head by itself, with one weight of `head_dim` elements for all heads (Qwen3, Gemma 3)."""
    WIDTH = "width"
    """All heads together (OLMo 2)."""
    ROTATED = "rotated"
    """Each head by itself after it is rotated, without weights, in layers that are rotated (Llama 4)."""


class Position(StrEnum):
    """Position encoding: rotated queries and keys, or a learned table added to the embeddings."""

    ROTARY = "rotary"
    LEARNED = "learned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Latent attention: keys and values are projected from a narrow vector of each token [DeepSeek-AI 2024, DeepSeek-V2, 2.1].

    A head's query and key have `head_dim` elements, of which the last `rotated` are rotated. That part of the key is the same
    for all heads.
    """

    key_value_rank: int
    """Elements of the vector that keys and values are projected from."""
    rotated: int
    value_size: int
    """Elements of a head's value."""
    query_rank: int = 0
    """Elements of the vector that queries are projected from; 0: they are projected from the hidden state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer, described by its shape.

    Raises:
        ModelFormatError: a size is not positive, or the numbers of heads are not divisible.
    """

    _LARGEST_SIZE = 2**31 - 1
    """Maximum of any other size: the largest dimension that kernels can index."""

    name: str
    family: str
    """`model_type` of its config.json."""
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    ffn_hidden_size: int
    """Width of the MLP's hidden layer (of one expert if there are experts)."""
    vocab_size: int
    sequence_length: int
    """Longest sequence, in tokens."""
    tied_embeddings: bool = False
    """Whether the output projection is the embedding table."""
    norm: Norm = Norm.RMSNORM
    norm_epsilon: float = 1e-5
    activation: str = "silu"
    """One of ACTIVATIONS."""
    gated_mlp: bool = True
    """Whether the MLP multiplies by a gate (three matrices instead of two)."""
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    position: Position = Position.ROTARY
    rotary_fraction: float = 1.0
    """Fraction of each head's dimensions that is rotated."""
    rope_theta: float = 10_000.0
    position_offset: int = 0
    """Rows of the learned position table before position 0 (2 in OPT)."""
    latent: Latent | None = None
    parallel_residual: bool = False
    """Whether attention and MLP read the same input (GPT-NeoX)."""
    norm_place: NormPlace = NormPlace.INPUT
    zero_centered_norms: bool = False
    """Whether an RMSNorm multiplies by 1 + its weight, which begins at 0 (Gemma)."""
    head_norm: HeadNorm = HeadNorm.NONE
    attention_scale: float = 0.0
    """Factor of the scores; 0: 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    """Scores are limited to c tanh(score / c) [Gemma Team 2024, 2.2]; 0: not limited."""
    query_temperature: float = 0.0
    """In layers without rotary positions, a query at position p is multiplied by 1 + t log(1 + floor((p + 1) / s)): t is this
    number and s `temperature_span` (Llama 4) [Nakanishi 2025, Scalable-Softmax]; 0: it is not multiplied."""
    temperature_span: int = 0
    """Tokens over which this factor does not change."""
    attention_sinks: bool = False
    """Whether each head has a trained score that takes its share of the softmax and gives nothing (GPT-OSS)."""
    output_softcap: float = 0.0
    """The same limit for the logits."""
    embedding_scale: float = 1.0
    """Factor of the embeddings (Gemma: the square root of the hidden size)."""
    residual_scale: float = 1.0
    """Factor of each sub-layer's output before it is added (Granite)."""
    output_scale: float = 1.0
    """Factor of the logits (Granite)."""
    embedding_size: int = 0
    """Width of the embedding table if it differs from `hidden_size` (OPT-350M), projected in and out; 0: the same."""
    num_experts: int = 0
    """Experts per layer; 0: a dense MLP."""
    experts_per_token: int = 0
    capacity_factor: float = 0.0
    """Maximum tokens of a sequence per expert, as a multiple of its even share; 0: no limit, no token is dropped."""
    expert_loads: tuple[tuple[float, ...], ...] = ()
    """Relative numbers of tokens that choose each expert: a row for all layers with experts, or one for each of them; empty:
    the router chooses (`search_spaces.training.expert_loads`)."""
    router_bias: bool = False
    normalised_routing: bool = True
    """Whether the weights of a token's experts sum to 1: softmax over these, not over all experts."""
    sigmoid_routing: bool = False
    """Whether an expert's weight is the sigmoid of its score, instead of the softmax over scores [DeepSeek-V3, 2.1.2]."""
    router_correction: bool = False
    """Whether experts are chosen by their weight plus a bias that balances their loads and is not trained by gradients."""
    router_groups: int = 1
    """Groups of consecutive experts; a token goes to experts of its best `router_groups_kept` groups."""
    router_groups_kept: int = 1
    routing_scale: float = 1.0
    """Factor of the weights of a token's experts."""
    weighted_inputs: bool = False
    """Whether an expert's weight multiplies its input instead of its result (Llama 4)."""
    shared_expert_size: int = 0
    """Width of an MLP that every token passes through in addition to its experts; 0: none."""
    dense_layers: tuple[bool, ...] = ()
    """Layers with a dense MLP instead of experts: a pattern that repeats from the first layer on; empty: none."""
    dense_ffn_size: int = 0
    """Width of the MLP of these layers."""
    load_balance: float = 0.0
    """Weight of each router's load-balance loss; it affects gradients but is not part of the reported loss; 0: none."""
    mtp_layers: int = 0
    """Modules for multi-token prediction after the model, each with a layer of the last one's kind [DeepSeek-AI 2024,
    DeepSeek-V3, 2.2]."""
    mtp_loss_weight: float = 0.3
    """Weight of the mean loss of these modules; it affects gradients but is not part of the reported loss."""
    sliding_window: int = 0
    """Length of the attention window in tokens; 0: no window."""
    chunked_attention: bool = False
    """Whether the window is the chunk that a token is in: a sequence is cut every `sliding_window` tokens, and attention does
    not cross the cuts (Llama 4)."""
    whole_layers: tuple[bool, ...] = ()
    """Layers without the window: a pattern that repeats from the first layer on; empty: every layer has the window."""
    rotated_layers: tuple[bool, ...] = ()
    """Layers with rotary positions, as such a pattern; empty: every layer."""
    window_rope_theta: float = 0.0
    """`rope_theta` of layers with the window, without `rope_scaling` (Gemma 3); 0: that of the others."""
    rope_scaling: RopeScaling | None = None
    global_tokens: int = 0
    """First tokens of a sequence that every token attends to in addition to its sliding window."""
    lora_rank: int = 0
    """Rank of low-rank adapters; all other parameters are then frozen. 0: every parameter is trained."""
    lora_targets: tuple[str, ...] = ("query", "value")
    """Matrices of a layer with an adapter: names of `LORA_TARGETS`."""
    frozen_bits: int = 16
    """Bits of a frozen parameter: 16, or 8 or 4 if the base weights are quantised."""
    adapter_size: int = 0
    """Width of the bottlenecks after attention and MLP of each layer; all else is then frozen. 0: none."""
    prefix_length: int = 0
    """Trained keys and values before those of the tokens, in each layer; all else is then frozen. 0: none."""
    prompt_length: int = 0
    """Trained embeddings before those of the tokens; all else is then frozen. 0: none."""
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """What the reader of its file left out, or took because the file does not state it."""

    def __post_init__(self) -> None:
        for field in (
            "num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "ffn_hidden_size", "vocab_size", "sequence_length",
        ):  # fmt: skip
            if getattr(self, field) < 1:
                raise ModelFormatError(field, f"{getattr(self, field)} is not positive", "give a positive integer")
            self._require_at_most(field, MOST_LAYERS if field == "num_layers" else self._LARGEST_SIZE)
        for field in (
            "position_offset",
            "embedding_size",
            "num_experts",
            "experts_per_token",
            "sliding_window",
            "global_tokens",
        ):
            self._require_at_most(field, self._LARGEST_SIZE)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelFormatError(
                "num_key_value_heads",
                f"{self.num_key_value_heads} does not divide {self.num_attention_heads} attention heads",
                "give a divisor of num_attention_heads",
            )
        if self.activation not in ACTIVATIONS:
            raise ModelFormatError("activation", f"{self.activation!r} is not known", f"use one of {', '.join(ACTIVATIONS)}")
        if self.activation == CLAMPED and not self.gated_mlp:
            raise ModelFormatError("activation", f"{CLAMPED} is a gate's", "use another one, or gated_mlp")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ModelFormatError(
                "experts_per_token",
                f"{self.experts_per_token} is not between 1 and {self.num_experts}",
                "route each token to at least one and at most every expert",
            )

        for field in ("capacity_factor", "load_balance"):
            value = getattr(self, field)
            if not 0 <= value < math.inf:
                raise ModelFormatError(field, f"{value} is negative or not finite", "give a positive number, or 0 for none")
            if value and not self.num_experts:
                raise ModelFormatError(
                    field, "belongs to a router, and there are no experts", "leave it at 0, or give num_experts"
                )

        self._check_routing()
        self._check_prediction()
        self._check_attention()
        self._check_adapters()

    def _check_routing(self) -> None:
        for field in ("shared_expert_size", "dense_ffn_size"):
            self._require_at_most(field, self._LARGEST_SIZE)
        groups, kept_groups = self.router_groups, self.router_groups_kept
        if not 1 <= kept_groups <= groups or self.num_experts % groups:
            problem = f"{kept_groups} of {groups} groups of {self.num_experts} experts cannot be chosen"
            raise ModelFormatError("router_groups", problem, "give a divisor of the experts, and keep at most all groups")
        if self.num_experts and self.experts_per_token > self.num_experts // groups * kept_groups:
            raise ModelFormatError(
                "experts_per_token", f"{self.experts_per_token} are more than {kept_groups} groups have", "keep more groups"
            )
        if self.load_balance and self.sigmoid_routing:
            raise ModelFormatError("load_balance", "is that of softmax routers", "leave it at 0")
        if self.weighted_inputs and self.mlp_bias:
            raise ModelFormatError("weighted_inputs", "is for experts without biases", "leave it out, or mlp_bias")
        if any(self.dense_layers) and not (self.num_experts and self.dense_ffn_size):
            raise ModelFormatError("dense_layers", "belongs to a model of experts", "give num_experts and dense_ffn_size")

    def _check_prediction(self) -> None:
        if not 0 <= self.mtp_layers <= MOST_LAYERS:
            raise ModelFormatError("mtp_layers", f"{self.mtp_layers} is not a number of modules", "give 0 for none, or 1")
        if not 0 <= self.mtp_loss_weight < math.inf:
            raise ModelFormatError("mtp_loss_weight", f"{self.mtp_loss_weight} is no weight", "give a positive number, as 0.3")
        if self.mtp_layers and (problem := self.mtp_problem):
            raise ModelFormatError("mtp_layers", problem, "leave it at 0")

    @property
    def mtp_problem(self) -> str:
        """Why the model cannot have modules for multi-token prediction, in a clause; empty: it can."""
        if self.position is Position.LEARNED or self.embedding_size or not self.final_norm:
            return f"{self.name} has learned positions, projected embeddings or no final norm, which the modules cannot share"
        return f"{self.name} is frozen, and its adapters have no place in the modules" if self.adapts else ""

    def _check_attention(self) -> None:
        for field in (
            "attention_scale", "attention_softcap", "output_softcap", "embedding_scale", "residual_scale", "output_scale",
            "window_rope_theta", "query_temperature",
        ):  # fmt: skip
            if not 0 <= getattr(self, field) < math.inf:
                raise ModelFormatError(field, f"{getattr(self, field)} is negative or not finite", "give a positive number")
        if self.zero_centered_norms and self.norm is not Norm.RMSNORM:
            raise ModelFormatError("zero_centered_norms", "belongs to RMSNorm", "leave it out, or use rmsnorm")
        latent, pairs = self.latent, self.rotated_size // 2
        if latent is not None and not (0 < latent.rotated < self.head_dim and latent.key_value_rank > 0 < latent.value_size):
            raise ModelFormatError("latent", f"its sizes do not fit heads of {self.head_dim}", "correct the config.json")
        if latent is not None and self.num_key_value_heads != self.num_attention_heads:
            raise ModelFormatError("num_key_value_heads", "latent attention has keys of every head", "give num_attention_heads")
        if latent is not None and (self.head_norm is not HeadNorm.NONE or self.query_temperature):
            raise ModelFormatError("latent", "has no norms or factors of queries", "leave out head_norm and query_temperature")
        if self.query_temperature and self.temperature_span < 1:
            raise ModelFormatError("temperature_span", f"{self.temperature_span} is not positive", "give a positive integer")
        for factors in (self.rope_scaling.short_factors, self.rope_scaling.long_factors) if self.rope_scaling else ():
            if factors and len(factors) != pairs:
                raise ModelFormatError(
                    "rope_scaling", f"has {len(factors)} factors", f"give {pairs}, one for each pair of dimensions"
                )
        if any(self.whole_layers) and not self.sliding_window:
            raise ModelFormatError("whole_layers", "there is no window", "leave it out, or give sliding_window")
        if self.chunked_attention and not (self.sliding_window and not self.global_tokens):
            problem = "needs a sliding_window as its length, and no global_tokens"
            raise ModelFormatError("chunked_attention", problem, "give sliding_window, and leave out global_tokens")

    def _check_adapters(self) -> None:
        for field in ("lora_rank", "adapter_size", "prefix_length", "prompt_length"):
            self._require_at_most(field, self._LARGEST_SIZE)
            if getattr(self, field) < 0:
                raise ModelFormatError(field, f"{getattr(self, field)} is negative", "give a positive integer, or 0 for none")
        unknown = [name for name in self.lora_targets if name not in LORA_TARGETS]
        if unknown or (self.lora_rank and not self.lora_targets):
            listed = ", ".join(unknown) or "nothing"
            raise ModelFormatError("lora_targets", f"names {listed}", f"name some of {', '.join(LORA_TARGETS)}")
        if self.frozen_bits not in (16, 8, 4):
            raise ModelFormatError("frozen_bits", f"{self.frozen_bits} is not known", "use 16, 8 or 4")

    def _require_at_most(self, field: str, most: int) -> None:
        if getattr(self, field) > most:
            raise ModelFormatError(field, "is larger than in any model", f"give at most {most:,}")

    def expert_capacity(self, tokens: int) -> int:
        """Capacity of an expert for a sequence of `tokens` tokens: its even share x `capacity_factor`; 0: no limit.

        [Lepikhin et al. 2021, GShard, 2.2]
        """
        even = tokens * self.experts_per_token / max(self.num_experts, 1)
        return min(math.ceil(even * self.capacity_factor), tokens)

    def has_window(self, layer: int) -> bool:
        """Whether attention of this layer is limited to the window."""
        return self.sliding_window > 0 and not self._listed(self.whole_layers, layer)

    def is_rotated(self, layer: int) -> bool:
        """Whether queries and keys of this layer are rotated by their positions."""
        return self.position is Position.ROTARY and (not self.rotated_layers or self._listed(self.rotated_layers, layer))

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts."""
        return self.num_experts > 0 and not self._listed(self.dense_layers, layer)

    def _listed(self, pattern: tuple[bool, ...], layer: int) -> bool:
        """Whether a pattern names this layer. Layers after the last one, of multi-token prediction, are of its kind."""
        return bool(pattern) and pattern[min(layer, self.num_layers - 1) % len(pattern)]

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.num_layers - _count(self.dense_layers, self.num_layers) if self.num_experts else 0

    @property
    def layer_period(self) -> int:
        """Layers after which the kinds of layers repeat."""
        patterns = self.whole_layers, self.rotated_layers, self.dense_layers
        period = math.lcm(*(len(pattern) or 1 for pattern in patterns))
        return period if len(self.expert_loads) < 2 else self.num_layers

    @property
    def rotated_size(self) -> int:
        """Elements of a head that rotary positions rotate."""
        return int(self.head_dim * self.rotary_fraction) // 2 * 2 if self.latent is None else self.latent.rotated

    @property
    def value_size(self) -> int:
        """Elements of a head's value."""
        return self.head_dim if self.latent is None else self.latent.value_size

    @property
    def window_share(self) -> float:
        """The share of layers with the window."""
        return (self.num_layers - _count(self.whole_layers, self.num_layers)) / self.num_layers if self.sliding_window else 0.0

    @property
    def changes_scores(self) -> bool:
        """Whether attention does more with its scores than the fused kernels of torch do."""
        return self.attention_softcap > 0 or self.attention_sinks

    @property
    def final_norm(self) -> bool:
        """Whether a norm precedes the output projection: none does if each layer ends with one."""
        return self.norm_place is not NormPlace.SUM

    @property
    def layer_norms(self) -> int:
        """Norms over the hidden width in a layer."""
        return 4 if self.norm_place is NormPlace.BOTH else 2

    @property
    def input_embedding_parameters(self) -> int:
        """Parameters of the lookup tables: tokens and learned positions."""
        table = self.vocab_size * self.table_width
        if self.position is Position.LEARNED:
            table += (self.sequence_length + self.position_offset) * self.hidden_size
        return table

    @property
    def layer_parameters(self) -> int:
        """Parameters of the largest layer, all experts included."""
        mlp = self._expert_mlp_parameters(self.num_experts) if self.num_experts else self._mlp_parameters(self.ffn_hidden_size)
        if any(self.dense_layers):
            mlp = max(mlp, self._mlp_parameters(self.dense_ffn_size))
        return self._attention_parameters + mlp + self.layer_norms * self._norm_parameters

    @property
    def parameter_count(self) -> int:
        """Total parameters, tied tables counted once."""
        return _parameter_count(self)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts, without routers and shared experts."""
        layers = self.expert_layers + self.mtp_layers * self.has_experts(self.num_layers)
        return layers * self.num_experts * self._mlp_parameters(self.ffn_hidden_size)

    @property
    def active_parameter_count(self) -> int:
        """Parameters used for one token: all except those of the experts that it is not routed to."""
        return self.parameters_with(self.experts_per_token)

    def parameters_with(self, experts: int) -> int:
        """Total parameters of the model with so many experts in a layer, but the whole router."""
        mlps = self.expert_layers * self._expert_mlp_parameters(experts)
        dense = self.num_layers - self.expert_layers
        mlps += dense * self._mlp_parameters(self.dense_ffn_size or self.ffn_hidden_size)
        return (
            self.input_embedding_parameters
            + self.num_layers * (self._attention_parameters + self.layer_norms * self._norm_parameters)
            + mlps
            + (2 * self.embedding_size * self.hidden_size if self.embedding_size else 0)
            + (self._norm_parameters if self.final_norm else 0)
            + (0 if self.tied_embeddings else self.vocab_size * self.table_width)
            + self.mtp_layers * self._module_parameters_with(experts)
        )

    def _module_parameters_with(self, experts: int) -> int:
        """Parameters of a module for multi-token prediction: a layer, the projection of its two inputs, and three norms."""
        mlp = self._mlp_parameters(self.dense_ffn_size or self.ffn_hidden_size)
        if self.has_experts(self.num_layers):
            mlp = self._expert_mlp_parameters(experts)
        norms = (self.layer_norms + 3) * self._norm_parameters
        return self._attention_parameters + mlp + 2 * self.hidden_size**2 + norms

    @property
    def mtp_parameters(self) -> int:
        """Parameters of all modules for multi-token prediction, without the tables that they share with the model."""
        return self.mtp_layers * self._module_parameters_with(self.num_experts)

    @property
    def adapts(self) -> bool:
        """Whether the model is frozen and only adapters or virtual tokens are trained."""
        return max(self.lora_rank, self.adapter_size, self.prefix_length, self.prompt_length) > 0

    @property
    def adapter_parameters(self) -> int:
        """Trainable parameters if all else is frozen."""
        prefix = 2 * self.prefix_length * self.num_key_value_heads * self.head_dim
        layer = self._factor_parameters + self.bottleneck_parameters + prefix
        return self.num_layers * layer + self.prompt_length * self.table_width

    @property
    def table_width(self) -> int:
        """Width of the embedding table."""
        return self.embedding_size or self.hidden_size

    @property
    def adapted_matrices(self) -> list[tuple[str, int, int]]:
        """Target, inputs and outputs of each matrix of a layer in `lora_targets`, one for every expert."""
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        sides = {**self._attention_sides, "gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden)}
        targets = [name for name in self.lora_targets if name in sides and (name != "gate" or self.gated_mlp)]
        copies = {name: max(self.num_experts, 1) for name in ("gate", "up", "down")}
        return [(name, *sides[name]) for name in targets for _ in range(copies.get(name, 1))]

    @property
    def _attention_sides(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the projections of attention by their names in `LORA_TARGETS`."""
        hidden, heads, latent = self.hidden_size, self.num_attention_heads, self.latent
        queries, output = heads * self.head_dim, (heads * self.value_size, hidden)
        if latent is None:
            keys = self.num_key_value_heads * self.head_dim
            return {"query": (hidden, queries), "key": (hidden, keys), "value": (hidden, keys), "output": output}
        down = {"query_down": (hidden, latent.query_rank)} if latent.query_rank else {}
        return {
            **down, "query": (latent.query_rank or hidden, queries), "output": output,
            "key_value_down": (hidden, latent.key_value_rank + latent.rotated),
            "key_value": (latent.key_value_rank, heads * (self.head_dim - latent.rotated + latent.value_size)),
        }  # fmt: skip

    @property
    def frozen_bytes(self) -> float:
        """Bytes of a frozen parameter, including quantisation scales (one fp32 for 64 values); 0: nothing is frozen."""
        if not self.adapts:
            return 0.0
        return 2.0 if self.frozen_bits == 16 else self.frozen_bits / 8 + 4 / 64

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs per token, forward and backward, without recomputation.

        6 N + 12 L H Q T [Chowdhery et al. 2022, PaLM, appendix B]. N: active parameters in matrix products (a tied table counts
        once, as the output projection; lookup tables do not count). T: `sequence_length` or, if that is less, the tokens of the
        sliding window plus the global ones. Causality is not discounted. Virtual tokens of a prompt pass through the layers,
        and every token attends to a prefix. Modules for multi-token prediction count for every token, although the last ones
        of a sequence have no target.
        """
        multiplied = self.active_parameter_count - self.input_embedding_parameters
        if self.tied_embeddings:
            multiplied += self.vocab_size * self.table_width
        attention = 6.0 * self.num_layers * self.num_attention_heads * (self.head_dim + self.value_size)
        if not self.adapts:
            return 6.0 * multiplied + attention * self.attended(sequence_length) + self._mtp_products(sequence_length)
        # No gradient is computed for a frozen matrix.
        length = sequence_length + self.prompt_length
        passing = 6.0 * self.num_layers * (self._factor_parameters + self.bottleneck_parameters)
        passing += attention * (self.attended(length) + self.prefix_length)
        head = 4.0 * self.vocab_size * self.table_width
        return head + (4.0 * multiplied - head + passing) * length / sequence_length

    def mtp_flops_per_token(self, sequence_length: int) -> float:
        """The part of `flops_per_token` in modules for multi-token prediction, their logits included."""
        multiplied = self.mtp_layers * self._module_parameters_with(self.experts_per_token)
        return 6.0 * multiplied + self._mtp_products(sequence_length)

    def _mtp_products(self, sequence_length: int) -> float:
        """The FLOPs for each token of scores and logits in these modules."""
        keys = self.sliding_window + self.global_tokens if self.has_window(self.num_layers) else sequence_length
        pairs = self.num_attention_heads * (self.head_dim + self.value_size) * min(keys, sequence_length)
        return 6.0 * self.mtp_layers * (pairs + self.vocab_size * self.table_width)

    def attended(self, length: int) -> float:
        """Mean number of tokens that a token attends to in a sequence of this length, causality not discounted."""
        window_tokens: float = min(self.sliding_window + self.global_tokens, length)
        if self.chunked_attention and length > window_tokens:
            # The last chunk may be shorter.
            window_tokens -= (window_tokens - length % window_tokens) * (length % window_tokens) / length
        return length + self.window_share * (window_tokens - length)

    @property
    def _factor_parameters(self) -> int:
        """Parameters of a layer's low-rank adapters [Hu et al. 2021, LoRA]: rank x (inputs + outputs) of each target."""
        return self.lora_rank * sum(inputs + outputs for _, inputs, outputs in self.adapted_matrices)

    @property
    def bottleneck_parameters(self) -> int:
        """Parameters of a layer's bottlenecks [Houlsby et al. 2019, 2.1]: two, with two matrices and two biases each."""
        bottleneck = 2 * self.hidden_size * self.adapter_size + self.adapter_size + self.hidden_size
        return 2 * bottleneck if self.adapter_size else 0

    @property
    def _norm_parameters(self) -> int:
        return self.hidden_size * (2 if self.norm is Norm.LAYERNORM else 1)

    @property
    def _attention_parameters(self) -> int:
        sinks = self.num_attention_heads if self.attention_sinks else 0
        return sum(self.attention_matrices.values()) + sinks + self.head_norm_parameters

    @property
    def attention_matrices(self) -> dict[str, int]:
        """Parameters of a layer's projections of attention by name, with their biases and the norms of narrow vectors."""
        hidden, heads, bias = self.hidden_size, self.num_attention_heads, int(self.qkv_bias)
        queries, latent = heads * self.head_dim, self.latent
        output = {"output": heads * self.value_size * hidden + hidden * self.attention_output_bias}
        if latent is None:
            keys = self.num_key_value_heads * self.head_dim * (hidden + bias)
            return {"query": queries * (hidden + bias), "key": keys, "value": keys, **output}
        down, rank = latent.key_value_rank + latent.rotated, latent.query_rank
        return {
            **({"query down": rank * (hidden + bias + 1)} if rank else {}),
            "query": (rank or hidden) * queries,
            "keys and values down": down * (hidden + bias) + latent.key_value_rank,
            "keys and values": latent.key_value_rank * heads * (self.head_dim - latent.rotated + latent.value_size),
            **output,
        }

    @property
    def head_norm_parameters(self) -> int:
        """Parameters of a layer's norms of queries and keys."""
        match self.head_norm:
            case HeadNorm.HEAD:
                return 2 * self.head_dim
            case HeadNorm.WIDTH:
                return (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
            case _:
                return 0

    def _mlp_parameters(self, width: int) -> int:
        """Parameters of an MLP."""
        matrices = 3 if self.gated_mlp else 2
        biases = (matrices - 1) * width + self.hidden_size if self.mlp_bias else 0
        return matrices * self.hidden_size * width + biases

    def _expert_mlp_parameters(self, experts: int) -> int:
        """Parameters of the MLPs of a layer with so many experts, of the whole router and of the shared experts."""
        shared = self._mlp_parameters(self.shared_expert_size) if self.shared_expert_size else 0
        return experts * self._mlp_parameters(self.ffn_hidden_size) + self.num_experts * self.router_row + shared

    @property
    def router_row(self) -> int:
        """Parameters of the router for one expert."""
        return self.hidden_size + int(self.router_bias) if self.num_experts else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoryModel:
    """A user's module, built in the ranks by `module:factory`, with properties found by inspecting it."""

    reference: str
    """`module:factory`; `factory()` returns `(module, batch)`."""
    parameter_count: int
    """Trainable and frozen parameters, tied ones counted once."""
    python_path: tuple[str, ...] = ()
    """Folders that the ranks prepend to `sys.path` before they import the factory."""
    frozen_parameter_count: int = 0
    """Parameters that are not trained: they have neither gradients nor optimizer state."""
    tensor_divisor: int = 0
    """The tensor-parallel size must divide this; 0: the module has no tensor-parallel plan."""
    pipeline_stages: int = 1
    """Maximum number of pipeline stages."""
    no_stages: str = ""
    """Why there is only one stage, in a clause."""
    precision: str = ""
    """That of its trained parameters as the factory makes them, in which it is not converted; empty: they have several, or it
    is unknown, so the module is converted to every precision."""
    other_types: str = ""
    """Numbers of parameters that have other types as the factory makes them; empty: there are none."""
    refused_knobs: tuple[tuple[str, str], ...] = ()
    """Knobs of `ON_BLOCKS` that would do nothing or fail, each with the reason."""
    loss_traits: tuple[LossTrait, ...] = ()
    """What its loss depends on besides the samples."""
    flops_per_sample: float | None = None
    """FLOPs of a sample, forward and backward, counted on the module; None: not counted."""
    profile: ModuleProfile | None = dataclasses.field(default=None, compare=False, repr=False)
    """What predictions read; None: not derived."""
    no_profile: str = dataclasses.field(default="", compare=False, repr=False)
    """Why it could not be derived, in one line with the remedy."""

    @property
    def name(self) -> str:
        """The reference, as the user wrote it."""
        return self.reference

    @property
    def default_precision(self) -> str:
        """The precision that keeps its types, if they are not all fp32; empty: the device's default."""
        return self.precision if self.other_types or self.precision != "fp32" else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user must know of its types and of its FLOPs, one line each."""
        lines = []
        if self.other_types and not self.precision:
            kinds = f"the factory makes parameters of several types ({self.other_types})"
            lines.append(f"{kinds}, which engines train in one: all are converted to the precision (--pin precision)")
        elif self.default_precision:
            others = f" ({self.other_types})" if self.other_types else ""
            lines.append(
                f"with precision={self.precision} parameters keep the factory's types{others}; another one converts all"
            )
        if self.profile is not None and self.profile.uncounted:
            operators = ", ".join(self.profile.uncounted)
            lines.append(f"the FLOPs of {operators} are unknown: predicted times count the bytes that they move")
        if self.profile is not None and self.profile.is_recurrent:
            lines.append("recurrent layers keep the workspace of a CPU; that of a GPU is known after a trial only")
        return tuple(lines)


Model = ModelSpec | FactoryModel | CommandModel

ON_BLOCKS = ("activation_checkpointing", "offload_activations", "compile_blocks", "cuda_graphs")
"""Knobs that act when a block of a user's module is called."""


def block_parameters(model: Model | None) -> int:
    """Parameters of a layer, or of the largest block of a module; 0: unknown."""
    if isinstance(model, ModelSpec):
        return model.layer_parameters
    if not isinstance(model, FactoryModel) or model.profile is None:
        return 0
    blocks: dict[int, int] = {}
    for parameter in model.profile.trained:
        blocks[parameter.block] = blocks.get(parameter.block, 0) + parameter.elements
    return max((size for block, size in blocks.items() if block >= 0), default=0)


@lru_cache(maxsize=256)
def _parameter_count(model: ModelSpec) -> int:
    """Kept because the canonical form of each configuration asks for it."""
    return model.parameters_with(model.num_experts)


def _count(pattern: tuple[bool, ...], layers: int) -> int:
    """Number of the layers at which a repeated pattern is true; 0 if it is empty."""
    periods, remaining_layers = divmod(layers, len(pattern) or 1)
    return periods * sum(pattern) + sum(pattern[:remaining_layers])


def without_profile(model: Model) -> Model:
    """The model without what only predictions read."""
    return dataclasses.replace(model, profile=None, no_profile="") if isinstance(model, FactoryModel) else model


def attention_span(model: Model, sequence_length: int) -> int:
    """Widest attention of a layer in tokens, at most the sequence length; 0: unknown, it is not our model."""
    if not isinstance(model, ModelSpec):
        return 0
    if any(model.whole_layers):
        return sequence_length
    return min(model.sliding_window or sequence_length, sequence_length)
