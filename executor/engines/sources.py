"""Sources of an engine's modules: our Transformer or a user's module, in the parts that a rank holds."""

import functools
import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from executor.batches import AHEAD, PLACES, Data, DataAhead, FactoryData, document_data, map_tensors, text_data
from executor.errors import EngineRefusalError
from executor.parallel.context import METHODS
from executor.parallel.fused import load_operators
from executor.parallel.groups import ParallelGroups
from executor.parallel.initialization import is_plain
from executor.parallel.model import RankModel, Transformer, transformer_without_memory
from executor.parallel.replica import ModelPart
from executor.parallel.tensor import TensorParallel
from executor.user_module.calls import CalledBlocks, called_blocks
from executor.user_module.factory import LEAST_SAMPLES
from executor.user_module.originals import build_seeded, checksum_of, copy_or_build
from executor.user_module.plan import UserModule, divide
from executor.user_module.survey import Survey, UndividedError, cut_stage, survey
from search_spaces.mesh import PIPELINE
from search_spaces.models.model import FactoryModel, Model, ModelSpec
from search_spaces.models.module_profile import LossTrait
from search_spaces.models.pipeline import losses_wait, rank_of_stage, split_blocks, split_layers, stages_of_rank
from search_spaces.rules.computation import FLOAT8, MODEL_REMEDY
from search_spaces.training.adapters import configured
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, FLOAT8: torch.bfloat16,
}  # fmt: skip
"""Precision -> dtype of parameters and activations."""
TABLE, OUTPUT = "embedding.tokens.weight", "head.output.weight"
"""The names of the tables of our Transformer, which may be tied."""


class TrainingSource(ABC):
    """A model, its data and its parts. Every rank constructs it identically."""

    data: Data | FactoryData
    trains_only = False
    """Whether the module returns no loss in evaluation mode."""
    input_dtype: torch.dtype | None
    """Dtype of floating inputs; None: that of the batch."""

    def __init__(self, config: TrialConfig, workload: Workload) -> None:
        self.config, self.workload = config, workload
        self.dtype = self.input_dtype = DTYPES[config.precision]

    @property
    @abstractmethod
    def is_tied(self) -> bool:
        """Whether the first and the last stage of a pipeline share a trained weight."""

    @abstractmethod
    def parts(self, groups: ParallelGroups) -> list[ModelPart]:
        """The parts of this rank in the order of their stages: ours on the meta device, a user's on the CPU."""

    @property
    def ties(self) -> tuple[int, int] | None:
        """Pipeline ranks of the first and the second copy of a tied weight; None: no weight has two copies."""
        config = self.config
        if config.pipeline_parallel_size == 1 or not self.is_tied:
            return None
        stages = config.pipeline_parallel_size * config.virtual_stages
        return rank_of_stage(config, 0), rank_of_stage(config, stages - 1)


def source_of(model: Model, config: TrialConfig, workload: Workload) -> TrainingSource:
    """The source of the model.

    Raises:
        EngineRefusalError, FactoryError, DataError: as `Engine.build`.
    """
    if isinstance(model, ModelSpec):
        return _Shape(model, config, workload)
    assert isinstance(model, FactoryModel)  # the command engine runs a user's command
    return _Factory(model, config, workload)


