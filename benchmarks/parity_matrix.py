"""The parity matrix: what the capability tables claim, crossed, less what the rules refuse."""

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

from benchmarks.parity_cases import BRANCH, CAPABILITIES, EXPERTS, GLOBAL_BATCH, MODELS, USER, WIDE, Case
from benchmarks.parity_layouts import layout_in_turn
from search_spaces.canonical import canonical
from search_spaces.knobs import KNOBS
from search_spaces.rules import check_config
from search_spaces.trial_config import TrialConfig, Value

Knobs = Mapping[str, Value]

NOT_COMPUTED = frozenset({"expandable_segments", "environment", "gc_interval", "numa_binding"})
"""Knobs that change nothing that is computed or sent on CPUs: how the CUDA allocator grows, what processes are started with,
when Python collects, on which cores."""
ON_CUDA: Mapping[str, Sequence[Value]] = {"attention_backend": ("flash", "efficient", "cudnn")}
"""Values that no case on CPUs has: rules refuse the kernels of CUDA there, and flash is what `best` is."""
USUAL_MICRO_BATCHES, MOST_MICRO_BATCHES = 4, 8
"""What a case takes at most if it may, and if it must (time grows with them)."""
MENDED = (
    "tensor-divides",
    "factory-shape",
    "pipeline-layers",
    "batch-divides",
    "pipeline-micro-batches",
    "zero-bubble-reshard",
    "experts-context",
)
"""Rules that another model, micro-batch size or reshard_after_forward may satisfy."""
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
CLIPPINGS = (0.05, 0.0)
CHECKPOINTING: tuple[Knobs, ...] = (
    {},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "full", "checkpoint_every_k": 2},
)
HUGE = 10**9
BASE: Knobs = {"precision": "fp64", "param_persistence_threshold": 100}
"""Where nothing else is said. By default nothing of so small a model would be sharded at stage 3."""
SETTINGS: Mapping[str, Knobs] = {
    "default": {},
    "tiny buckets": {"reduce_bucket_size": 300, "allgather_bucket_size": 300, "prefetch_bucket_size": 700},
    "overlap off": {"overlap_comm": False, "reduce_bucket_size": 1000, "prefetch_bucket_size": 2000},
    "no prefetch": {"prefetch_bucket_size": 0},
    "everything persistent": {"param_persistence_threshold": HUGE},
    "everything sharded": {"param_persistence_threshold": 0, "max_live_parameters": 1, "contiguous_gradients": False},
    "kept gathered": {"reshard_after_forward": False},
    "deferred": {"defer_gradient_reduction": True},
    "gathered beside forward": {"overlap_param_gather": True},
    "gathered beside forward in pieces": {
        "overlap_param_gather": True,
        "allgather_bucket_size": 300,
        "reduce_bucket_size": 700,
    },
    "chunked loss": {"loss_chunk_size": 20},
    "unfused attention": {"attention_backend": "math"},
}
OFFLOADS: tuple[Knobs, ...] = (
    {"offload_optimizer": "cpu"},
    {"offload_optimizer": "cpu", "offload_ratio": 0.4},
    {"offload_optimizer": "cpu", "offload_ratio": 0.0},
    {"offload_optimizer": "nvme"},
    {"offload_optimizer": "nvme", "offload_ratio": 0.4},
    {"offload_optimizer": "nvme", "offload_param": "cpu"},
    {"offload_param": "nvme"},
    {"offload_optimizer": "cpu", "offload_param": "nvme", "offload_ratio": 0.4},
    {"offload_optimizer": "nvme", "offload_param": "nvme"},
    {"offload_param": "cpu"},
    {"offload_optimizer": "cpu", "offload_param": "cpu"},
    {"offload_optimizer": "cpu", "offload_param": "cpu", "offload_ratio": 0.4},
)
BESIDE_FROZEN: tuple[Knobs, ...] = ({"adapter_size": 3}, {"prefix_length": 3}, {"prompt_length": 4})
WINDOWS: tuple[Knobs, ...] = (
    {"attention_window": 5},
    {"attention_window": 4, "attention_global_tokens": 3},
    {"attention_window": 1, "attention_global_tokens": 1},
)
FROZEN: tuple[Knobs, ...] = ({"frozen_dtype": "same"}, {"frozen_dtype": "int8"}, {"frozen_dtype": "nf4"})
SCHEDULES: tuple[Knobs, ...] = (
    {"curriculum_start_length": 8, "curriculum_steps": 2},
    {"random_ltd_start_tokens": 8, "random_ltd_steps": 2},
)
"""Each grows from 8 to 16 tokens in two steps, so that the third of three steps has whole sequences."""
PRECISIONS: tuple[Knobs, ...] = (
    {"precision": "fp32"},
    {"precision": "fp32", "fused_optimizer": False},
    {"precision": "bf16"},
    {"precision": "bf16", "reduce_dtype": "bf16", "fused_optimizer": False},
    {"reduce_dtype": "bf16"},
    {"precision": "bf16", "accumulation_dtype": "bf16", "micro_batch_size": 2},
    {"precision": "fp16"},
    {"precision": "fp16", "reduce_dtype": "fp16"},
    {"precision": "fp16", "accumulation_dtype": "fp16", "micro_batch_size": 2},
)


