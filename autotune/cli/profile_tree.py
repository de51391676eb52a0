"""A profile's modules as a tree of rows with totals; repeated blocks are merged into one row."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from executor.measurement.module_profile import ModelProfile, ModuleCost, Phases, summed

OWN = "(own)"
"""Label of the row for a module's own operations, outside its sub-modules."""
HOLDERS = ("ModuleList", "ModuleDict")
"""Container classes that are never called: their children replace them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One module, or several identical ones, including sub-modules."""

    label: str
    name: str
    """Dotted path; for several modules with their numbers: `blocks.0-11.attention`."""
    kind: str
    depth: int
    """Nesting level; 0: the model."""
    count: int
    """Number of modules in the row."""
    calls: int
    parameters: int
    """Elements; all figures are sums over the modules in the row."""
    flops: Phases
    seconds: Phases


@dataclass(frozen=True, slots=True)
class _Node:
    """Identical modules (often one), with their sub-modules."""

    label: str
    name: str
    costs: tuple[ModuleCost, ...]
    inside: "tuple[_Node, ...]"

    @property
    def every(self) -> Iterator[ModuleCost]:
        yield from self.costs
        for node in self.inside:
            yield from node.every

    @property
    def shape(self) -> tuple[object, ...]:
        """Equal for identical modules."""
        own = self.costs[0]
        return (own.kind, own.parameters, tuple((node.label, node.shape) for node in self.inside))


def rows_of(profile: ModelProfile, *, depth: int | None, merge: bool) -> list[Row]:
    """The rows from the model down to `depth` levels (None: all), parents before children.

    With `merge`, identical numbered neighbours (the blocks of a transformer) are one row with their sum. The children of a row,
    including `(own)`, sum to it.
    """
    return list(_rows(_tree(profile.modules, merge), 0, depth))


def _tree(modules: Sequence[ModuleCost], merge: bool) -> _Node:
    """Build the tree from the flat list, in which parents precede children."""
    inside: dict[str, list[ModuleCost]] = {}
    names = {module.name for module in modules}
    for module in modules[1:]:
        parent = module.name.rpartition(".")[0]
        while parent and parent not in names:  # a shared module's other name
            parent = parent.rpartition(".")[0]
        inside.setdefault(parent, []).append(module)

    def node(module: ModuleCost, prefix: str) -> _Node:
        found = [made for child in inside.get(module.name, ()) for made in _children(node(child, module.name))]
        label = module.name[len(prefix) :].lstrip(".") or "model"
        return _Node(label, module.name, (module,), tuple(_merged(found) if merge else found))

    return node(modules[0], "")


def _children(node: _Node) -> Iterable[_Node]:
    """The node itself; for a container its children instead, with its name in their labels."""
    if node.costs[0].kind not in HOLDERS:
        return (node,)
    return tuple(_Node(f"{node.label}.{child.label}", child.name, child.costs, child.inside) for child in node.inside)


def _merged(nodes: Sequence[_Node]) -> Iterator[_Node]:
    """Merge identical numbered neighbours."""

    def key(node: _Node) -> tuple[object, ...]:
        stem, _, number = node.label.rpartition(".")
        return (stem, node.shape) if number.isdigit() else (node.label,)

    for _, group in groupby(nodes, key):
        identical = list(group)
        yield identical[0] if len(identical) == 1 else _as_one(identical)


def _as_one(alike: Sequence[_Node]) -> _Node:
    first, last = alike[0], alike[-1]
    stem, _, number = first.label.rpartition(".")
    numbers = f"{number}-{last.label.rpartition('.')[2]}"
    return _spread(alike, f"{stem}.{numbers}".lstrip("."), f"{first.name.rpartition('.')[0]}.{numbers}".lstrip("."))


def _spread(alike: Sequence[_Node], label: str, name: str) -> _Node:
    inside = tuple(
        _spread(nodes, nodes[0].label, f"{name}.{nodes[0].label}")
        for nodes in zip(*(node.inside for node in alike), strict=True)
    )
    return _Node(label, name, tuple(cost for node in alike for cost in node.costs), inside)


def _rows(node: _Node, level: int, depth: int | None) -> Iterator[Row]:
    yield _row(node.label, node.name, node.costs[0].kind, level, node.costs, tuple(node.every))
    if not node.inside or (depth is not None and level >= depth):
        return
    yield _row(OWN, node.name, "", level + 1, node.costs, node.costs)
    for child in node.inside:
        yield from _rows(child, level + 1, depth)


def _row(label: str, name: str, kind: str, level: int, modules: Sequence[ModuleCost], counted: Sequence[ModuleCost]) -> Row:
    return Row(
        label=label,
        name=name,
        kind=kind,
        depth=level,
        count=len(modules),
        calls=sum(cost.calls for cost in modules),
        parameters=sum(cost.parameters for cost in counted),
        flops=summed(cost.flops for cost in counted),
        seconds=summed(cost.seconds for cost in counted),
    )
