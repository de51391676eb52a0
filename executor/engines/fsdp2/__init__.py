"""torch's fully_shard (FSDP2), to hold the native engine against at stages 2 and 3."""
