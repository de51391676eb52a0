"""Who runs trials: `ray` (the real one), `local` (plain processes), `replay` (a table of measurements)."""
