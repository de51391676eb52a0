"""What a request resolves to: engine, space, baselines, strategy, runner."""
