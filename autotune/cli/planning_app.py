"""Commands that predict: the cost of a configuration, the best configurations, and prediction accuracy. See `app`."""

from typing import Annotated

import typer

from autotune.cli import options
from autotune.cli.options import Database, Json, parse_bytes
from autotune.cli.status import end

app = typer.Typer()


@app.command()
def predict(
    model: options.Model = None,
    cluster: options.AnyCluster = None,
    ray_address: options.RayToDescribe = None,
    ranks: options.EveryRank = None,
    pin: options.KnobValues = None,
    global_batch_size: options.AnyBatch = None,
    sequence_length: options.AnyLength = None,
    training_steps: options.TrainingSteps = None,
    document_lengths: options.DocumentLengths = None,
    expert_loads: options.ExpertLoads = None,
    memory_limit: options.MemoryLimit = None,
    nvme_path: options.NvmePath = None,
    engine: options.NamedEngine = "native",
    lora_rank: options.LoraRank = None,
    lora_targets: options.LoraTargets = None,
    frozen_bits: options.FrozenBits = None,
    knowledge: options.Knowledge = None,
    stages: Annotated[bool, typer.Option("--stages", help="Also show the memory of every pipeline rank.")] = False,
    db: Database = None,
    json: Json = False,
) -> None:
    """Predict step time and memory of one configuration, without running it."""
    from autotune.cli.predict import PredictOptions, predict_command

    end(
        lambda: predict_command(
            PredictOptions(
                model=model,
                cluster=cluster,
                ray_address=ray_address,
                ranks=ranks,
                pins=tuple(pin or ()),
                global_batch_size=global_batch_size,
                sequence_length=sequence_length,
                training_steps=training_steps,
                document_lengths=document_lengths,
                expert_loads=expert_loads,
                memory_limit=memory_limit,
                engine=engine,
                lora_rank=lora_rank,
                lora_targets=lora_targets,
                frozen_bits=frozen_bits,
                knowledge=knowledge,
                stages=stages,
                nvme_path=nvme_path,
                database=db,
                json=json,
            )
        )
    )


@app.command()
def plan(
    model: options.Model = None,
    cluster: options.AnyCluster = None,
    ray_address: options.RayToDescribe = None,
    ranks: options.EveryRank = None,
    space_: Annotated[
        str, typer.Option("--space", metavar="NAME", help="parallel, zero, zero-buckets, 3d, full, or a TOML file.")
    ] = "parallel",
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Number of plans to show.")] = 10,
    ties: Annotated[bool, typer.Option("--ties", help="Also show the configurations that tie with each plan.")] = False,
    simple: options.Simple = None,
    objective: Annotated[
        str, typer.Option(metavar="NAME", help="throughput, memory, cost, devices or goodput.")
    ] = "throughput",
    max_: Annotated[
        str | None,
        typer.Option(
            "--max",
            metavar="WHAT",
            help="Maximize sequence_length, micro_batch_size or model, and plan for the largest that fits.",
        ),
    ] = None,
    price: Annotated[float | None, typer.Option(metavar="PRICE", help="Price of a device per hour.")] = None,
    rate: Annotated[float | None, typer.Option(metavar="RATE", help="Samples/s that a plan must reach.")] = None,
    share: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Minimum share of the best rate, for the objective memory. [default: 0.8]"),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Objective goodput: failures=llama3, spares=0,2, tokens=1e12, … May be repeated."
        ),
    ] = None,
    fit_probability: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Minimum probability that a plan fits. [default: 0.95]")
    ] = None,
    pin: options.Pins = None,
    global_batch_size: options.AnyBatch = None,
    sequence_length: options.AnyLength = None,
    training_steps: options.TrainingSteps = None,
    document_lengths: options.DocumentLengths = None,
    expert_loads: options.ExpertLoads = None,
    memory_limit: options.MemoryLimit = None,
    nvme_path: options.NvmePath = None,
    engine: options.NamedEngine = "native",
    lora_rank: options.LoraRank = None,
    lora_targets: options.LoraTargets = None,
    frozen_bits: options.FrozenBits = None,
    knowledge: options.Knowledge = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Rank all configurations of a space by predictions, with the reason for each knob, without running them."""
    from autotune.cli.plan import PlanCommandOptions, plan_command

    end(
        lambda: plan_command(
            PlanCommandOptions(
                model=model,
                cluster=cluster,
                ray_address=ray_address,
                ranks=ranks,
                space=space_,
                top=top,
                ties=ties,
                simple=simple,
                objective=objective,
                most=max_,
                fit_probability=fit_probability,
                share=share,
                price=price,
                rate=rate,
                goodput=tuple(goodput or ()),
                pins=tuple(pin or ()),
                global_batch_size=global_batch_size,
                sequence_length=sequence_length,
                training_steps=training_steps,
                document_lengths=document_lengths,
                expert_loads=expert_loads,
                memory_limit=memory_limit,
                engine=engine,
                lora_rank=lora_rank,
                lora_targets=lora_targets,
                frozen_bits=frozen_bits,
                knowledge=knowledge,
                nvme_path=nvme_path,
                database=db,
                json=json,
            )
        )
    )


@app.command()
def capacity(
    model: options.Model = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="2x24GB, 8xa100-80gb, local, ray, a preset as NAME:NODES, or a TOML file. [default: local]"
        ),
    ] = None,
    ray_address: options.RayToDescribe = None,
    ranks: options.EveryRank = None,
    sequence_length: options.AnyLength = None,
    memory_limit: options.MemoryLimit = None,
    host_memory: Annotated[
        int | None,
        typer.Option(parser=parse_bytes, metavar="BYTES", help="Main memory of a node. [default: from the cluster]"),
    ] = None,
    fit_probability: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Minimum probability that a configuration fits. [default: 0.95]")
    ] = None,
    pin: options.KnobValues = None,
    engine: options.NamedEngine = "native",
    lora_rank: options.LoraRank = None,
    lora_targets: options.LoraTargets = None,
    frozen_bits: options.FrozenBits = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Predict the ZeRO stage and offloading that a model needs, and the largest micro-batch and sequence that then fit."""
    from autotune.cli.capacity import CapacityOptions, capacity_command

    end(
        lambda: capacity_command(
            CapacityOptions(
                model=model,
                cluster=cluster,
                ray_address=ray_address,
                ranks=ranks,
                sequence_length=sequence_length,
                memory_limit=memory_limit,
                host_memory=host_memory,
                fit_probability=fit_probability,
                pins=tuple(pin or ()),
                engine=engine,
                lora_rank=lora_rank,
                lora_targets=lora_targets,
                frozen_bits=frozen_bits,
                database=db,
                json=json,
            )
        )
    )


