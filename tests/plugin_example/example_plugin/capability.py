"""What the example's engine honours. Imports no torch."""

from search_spaces.capability import Capability, honoured_by

EXAMPLE = Capability(engine="example", knobs=honoured_by("example") | {"micro_batch_size": None, "zero_stage": (0,)})
