"""The declarations of all knobs, one module per family. `TrialConfig` combines them."""
