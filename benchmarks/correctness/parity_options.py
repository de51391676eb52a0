"""Sections of the parity matrix beyond layouts and stages: experts, families, multi-token prediction, attention, training
methods, communication, memory."""

from collections.abc import Iterator, Sequence
from itertools import product

from benchmarks.correctness.parity_cases import EXPERTS, FAMILIES, MODELS, ROUTED, USER, WIDE, Case
from benchmarks.correctness.parity_draw import (
    CHECKPOINTING,
    FROZEN,
    OFFLOADS,
    SCHEDULES,
    Draw,
    Knobs,
    layouts,
    pipelines,
    stages_of,
)
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS

BESIDE_FROZEN: tuple[Knobs, ...] = ({"adapter_size": 3}, {"prefix_length": 3}, {"prompt_length": 4})
WINDOWS: tuple[Knobs, ...] = (
    {"attention_window": 5},
    {"attention_window": 4, "attention_global_tokens": 3},
    {"attention_window": 1, "attention_global_tokens": 1},
)


def experts(engine: str, ranks: int) -> Iterator[Case | None]:
    """Experts on different ranks: each layout, degree and stage; schedules, checkpointing, offloads and optimizers in turn."""
    draw = Draw(engine, ranks, "experts")
    for turn, (layout, size, stage) in enumerate(product(layouts(ranks), (2, 4), stages_of(engine))):
        knobs = {**layout, "expert_parallel_size": size, "zero_stage": stage}
        runs = [run for run in pipelines(layout) if draw.case({**knobs, **run}, [*EXPERTS])]
        if runs:
            knobs = {**knobs, **draw.choose(runs), **draw.choose(CHECKPOINTING)}
            yield draw.case(knobs, [*EXPERTS])
            extra: Knobs = {"optimizer": ("sgd", "lamb", "muon")[turn % 3]}
            yield draw.case({**knobs, **(extra if turn % 2 else draw.choose(OFFLOADS))}, [*EXPERTS])
    for (turn, offload), stage in product(enumerate(OFFLOADS), stages_of(engine)):
        divided: Knobs = {"expert_parallel_size": min((2, 4)[(turn + stage) % 2], ranks), "micro_batch_size": 2}
        yield draw.case({**divided, "zero_stage": stage, **offload}, [*EXPERTS])


def folded(engine: str, ranks: int) -> Iterator[Case | None]:
    """Fewer ranks for each expert than tensor ranks: each layout, number of these, degree and stage; models, schedules,
    checkpointing, offloads and optimizers in turn."""
    draw = Draw(engine, ranks, "folded")
    models = ("experts", "balanced", *(name for name, shape in FAMILIES.items() if "num_experts" in shape))
    slices = [(layout, size) for layout, size in product(layouts(ranks), (1, 2)) if size < int(layout["tensor_parallel_size"])]
    for turn, ((layout, size), expert, stage) in enumerate(product(slices, (1, 2, 4, 8), stages_of(engine))):
        knobs = {**layout, "expert_tensor_parallel_size": size, "expert_parallel_size": expert, "zero_stage": stage}
        runs = [run for run in pipelines(layout) if draw.case({**knobs, **run}, models)]
        if runs:
            knobs = {**knobs, **draw.choose(runs), **draw.choose(CHECKPOINTING)}
            yield draw.case(knobs, models)
            extra: Knobs = {"optimizer": ("sgd", "lamb", "muon")[turn % 3]}
            yield draw.case({**knobs, **(extra if turn % 2 else draw.choose(OFFLOADS))}, models)


