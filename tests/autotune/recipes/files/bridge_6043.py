def nemotron_3_super_pretrain_64gpu_b200_bf16_config():
    cfg = nemotron_3_super_pretrain_config()
    cfg.model.tensor_model_parallel_size = 1
    cfg.model.pipeline_model_parallel_size = 1
    cfg.model.expert_tensor_parallel_size = 1
    cfg.model.expert_model_parallel_size = 64
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 1
    cfg.model.moe_flex_dispatcher_backend = "hybridep"
    cfg.model.moe_token_dispatcher_type = "flex"
    cfg.env_vars = {**COMMON, "NVLINK_DOMAIN_SIZE": 8}
    return cfg
