"""The declarations of all knobs, a module for each family. `TrialConfig` is made of them."""
