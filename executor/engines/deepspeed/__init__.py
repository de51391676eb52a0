"""DeepSpeed itself (extra `deepspeed`): its ZeRO 0-3, offload, AutoTP and pipeline module, in warm ranks."""