def beside_shared_experts(engine: str, ranks: int) -> Iterator[Case | None]:
    """Shared experts that compute while tokens travel: each layout, number of ranks for each expert and stage; models, degrees,
    schedules, checkpointing and offloads in turn; sums of tensor ranks beside products, saved activations on the host and bf16
    once."""
    draw = Draw(engine, ranks, "beside shared experts")
    models = [name for name, shape in {**EXPERTS, **FAMILIES}.items() if "shared_expert_size" in shape]
    for turn, (layout, size, stage) in enumerate(product(layouts(ranks), (0, 1), stages_of(engine))):
        knobs = {**layout, "expert_tensor_parallel_size": size, "zero_stage": stage, "shared_expert_overlap": True}
        for degree in ((2, 4), (4, 2))[turn % 2]:
            divided = {**knobs, "expert_parallel_size": degree}
            runs = [run for run in pipelines(layout) if draw.case({**divided, **run}, models)]
            if runs:
                extra = CHECKPOINTING[(turn + turn // len(CHECKPOINTING)) % len(CHECKPOINTING)]
                other = draw.choose(OFFLOADS) if turn % 3 == 0 else {}
                yield draw.case({**divided, **draw.choose(runs), **extra, **other}, models)
                break
    beside: Knobs = {"expert_parallel_size": 2, "shared_expert_overlap": True, "micro_batch_size": 2}
    whole: Knobs = {"tensor_parallel_size": 2, "expert_tensor_parallel_size": 1, "async_tensor_parallel": True}
    for extra in (whole, {**whole, "sequence_parallel": True}, {"offload_activations": True}, {"precision": "bf16"}):
        yield draw.case({**beside, **extra}, models)


def balanced(engine: str, ranks: int) -> Iterator[Case | None]:
    """Biases of routers that follow the loads of experts: each layout, number of ranks for each expert and stage; degrees,
    schedules, checkpointing and offloads in turn; modules for multi-token prediction and data schedules once."""
    draw = Draw(engine, ranks, "balanced")
    rate: Knobs = {"router_bias_update_rate": 0.05}
    for turn, (layout, size, stage) in enumerate(product(layouts(ranks), (0, 1), stages_of(engine))):
        knobs = {**layout, **rate, "expert_tensor_parallel_size": size, "zero_stage": stage}
        knobs["expert_parallel_size"] = (1, 2, 4)[(turn + turn // 3) % 3]
        runs = [run for run in pipelines(layout) if draw.case({**knobs, **run}, ["latent"])]
        if runs:
            extra = {**CHECKPOINTING[(turn + turn // len(CHECKPOINTING)) % len(CHECKPOINTING)]}
            other = draw.choose(OFFLOADS) if turn % 3 == 0 else {}
            yield draw.case({**knobs, **draw.choose(runs), **extra, **other}, ["latent"])
    for extra in ({"mtp_layers": 1}, {"zero_stage": 3, "hsdp_shard_size": ranks // 2}, *SCHEDULES):
        yield draw.case({**rate, **extra}, ["latent"])


def families(engine: str, ranks: int) -> Iterator[Case | None]:
    """What newer families do: each model, layout and stage; schedules, checkpointing, offloads and context methods in turn."""
    draw = Draw(engine, ranks, "families")
    for turn, (name, layout, stage) in enumerate(product(FAMILIES, layouts(ranks), stages_of(engine))):
        size = 2 if "num_experts" in FAMILIES[name] and turn % 2 else 1
        knobs = {**layout, "zero_stage": stage, "expert_parallel_size": size}
        if layout["context_parallel_size"] != 1:
            # By pairs, so that either method is combined with whole and with divided experts.
            knobs["context_parallel_method"] = ("ulysses", "gather")[turn // 2 % 2]
        runs = [run for run in pipelines(layout) if draw.case({**knobs, **run}, [name])]
        if runs:
            extra = {**draw.choose(CHECKPOINTING), **(draw.choose(OFFLOADS) if turn % 3 == 0 else {})}
            yield draw.case({**knobs, **draw.choose(runs), **extra, "loss_chunk_size": (0, 5)[turn % 2]}, [name])


PREDICTING = ("llama", "experts", "latent", "qwen", "gemma", "latent keys", "sinks", "olmo")
"""Models with modules for multi-token prediction: also with tied embeddings, a balance loss, and windows in some layers."""


def token_prediction(engine: str, ranks: int) -> Iterator[Case | None]:
    """Multi-token prediction: each layout and stage; models, experts on different ranks, schedules, checkpointing and offloads
    in turn."""
    draw = Draw(engine, ranks, "token prediction")
    for turn, (layout, stage) in enumerate(product(layouts(ranks), stages_of(engine))):
        modules: Knobs = {"mtp_layers": 1 + turn % 2, "mtp_loss_weight": (0.3, 0.7)[turn // 2 % 2]}
        knobs = {**layout, "zero_stage": stage, **modules}
        models = [PREDICTING[(turn + way) % len(PREDICTING)] for way in range(len(PREDICTING))]
        if layout["context_parallel_size"] != 1:
            knobs["context_parallel_method"] = ("ulysses", "gather")[turn % 2]
        runs = [run for run in pipelines(layout) if draw.case({**knobs, **run}, models)]
        if runs:
            extra = {**CHECKPOINTING[turn % len(CHECKPOINTING)], **(draw.choose(OFFLOADS) if turn % 3 == 0 else {})}
            yield draw.case({**knobs, **draw.choose(runs), **extra, "loss_chunk_size": (0, 5)[turn % 2]}, models)
            yield draw.case({**knobs, **draw.choose(runs), "expert_parallel_size": 2}, ["latent", "experts"])
    pipeline: Knobs = {"pipeline_parallel_size": 2, "mtp_layers": 2}
    for run, model in product(pipelines(pipeline), ("llama", "gemma")):
        yield draw.case({**pipeline, **run, "loss_chunk_size": 20}, [model])
    for extra in ({"optimizer": "muon"}, {"offload_activations": True}, {"precision": "bf16"}, {"reduce_dtype": "int8"}):
        yield draw.case({"mtp_layers": 1, **extra}, ["llama"])
    for packed, modules in product((False, True), (1, 3)):
        documents = Draw(engine, ranks, "token prediction of documents", documents=True)
        yield documents.case({"mtp_layers": modules, "pack_sequences": packed, "loss_chunk_size": 20}, ["llama", ROUTED])


def attention(engine: str, ranks: int) -> Iterator[Case | None]:
    """Attention windows, and Ulysses: each layout and stage; schedules, checkpointing and kernels in turn."""
    draw = Draw(engine, ranks, "attention")
    for turn, (layout, stage) in enumerate(product(layouts(ranks), stages_of(engine))):
        knobs = {**layout, "zero_stage": stage}
        runs = [run for run in pipelines(layout) if draw.case({**knobs, **run})]
        if not runs:
            continue
        divided = layout["context_parallel_size"] != 1
        for way in range(2 if divided or not turn else 1):
            window = WINDOWS[(turn + way) % len(WINDOWS)]
            method: Knobs = {"context_parallel_method": ("ulysses", "gather")[way]} if divided else {}
            extra = {**draw.choose(runs), **CHECKPOINTING[(turn + way) % len(CHECKPOINTING)]}
            yield draw.case({**knobs, **extra, **window, **method}, [*MODELS])
        if divided:
            checkpointing = draw.choose(CHECKPOINTING)
            yield draw.case({**knobs, **draw.choose(runs), **checkpointing, "context_parallel_method": "ulysses"}, [*MODELS])


def activations(engine: str, ranks: int) -> Iterator[Case | None]:
    """Saved activations in host memory: each layout and stage; schedules and recomputation in turn."""
    draw = Draw(engine, ranks, "activations")
    again = [way for way in CHECKPOINTING if way.get("activation_checkpointing") != "selective"]
    for turn, (layout, stage) in enumerate(product(layouts(ranks), stages_of(engine))):
        knobs = {**layout, **again[turn % len(again)], "zero_stage": stage, "offload_activations": True}
        runs = [run for run in pipelines(layout) if draw.case({**knobs, **run})]
        if runs:
            yield draw.case({**knobs, **draw.choose(runs)})


def beside_products(engine: str, ranks: int) -> Iterator[Case | None]:
    """Tensor-parallel sums overlapped with products: each layout and stage with checkpointing in turn; schedules, adapters and
    a user's module in turn; experts, a prompt, bf16, data schedules and compiled blocks once.
    """
    draw = Draw(engine, ranks, "beside products")
    extra: tuple[Knobs, ...] = (
        {}, {"lora_rank": 2, "lora_targets": "both"}, {"loss_chunk_size": 20}, {"adapter_size": 3}, {"prefix_length": 3},
    )  # fmt: skip
    divided = [layout for layout in layouts(ranks) if layout["tensor_parallel_size"] != 1]
    for turn, (layout, stage) in enumerate(product(divided, stages_of(engine))):
        knobs = {**layout, "zero_stage": stage, "async_tensor_parallel": True}
        runs = [run for run in pipelines(layout) if draw.case({**knobs, **run})]
        for way in range(2 if runs else 0):
            checkpointing = CHECKPOINTING[(turn + turn // len(CHECKPOINTING) + 2 * way) % len(CHECKPOINTING)]
            own = {**knobs, **draw.choose(runs), **checkpointing}
            yield draw.case(own) if way else draw.case({**own, **extra[turn % len(extra)]}, [*MODELS])
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


def optimizers(engine: str, ranks: int) -> Iterator[Case | None]:
    """Every optimizer but AdamW with each stage on three layouts in turn: stages that shard matrices, and slices of them.

    A slice has other quantised blocks than the whole matrix, so adamw8bit has no tensor ranks here.
    """
    draw = Draw(engine, ranks, "optimizers")
    pipeline: Knobs = {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"}
    tensor: Knobs = {"tensor_parallel_size": 2, "sequence_parallel": True}
    context: Knobs = {"context_parallel_size": 2}
    options: tuple[Knobs, ...] = ({}, tensor, pipeline, {**tensor, **pipeline}, context, {"tensor_parallel_size": ranks})
    names = [str(name) for name in KNOBS["optimizer"].choices if name != KNOBS["optimizer"].default]
    for turn, (stage, name) in enumerate(product(stages_of(engine), names)):
        quantised = name == "adamw8bit"
        copies = ({"hsdp_shard_size": ranks // 2},) if stage == 3 else ()
        layouts = [layout for layout in (*options, *copies) if not (quantised and "tensor_parallel_size" in layout)]
        possible = [layout for layout in layouts if draw.case({**layout, "optimizer": name, "zero_stage": stage})]
        for way in range(min(3, len(possible))):
            layout = possible[(turn + way) % len(possible)]
            yield draw.case({**layout, "optimizer": name, "zero_stage": stage}, [WIDE] if quantised else [*MODELS])


def adapters(engine: str, ranks: int) -> Iterator[Case | None]:
    """Low-rank adapters: each layout, stage and target; checkpointing, offload and the type of frozen matrices in turn. Copies
    of the shards, and on 2 ranks each schedule, once.
    """
    draw = Draw(engine, ranks, "adapters")
    targets, models = KNOBS["lora_targets"].choices if ranks == 2 else ("both",), [*MODELS]
    for turn, (layout, stage, target) in enumerate(product(layouts(ranks), stages_of(engine), targets)):
        first = {"pipeline_schedule": "1f1b"} if layout["pipeline_parallel_size"] != 1 else {}
        knobs = {**layout, **first, "zero_stage": stage, "lora_rank": 2, "lora_targets": target}
        # Targets alternate too: shifted with each round, so that every model is combined with every target.
        model = models[(turn + turn // len(models)) % len(models)]
        # Shifted with each round for the same reason.
        kept, other = (FROZEN[(turn + turn // len(FROZEN) + shift) % len(FROZEN)] for shift in range(2))
        yield draw.case({**knobs, **kept, **CHECKPOINTING[turn % len(CHECKPOINTING)]}, [model])
        yield draw.case({**knobs, **other, **OFFLOADS[turn % len(OFFLOADS)]}, [model])
    for stage, name in product(stages_of(engine), (name for name in KNOBS["optimizer"].choices if name != "adamw")):
        knobs = {"lora_rank": 2, "lora_targets": "both", "zero_stage": stage, "optimizer": name}
        yield draw.case(knobs, [WIDE] if name == "adamw8bit" else [*MODELS])
    adapters: Knobs = {"lora_rank": 2, "lora_targets": "both", "zero_stage": 3}
    for kept in FROZEN:
        yield draw.case({**adapters, **kept, "hsdp_shard_size": ranks // 2})
        if ranks == 2:
            yield draw.case({**adapters, **kept, "compile_blocks": True}, ["llama"])
    for run in pipelines({"pipeline_parallel_size": ranks}) if ranks == 2 else ():
        yield draw.case({**adapters, "pipeline_parallel_size": ranks, **draw.choose(FROZEN), **run})


def latent_adapters(engine: str, ranks: int) -> Iterator[Case | None]:
    """Low-rank adapters on latent attention: each layout and stage; models, schedules, checkpointing, offloads and the type of
    frozen matrices in turn."""
    draw = Draw(engine, ranks, "latent adapters")
    adapted: Knobs = {"lora_rank": 2, "lora_targets": "attention"}
    for turn, (layout, stage) in enumerate(product(layouts(ranks), stages_of(engine))):
        models = [("latent", "latent keys")[turn % 2]]
        knobs = {**layout, **adapted, "zero_stage": stage, **FROZEN[(turn + turn // len(FROZEN)) % len(FROZEN)]}
        runs = [run for run in pipelines(layout) if draw.case({**knobs, **run}, models)]
        if runs:
            extra = {**CHECKPOINTING[(turn + turn // len(CHECKPOINTING)) % len(CHECKPOINTING)]}
            other = draw.choose(OFFLOADS) if turn % 3 == 0 else {}
            yield draw.case({**knobs, **draw.choose(runs), **extra, **other}, models)
    yield draw.case({**adapted, "tensor_parallel_size": 2, "async_tensor_parallel": True}, ["latent"])


def by_module(engine: str, ranks: int) -> Iterator[Case | None]:
    """Recomputation by module: each layout and stage; modules, models with them, schedules, offloads and adapters in turn."""
    draw = Draw(engine, ranks, "by module")
    models = {
        "norms": (*MODELS, "latent"), "activations": ("llama", "gpt2"), "attention": ("llama", "latent keys", "gpt2"),
        "expert_activations": ("experts", "latent"), "up_projections": ("latent", "latent keys"),
        "norms+activations+attention": ("llama", "gpt2"),
        "norms+activations+expert_activations+attention+up_projections": ("latent",),
    }  # fmt: skip
    for turn, (layout, stage) in enumerate(product(layouts(ranks), stages_of(engine))):
        modules = [*models][turn % len(models)]
        knobs: Knobs = {**layout, "zero_stage": stage, "recompute_modules": modules}
        own = [models[modules][turn % len(models[modules])]]
        runs = [run for run in pipelines(layout) if draw.case({**knobs, **run}, own)]
        if runs:
            other = draw.choose(OFFLOADS) if turn % 3 == 0 else {"lora_rank": 2} if turn % 5 == 0 else {}
            yield draw.case({**knobs, **draw.choose(runs), **other}, own)


def beside_frozen(engine: str, ranks: int) -> Iterator[Case | None]:
    """Bottlenecks, prefixes and prompts: on 2 ranks each with every layout and stage, on more ranks one in turn; recomputation,
    offload and the type of frozen matrices are drawn. Copies of the shards, optimizers, compiled blocks and on 2 ranks each
    schedule, once.
    """
    draw = Draw(engine, ranks, "beside frozen")
    models = [*MODELS]
    for turn, (layout, stage) in enumerate(product(layouts(ranks), stages_of(engine))):
        first = {"pipeline_schedule": "1f1b"} if layout["pipeline_parallel_size"] != 1 else {}
        of_turn = (BESIDE_FROZEN[(turn + turn // len(stages_of(engine))) % len(BESIDE_FROZEN)],)
        for method in BESIDE_FROZEN if ranks == 2 else of_turn:
            knobs = {**layout, **first, "zero_stage": stage, **method}
            yield draw.case({**knobs, **draw.choose(CHECKPOINTING), **draw.choose(FROZEN)}, models)
            if ranks == 2:
                yield draw.case({**knobs, **draw.choose(OFFLOADS)}, models)
    for stage, name, method in product(stages_of(engine), KNOBS["optimizer"].choices, BESIDE_FROZEN):
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


def scheduled(engine: str, ranks: int) -> Iterator[Case | None]:
    """Data schedules: each layout, pipeline schedule and stage, on 4 ranks every third; checkpointing and offload in turn.
    Adapters and every optimizer once.
    """
    draw = Draw(engine, ranks, "scheduled")
    turn = 0
    for layout, stage, schedule in product(layouts(ranks), stages_of(engine), SCHEDULES):
        for run in pipelines(layout):
            knobs: Knobs = {**layout, **run, "zero_stage": stage, **schedule}
            case = draw.case({**knobs, **CHECKPOINTING[turn % len(CHECKPOINTING)]}, [*MODELS])
            turn += case is not None
            if case is not None and (ranks == 2 or turn % 3 == 0):
                yield case
                if turn % 4 == 0:
                    yield draw.case({**knobs, **draw.choose(OFFLOADS)}, [*MODELS])
    for schedule, extra in product(SCHEDULES, ("optimizer", "lora_rank")):
        values: Sequence[Value] = ("sgd", "lamb", "muon") if extra == "optimizer" else (2,)
        for value in values:
            yield draw.case({**schedule, extra: value, "zero_stage": 2 if extra == "optimizer" else 3}, [*MODELS])


def documents(engine: str, ranks: int) -> Iterator[Case | None]:
    """Documents packed into rows, and padded ones: each layout, pipeline schedule and stage, on 4 ranks every third; every
    fourth is padded. Checkpointing and offload in turn; adapters, kernels, types and every optimizer once.
    """
    draw = Draw(engine, ranks, "documents", documents=True)
    packed: Knobs = {"pack_sequences": True}
    models = ["llama", "gpt2", ROUTED, "cut chunks"]
    turn = 0
    for layout, stage in product(layouts(ranks), stages_of(engine)):
        for run in pipelines(layout):
            knobs: Knobs = {**layout, **run, "zero_stage": stage, **CHECKPOINTING[turn % len(CHECKPOINTING)]}
            turn += 1
            if ranks > 2 and turn % 3:
                continue
            divided = layout["context_parallel_size"] != 1
            yield draw.case(knobs if divided or turn % 4 == 0 else {**knobs, **packed}, models)
            if turn % 4 == 1:
                yield draw.case({**knobs, **packed, **draw.choose(OFFLOADS)}, models)
    if ranks > 2:
        return
    extra: tuple[Knobs, ...] = (
        {"lora_rank": 2}, {"adapter_size": 3}, {"loss_chunk_size": 20}, {"attention_backend": "math"}, {"precision": "bf16"},
        {"async_tensor_parallel": True, "tensor_parallel_size": 2}, {"expert_parallel_size": 2, "micro_batch_size": 4},
        {"tensor_parallel_size": 2, "sequence_parallel": True, "loss_chunk_size": 20}, {"precision": "fp16"},
        *({"optimizer": name} for name in ("sgd", "lamb", "muon")),
    )  # fmt: skip
    for place, knobs in enumerate(extra):
        yield draw.case({**packed, "zero_stage": stages_of(engine)[place % len(stages_of(engine))], **knobs}, models)
    for knobs in ({"prompt_length": 4}, {"prefix_length": 3}, {"attention_window": 5}):
        yield draw.case({**knobs, "zero_stage": stages_of(engine)[-1]}, models)


def near(engine: str, ranks: int) -> Iterator[Case | None]:
    """Secondary shards among neighbours: each layout, schedule and size; other knobs that affect gathers in turn."""
    draw = Draw(engine, ranks, "near")
    extra: tuple[Knobs, ...] = (
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
            knobs = {**layout, **run, **fixed, "secondary_shard_size": size, **extra[turn % len(extra)]}
            yield draw.case(knobs, [*MODELS]) if own is not None else None
    yield draw.case({**fixed, "secondary_shard_size": 1, "expert_parallel_size": 2, "micro_batch_size": 2}, [*EXPERTS])


def integers(engine: str, ranks: int) -> Iterator[Case | None]:
    """Gathers and reductions in 8-bit integers, where only losses can be compared: each stage on two layouts in turn.

    Slices of tensor ranks are too small to be gathered as integers, so gathers have no tensor ranks.
    """
    draw = Draw(engine, ranks, "integers")
    pipeline: Knobs = {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"}
    tensor: Knobs = {"tensor_parallel_size": 2, "sequence_parallel": True}
    options: tuple[Knobs, ...] = ({}, {"context_parallel_size": 2}, pipeline, tensor, {"micro_batch_size": 2})
    for turn, stage in enumerate(stages_of(engine)):
        knobs: Knobs = {"zero_stage": stage, "reduce_dtype": "int8"}
        possible = [layout for layout in options if draw.case({**layout, **knobs})]
        for way in range(min(2, len(possible))):
            yield draw.case({**possible[(2 * turn + way) % len(possible)], **knobs}, [*MODELS])
    sharded: Knobs = {"zero_stage": 3, "param_persistence_threshold": 0}
    yield draw.case({**sharded, "reduce_dtype": "int8", "hsdp_shard_size": ranks // 2}, [*MODELS])
    for extra in ({}, {"context_parallel_size": 2}, {"secondary_shard_size": ranks // 2}, {"reduce_dtype": "int8"}, pipeline):
        yield draw.case({**sharded, "reshard_after_forward": True, **extra, "gather_dtype": "int8"}, [WIDE])


def warm_up(engine: str, ranks: int) -> Iterator[Case | None]:
    """1-bit Adam during its warm-up, when it equals AdamW."""
    for extra in ({}, {"context_parallel_size": 2}):
        yield Draw(engine, ranks, "warm-up").case({"optimizer": "onebit_adam", "onebit_warmup_steps": 3, **extra}, [*MODELS])