@app.command()
def calibrate(
    cluster: options.Cluster = None,
    ranks: options.Ranks = None,
    runner: Annotated[str, typer.Option(metavar="NAME", help="ray or local.")] = "ray",
    ray_address: options.RayAddress = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="The engine whose predictions are shown.")] = "native",
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="Approximate duration of the measurement.")] = 20.0,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds after which it is killed.")] = 300.0,
    nvme_path: options.NvmePath = None,
    force: Annotated[bool, typer.Option("--force", help="Measure even if this cluster was measured before.")] = False,
    db: Database = None,
    json: Json = False,
) -> None:
    """Measure this cluster for predictions: matrix products, memory, collectives. The measurement is reused afterwards."""
    from autotune.cli.calibrate import calibrate_command

    end(
        lambda: calibrate_command(
            db,
            json,
            cluster=cluster,
            ranks=ranks,
            runner=runner,
            ray_address=ray_address,
            engine=engine,
            seconds=seconds,
            timeout=timeout,
            force=force,
            nvme_path=nvme_path,
        )
    )


@app.command("dry-run")
def dry_run(
    model: options.Model = None,
    cluster: Annotated[str, typer.Option(metavar="NAME", help="local, a preset as NAME:NODES, or a TOML file.")] = "local",
    ranks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks; default: 2 for local, else every device.")
    ] = None,
    pin: options.KnobValues = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Samples per optimizer step. [default: one micro-batch per replica]"),
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens per sample; default: the model's maximum, 128 for local.")
    ] = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="native.")] = "native",
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds after which it is killed.")] = 300.0,
    json: Json = False,
) -> None:
    """Compute memory, FLOPs and traffic of a configuration on any cluster, without its hardware; status 3: does not fit."""
    from autotune.cli.dry_run import DryRunOptions, dry_run_command

    end(
        lambda: dry_run_command(
            DryRunOptions(
                model=model,
                cluster=cluster,
                ranks=ranks,
                pins=tuple(pin or ()),
                engine=engine,
                global_batch_size=global_batch_size,
                sequence_length=sequence_length,
                timeout=timeout,
                json=json,
            )
        )
    )
