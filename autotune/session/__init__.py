"""Resolution of a request: engine, space, baselines, strategy, runner."""
