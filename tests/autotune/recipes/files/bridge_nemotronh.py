def nemotronh_56b_pretrain_64gpu_b200_fp8cs_config():
    cfg = nemotronh_56b_pretrain_config()
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = 1
    cfg.model.sequence_parallel = True
    cfg.train.global_batch_size = 192
    cfg.train.micro_batch_size = 1
    return cfg


def nemotronh_56b_pretrain_256gpu_b200_bf16_config():
    cfg = nemotronh_56b_pretrain_64gpu_b200_fp8cs_config()
    cfg.mixed_precision = bf16_mixed()
    return cfg
