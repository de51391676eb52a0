"""torch's fully_shard (FSDP2), a reference for the native engine at stages 2 and 3."""
