"""Sections of the parity matrix: layouts x stages x schedules, and options of every engine."""

from collections import Counter
from collections.abc import Iterator
from itertools import product

from benchmarks.correctness.parity_cases import BRANCH, CAPABILITIES, GLOBAL_BATCH, MODELS, USER, Case
from benchmarks.correctness.parity_draw import (
    CHECKPOINTING,
    MICRO_BATCH_SIZES,
    OFFLOADS,
    SETTINGS,
    Draw,
    Knobs,
    layouts,
    pipelines,
    stages_of,
)
from benchmarks.correctness.parity_layouts import layout_in_turn
from search_spaces.knob import Value

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


def crossed(engine: str, ranks: int) -> Iterator[Case | None]:
    """Layout x schedule x stage x checkpointing.

    Native engine: the full product on 2 ranks. On 4, two kinds of checkpointing in turn, one for each pipeline, so that each
    schedule and stage has every kind on some layout; on 8, also one schedule in turn for each layout and stage. Reference
    engines: kinds of checkpointing in turn, on 8 ranks every other stage.
    """
    draw = Draw(engine, ranks, "crossed")
    used: Counter[tuple[Value, str]] = Counter()
    for (place, layout), stage in product(enumerate(layouts(ranks)), stages_of(engine)):
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


def copies(engine: str, ranks: int) -> Iterator[Case | None]:
    """Copies of the sharded states (HSDP): each layout and size; on up to 4 ranks each schedule too."""
    draw = Draw(engine, ranks, "copies")
    sizes = [size for size in range(1, ranks) if ranks % size == 0]
    for layout in layouts(ranks):
        for run, size in product(pipelines(layout), sizes) if ranks <= 4 else [({}, draw.choose(sizes))]:
            yield draw.case({**layout, **run, "zero_stage": 3, "hsdp_shard_size": size, **draw.choose(CHECKPOINTING)})


def offloads(engine: str, ranks: int) -> Iterator[Case | None]:
    """Offload: on 2 ranks each layout, schedule and stage with two settings in turn; on 4 each layout and stage once; on 8 each
    layout.
    """
    draw = Draw(engine, ranks, "offloads")
    turn = 0
    for place, (layout, stage) in enumerate(product(layouts(ranks), stages_of(engine))):
        if ranks > 4 and place % 3:
            continue
        runs = pipelines(layout) if ranks == 2 else [draw.choose([{"pipeline_schedule": "1f1b"}, *pipelines(layout)])]
        for run in runs:
            offloads = [offload for offload in OFFLOADS if draw.case({**layout, **run, "zero_stage": stage, **offload})]
            turn += 1
            for way in range(min(len(offloads), 2 if ranks == 2 else 1)):
                knobs = {**layout, **run, "zero_stage": stage, **draw.choose(CHECKPOINTING)}
                yield draw.case({**knobs, **offloads[(turn + way) % len(offloads)]})


