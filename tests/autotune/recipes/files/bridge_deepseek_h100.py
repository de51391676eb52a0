def deepseek_v3_pretrain_1024gpu_h100_bf16_config():
    cfg = deepseek_v3_pretrain_config()
    cfg.mixed_precision = bf16_mixed()
    cfg.model.seq_length = 4096
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = 8
    cfg.model.virtual_pipeline_model_parallel_size = 4
    cfg.model.expert_model_parallel_size = 64
    cfg.model.sequence_parallel = True
    cfg.model.recompute_granularity = "selective"
    cfg.model.recompute_modules = ["mla_up_proj", "mlp"]
    cfg.train.global_batch_size = 16384
    cfg.train.micro_batch_size = 1
    return cfg


def deepseek_v3_pretrain_64gpu_h100_bf16_config():
    cfg = deepseek_v3_pretrain_1024gpu_h100_bf16_config()
    cfg.train.global_batch_size = 1024
    return cfg