class _Shape(TrainingSource):
    """Our Transformer of a given shape, trained on text."""

    def __init__(self, spec: ModelSpec, config: TrialConfig, workload: Workload) -> None:
        super().__init__(config, workload)
        if spec.adapts:
            raise EngineRefusalError("adapters", "the model's fields configure adapters; set the knobs instead")
        if spec.mtp_layers:
            raise EngineRefusalError("mtp-model", "the model has mtp_layers; set the knob of that name instead")
        if config.precision == FLOAT8 and torch.version.hip:
            raise EngineRefusalError("float8-device", "AMD devices have other 8-bit types than NVIDIA's; use precision=bf16")
        self.spec = configured(spec, config)
        data = _data(spec, config, workload)
        self.data = DataAhead(data=data, modules=self.spec.mtp_layers) if self.spec.mtp_layers else data

    @property
    def is_tied(self) -> bool:
        # Modules for multi-token prediction, in the last stage, read the embedding.
        return (self.spec.tied_embeddings or self.spec.mtp_layers > 0) and not self.spec.adapts

    def parts(self, groups: ParallelGroups) -> list[ModelPart]:
        tensor = TensorParallel(groups.tensor, self.config.sequence_parallel, self.config.async_tensor_parallel)
        apart = groups.expert_tensor.size < groups.tensor.size
        context = METHODS[self.config.context_parallel_method](groups.context)
        operators = load_operators(self.config, self.spec, groups.device, self.dtype)
        layers = split_layers(self.spec, self.config, self.workload.sequence_length)
        stages = stages_of_rank(self.config, groups.coordinates[PIPELINE])
        return [
            self._part(
                RankModel(
                    layers=layers[stage],
                    first=stage == 0,
                    last=stage == len(layers) - 1,
                    tensor=tensor,
                    context=context,
                    expert=groups.expert,
                    expert_tensor=TensorParallel(groups.expert_tensor, sequence_parallel=True) if apart else None,
                    operators=operators,
                    overlaps_shared_experts=self.config.shared_expert_overlap,
                    losses_wait=losses_wait(self.config),
                ),
                stage,
            )
            for stage in stages
        ]

    def _part(self, part: RankModel, stage: int) -> ModelPart:
        chunk, length = self.config.loss_chunk_size, self.workload.sequence_length
        module, values = transformer_without_memory(self.spec, length, self.workload.seed, self.dtype, chunk, part)
        if self.config.precision == FLOAT8:
            module.multiply_in_float8(self.config.fp8_recipe)
        tied = (TABLE, OUTPUT) if self.spec.tied_embeddings else (TABLE,)
        return ModelPart(
            module=module, values=values, blocks=module.layers(), units=module.sharding_units(),
            split=module.split_dimensions(), summands=frozenset(module.summand_parameters()),
            experts=frozenset(module.expert_parameters()),
            tied=frozenset(tied if self.is_tied else ()), reads_in_units=True, enters="tokens",
            reads=self._reads(part), entry=self._entry(module), hidden=self._hidden(module), stage=stage,
        )  # fmt: skip

    def _reads(self, part: RankModel) -> tuple[str, ...]:
        places = (PLACES,) if self.config.pack_sequences and self.workload.document_lengths else ()
        ahead = (AHEAD,) if self.spec.mtp_layers else ()
        return ("labels", *places, *ahead) if part.last else places

    def _entry(self, module: Transformer) -> Tensor:
        return torch.empty(self.config.micro_batch_size, len(module.places), dtype=torch.int64, device="meta")

    def _hidden(self, module: Transformer) -> Tensor:
        tensor = module.part.tensor
        tokens = (len(module.places) + self.spec.prompt_length) // (tensor.size if tensor.sequence_parallel else 1)
        shape = (self.config.micro_batch_size, tokens, self.spec.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)


def _data(spec: ModelSpec, config: TrialConfig, workload: Workload) -> Data:
    if workload.document_lengths:
        return document_data(config, workload, spec.vocab_size)
    return text_data(workload, spec.vocab_size)


