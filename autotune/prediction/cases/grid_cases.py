"""Parts of a grid as cases: the arrays of `config_cases`, with one dimension for each axis of the grid."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from autotune.prediction.cases.config_cases import engine_software, layouts_from, shapes_of
from autotune.prediction.cases.grid import Codes
from autotune.prediction.cases.module_cases import described
from autotune.prediction.equations.cases import (
    Array,
    Cases,
    Layouts,
    RankTable,
)
from autotune.prediction.equations.hardware import devices_of, hardware_of
from autotune.prediction.equations.layer_shapes import documented, layer_kinds, loaded, trained_shapes
from autotune.prediction.equations.schedules import scheduled
from autotune.prediction.equations.software import Software
from autotune.prediction.equations.uneven import LayoutKey, layout_key, tabled
from search_spaces.canonical import SEARCH_ORDER
from search_spaces.knob import Planning, Value
from search_spaces.knob_values import KNOBS
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.space import SearchSpace

UNIFORM = tuple(knob.name for knob in KNOBS.values() if knob.planning is Planning.FIXED)
"""Knobs that all configurations of a grid have the same value of: what computes and is trained, and how, follows from them."""


_PLACING = ("pipeline_parallel_size", "virtual_stages", "pipeline_schedule", "pipeline_layout")
"""Knobs on which it depends which rank of a pipeline holds what."""
_ON_DEVICES = ("pipeline_split", "tensor_parallel_size", "context_parallel_size", "rank_order")
"""Those on which it depends besides where the nodes of a cluster differ."""

Part = TypeVar("Part", contravariant=True)


class Coded(Protocol[Part]):
    """Configurations in parts: of a `Grid` its rows, of `Products` each product."""

    @property
    def values(self) -> Sequence[list[Value]]:
        """For each knob of SEARCH_ORDER, the values that occur."""
        ...

    def codes(self, rows: Part, name: str, /) -> Codes:
        """The indices of one knob's values in a part, with one dimension for each axis."""
        ...


def placing_knobs(space: SearchSpace) -> tuple[str, ...]:
    """The knobs on which it depends what each rank of a pipeline holds, and where, in a space with explicit layers."""
    written = space.domains.get("pipeline_layout", (space.base.pipeline_layout,)) != ("",)
    return (*_PLACING, *_ON_DEVICES) if space.cluster.groups else _PLACING if written else ()


class GridCases(Generic[Part]):
    """Makes the cases of a grid's parts."""

    def __init__(self, space: SearchSpace, model: ModelSpec | FactoryModel, engine: str, grid: Coded[Part]) -> None:
        self._world, self._batch, self._grid = space.world_size, space.workload.global_batch_size, grid
        same = {name: _only(space, name) for name in UNIFORM}
        precision, attention = same["precision"], same["attention_backend"]
        self._alike = space.base.replace(same)
        length, alike = space.workload.sequence_length, [self._alike]
        self._shapes = shapes_of(model, length)
        if isinstance(model, ModelSpec):
            shapes = trained_shapes(self._shapes, model, length, alike)
            self._shapes = documented(shapes, model, space.workload, alike)
        self._module = described(model, str(precision), space.cluster.device.kind)
        self._hardware = hardware_of(space.cluster, str(precision))
        self._software: Software = engine_software(model, engine, {str(attention)}, space.cluster.device.kind)
        self._space, self._model = space, model
        self._keys: dict[tuple[Value, ...], LayoutKey | None] = {}
        """By values of the placing knobs."""
        self._devices = devices_of(space.cluster, str(precision))
        windows = self._alike.attention_window == 0
        self._kinds = layer_kinds(model, length, windows) if isinstance(model, ModelSpec) else ()
        self._placing = placing_knobs(space) or ((*_PLACING, "pipeline_split") if self._kinds else ())

    def of(self, part: Part) -> Cases:
        """The cases of a part."""
        return self._cases(lambda name: self._grid.codes(part, name))

    def at(self, codes: Codes) -> Cases:
        """The cases of configurations that have these codes, of shape (configurations, knobs)."""
        return self._cases(lambda name: codes[:, SEARCH_ORDER.index(name)])

    def _cases(self, codes_of: Callable[[str], Codes]) -> Cases:
        layouts, ranks = scheduled(self._layouts(codes_of), [self._alike], self._space.workload), None
        if isinstance(self._model, ModelSpec):
            layouts = loaded(layouts, self._model)
        if self._placing and isinstance(self._model, ModelSpec):
            laid_out, ranks = self._laid_out(codes_of)
            layouts = dataclasses.replace(layouts, laid_out=laid_out)
        return Cases(
            shapes=self._shapes, hardware=self._hardware, layouts=layouts, software=self._software, ranks=ranks,
            devices=self._devices, module=self._module, kinds=self._kinds,
        )  # fmt: skip

    def _layouts(self, codes_of: Callable[[str], Codes]) -> Layouts:
        def number(name: str, meaning: Callable[[Value], float] = float, /) -> Array:
            return numbers(self._grid, name, codes_of(name), meaning)

        return layouts_from(number, self._batch, self._world)

    def _laid_out(self, codes_of: Callable[[str], Codes]) -> tuple[Array, RankTable | None]:
        """Which rank holds what, and where: asked once for each combination of the knobs that it depends on."""
        combined = np.zeros(1, dtype=np.int64)
        for name in self._placing:
            combined = combined * len(self._values(name)) + codes_of(name)
        assert isinstance(self._model, ModelSpec)
        met, inverse = np.unique(combined, return_inverse=True)
        length = self._space.workload.sequence_length
        windows, cluster = self._alike.attention_window == 0, self._space.cluster
        combinations = [self._combination(number) for number in met.tolist()]
        for values in combinations:
            if values not in self._keys:
                config = self._space.base.replace(dict(zip(self._placing, values, strict=True)))
                self._keys[values] = layout_key(config, self._model, cluster, length, windows)
        codes, table = tabled([self._keys[values] for values in combinations])
        return codes[inverse].reshape(combined.shape), table

    def _combination(self, combined: int) -> tuple[Value, ...]:
        """The values of the placing knobs."""
        values: list[Value] = []
        for name in reversed(self._placing):
            combined, code = divmod(combined, len(self._values(name)))
            values.append(self._values(name)[code])
        return tuple(reversed(values))

    def _values(self, name: str) -> list[Value]:
        return self._grid.values[SEARCH_ORDER.index(name)]


def numbers(grid: Coded[Any], name: str, codes: Codes, meaning: Callable[[Value], float] = float) -> Array:
    """What the codes of a knob mean."""
    table = np.array([meaning(value) for value in grid.values[SEARCH_ORDER.index(name)]], dtype=np.float64)
    return table[codes]


def _only(space: SearchSpace, name: str) -> Value:
    """The one value of a knob that is the same everywhere."""
    values: tuple[Value, ...] = space.domains.get(name, (getattr(space.base, name),))
    if len(values) != 1:
        raise ValueError(f"{name} has {len(values)} values in one grid")
    return values[0]
