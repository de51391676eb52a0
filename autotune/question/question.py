"""What is asked, by the words of whoever asks. One record for every entry point: commands, REST, the client, tools, Python."""

from dataclasses import dataclass
from typing import Any

from autotune.question.field import (
    ASKED,
    EVERY,
    FORM,
    JOB,
    PLANNED,
    RECIPE,
    SERVICE,
    SWEEP,
    Panel,
    redeclared,
    request_field,
)  # fmt: skip

SIMPLE_TARGETS = (
    "deepspeed", "accelerate-fsdp", "accelerate-deepspeed", "transformers", "torchtitan", "megatron", "lightning", "torch",
)  # fmt: skip
"""Frameworks to whose exports a search can be restricted."""
METHODS = ("full", "full-bf16", "full-8bit", "lora", "lora-8bit", "qlora")
"""Ways in which a model is fine-tuned (`planning.fit.EVERY_METHOD`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionFields:
    """The model, the cluster, the workload, the space, the engine and the objective. `JobRequest` and `PlanningFields` add what
    only jobs, and only predictions and plans, have."""

    model: str = request_field(
        "",
        "A name (autotune models) or Hugging Face id, a config.json, hf:CONFIG, or module:factory.",
        Panel.BASIC,
        "MODEL",
        commands=(*EVERY, *PLANNED, "space", "dry-run", "profile", "lint", "carry", "challenge"),
        helps=(
            ("space weights", "A name (autotune models) or Hugging Face id, or a config.json."),
            ("profile", "A name (autotune models) or Hugging Face id, a config.json, or module:factory."),
            ("lint", "A name, a Hugging Face id or a config.json. [default: the one that the file names]"),
            ("carry challenge", "A name, a Hugging Face id or a config.json. [default: as in the recipe]"),
        ),
    )
    """A preset's name, a Hugging Face id, a config.json's path, `module:factory`, or the name of the program in a command."""
    cluster: str | None = request_field(
        None,
        "8xh100, local, ray, a name (autotune clusters) as NAME:NODES, or a TOML file.",
        Panel.BASIC,
        "NAME",
        shown_default="local",
        commands=(*EVERY, *PLANNED, "calibrate", "space", "dry-run", "lint", "challenge"),
        helps=(
            ("fit", "1xrtx-4090, 2x24GB, 8xh100, local, ray, a name (autotune clusters) as NAME:NODES, or a TOML file."),
            ("lint", "The cluster of the run: 8xh100, local, ray, a name as NAME:NODES, or a TOML file."),
            ("dry-run", "8xh100, local, a name (autotune clusters) as NAME:NODES, or a TOML file."),
            (SERVICE, "`local`, a number of cards (8xh100), or a preset as NAME:NODES."),
        ),
    )
    """None: local, or `ray` if a Ray address is given."""
    ranks: int | None = request_field(
        None,
        "Ranks per trial.",
        Panel.BASIC,
        "N",
        least=1,
        most=2**20,
        commands=(*JOB, *PLANNED, "calibrate", "space", "dry-run", "lint", "challenge"),
        shown_default="every GPU; on CPUs 2",
        helps=(
            (" ".join((*PLANNED, "space", "dry-run", "challenge")), "Ranks. [default: every device; on CPUs 2]"),
            ("lint", "Ranks of the run, to check sizes. [default: every device]"),
            ("form", "Default: every device of the cluster."),
            ("sweep", "Ranks per trial; several values for a series."),
        ),
        label="Ranks",
        section="machine",
    )
    """Ranks per trial; None: every device of the cluster (`local` without GPUs: 2, or 1 on one core)."""
    space: str = request_field(
        "zero",
        "zero, zero-buckets, 3d, parallel, full, or a TOML file.",
        Panel.BASIC,
        "NAME",
        commands=(*EVERY, "plan", "space"),
    )
    """A preset's name or the path of a TOML file."""
    pins: dict[str, Any] = request_field(
        dict,
        "Pin a knob to one value, or to several (KNOB=A,B). May be repeated.",
        Panel.BASIC,
        "KNOB=VALUE",
        commands=(*EVERY, *PLANNED, "space", "dry-run", "profile"),
        helps=(("predict fit dry-run profile", "A knob's value. May be repeated."),),
        option=list[str],
    )
    """Knob -> the value or values that are tried; text is parsed as on the command line."""
    simple: str | None = request_field(
        None,
        "Search only what this framework's export expresses without loss: deepspeed, torchtitan, megatron, …",
        Panel.SEARCH,
        "TARGET",
        commands=(*EVERY, *ASKED),
        helps=(("predict", "What trains: its memory, where that is known (megatron, transformers)."),),
        choices=lambda: SIMPLE_TARGETS,
    )
    """One of `SIMPLE_TARGETS`: only what its export expresses without loss is searched; None: the whole space."""
    objective: str = request_field(
        "throughput",
        "throughput, memory, pareto or goodput.",
        Panel.SEARCH,
        "NAME",
        commands=(*JOB, "plan"),
        helps=(("form", ""), ("sweep", "throughput, memory, pareto, goodput; for a series cost, devices, sequence, scale.")),
        label="Objective",
        section="goal",
    )
    goodput: tuple[str, ...] = request_field(
        (),
        "Objective goodput: failures=llama3, spares=0,2, tokens=1e12, … May be repeated.",
        Panel.SEARCH,
        "NAME=VALUE",
        commands=(*JOB, "plan"),
        label="Failures",
        section="goal",
        helps=(("form", "Objective goodput: NAME=VALUE, a | between them, such as failures=llama3 | tokens=1e12."),),
    )
    """Inputs of the objective goodput: `autotune.goodput.terms.GoodputTerms`, as texts NAME=VALUE."""
    global_batch_size: int | None = request_field(
        None,
        "Samples per optimizer step, over all ranks.",
        Panel.BASIC,
        "N",
        least=1,
        most=2**32,
        commands=(*EVERY, *PLANNED, "space", "dry-run", "profile", *RECIPE),
        label="Global batch size",
        required_on="cuda",
        section="workload",
        measure="samples",
        shown_default="at least 8 and a micro-batch for each rank; a job on GPUs must state it",
        helps=(
            ("form", "Per optimizer step, over all ranks. On CPUs 8 by default, or one for each rank if there are more."),
            ("sweep scale submit", "Samples per optimizer step, over all ranks. [default: on CPUs 8, or one for each rank]"),
            ("predict plan space", "Samples per optimizer step. [default: at least 8 and a micro-batch for each rank]"),
            ("fit", "Samples per optimizer step, over all cards. [default: at least 64]"),
            ("lint carry challenge", "Samples per optimizer step. [default: as in the recipe]"),
            ("dry-run", "Samples per optimizer step. [default: one micro-batch per replica]"),
            ("profile", "Samples per optimizer step. [default: one micro-batch]"),
        ),
    )
    """Samples per optimizer step, over all ranks. None: the default for the cluster."""
    sequence_length: int | None = request_field(
        None,
        "Tokens per sample, such as 8k.",
        Panel.BASIC,
        "TOKENS",
        least=1,
        most=2**32,
        commands=(*EVERY, *PLANNED, "space", "dry-run", "profile", *RECIPE),
        label="Sequence length",
        required_on="cuda",
        section="workload",
        measure="tokens",
        shown_default="128 on CPUs; a job on GPUs must state it",
        helps=(
            ("form", "On CPUs 128 by default."),
            ("sweep scale submit", "Tokens per sample. [default: on CPUs 128]"),
            (
                "predict plan fit space dry-run",
                "Tokens per sample. [default: 128 on CPUs, 4,096 on GPUs, at most those of the model]",
            ),
            ("lint carry challenge", "Tokens per sample. [default: as in the recipe]"),
            ("profile", "Tokens per sample. [default: 128]"),
        ),
    )
    """Tokens per sample. None: the default for the model and the cluster."""
    training_steps: int | None = request_field(
        None,
        "Optimizer steps of your run, over which data schedules are averaged.",
        Panel.TRAINING,
        "N",
        least=1,
        most=2**53,
        commands=(*JOB, *PLANNED),
        helps=(("fit", "Optimizer steps of your run, for the hours that they take."),),
    )
    """Optimizer steps of the run that is tuned for, over which data schedules are averaged; None: data schedules are not
    possible."""
    document_lengths: tuple[int, ...] = request_field(
        (),
        "Lengths in tokens of a sample of your documents, separated by commas, or a file of them.",
        Panel.TRAINING,
        "LENGTHS",
        option=str,
        commands=(*JOB, *PLANNED),
        shown_default="all samples have the full length",
        helps=(
            ("fit", "Lengths in tokens of a sample of your dataset, separated by commas, or a file: they are packed."),
            (SERVICE, "Lengths in tokens of a sample of the data's documents; empty: each sample is one document."),
        ),
    )
    """Lengths in tokens of a sample of the user's documents, at most 1,000 and none longer than `sequence_length`; empty: every
    sample has the full length."""
    expert_loads: tuple[tuple[float, ...], ...] = request_field(
        (),
        "Relative numbers of tokens that choose each expert, separated by commas, or a file of them with a line for each layer "
        "with experts.",
        Panel.TRAINING,
        "LOADS",
        option=str,
        commands=(*JOB, *PLANNED),
        shown_default="the router chooses, and predictions assume equal loads",
        helps=(
            (
                SERVICE,
                "Relative numbers of tokens that choose each expert: a row for all layers with experts, or one for each.",
            ),
        ),
    )
    """How many tokens choose each expert, in any unit: one row for all layers with experts, or one for each of them. Trials
    draw choices that follow the loads, and predictions are of the busiest rank. Empty: not stated."""
    knowledge: dict[str, Any] | str | None = request_field(
        None,
        "Measurements to learn from: a table, a study, an MLPerf log, a job, or an address.",
        Panel.SEARCH,
        "FILE|JOB|URL",
        option=str,
        commands=(*JOB, *PLANNED),
        helps=(
            ("submit predict plan fit", "Measurements to learn from: a table, an MLPerf log, a job, or an address."),
            (SERVICE, "Measurements to learn from: their settings and measurements."),
            (FORM, ""),
        ),
    )
    """Measurements by others as plain data (`autotune.knowledge.content`); text: what the user named, until it is read; None:
    only those of the database."""
    memory_limit: int | None = request_field(
        None,
        "Memory limit per rank: 2000000000, 2GB or 1.5GiB.",
        Panel.BASIC,
        "BYTES",
        least=1,
        most=2**53,
        commands=(*EVERY, *PLANNED, "space", "challenge"),
        label="Memory limit",
        section="machine",
        helps=(("form", "Per rank. Default: the device's memory."),),
    )
    """Bytes per rank above which a trial is INFEASIBLE, or text with a unit (40GB); None: the device's memory."""
    nvme_path: str | None = request_field(
        None,
        "Folder on a fast local disk for states offloaded to files (nvme).",
        Panel.HARDWARE,
        "PATH",
        commands=(*SWEEP, *ASKED, "calibrate"),
        service=False,
    )
    """Folder on a fast local file system of every node for states offloaded to files; None: no configuration offloads to
    files."""
    engine: str = request_field(
        "native",
        "native, ddp, fsdp2, deepspeed, or command (after --).",
        Panel.TRIALS,
        "NAME",
        commands=(*EVERY, *PLANNED, "calibrate", "space", "dry-run", "challenge"),
        label="Engine",
        section="machine",
        helps=(
            ("form", ""),
            ("predict plan challenge", "native, ddp, fsdp2 or deepspeed."),
            ("fit", "The engine of a module:factory: native, ddp, fsdp2 or deepspeed."),
            ("space", "native, ddp, fsdp2 or deepspeed; any: count without an engine's restrictions."),
            ("calibrate", "The engine whose predictions are shown."),
            ("dry-run", "native."),
        ),
    )
    ray_address: str | None = request_field(
        None,
        "Ray cluster, HOST:PORT or auto. Default: AUTOTUNE_RAY_ADDRESS, RAY_ADDRESS, else a local Ray is started.",
        Panel.HARDWARE,
        "ADDRESS",
        commands=(*EVERY, *PLANNED, "calibrate", "space", "challenge"),
        service=False,
        helps=(
            ("submit", "Ray cluster of the job, HOST:PORT. [default: that of the worker]"),
            (
                "predict plan fit space",
                "HOST:PORT or auto: the Ray cluster of --cluster ray. Default: AUTOTUNE_RAY_ADDRESS, RAY_ADDRESS, else auto.",
            ),
        ),
    )
    """The Ray cluster that trials run on: HOST:PORT, or `auto` for the one that this machine belongs to; None: a local Ray that
    is started for the job or, if `cluster` is `ray`, `auto`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningFields(QuestionFields):
    """What a prediction, a plan or a fit is asked for."""

    space: str = redeclared(QuestionFields, "space", "parallel")
    objective: str = redeclared(
        QuestionFields, "objective", "throughput", help="throughput, memory, cost, devices or goodput.", helps=()
    )
    goodput: tuple[str, ...] = redeclared(
        QuestionFields,
        "goodput",
        (),
        helps=((SERVICE, "For the objective goodput: its inputs, as those of `autotune plan --goodput`."),),
    )
    lora_rank: int | None = request_field(
        None,
        "Train low-rank adapters of this rank; all else is frozen.",
        Panel.TRAINING,
        "N",
        least=1,
        most=2**20,
        commands=PLANNED,
    )
    lora_targets: tuple[str, ...] | None = request_field(
        None,
        "Matrices with adapters, separated by commas.",
        Panel.TRAINING,
        "NAMES",
        commands=PLANNED,
        option=str,
        shown_default="query,value",
        helps=((SERVICE, "Matrices with adapters."),),
    )
    frozen_bits: int | None = request_field(
        None,
        "Bits of a frozen parameter: 16, 8 or 4.",
        Panel.TRAINING,
        "BITS",
        least=1,
        most=64,
        commands=PLANNED,
        shown_default="16",
    )
    host_memory: int | None = request_field(
        None,
        "Main memory of a node.",
        Panel.BASIC,
        "BYTES",
        commands=("fit",),
        shown_default="from the cluster",
        service=False,
    )
    """Bytes."""
    fit_probability: float | None = request_field(
        None,
        "Minimum probability that a configuration fits.",
        Panel.SEARCH,
        "SHARE",
        above=0,
        below=1,
        commands=("plan", "fit"),
        shown_default="0.95",
    )
    top: int = request_field(10, "Number of plans to show.", Panel.BASIC, "N", least=1, most=100, commands=("plan",))
    max: str | None = request_field(
        None,
        "Maximize sequence_length, micro_batch_size or model, and plan for the largest that fits.",
        Panel.SEARCH,
        "WHAT",
        commands=("plan", "fit"),
        helps=(("fit", "Show the way with the largest sequence_length or micro_batch_size, or the largest model that fits."),),
    )
    price: float | None = request_field(
        None, "Price of a device per hour.", Panel.SEARCH, "PRICE", above=0, most=1e18, commands=("plan", "fit")
    )
    methods: tuple[str, ...] = request_field(
        (),
        f"Ways of training to compare, separated by commas: {', '.join(METHODS)}.",
        Panel.TRAINING,
        "NAMES",
        commands=("fit",),
        option=str,
        shown_default="all that the model leaves open",
    )
    libraries: tuple[str, ...] = request_field(
        (),
        "What the libraries do, NAME=VALUE: loss=projection (Liger), reference=copy or sequences=2 (DPO), paged=true, … May be "
        "repeated.",
        Panel.TRAINING,
        "NAME=VALUE",
        commands=("fit",),
    )
    """Fields of `equations.software.Transformers`."""
    run_tokens: int | None = request_field(
        None,
        "Tokens to train on, for the hours that they take.",
        Panel.TRAINING,
        "TOKENS",
        least=1,
        most=2**53,
        commands=("fit",),
    )
    epochs: float | None = request_field(
        None,
        "Epochs over --dataset-rows, for the hours that they take.",
        Panel.TRAINING,
        "N",
        above=0,
        most=1e9,
        commands=("fit",),
    )
    dataset_rows: int | None = request_field(
        None, "Samples of the dataset, each one document.", Panel.TRAINING, "N", least=1, most=2**53, commands=("fit",)
    )
    cards: tuple[str, ...] = request_field(
        (),
        "Machines to compare, separated by commas, each with a price per device and hour if known: 1x4090=0.4,1xa100=1.9.",
        Panel.BASIC,
        "NAMES",
        commands=("fit",),
        option=str,
        service=False,
    )
    rate: float | None = request_field(
        None, "Samples/s that a plan must reach.", Panel.SEARCH, "RATE", above=0, most=1e18, commands=("plan",)
    )
    share: float | None = request_field(
        None,
        "Minimum share of the best rate, for the objective memory.",
        Panel.SEARCH,
        "SHARE",
        above=0,
        most=1,
        commands=("plan",),
        shown_default="0.8",
    )
