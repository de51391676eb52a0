"""The runners of trials: `ray` (for clusters), `local` (plain processes), `replay` (a table of measurements)."""
