"""The engines that run trials; `native` is our own sharded engine."""
