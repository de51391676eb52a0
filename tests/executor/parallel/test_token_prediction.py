"""Multi-token prediction against the equations of the DeepSeek-V3 paper, written out."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from executor.batches import NO_TARGET, labels_ahead
from executor.parallel.model import Transformer, build_transformer
from search_spaces.models.model import ModelSpec

SPEC = ModelSpec(
    name="small", family="llama", num_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    ffn_hidden_size=24, vocab_size=32, sequence_length=12, mtp_layers=2, mtp_loss_weight=0.4,
)  # fmt: skip
LENGTH, SAMPLES, STEPS = 12, 3, 3
BOUND = 1e-9


class Norm(nn.Module):
    """x / sqrt(mean(x²) + e), times a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + SPEC.norm_epsilon).sqrt() * self.weight


def matrix(outputs: int, inputs: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(outputs, inputs, dtype=torch.float64))


class Layer(nn.Module):
    """TRM: Llama's layer."""

    def __init__(self) -> None:
        super().__init__()
        hidden, queries, keys, ffn = 16, 16, 8, 24
        self.first, self.second = Norm(hidden), Norm(hidden)
        self.q, self.k, self.v = (matrix(outputs, hidden) for outputs in (queries, keys, keys))
        self.o = matrix(hidden, queries)
        self.gate, self.up, self.down = matrix(ffn, hidden), matrix(ffn, hidden), matrix(hidden, ffn)

    def forward(self, x: Tensor) -> Tensor:
        read = self.first(x)
        q, k, v = (self.heads(read @ one.T) for one in (self.q, self.k, self.v))
        q, k = self.rotated(q), self.rotated(k)
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        scores = q @ k.transpose(2, 3) / 2.0
        length = x.shape[1]
        scores = scores.masked_fill(torch.ones(length, length).triu(1) > 0, float("-inf"))
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ self.o.T
        read = self.second(x)
        gate = read @ self.gate.T
        return x + (gate * gate.sigmoid() * (read @ self.up.T)) @ self.down.T

    @staticmethod
    def heads(x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, 4).transpose(1, 2)

    @staticmethod
    def rotated(x: Tensor) -> Tensor:
        """By m theta^(-2 i / d); angles, cosines and sines in fp32, as models are trained."""
        frequencies = 1.0 / SPEC.rope_theta ** (torch.arange(0, 4, 2, dtype=torch.float32) / 4)
        angles = torch.arange(x.shape[2], dtype=torch.float32)[:, None] * frequencies
        pairs = torch.complex(x[..., :2], x[..., 2:]) * torch.complex(angles.cos().double(), angles.sin().double())
        return torch.cat((pairs.real, pairs.imag), dim=-1)


class Module(nn.Module):
    """h'_i = M [RMSNorm(Emb(t_{i+k})); RMSNorm(h_i)], h = TRM(h'), equations 21 and 22."""

    def __init__(self) -> None:
        super().__init__()
        self.hnorm, self.enorm, self.norm, self.layer, self.project = Norm(16), Norm(16), Norm(16), Layer(), matrix(16, 32)


class Reference(nn.Module):
    """The model, and its modules for multi-token prediction, on a whole batch."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = spec.mtp_loss_weight
        self.table, self.output = matrix(32, 16), matrix(32, 16)
        if spec.tied_embeddings:
            self.output = self.table
        self.layers = nn.ModuleList(Layer() for _ in range(spec.num_layers))
        self.norm = Norm(16)
        self.modules_ahead = nn.ModuleList(Module() for _ in range(spec.mtp_layers))

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Main loss and all of it for text [samples, T + 1]."""
        tokens = text.shape[1] - 1
        h = self.table[text[:, :tokens]]
        for layer in self.layers:
            h = layer(h)
        h = self.norm(h)
        main = self.cross_entropy(h, text[:, 1:], tokens)
        losses = []
        for depth, module in enumerate(self.modules_ahead, 1):
            # Tokens 1 to T - k.
            h = h[:, : tokens - depth]
            embedded = self.table[text[:, depth:tokens]]
            h = torch.cat((module.enorm(embedded), module.hnorm(h)), dim=-1) @ module.project.T
            h = module.norm(module.layer(h))
            losses.append(self.cross_entropy(h, text[:, depth + 1 :], tokens))
        return main, main + self.weight / len(losses) * sum(losses)

    def cross_entropy(self, h: Tensor, targets: Tensor, tokens: int) -> Tensor:
        """-1/T of the summed logarithms of the targets' probabilities (equation 24), mean over samples."""
        logs = (h @ self.output.T).log_softmax(-1)
        return -logs.gather(-1, targets[..., None]).sum() / (tokens * len(targets))


OURS = {
    "q": "attention.query",
    "k": "attention.key",
    "v": "attention.value",
    "o": "attention.output",
    "gate": "mlp.gate",
    "up": "mlp.up",
    "down": "mlp.down",
}