def refused_by(case: Case) -> str | None:
    """The first rule that refuses the case, here also for taking longer than it tells; None: it is legal."""
    refusals = check_config(case.config, case.context())
    if refusals:
        # What another model or batch does not mend comes first.
        return min((refusal.rule for refusal in refusals), key=lambda rule: rule in MENDED)
    slow = case.config.gradient_accumulation_steps(GLOBAL_BATCH, case.ranks) > MOST_MICRO_BATCHES
    return "batch-divides" if slow else None


class Draw:
    """Fills in what a case leaves open, always in the same way for the same seed."""

    def __init__(self, engine: str, ranks: int, seed: str) -> None:
        self.capability, self.ranks = CAPABILITIES[engine], ranks
        self._random = random.Random(f"{seed} {engine} {ranks}")

    def case(self, knobs: Knobs, models: Sequence[str] = (*MODELS, BRANCH, USER)) -> Case | None:
        """A legal case with these knobs, if they matter in it; None: there is none."""
        chosen = {**self._setting(), **knobs}
        options = [*product(models, MICRO_BATCH_SIZES, (True, False))]
        self._random.shuffle(options)
        degrees = TrialConfig().replace({name: value for name, value in knobs.items() if name.endswith("_parallel_size")})
        usual = USUAL_MICRO_BATCHES * degrees.data_parallel_size(self.ranks)
        options.sort(key=lambda option: option[1] * usual < GLOBAL_BATCH)
        clipping = self._random.choice(CLIPPINGS)
        engine = self.capability.engine
        for model, size, reshard in options:
            config = TrialConfig().replace({**BASE, "micro_batch_size": size, "reshard_after_forward": reshard, **chosen})
            config = config.replace({name: getattr(TrialConfig(), name) for name in self._dishonoured(config, knobs)})
            case = Case(engine=engine, ranks=self.ranks, model=model, config=config, clipping=clipping)
            rule = refused_by(case)
            if rule is None:
                settled = dataclasses.replace(case, config=canonical(config, case.context()))
                return settled if all(_kept(settled, name, value) for name, value in knobs.items()) else None
            if rule not in MENDED:
                return None
        return None

    def choose(self, options: Sequence[Knobs]) -> Knobs:
        return self._random.choice(options)

    def _setting(self) -> Knobs:
        choice = self._random.choice
        setting = SETTINGS[choice([*SETTINGS])]
        return {**setting, "pipeline_split": choice(("even", "balanced")), "rank_order": choice(("tp-cp-dp-pp", "tp-cp-pp-dp"))}

    def _dishonoured(self, config: TrialConfig, asked: Knobs) -> Iterator[str]:
        """Knobs that nobody asked for and that the engine does not honour so."""
        for name, value in config.values().items():
            if name not in asked and not self.capability.honours(name, value):
                yield name


def _kept(case: Case, name: str, value: Value) -> bool:
    """Whether the knob still has the value in canonical form, or one that means the same."""
    return getattr(case.config, name) == value or KNOBS[name].is_element_size


