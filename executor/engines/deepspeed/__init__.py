"""The deepspeed engine (extra `deepspeed`): ZeRO 0-3, offload, AutoTP and pipeline module of DeepSpeed, in warm ranks."""
