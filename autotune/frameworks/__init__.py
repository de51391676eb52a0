"""Configuration files of other frameworks, and of ours: read as knobs, written, and checked."""