def matrix(ranks: int) -> list[Case]:
    """Every case on so many ranks, each once, in a fixed order."""
    found: dict[Case, None] = {}
    for engine in CAPABILITIES:
        sections = [_crossed(engine, ranks), _copies(engine, ranks), _offloads(engine, ranks)]
        if ranks <= 4:
            sections += [_data_parallel(engine, ranks), _precisions(engine, ranks), _attention(engine, ranks)]
        if ranks <= 4 and engine == "native":
            sections += [_micro_batches(engine, ranks), _written(engine, ranks), _optimizers(engine, ranks)]
            sections += [_experts(engine, ranks), _activations(engine, ranks), _beside_products(engine, ranks)]
        if ranks == 2:
            sections += [_compiled(engine, ranks)]
        if ranks <= 4 and engine == "native":
            sections += [_adapters(engine, ranks), _beside_frozen(engine, ranks), _scheduled(engine, ranks)]
            sections += [_near(engine, ranks), _integers(engine, ranks), _warm_up(engine, ranks)]
        for section in sections:
            found.update(dict.fromkeys(case for case in section if case is not None))
    return [*found]


def layouts(ranks: int) -> Iterator[Knobs]:
    """Every division of the ranks; the rules take out what is illegal."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for pipeline, tensor, context in product(sizes, repeat=3):
        degrees = {
            "tensor_parallel_size": tensor, "context_parallel_size": context, "pipeline_parallel_size": pipeline,
        }  # fmt: skip
        if ranks % (pipeline * tensor * context) == 0:
            yield from ({**degrees, "sequence_parallel": split} for split in ((False, True) if tensor > 1 else (False,)))


def pipelines(layout: Knobs) -> list[Knobs]:
    """Every schedule with one and with two stages a rank; the rules take out what is illegal."""
    if layout["pipeline_parallel_size"] == 1:
        return [{}]
    schedules = KNOBS["pipeline_schedule"].choices
    return [{"pipeline_schedule": name, "virtual_stages": stages} for name, stages in product(schedules, (1, 2))]


def _stages(engine: str) -> tuple[Value, ...]:
    return CAPABILITIES[engine].honoured("zero_stage") or KNOBS["zero_stage"].choices


def _crossed(engine: str, ranks: int) -> Iterator[Case | None]:
    """Layout x schedule x stage x checkpointing.

    The native engine: all of it on 2 ranks. On 4 two kinds of checkpointing in turn, one for each pipeline, so that each
    schedule and stage meets every kind on some layout; on 8 also one schedule in turn for each layout and stage. Engines that
    are there to compare with: kinds of checkpointing in turn everywhere, on 8 ranks every other stage.
    """
    draw = Draw(engine, ranks, "crossed")
    used: Counter[tuple[Value, str]] = Counter()
    for (place, layout), stage in product(enumerate(layouts(ranks)), _stages(engine)):
        runs = [*enumerate(pipelines(layout))]
        if ranks > 4 and engine != "native" and (place + int(stage)) % 2:
            continue
        if ranks > 4:
            legal = [(turn, run) for turn, run in runs if draw.case({**layout, **run, "zero_stage": stage})]
            runs = sorted(legal, key=lambda run: used[stage, str(run[1])])[:1]
            used.update((stage, str(run)) for _, run in runs)
        for turn, run in runs:
            first = (place + turn + int(stage)) % len(CHECKPOINTING)
            in_turn = CHECKPOINTING[first % 2 :: 2] if ranks == 4 and not run else CHECKPOINTING[first : first + 1]
            for checkpointing in CHECKPOINTING if engine == "native" and ranks == 2 else in_turn:
                yield draw.case({**layout, **run, "zero_stage": stage, **checkpointing})


def _copies(engine: str, ranks: int) -> Iterator[Case | None]:
    """Copies of the sharded states (HSDP): each layout and size; on up to 4 ranks each schedule too."""
    draw = Draw(engine, ranks, "copies")
    sizes = [size for size in range(1, ranks) if ranks % size == 0]
    for layout in layouts(ranks):
        for run, size in product(pipelines(layout), sizes) if ranks <= 4 else [({}, draw.choose(sizes))]:
            yield draw.case({**layout, **run, "zero_stage": 3, "hsdp_shard_size": size, **draw.choose(CHECKPOINTING)})


def _offloads(engine: str, ranks: int) -> Iterator[Case | None]:
    """What is offloaded: on 2 ranks each layout, schedule, stage and two ways in turn; on 4 each layout and stage once; on 8
    each layout.
    """
    draw = Draw(engine, ranks, "offloads")
    turn = 0
    for place, (layout, stage) in enumerate(product(layouts(ranks), _stages(engine))):
        if ranks > 4 and place % 3:
            continue
        runs = pipelines(layout) if ranks == 2 else [draw.choose([{"pipeline_schedule": "1f1b"}, *pipelines(layout)])]
        for run in runs:
            offloads = [offload for offload in OFFLOADS if draw.case({**layout, **run, "zero_stage": stage, **offload})]
            turn += 1
            for way in range(min(len(offloads), 2 if ranks == 2 else 1)):
                knobs = {**layout, **run, "zero_stage": stage, **draw.choose(CHECKPOINTING)}
                yield draw.case({**knobs, **offloads[(turn + way) % len(offloads)]})


def _data_parallel(engine: str, ranks: int) -> Iterator[Case | None]:
    """Without model parallelism: setting x stage x micro-batches x two models in turn (one on 4 ranks)."""
    draw = Draw(engine, ranks, "data parallel")
    models = [*MODELS, BRANCH, USER]
    settings = [{name: value for name, value in setting.items() if CAPABILITIES[engine].honours(name, value)}
                for setting in SETTINGS.values()]  # fmt: skip
    distinct = [setting for place, setting in enumerate(settings) if setting not in settings[:place]]
    for (place, setting), stage, micro_batches in product(enumerate(distinct), _stages(engine), (1, 2)):
        knobs = {"zero_stage": stage, "micro_batch_size": GLOBAL_BATCH // ranks // micro_batches, **setting}
        for offset in (0, 2) if ranks == 2 else (0,):
            model = models[(place + int(stage) + micro_batches + offset) % len(models)]
            yield draw.case({**knobs, **draw.choose(CHECKPOINTING)}, [model])


def _micro_batches(engine: str, ranks: int) -> Iterator[Case | None]:
    """A pipeline of all ranks with each schedule and each number of micro-batches, also fewer than ranks."""
    draw = Draw(engine, ranks, "micro-batches")
    layout: Knobs = {"pipeline_parallel_size": ranks}
    for run, size in product(pipelines(layout), MICRO_BATCH_SIZES):
        stage = draw.choose([{"zero_stage": stage} for stage in _stages(engine)])
        yield draw.case({**layout, **run, **stage, "micro_batch_size": size})


def _written(engine: str, ranks: int) -> Iterator[Case | None]:
    """Layers of stages written out: each layout, schedule and stage, on 4 ranks every other one; marks in turn."""
    draw = Draw(engine, ranks, "written")
    turn = 0
    for layout, stage in product(layouts(ranks), _stages(engine)):
        for run in filter(None, pipelines(layout)):
            stages = int(layout["pipeline_parallel_size"]) * int(run["virtual_stages"])
            case = draw.case({**layout, **run, "zero_stage": stage}, [*MODELS])
            turn += case is not None
            if case is not None and (ranks == 2 or turn % 2):
                text = layout_in_turn(stages, turn, offloads=int(stage) >= 1 and turn % 3 == 0)
                yield draw.case({**layout, **run, "zero_stage": stage, "pipeline_layout": text}, [*MODELS])


def _experts(engine: str, ranks: int) -> Iterator[Case | None]:
    """Experts on different ranks: each layout, degree and stage; schedules, checkpointing, offloads and optimizers in turn."""
    draw = Draw(engine, ranks, "experts")
    for turn, (layout, size, stage) in enumerate(product(layouts(ranks), (2, 4), _stages(engine))):
        knobs = {**layout, "expert_parallel_size": size, "zero_stage": stage}
        runs = [run for run in pipelines(layout) if draw.case({**knobs, **run}, [*EXPERTS])]
        if runs:
            knobs = {**knobs, **draw.choose(runs), **draw.choose(CHECKPOINTING)}
            yield draw.case(knobs, [*EXPERTS])
            besides: Knobs = {"optimizer": ("sgd", "lamb", "muon")[turn % 3]}
            yield draw.case({**knobs, **(besides if turn % 2 else draw.choose(OFFLOADS))}, [*EXPERTS])


def _attention(engine: str, ranks: int) -> Iterator[Case | None]:
    """Windows, and tokens exchanged for heads: each layout and stage; schedules, checkpointing and kernels in turn."""
    draw = Draw(engine, ranks, "attention")
    for turn, (layout, stage) in enumerate(product(layouts(ranks), _stages(engine))):
        knobs = {**layout, "zero_stage": stage}
        runs = [run for run in pipelines(layout) if draw.case({**knobs, **run})]
        if not runs:
            continue
        divided = layout["context_parallel_size"] != 1
        for way in range(2 if divided or not turn else 1):
            window = WINDOWS[(turn + way) % len(WINDOWS)]
            method: Knobs = {"context_parallel_method": ("ulysses", "gather")[way]} if divided else {}
            besides = {**draw.choose(runs), **CHECKPOINTING[(turn + way) % len(CHECKPOINTING)]}
            yield draw.case({**knobs, **besides, **window, **method}, [*MODELS])
        if divided:
            checkpointing = draw.choose(CHECKPOINTING)
            yield draw.case({**knobs, **draw.choose(runs), **checkpointing, "context_parallel_method": "ulysses"}, [*MODELS])


def _activations(engine: str, ranks: int) -> Iterator[Case | None]:
    """Saved activations in host memory: each layout and stage; schedules and what is computed again in turn."""
    draw = Draw(engine, ranks, "activations")
    again = [way for way in CHECKPOINTING if way.get("activation_checkpointing") != "selective"]
    for turn, (layout, stage) in enumerate(product(layouts(ranks), _stages(engine))):
        knobs = {**layout, **again[turn % len(again)], "zero_stage": stage, "offload_activations": True}
        runs = [run for run in pipelines(layout) if draw.case({**knobs, **run})]
        if runs:
            yield draw.case({**knobs, **draw.choose(runs)})


def _beside_products(engine: str, ranks: int) -> Iterator[Case | None]:
    """Sums of tensor ranks beside their products: each layout and stage with checkpointing in turn; schedules, adapters and a
    user's own module in turn; experts, a prompt, bf16, schedules of the data and compiled blocks once.
    """
    draw = Draw(engine, ranks, "beside products")
    besides: tuple[Knobs, ...] = (
        {}, {"lora_rank": 2, "lora_targets": "both"}, {"loss_chunk_size": 20}, {"adapter_size": 3}, {"prefix_length": 3},
    )  # fmt: skip
    divided = [layout for layout in layouts(ranks) if layout["tensor_parallel_size"] != 1]
    for turn, (layout, stage) in enumerate(product(divided, _stages(engine))):
        knobs = {**layout, "zero_stage": stage, "async_tensor_parallel": True}
        runs = [run for run in pipelines(layout) if draw.case({**knobs, **run})]
        for way in range(2 if runs else 0):
            checkpointing = CHECKPOINTING[(turn + turn // len(CHECKPOINTING) + 2 * way) % len(CHECKPOINTING)]
            own = {**knobs, **draw.choose(runs), **checkpointing}
            yield draw.case(own) if way else draw.case({**own, **besides[turn % len(besides)]}, [*MODELS])
    knobs = {"tensor_parallel_size": 2, "async_tensor_parallel": True, "micro_batch_size": 4}
    yield draw.case(knobs, [USER])
    if ranks == 2:
        yield draw.case({**knobs, "compile_blocks": True}, ["llama"])
    for schedule in SCHEDULES:
        yield draw.case({**knobs, **schedule}, ["gpt2"])
    for sequence in (False, True):
        yield draw.case({**knobs, "sequence_parallel": sequence, "precision": "bf16"}, [*MODELS])
        yield draw.case({**knobs, "sequence_parallel": sequence, "activation_checkpointing": "selective"}, [*EXPERTS])
        yield draw.case({**knobs, "sequence_parallel": sequence, "prompt_length": 4}, [*MODELS])


def _precisions(engine: str, ranks: int) -> Iterator[Case | None]:
    """Other types than float64, of which losses alone can be compared: each with each stage on two layouts in turn."""
    draw = Draw(engine, ranks, "precisions")
    pipeline: Knobs = {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"}
    tensor: Knobs = {"tensor_parallel_size": 2, "sequence_parallel": True}
    options: tuple[Knobs, ...] = ({}, pipeline, tensor, {"context_parallel_size": 2}, {**tensor, **pipeline})
    for turn, (stage, precision) in enumerate(product(_stages(engine), PRECISIONS)):
        possible = [layout for layout in options if draw.case({**layout, **precision, "zero_stage": stage})]
        for way in range(min(2, len(possible))):
            layout = possible[(turn + turn // len(PRECISIONS) + way) % len(possible)]
            yield draw.case({**layout, **precision, "zero_stage": stage}, [*MODELS])


def _compiled(engine: str, ranks: int) -> Iterator[Case | None]:
    """Compiled blocks: each stage on two layouts in turn, with and without checkpointing. Few, since each takes seconds."""
    draw = Draw(engine, ranks, "compiled")
    options: tuple[Knobs, ...] = (
        {},
        {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"},
        {"tensor_parallel_size": 2, "sequence_parallel": True},
        {"context_parallel_size": 2},
        {"context_parallel_size": 2, "context_parallel_method": "ulysses", "attention_window": 5},
    )
    for turn, stage in enumerate(_stages(engine)):
        for way in range(2):
            checkpointing = {"activation_checkpointing": ("none", "full")[way]}
            model = [*MODELS, BRANCH, USER][(2 * turn + way) % (len(MODELS) + 2)]
            knobs = {**options[(turn + 2 * way) % len(options)], **checkpointing, "zero_stage": stage, "compile_blocks": True}
            yield draw.case(knobs, [model])


def _optimizers(engine: str, ranks: int) -> Iterator[Case | None]:
    """Every other optimizer than AdamW with each stage on three layouts in turn: stages that cut matrices, slices of them.

    Of a slice the blocks that are quantised together are others than of the whole matrix: adamw8bit has no tensor ranks here.
    """
    draw = Draw(engine, ranks, "optimizers")
    pipeline: Knobs = {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"}
    tensor: Knobs = {"tensor_parallel_size": 2, "sequence_parallel": True}
    context: Knobs = {"context_parallel_size": 2}
    options: tuple[Knobs, ...] = ({}, tensor, pipeline, {**tensor, **pipeline}, context, {"tensor_parallel_size": ranks})
    names = [str(name) for name in KNOBS["optimizer"].choices if name != KNOBS["optimizer"].default]
    for turn, (stage, name) in enumerate(product(_stages(engine), names)):
        quantised = name == "adamw8bit"
        copies = ({"hsdp_shard_size": ranks // 2},) if stage == 3 else ()
        layouts = [layout for layout in (*options, *copies) if not (quantised and "tensor_parallel_size" in layout)]
        possible = [layout for layout in layouts if draw.case({**layout, "optimizer": name, "zero_stage": stage})]
        for way in range(min(3, len(possible))):
            layout = possible[(turn + way) % len(possible)]
            yield draw.case({**layout, "optimizer": name, "zero_stage": stage}, [WIDE] if quantised else [*MODELS])


def _adapters(engine: str, ranks: int) -> Iterator[Case | None]:
    """Low-rank adapters: each layout, stage and target, with checkpointing, what is offloaded and what frozen matrices are kept
    in by turns. Copies of the shards, and on 2 ranks each schedule, once.
    """
    draw = Draw(engine, ranks, "adapters")
    targets, models = KNOBS["lora_targets"].choices if ranks == 2 else ("both",), [*MODELS]
    for turn, (layout, stage, target) in enumerate(product(layouts(ranks), _stages(engine), targets)):
        first = {"pipeline_schedule": "1f1b"} if layout["pipeline_parallel_size"] != 1 else {}
        knobs = {**layout, **first, "zero_stage": stage, "lora_rank": 2, "lora_targets": target}
        # Targets come in turn too: shifted with each round of them, so that every model meets every target.
        model = models[(turn + turn // len(models)) % len(models)]
        # Shifted with each round for the same reason.
        kept, other = (FROZEN[(turn + turn // len(FROZEN) + shift) % len(FROZEN)] for shift in range(2))
        yield draw.case({**knobs, **kept, **CHECKPOINTING[turn % len(CHECKPOINTING)]}, [model])
        yield draw.case({**knobs, **other, **OFFLOADS[turn % len(OFFLOADS)]}, [model])
    for stage, name in product(_stages(engine), (name for name in KNOBS["optimizer"].choices if name != "adamw")):
        knobs = {"lora_rank": 2, "lora_targets": "both", "zero_stage": stage, "optimizer": name}
        yield draw.case(knobs, [WIDE] if name == "adamw8bit" else [*MODELS])
    adapters: Knobs = {"lora_rank": 2, "lora_targets": "both", "zero_stage": 3}
    for kept in FROZEN:
        yield draw.case({**adapters, **kept, "hsdp_shard_size": ranks // 2})
        if ranks == 2:
            yield draw.case({**adapters, **kept, "compile_blocks": True}, ["llama"])
    for run in pipelines({"pipeline_parallel_size": ranks}) if ranks == 2 else ():
        yield draw.case({**adapters, "pipeline_parallel_size": ranks, **draw.choose(FROZEN), **run})


def _beside_frozen(engine: str, ranks: int) -> Iterator[Case | None]:
    """Bottlenecks, prefixes and prompts: on 2 ranks each with every layout and stage, on more of them one by turns; what is
    computed again, what is offloaded and what frozen matrices are kept in are drawn. Copies of the shards, optimizers, compiled
    blocks and on 2 ranks each schedule, once.
    """
    draw = Draw(engine, ranks, "beside frozen")
    models = [*MODELS]
    for turn, (layout, stage) in enumerate(product(layouts(ranks), _stages(engine))):
        first = {"pipeline_schedule": "1f1b"} if layout["pipeline_parallel_size"] != 1 else {}
        of_turn = (BESIDE_FROZEN[(turn + turn // len(_stages(engine))) % len(BESIDE_FROZEN)],)
        for method in BESIDE_FROZEN if ranks == 2 else of_turn:
            knobs = {**layout, **first, "zero_stage": stage, **method}
            yield draw.case({**knobs, **draw.choose(CHECKPOINTING), **draw.choose(FROZEN)}, models)
            if ranks == 2:
                yield draw.case({**knobs, **draw.choose(OFFLOADS)}, models)
    for stage, name, method in product(_stages(engine), KNOBS["optimizer"].choices, BESIDE_FROZEN):
        if name != "adamw" and (stage + len(str(name))) % 2 == 0:
            yield draw.case({**method, "zero_stage": stage, "optimizer": name}, [WIDE] if name == "adamw8bit" else models)
    for method in BESIDE_FROZEN:
        yield draw.case({**method, "zero_stage": 3, "hsdp_shard_size": ranks // 2}, models)
        if ranks == 2:
            yield draw.case({**method, "zero_stage": 3, "compile_blocks": True}, ["llama"])
        for run in pipelines({"pipeline_parallel_size": ranks}) if ranks == 2 else ():
            for stage in (1, 3):
                yield draw.case({**method, "pipeline_parallel_size": ranks, "zero_stage": stage, **run}, models)
    divided: Knobs = {"context_parallel_size": 2} if ranks == 2 else {"context_parallel_size": 2, "tensor_parallel_size": 2}
    for window, name in product((*WINDOWS, {}), KNOBS["context_parallel_method"].choices):
        yield draw.case({**BESIDE_FROZEN[1], **divided, "context_parallel_method": name, **window}, [WIDE])
        yield draw.case({**BESIDE_FROZEN[2], "zero_stage": 2, **window}, models)


def _scheduled(engine: str, ranks: int) -> Iterator[Case | None]:
    """Schedules of the data: each layout, pipeline schedule and stage, on 4 ranks every third; checkpointing and what is
    offloaded in turn. Adapters and every optimizer once.
    """
    draw = Draw(engine, ranks, "scheduled")
    turn = 0
    for layout, stage, schedule in product(layouts(ranks), _stages(engine), SCHEDULES):
        for run in pipelines(layout):
            knobs: Knobs = {**layout, **run, "zero_stage": stage, **schedule}
            case = draw.case({**knobs, **CHECKPOINTING[turn % len(CHECKPOINTING)]}, [*MODELS])
            turn += case is not None
            if case is not None and (ranks == 2 or turn % 3 == 0):
                yield case
                if turn % 4 == 0:
                    yield draw.case({**knobs, **draw.choose(OFFLOADS)}, [*MODELS])
    for schedule, besides in product(SCHEDULES, ("optimizer", "lora_rank")):
        values: Sequence[Value] = ("sgd", "lamb", "muon") if besides == "optimizer" else (2,)
        for value in values:
            yield draw.case({**schedule, besides: value, "zero_stage": 2 if besides == "optimizer" else 3}, [*MODELS])


def _near(engine: str, ranks: int) -> Iterator[Case | None]:
    """A second copy of the parameters among neighbours: each layout, schedule and size; what else touches gathers in turn."""
    draw = Draw(engine, ranks, "near")
    besides: tuple[Knobs, ...] = (
        {}, {"lora_rank": 2, "frozen_dtype": "int8"}, {"offload_param": "cpu"}, {"micro_batch_size": 2},
        {"prefetch_bucket_size": 700}, {"hsdp_shard_size": ranks // 2}, {"offload_param": "nvme"},
        {"param_persistence_threshold": 0},
    )  # fmt: skip
    fixed: Knobs = {"zero_stage": 3, "reshard_after_forward": True}
    turn = 0
    for layout in layouts(ranks):
        for run, size in product(pipelines(layout), [size for size in range(1, ranks) if ranks % size == 0]):
            own = draw.case({**layout, **run, **fixed, "secondary_shard_size": size}, [*MODELS, USER])
            yield own
            turn += own is not None
            knobs = {**layout, **run, **fixed, "secondary_shard_size": size, **besides[turn % len(besides)]}
            yield draw.case(knobs, [*MODELS]) if own is not None else None
    yield draw.case({**fixed, "secondary_shard_size": 1, "expert_parallel_size": 2, "micro_batch_size": 2}, [*EXPERTS])


def _integers(engine: str, ranks: int) -> Iterator[Case | None]:
    """Gathers and reductions in 8-bit integers, of which losses alone can be compared: each stage on two layouts in turn.

    Slices of tensor ranks have fewer elements than are gathered as integers: those gathers are without.
    """
    draw = Draw(engine, ranks, "integers")
    pipeline: Knobs = {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"}
    tensor: Knobs = {"tensor_parallel_size": 2, "sequence_parallel": True}
    options: tuple[Knobs, ...] = ({}, {"context_parallel_size": 2}, pipeline, tensor, {"micro_batch_size": 2})
    for turn, stage in enumerate(_stages(engine)):
        knobs: Knobs = {"zero_stage": stage, "reduce_dtype": "int8"}
        possible = [layout for layout in options if draw.case({**layout, **knobs})]
        for way in range(min(2, len(possible))):
            yield draw.case({**possible[(2 * turn + way) % len(possible)], **knobs}, [*MODELS])
    sharded: Knobs = {"zero_stage": 3, "param_persistence_threshold": 0}
    yield draw.case({**sharded, "reduce_dtype": "int8", "hsdp_shard_size": ranks // 2}, [*MODELS])
    for besides in ({}, {"context_parallel_size": 2}, {"secondary_shard_size": ranks // 2}, {"reduce_dtype": "int8"}, pipeline):
        yield draw.case({**sharded, "reshard_after_forward": True, **besides, "gather_dtype": "int8"}, [WIDE])


def _warm_up(engine: str, ranks: int) -> Iterator[Case | None]:
    """1-bit Adam before it sends signs, when it is AdamW."""
    for besides in ({}, {"context_parallel_size": 2}):
        yield Draw(engine, ranks, "warm-up").case({"optimizer": "onebit_adam", "onebit_warmup_steps": 3, **besides}, [*MODELS])


def untested(cases: Iterable[Case]) -> list[str]:
    """What the capability tables claim and no case exercises. Each must be repaired here, or struck from the table."""
    cases = [*cases]
    found = []
    for engine, capability in CAPABILITIES.items():
        mine = [case for case in cases if case.engine == engine]
        for name, values in capability.knobs.items():
            if name in NOT_COMPUTED:
                continue
            tried = {getattr(case.config, name) for case in mine}
            for value in values or KNOBS[name].choices:
                found += [] if value in tried or value in ON_CUDA.get(name, ()) else [f"{engine}: {name}={value}"]
            if len(tried) < 2 and len(values or "..") > 1:
                found.append(f"{engine}: {name} at another value than {tried}")
    return found


def some(cases: Sequence[Case], every: int) -> list[Case]:
    """Every `every`th case and, besides, the first of each schedule."""
    firsts: dict[str, Case] = {}
    for case in cases:
        firsts.setdefault(case.schedule, case)
    return [*dict.fromkeys([*cases[::every], *firsts.values()])]