def data_parallel(engine: str, ranks: int) -> Iterator[Case | None]:
    """Without model parallelism: setting x stage x micro-batches x two models in turn (one on 4 ranks)."""
    draw = Draw(engine, ranks, "data parallel")
    models = [*MODELS, BRANCH, USER]
    settings = [{name: value for name, value in setting.items() if CAPABILITIES[engine].honours(name, value)}
                for setting in SETTINGS.values()]  # fmt: skip
    distinct = [setting for place, setting in enumerate(settings) if setting not in settings[:place]]
    for (place, setting), stage, micro_batches in product(enumerate(distinct), stages_of(engine), (1, 2)):
        knobs = {"zero_stage": stage, "micro_batch_size": GLOBAL_BATCH // ranks // micro_batches, **setting}
        for offset in (0, 2) if ranks == 2 else (0,):
            model = models[(place + int(stage) + micro_batches + offset) % len(models)]
            yield draw.case({**knobs, **draw.choose(CHECKPOINTING)}, [model])


def micro_batches(engine: str, ranks: int) -> Iterator[Case | None]:
    """A pipeline of all ranks with each schedule and each number of micro-batches, also fewer than ranks."""
    draw = Draw(engine, ranks, "micro-batches")
    layout: Knobs = {"pipeline_parallel_size": ranks}
    for run, size in product(pipelines(layout), MICRO_BATCH_SIZES):
        stage = draw.choose([{"zero_stage": stage} for stage in stages_of(engine)])
        yield draw.case({**layout, **run, **stage, "micro_batch_size": size})


def written(engine: str, ranks: int) -> Iterator[Case | None]:
    """Explicit stage layouts: each layout, schedule and stage, on 4 ranks every other one; marks in turn."""
    draw = Draw(engine, ranks, "written")
    turn = 0
    for layout, stage in product(layouts(ranks), stages_of(engine)):
        for run in filter(None, pipelines(layout)):
            stages = int(layout["pipeline_parallel_size"]) * int(run["virtual_stages"])
            case = draw.case({**layout, **run, "zero_stage": stage}, [*MODELS])
            turn += case is not None
            if case is not None and (ranks == 2 or turn % 2):
                text = layout_in_turn(stages, turn, offloads=int(stage) >= 1 and turn % 3 == 0)
                yield draw.case({**layout, **run, "zero_stage": stage, "pipeline_layout": text}, [*MODELS])


def compiled(engine: str, ranks: int) -> Iterator[Case | None]:
    """Compiled blocks: each stage on three layouts in turn, one for each checkpointing, and with experts on ranks. Few, since
    each takes seconds."""
    draw = Draw(engine, ranks, "compiled")
    options: tuple[Knobs, ...] = (
        {},
        {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"},
        {"tensor_parallel_size": 2, "sequence_parallel": True},
        {"context_parallel_size": 2},
        {"tensor_parallel_size": 2, "async_tensor_parallel": True},
        {"context_parallel_size": 2, "context_parallel_method": "ulysses", "attention_window": 5},
        {"tensor_parallel_size": 2, "sequence_parallel": True, "async_tensor_parallel": True},
        {"tensor_parallel_size": 2},
    )
    for turn, stage in enumerate(stages_of(engine)):
        for way in range(3):
            checkpointing = {"activation_checkpointing": ("none", "full", "selective")[way]}
            # What some samples alone run through is no one graph, which selective checkpointing needs.
            models = (*MODELS, USER) if way == 2 else (*MODELS, BRANCH, USER)
            model = models[(turn if way == 2 else 3 * turn + way) % len(models)]
            knobs = {**options[(3 * turn + way) % len(options)], **checkpointing, "zero_stage": stage, "compile_blocks": True}
            yield draw.case(knobs, [model])
            if way == turn % 3:
                experts: Knobs = {"expert_parallel_size": 2, **checkpointing, "zero_stage": stage, "compile_blocks": True}
                yield draw.case(experts, ["experts"])


def precisions(engine: str, ranks: int) -> Iterator[Case | None]:
    """Types other than float64, where only losses can be compared: each with each stage on two layouts in turn."""
    draw = Draw(engine, ranks, "precisions")
    pipeline: Knobs = {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"}
    tensor: Knobs = {"tensor_parallel_size": 2, "sequence_parallel": True}
    options: tuple[Knobs, ...] = ({}, pipeline, tensor, {"context_parallel_size": 2}, {**tensor, **pipeline})
    for turn, (stage, precision) in enumerate(product(stages_of(engine), PRECISIONS)):
        possible = [layout for layout in options if draw.case({**layout, **precision, "zero_stage": stage})]
        for way in range(min(2, len(possible))):
            layout = possible[(turn + turn // len(PRECISIONS) + way) % len(possible)]
            yield draw.case({**layout, **precision, "zero_stage": stage}, [*MODELS])