class _Factory(TrainingSource):
    """A user's module, trained on its factory's batches.

    Its code may initialize parameters in any way, so every rank builds the whole module from the same seed and then cuts it.
    """

    def __init__(self, model: FactoryModel, config: TrialConfig, workload: Workload) -> None:
        super().__init__(config, workload)
        if config.precision == FLOAT8:
            raise EngineRefusalError("float8-model", f"{model.name} has its own matrix products; {MODEL_REMEDY}")
        self.model = model
        self.first = load_user_module(model, config, workload)
        self.data, self.trains_only = self.first.data, self.first.trains_only
        self.input_dtype = self.first.input_dtype
        self.survey = self._survey_module() if config.pipeline_parallel_size > 1 else None

    @property
    def is_tied(self) -> bool:
        return self.survey is not None and bool(self.survey.tied)

    def parts(self, groups: ParallelGroups) -> list[ModelPart]:
        if self.survey is None:
            return [self._whole(self.first, groups)]
        stages = stages_of_rank(self.config, groups.coordinates[PIPELINE])
        # One module per stage, from which unneeded parameters are removed.
        others = (load_user_module(self.model, self.config, self.workload) for _ in itertools.count())
        modules = itertools.chain([self.first], others)
        return [self._stage(stage, loaded.user, groups, self.survey) for stage, loaded in zip(stages, modules, strict=False)]

    def _whole(self, loaded: "LoadedModule", groups: ParallelGroups) -> ModelPart:
        division = divide(loaded.user, TensorParallel(groups.tensor, False, self.config.async_tensor_parallel))
        return ModelPart(
            module=loaded.user.module, blocks=loaded.blocks, units=loaded.units, outside=loaded.called.outside,
            split=division.split, summands=division.summands,
        )  # fmt: skip

    def _stage(self, stage: int, user: UserModule, groups: ParallelGroups, module_survey: Survey) -> ModelPart:
        division = divide(user, TensorParallel(groups.tensor, False, self.config.async_tensor_parallel))
        names = tuple(self._micro_batch)
        cuts = split_blocks(self.config, len(module_survey.blocks), module_survey.starts)
        blocks = cut_stage(user.module, module_survey, cuts[stage], enters=names[0])
        return ModelPart(
            module=user.module, blocks=blocks, units=blocks, split=division.split, summands=division.summands,
            tied=module_survey.tied, enters=names[0], reads=names, entry=self._micro_batch[names[0]].to("meta"),
            hidden=module_survey.hidden.detach().to(self.dtype).requires_grad_(), stage=stage,
        )  # fmt: skip

    @functools.cached_property
    def _micro_batch(self) -> dict[str, Tensor]:
        size = self.config.micro_batch_size
        batch: dict[str, Tensor] = self.first.data.micro_batch(0, 0, size)
        for name, value in batch.items():
            if not isinstance(value, Tensor) or not value.dim() or len(value) != size:
                raise EngineRefusalError(
                    "factory-shape",
                    f"{self.model.name}: the first dimension of batch entry {name!r} is not the samples, as a pipeline needs; "
                    "use pipeline_parallel_size=1",
                )
        converted: dict[str, Tensor] = map_tensors(batch, self.first.converted)
        return converted

    def _survey_module(self) -> Survey:
        try:
            return survey(self.first.user.module, self._micro_batch, self.first.user.plan)
        except UndividedError as error:
            raise EngineRefusalError("factory-shape", f"{self.model.name} has no pipeline stages: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModule:
    """A user's module on the CPU, with its data."""

    user: UserModule
    data: FactoryData
    called: CalledBlocks
    trains_only: bool
    """Whether it cannot be trained on in evaluation mode."""
    input_dtype: torch.dtype | None
    """Dtype of floating inputs; None: the module keeps its own dtypes, so inputs keep theirs."""

    @property
    def units(self) -> list[nn.Module]:
        """The modules that stage 3 gathers."""
        return [self.user.module.get_submodule(name) for name in self.called.units]

    @property
    def blocks(self) -> list[nn.Module]:
        """The modules that checkpointing recomputes."""
        return self.units if self.called.recomputes else []

    def converted(self, value: Tensor) -> Tensor:
        """An input in the dtype that the module expects."""
        return value if self.input_dtype is None or not value.is_floating_point() else value.to(self.input_dtype)


def require_one_dtype(module: nn.Module, engine: str) -> None:
    """Refuse a module of several dtypes, or of a library's own parameters, for an engine that gathers parameters of one.

    Raises:
        EngineRefusalError: it has several, or such parameters.
    """
    if kinds := sorted({type(value).__name__ for value in module.parameters() if not is_plain(value)}):
        problem = f"the {engine} engine divides plain parameters, and the module has {', '.join(kinds)}"
        raise EngineRefusalError("factory-dtypes", f"{problem}; use engine=native or ddp, or a module that is not quantised")
    dtypes = sorted({str(value.dtype).removeprefix("torch.") for value in module.parameters() if value.is_floating_point()})
    if len(dtypes) > 1:
        problem = f"the {engine} engine needs parameters of one dtype, and the module has {', '.join(dtypes)}"
        raise EngineRefusalError("factory-dtypes", f"{problem}; use engine=native, or pin another precision")


@functools.lru_cache(maxsize=4)
def _observed(reference: str, workload: Workload) -> tuple[CalledBlocks, int | None]:
    """The blocks that a module calls, and its checksum; observed once by a process on a module of its own, as a run without
    data may leave its tensors in what the module shares."""
    user = build_seeded(reference, workload)
    checksum = checksum_of(user.module)
    return called_blocks(user, FactoryData(batch=user.batch, seed=workload.seed).micro_batch(0, 0, LEAST_SAMPLES)), checksum


def load_user_module(model: FactoryModel, config: TrialConfig, workload: Workload) -> LoadedModule:
    """A user's module as the workload's seed makes it (`copy_or_build`), in the precision of the configuration. One that has it
    is not converted: parts of it may have other dtypes on purpose, such as frozen ones next to adapters.

    Raises:
        FactoryError: the factory violates the Protocol, or raises.
    """
    called, checksum = _observed(model.reference, workload)
    user = copy_or_build(model.reference, workload, checksum)
    data = FactoryData(batch=user.batch, seed=workload.seed)
    dtype = None if config.precision == model.precision else DTYPES[config.precision]
    if dtype is not None:
        user.module.to(dtype)
    trains_only = called.trains_only or LossTrait.TRAINS_ONLY in model.loss_traits
    return LoadedModule(user=user, data=data, called=called, trains_only=trains_only, input_dtype=dtype)
