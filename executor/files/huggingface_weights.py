"""Weights of Hugging Face's models as ours, and back: names, and tensors that one of them keeps together.

Names are those of the module's `state_dict` in transformers 5, where the experts of a layer are one tensor. Its modules have
no multi-token prediction, whose weights published checkpoints keep as further layers, each with copies of the tables.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.errors import WeightsError
from search_spaces.models.model import Latent, ModelSpec, NormPlace


@dataclass(frozen=True, slots=True)
class Together:
    """How one of their tensors is made of several of ours."""

    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor, Sequence[int]], Sequence[Tensor]]
    """Takes the rows of each of ours."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One of their tensors."""

    theirs: str
    ours: tuple[str, ...]
    rows: tuple[int, ...] = ()
    """Rows of each of ours; empty if they are equal."""
    together: Together | None = None
    """None: they are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """All tensors of a model under Hugging Face's names."""

    weights: tuple[Weight, ...]
    copies: Mapping[str, str]
    """Further names of some tensors -> their names in `weights`: written with them, and left out of what is read."""

    def ours(self, spec: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our weights, by the names of `Transformer.state_dict`, from theirs.

        Raises:
            WeightsError: a tensor is missing, or one is left, or a copy differs from its original.
        """
        originals = {name: value for name, value in state.items() if name not in self.copies}
        _require_same(originals, [weight.theirs for weight in self.weights], spec)
        for name, original in self.copies.items():
            if name in state and not torch.equal(state[name], state[original]):
                raise WeightsError(f"{name} differs from {original}, which the model shares: leave it out")
        tensors: dict[str, Tensor] = {}
        for weight in self.weights:
            tensor = state[weight.theirs]
            parts = [tensor] if weight.together is None else weight.together.split(tensor, weight.rows)
            tensors.update(zip(weight.ours, parts, strict=True))
        return tensors

    def theirs(self, spec: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `ours`."""
        _require_same(state, [name for weight in self.weights for name in weight.ours], spec)
        tensors: dict[str, Tensor] = {}
        for weight in self.weights:
            parts = [state[name] for name in weight.ours]
            tensors[weight.theirs] = parts[0] if weight.together is None else weight.together.join(parts)
        return tensors | {name: tensors[original] for name, original in self.copies.items()}


def _require_same(state: Mapping[str, Tensor], names: Sequence[str], spec: ModelSpec) -> None:
    # Tied tables have two names in a state_dict.
    tied = {"lm_head.weight", "head.output.weight"} if spec.tied_embeddings else set()
    missing, unexpected = sorted(set(names) - set(state)), sorted(set(state) - set(names) - tied)
    if missing or unexpected:
        problem = f"{missing[0]} is missing" if missing else f"{unexpected[0]} is not one of its weights"
        raise WeightsError(f"{problem}: give the weights of a {spec.family} model of the shape of {spec.name}")


def _rows(tensor: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
    return torch.split(tensor, list(rows))


ROWS = Together(join=lambda parts: torch.cat(list(parts)), split=_rows)


def rotated_halves(size: int, rotated: int) -> Together:
    """Heads of `size` rows, of which the last `rotated` are in pairs of neighbours in theirs, in two halves in ours.

    DeepSeek and Llama 4 rotate neighbours, we rotate halves.
    """

    def reordered(tensor: Tensor, pairs: tuple[int, int]) -> Tensor:
        heads = tensor.view(-1, size, *tensor.shape[1:])
        plain, last = torch.split(heads, [size - rotated, rotated], dim=1)
        turned = last.reshape(len(last), *pairs, *last.shape[2:]).transpose(1, 2).flatten(1, 2)
        return torch.cat((plain, turned), dim=1).flatten(0, 1)

    return Together(
        join=lambda parts: reordered(parts[0], (2, rotated // 2)),
        split=lambda tensor, _: [reordered(tensor, (rotated // 2, 2))],
    )


def pair(theirs: str, ours: str, bias: bool) -> Iterator[Weight]:
    """A tensor that is the same in both, and its bias."""
    for kind in ("weight", "bias") if bias else ("weight",):
        yield Weight(f"{theirs}.{kind}", (f"{ours}.{kind}",))


def joined(theirs: str, ours: Sequence[str], rows: Sequence[int], bias: bool, together: Together) -> Iterator[Weight]:
    """Tensors that they keep together, and their biases."""
    for kind in ("weight", "bias") if bias else ("weight",):
        yield Weight(f"{theirs}.{kind}", tuple(f"{name}.{kind}" for name in ours), tuple(rows), together)


def huggingface_names(spec: ModelSpec) -> TensorNames:
    """The tensors of Hugging Face's module."""
    return TensorNames(weights=tuple(_weights(spec)), copies=_table_copies(spec))


def checkpoint_names(spec: ModelSpec) -> TensorNames:
    """The tensors of published checkpoint files, where each expert has tensors of its own."""
    weights = [file_weight for weight in _weights(spec) for file_weight in _of_files(spec, weight)]
    return TensorNames(weights=tuple(weights), copies=_table_copies(spec))


def _of_files(spec: ModelSpec, weight: Weight) -> Iterator[Weight]:
    """A tensor of the module as in files."""
    mixtral = spec.family == "mixtral"
    theirs = weight.theirs.replace(".mlp.", ".block_sparse_moe.") if mixtral else weight.theirs
    mlp_path, _, kind = theirs.rpartition(".experts.")
    if not mlp_path or spec.family == "gpt_oss":
        yield Weight(theirs, weight.ours, weight.rows, weight.together)
        return
    matrices = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    if mixtral:
        matrices = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}[kind]
    for index, parameter_name in enumerate(weight.ours):
        expert, matrix = divmod(index, len(matrices))
        yield Weight(f"{mlp_path}.experts.{expert}.{matrices[matrix]}.weight", (parameter_name,))


def from_huggingface(spec: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights, by the names of `Transformer.state_dict`, from those of Hugging Face's module.

    Raises:
        WeightsError: a tensor is missing, or one is left, or a copy of a table differs from it.
    """
    return huggingface_names(spec).ours(spec, state)


def to_huggingface(spec: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `from_huggingface`."""
    return huggingface_names(spec).theirs(spec, state)


def _table_copies(spec: ModelSpec) -> dict[str, str]:
    """Names of the copies of tables in modules for multi-token prediction -> name of the table."""
    table, copies = "model.embed_tokens.weight", {}
    for layer in range(spec.num_layers, spec.num_layers + spec.mtp_layers):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = table
        copies[f"model.layers.{layer}.shared_head.head.weight"] = table if spec.tied_embeddings else "lm_head.weight"
    return copies


COLUMNS = Together(
    join=lambda parts: _transposed(torch.cat(list(parts))).contiguous(),
    split=lambda tensor, rows: torch.split(_transposed(tensor), list(rows)),
)
"""GPT-2 keeps the transpose."""


def _by_heads(heads: int) -> Together:
    """GPT-NeoX: queries, keys and values of the first head, of the second, and so on."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([part.view(heads, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 2)

    def split(tensor: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
        return [part.flatten(0, 1) for part in tensor.view(heads, len(rows), -1, *tensor.shape[1:]).unbind(1)]

    return Together(join, split)


def _of_experts(matrices: int) -> Together:
    """Matrices of all experts in one tensor [experts, rows, columns], the rows of an expert's matrices together."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        experts = [torch.cat(list(parts[first : first + matrices])) for first in range(0, len(parts), matrices)]
        return torch.stack(experts)

    def split(tensor: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
        return [part for expert in tensor for part in torch.split(expert, list(rows))]

    return Together(join, split)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    """Every tensor of Hugging Face's module."""
    return {"gpt2": _gpt2, "opt": _opt, "gpt_neox": _gpt_neox}.get(spec.family, _llama)(spec)


def _output_projection(spec: ModelSpec) -> Iterator[Weight]:
    if not spec.tied_embeddings:
        yield Weight("lm_head.weight", ("head.output.weight",))


LLAMA4 = "llama4_text"
NORMS = {
    NormPlace.INPUT: {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    NormPlace.OUTPUT: {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
    NormPlace.BOTH: {
        "attention_norm": "input_layernorm", "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm", "mlp_output_norm": "post_feedforward_layernorm",
    },
}  # fmt: skip
"""Names of the norms of a layer, ours and theirs."""


def _llama(spec: ModelSpec) -> Iterator[Weight]:
    """Llama and similar models."""
    yield Weight("model.embed_tokens.weight", ("embedding.tokens.weight",))
    for layer in range(spec.num_layers):
        yield from _llama_layer(spec, layer, f"blocks.{layer}")
    for depth in range(spec.mtp_layers):
        yield from _prediction_module(spec, spec.num_layers + depth, f"predictions.{depth}")
    yield from pair("model.norm", "head.norm", bias=False)
    yield from _output_projection(spec)


def _llama_layer(spec: ModelSpec, layer: int, ours: str) -> Iterator[Weight]:
    theirs, attention = f"model.layers.{layer}", f"{ours}.attention"
    queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    for module_name, other in NORMS[spec.norm_place].items():
        yield from pair(f"{theirs}.{other}", f"{ours}.{module_name}", bias=False)
    mlp = _llama_experts if spec.has_experts(layer) else _llama_mlp
    yield from mlp(spec, f"{theirs}.{'feed_forward' if spec.family == LLAMA4 else 'mlp'}", f"{ours}.mlp")
    yield from pair(f"{theirs}.self_attn.o_proj", f"{attention}.output", spec.attention_output_bias)
    if spec.latent is not None:
        yield from _latent(spec, spec.latent, f"{theirs}.self_attn", attention)
        return
    matrices = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    if spec.family == "phi3":
        names, rows = [f"{attention}.{module_name}" for module_name in matrices], (queries, keys, keys)
        yield from joined(f"{theirs}.self_attn.qkv_proj", names, rows, spec.qkv_bias, ROWS)
    else:
        for module_name, other in matrices.items():
            name = f"{theirs}.self_attn.{other}"
            if spec.family == LLAMA4 and module_name != "value" and spec.is_rotated(layer):
                heads = rotated_halves(spec.head_dim, spec.head_dim)
                yield from joined(name, [f"{attention}.{module_name}"], (), spec.qkv_bias, heads)
            else:
                yield from pair(name, f"{attention}.{module_name}", spec.qkv_bias)
    if spec.attention_sinks:
        yield Weight(f"{theirs}.self_attn.sinks", (f"{attention}.sinks.weight",))
    if spec.head_norm_parameters:
        yield from pair(f"{theirs}.self_attn.q_norm", f"{attention}.query_norm", bias=False)
        yield from pair(f"{theirs}.self_attn.k_norm", f"{attention}.key_norm", bias=False)


def _prediction_module(spec: ModelSpec, layer: int, ours: str) -> Iterator[Weight]:
    """A module for multi-token prediction, as DeepSeek-V3's checkpoint keeps it: a layer after the model's."""
    names = {
        "enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "project", "shared_head.norm": "norm",
    }  # fmt: skip
    for other, module_name in names.items():
        yield from pair(f"model.layers.{layer}.{other}", f"{ours}.{module_name}", bias=False)
    yield from _llama_layer(spec, layer, f"{ours}.block")


def _latent(spec: ModelSpec, latent: Latent, theirs: str, ours: str) -> Iterator[Weight]:
    """The rows of what is rotated have another order (`rotated_halves`)."""
    bias, narrow = spec.qkv_bias, latent.key_value_rank
    heads = rotated_halves(spec.head_dim, latent.rotated)
    if latent.query_rank:
        yield from pair(f"{theirs}.q_a_proj", f"{ours}.query_down", bias)
        yield from pair(f"{theirs}.q_a_layernorm", f"{ours}.query_latent_norm", bias=False)
    name = "q_b_proj" if latent.query_rank else "q_proj"
    yield from joined(f"{theirs}.{name}", [f"{ours}.query"], (), False, heads)
    key_value_rows = rotated_halves(narrow + latent.rotated, latent.rotated)
    yield from joined(f"{theirs}.kv_a_proj_with_mqa", [f"{ours}.key_value_down"], (), bias, key_value_rows)
    yield from pair(f"{theirs}.kv_a_layernorm", f"{ours}.key_value_latent_norm", bias=False)
    yield from pair(f"{theirs}.kv_b_proj", f"{ours}.key_value", bias=False)


def _llama_mlp(spec: ModelSpec, theirs: str, ours: str) -> Iterator[Weight]:
    bias = spec.mlp_bias
    if spec.family == "phi3":
        rows = (spec.ffn_hidden_size,) * 2
        yield from joined(f"{theirs}.gate_up_proj", [f"{ours}.gate", f"{ours}.up"], rows, bias, ROWS)
    else:
        yield from pair(f"{theirs}.gate_proj", f"{ours}.gate", bias)
        yield from pair(f"{theirs}.up_proj", f"{ours}.up", bias)
    yield from pair(f"{theirs}.down_proj", f"{ours}.down", bias)


def _llama_experts(spec: ModelSpec, theirs: str, ours: str) -> Iterator[Weight]:
    ffn, hidden = spec.ffn_hidden_size, spec.hidden_size
    experts = [f"{ours}.experts.{expert}" for expert in range(spec.num_experts)]
    if spec.family == "gpt_oss":
        yield from _gpt_oss_experts(spec, theirs, ours, experts)
        return
    if spec.family == LLAMA4:
        yield from _llama4_experts(spec, theirs, ours, experts)
        return
    gates = tuple(f"{expert}.{matrix}.weight" for expert in experts for matrix in ("gate", "up"))
    downs = tuple(f"{expert}.down.weight" for expert in experts)
    yield from pair(f"{theirs}.gate", f"{ours}.router", bias=False)
    if spec.router_correction:
        yield Weight(f"{theirs}.gate.e_score_correction_bias", (f"{ours}.correction",))
    if spec.shared_expert_size:
        yield from _llama_mlp(spec, f"{theirs}.shared_experts", f"{ours}.shared")
    yield Weight(f"{theirs}.experts.gate_up_proj", gates, (ffn, ffn), _of_experts(2))
    yield Weight(f"{theirs}.experts.down_proj", downs, (hidden,), _of_experts(1))


def _gpt_oss_experts(spec: ModelSpec, theirs: str, ours: str, experts: Sequence[str]) -> Iterator[Weight]:
    yield from pair(f"{theirs}.router", f"{ours}.router", bias=True)
    ffn, hidden = spec.ffn_hidden_size, spec.hidden_size
    for kind, end in (("weight", ""), ("bias", "_bias")):
        pairs = tuple(f"{expert}.{matrix}.{kind}" for expert in experts for matrix in ("gate", "up"))
        yield Weight(f"{theirs}.experts.gate_up_proj{end}", pairs, (ffn, ffn), INTERLEAVED)
        downs = tuple(f"{expert}.down.{kind}" for expert in experts)
        yield Weight(f"{theirs}.experts.down_proj{end}", downs, (hidden,), TRANSPOSED)


def _llama4_experts(spec: ModelSpec, theirs: str, ours: str, experts: Sequence[str]) -> Iterator[Weight]:
    """As Llama's, but the rows of an expert's tensors are its inputs."""
    ffn, hidden = spec.ffn_hidden_size, spec.hidden_size
    yield from pair(f"{theirs}.router", f"{ours}.router", bias=False)
    yield from _llama_mlp(spec, f"{theirs}.shared_expert", f"{ours}.shared")
    pairs = tuple(f"{expert}.{matrix}.weight" for expert in experts for matrix in ("gate", "up"))
    yield Weight(f"{theirs}.experts.gate_up_proj", pairs, (ffn, ffn), _transposed_experts(2))
    downs = tuple(f"{expert}.down.weight" for expert in experts)
    yield Weight(f"{theirs}.experts.down_proj", downs, (hidden,), _transposed_experts(1))


def _transposed_experts(matrices: int) -> Together:
    """`_of_experts` with transposed matrices."""
    plain = _of_experts(matrices)
    return Together(
        join=lambda parts: plain.join(parts).transpose(1, 2).contiguous(),
        split=lambda tensor, rows: plain.split(tensor.transpose(1, 2), rows),
    )


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.T if matrix.dim() == 2 else matrix


INTERLEAVED = Together(
    join=lambda parts: torch.stack(
        [_transposed(torch.stack(pair, dim=1).flatten(0, 1)) for pair in zip(parts[::2], parts[1::2], strict=True)]
    ),
    split=lambda tensor, _: [_transposed(expert)[first::2] for expert in tensor for first in (0, 1)],
)
"""GPT-OSS: a row of the gate, one of the other matrix, and so on, transposed."""
TRANSPOSED = Together(
    join=lambda parts: torch.stack([_transposed(part) for part in parts]),
    split=lambda tensor, _: [_transposed(expert) for expert in tensor],
)


def _gpt2(spec: ModelSpec) -> Iterator[Weight]:
    yield Weight("transformer.wte.weight", ("embedding.tokens.weight",))
    yield Weight("transformer.wpe.weight", ("embedding.positions.weight",))
    hidden, ffn = spec.hidden_size, spec.ffn_hidden_size
    for layer in range(spec.num_layers):
        theirs, ours = f"transformer.h.{layer}", f"blocks.{layer}"
        yield from pair(f"{theirs}.ln_1", f"{ours}.attention_norm", bias=True)
        names = [f"{ours}.attention.{name}" for name in ("query", "key", "value")]
        yield from joined(f"{theirs}.attn.c_attn", names, (hidden,) * 3, True, COLUMNS)
        yield from joined(f"{theirs}.attn.c_proj", [f"{ours}.attention.output"], (hidden,), True, COLUMNS)
        yield from pair(f"{theirs}.ln_2", f"{ours}.mlp_norm", bias=True)
        yield from joined(f"{theirs}.mlp.c_fc", [f"{ours}.mlp.up"], (ffn,), True, COLUMNS)
        yield from joined(f"{theirs}.mlp.c_proj", [f"{ours}.mlp.down"], (hidden,), True, COLUMNS)
    yield from pair("transformer.ln_f", "head.norm", bias=True)
    yield from _output_projection(spec)


def _opt(spec: ModelSpec) -> Iterator[Weight]:
    decoder = "model.decoder"
    yield Weight(f"{decoder}.embed_tokens.weight", ("embedding.tokens.weight",))
    yield Weight(f"{decoder}.embed_positions.weight", ("embedding.positions.weight",))
    if spec.embedding_size:
        yield Weight(f"{decoder}.project_in.weight", ("embedding.project.weight",))
        yield Weight(f"{decoder}.project_out.weight", ("head.project.weight",))
    for layer in range(spec.num_layers):
        theirs, ours = f"{decoder}.layers.{layer}", f"blocks.{layer}"
        for module_name, other in {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}.items():
            yield from pair(f"{theirs}.self_attn.{other}", f"{ours}.attention.{module_name}", spec.qkv_bias)
        yield from pair(f"{theirs}.self_attn_layer_norm", f"{ours}.attention_norm", bias=True)
        yield from pair(f"{theirs}.fc1", f"{ours}.mlp.up", spec.mlp_bias)
        yield from pair(f"{theirs}.fc2", f"{ours}.mlp.down", spec.mlp_bias)
        yield from pair(f"{theirs}.final_layer_norm", f"{ours}.mlp_norm", bias=True)
    if spec.final_norm:
        yield from pair(f"{decoder}.final_layer_norm", "head.norm", bias=True)
    yield from _output_projection(spec)


def _gpt_neox(spec: ModelSpec) -> Iterator[Weight]:
    yield Weight("gpt_neox.embed_in.weight", ("embedding.tokens.weight",))
    together, rows = _by_heads(spec.num_attention_heads), (spec.num_attention_heads * spec.head_dim,) * 3
    for layer in range(spec.num_layers):
        theirs, ours = f"gpt_neox.layers.{layer}", f"blocks.{layer}"
        yield from pair(f"{theirs}.input_layernorm", f"{ours}.attention_norm", bias=True)
        yield from pair(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", bias=True)
        names = [f"{ours}.attention.{name}" for name in ("query", "key", "value")]
        yield from joined(f"{theirs}.attention.query_key_value", names, rows, spec.qkv_bias, together)
        yield from pair(f"{theirs}.attention.dense", f"{ours}.attention.output", spec.attention_output_bias)
        yield from pair(f"{theirs}.mlp.dense_h_to_4h", f"{ours}.mlp.up", bias=True)
        yield from pair(f"{theirs}.mlp.dense_4h_to_h", f"{ours}.mlp.down", bias=True)
    yield from pair("gpt_neox.final_layer_norm", "head.norm", bias=True)
    yield from _output_projection(spec)