def ours_of(name: str) -> str:
    """The name of our parameter."""
    if name in ("table", "output"):
        return {"table": "embedding.tokens.weight", "output": "head.output.weight"}[name]
    place, _, rest = name.partition(".")
    if place == "norm":
        return f"head.norm.{rest}"
    index, _, rest = rest.partition(".")
    where = f"blocks.{index}" if place == "layers" else f"predictions.{index}.block"
    if place == "modules_ahead" and not rest.startswith("layer."):
        inner = {"hnorm.weight": "hidden_norm.weight", "enorm.weight": "embedding_norm.weight", "project": "project.weight"}
        return f"predictions.{index}.{inner.get(rest, rest)}"
    rest = rest.removeprefix("layer.")
    norms = {"first.weight": "attention_norm.weight", "second.weight": "mlp_norm.weight"}
    return f"{where}.{norms[rest] if rest in norms else OURS[rest] + '.weight'}"


def both(spec: ModelSpec, chunk: int = 0) -> tuple[Transformer, Reference]:
    model = build_transformer(spec, LENGTH, seed=1, dtype=torch.float64, loss_chunk_size=chunk)
    reference, own = Reference(spec), dict(model.named_parameters())
    with torch.no_grad():
        for value in own.values():
            value.add_(torch.randn_like(value) * 0.1)  # norms too
        for name, value in reference.named_parameters():
            value.copy_(own[ours_of(name)])
    return model, reference


def text_of(step: int) -> Tensor:
    return torch.randint(0, 32, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))


@pytest.mark.prove
@pytest.mark.parametrize(
    ("changes", "chunk"), [({}, 0), ({"mtp_layers": 1, "tied_embeddings": True}, 0), ({"mtp_layers": 3}, 7)]
)
def test_losses_gradients_and_steps_are_those_of_the_paper(changes: dict[str, int], chunk: int) -> None:
    spec = dataclasses.replace(SPEC, **changes)  # type: ignore[arg-type]
    model, reference = both(spec, chunk)
    own = dict(model.named_parameters())
    assert {ours_of(name) for name, _ in reference.named_parameters()} == set(own)
    assert sum(value.numel() for value in own.values()) == spec.parameter_count
    updates = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, reference)]
    for step in range(STEPS):
        text = text_of(step)
        loss = model(text[:, :-1], text[:, 1:])
        main, whole = reference(text)
        assert loss.item() == pytest.approx(main.item(), abs=BOUND)
        loss.backward()
        whole.backward()
        for name, value in reference.named_parameters():
            found = own[ours_of(name)].grad
            assert found is not None and value.grad is not None
            assert (found - value.grad).abs().max().item() < BOUND, name
        for update in updates:
            update.step()
            update.zero_grad()
    for name, value in reference.named_parameters():
        assert (own[ours_of(name)] - value).abs().max().item() < BOUND, name


def test_without_weight_only_the_main_loss_has_a_gradient() -> None:
    spec = dataclasses.replace(SPEC, mtp_loss_weight=0.0)
    model, _ = both(spec)
    plain = build_transformer(dataclasses.replace(spec, mtp_layers=0), LENGTH, seed=1, dtype=torch.float64)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "predictions" not in name})
    text = text_of(0)
    for one in (model, plain):
        one(text[:, :-1], text[:, 1:]).backward()
    for name, value in plain.named_parameters():
        assert value.grad is not None and torch.allclose(value.grad, model.get_parameter(name).grad, atol=1e-15)  # type: ignore[arg-type]


def test_labels_ahead_stay_within_samples_and_documents() -> None:
    labels = torch.tensor([[11, 12, 13, 14, 15], [21, 22, 31, 32, NO_TARGET]])
    none = NO_TARGET
    assert labels_ahead(labels, 2)[0].T.tolist() == [[12, 13, 14, 15, none], [13, 14, 15, none, none]]
    places = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 0]])
    found = labels_ahead(labels, 2, places)
    assert found[0].T.tolist() == [[12, 13, 14, 15, none], [13, 14, 15, none, none]]
    assert found[1].T.tolist() == [[22, none, 32, none, none], [none] * 5]
    assert bool((labels_ahead(labels, 7)[..., 5:] == NO_TARGET).all())


def test_documents_packed_into_a_row_are_independent() -> None:
    """The loss and gradients of a packed row are those of its documents, one at a time."""
    model, _ = both(SPEC)
    text = text_of(0)[:2]
    tokens, labels = text[:, :-1], text[:, 1:]
    places = torch.cat((torch.arange(7), torch.arange(5))).expand(2, LENGTH)
    model(tokens, labels, places).backward()
    packed = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    for first, end in ((0, 7), (7, 12)):
        model.set_length(end - first)
        (model(tokens[:, first:end], labels[:, first:end]) * ((end - first) / LENGTH)).backward()
    for name, value in model.named_parameters():
        assert value.grad is not None and torch.allclose(value.grad, packed[name], atol=1e-13), name
