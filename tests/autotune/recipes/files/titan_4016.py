def qwen35_122b_a10b():
    model_spec = model_registry("122B-A10B")
    return Trainer.Config(
        model_spec=model_spec,
        training=TrainingConfig(local_batch_size=4, seq_len=4096, steps=1000, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(data_parallel_shard_degree=-1, tensor_parallel_degree=4, expert_parallel_degree=8),
        activation_checkpoint=FullAC.Config(),
    )


def qwen35_397b_a17b():
    config = qwen35_122b_a10b()
    config.parallelism.tensor_parallel_degree = 8
    config.parallelism.expert_parallel_degree = 16
    return config


def deepseek_v3_671b():
    return Trainer.Config(
        training=TrainingConfig(local_batch_size=4, seq_len=4096, steps=10000, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(pipeline_parallel_schedule="Interleaved1F1B", expert_parallel_degree=2),
        activation_checkpoint=SelectiveAC.Config(),
    )
