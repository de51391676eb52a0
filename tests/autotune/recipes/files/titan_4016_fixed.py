def deepseek_v3_671b():
    return Trainer.Config(
        training=TrainingConfig(local_batch_size=128, seq_len=4096, steps=10000, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=8,
            pipeline_parallel_schedule="Interleaved1F1B",
            pipeline_parallel_microbatch_size=1,
            pipeline_parallel_layers_per_stage=2,
            expert_parallel_degree=32,
        ),
        activation_checkpoint=SelectiveAC.Config(),
    )
