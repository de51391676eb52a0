"""What the loss of a user's module depends on besides its samples and weights."""

from enum import StrEnum


class LossTrait(StrEnum):
    """A property of a loss that decides what can be compared. The values are stored: never rename one."""

    PADDED = "padded"
    """A mean over targets, of which samples have different numbers."""
    SUM = "sum"
    """A sum over samples."""
    TOGETHER = "together"
    """Samples are computed together: in-batch negatives, or statistics of a batch."""
    RANDOM = "random"
    """Random numbers are drawn in forward, in evaluation mode too."""
    UNDIVIDED = "undivided"
    """The first dimension of the batch's entries is not the samples, so nothing is known of its divisions."""
    UNCHECKED = "unchecked"
    """The module does not run on the CPU in a few seconds, so nothing is known."""
    IRREPRODUCIBLE = "irreproducible"
    """The same seeds give different samples or losses."""
    DROPOUT = "dropout"
    """Random numbers are drawn in training mode only."""
    STATE = "state"
    """Parameters or buffers change in forward, in evaluation mode too, such as a teacher that follows the trained part."""
    BUFFERS = "buffers"
    """Buffers change in training mode, such as the statistics of BatchNorm."""
    TRAINS_ONLY = "trains_only"
    """There is no loss in evaluation mode."""

    @property
    def varies_with_size(self) -> bool:
        """Whether the loss of a step depends on its division into micro-batches."""
        return self in (LossTrait.PADDED, LossTrait.SUM, LossTrait.TOGETHER, LossTrait.RANDOM)

    @property
    def depends_on_layout(self) -> bool:
        """Whether losses of layouts that divide the module are not those of the module, though both are right."""
        return self in (LossTrait.RANDOM, LossTrait.TRAINS_ONLY, LossTrait.STATE)

    @property
    def note(self) -> str:
        """What a user should know before the first trial, in one line."""
        if self.varies_with_size:
            within = "configurations are compared within each micro_batch_size"
            return f"loss: depends on micro_batch_size ({_CAUSES[self]}); {within}; if it is meant so, --loss-depends-on-batch"
        return f"loss: {_NOTES[self]}"


_CAUSES = {
    LossTrait.PADDED: "a mean over targets, of which samples have different numbers: divide the sum by a fixed number "
    "of targets, or pin micro_batch_size",
    LossTrait.SUM: "a sum over samples: divide it by their number, or pin micro_batch_size",
    LossTrait.TOGETHER: "samples are computed together, such as in-batch negatives: pin micro_batch_size to the number that "
    "you train with",
    LossTrait.RANDOM: "random numbers in forward, which the first steps draw from the number of the micro-batch: draw them in "
    "`batch` from its generator",
}
_NOTES = {
    LossTrait.UNDIVIDED: "whether it depends on micro_batch_size is unknown, as the first dimension of the batch is not the "
    "samples; configurations are compared within each micro_batch_size, and pipelines are not possible",
    LossTrait.UNCHECKED: "whether it depends on micro_batch_size is unknown, as the module does not run on the CPU in a few "
    "seconds; configurations are compared within each micro_batch_size",
    LossTrait.IRREPRODUCIBLE: "the same seeds give different samples or losses, so that losses of configurations are not "
    "compared; use only the generator that `batch` gets, and no generator of your own in forward",
    LossTrait.DROPOUT: "dropout and other randomness of training is off in the first three steps, whose losses are compared",
    LossTrait.STATE: "parameters or buffers change in forward (such as a teacher that follows), on each rank by its own "
    "micro-batches: layouts with another number of data-parallel ranks train differently",
    LossTrait.BUFFERS: "buffers change in training (such as BatchNorm's statistics, which each rank takes of its own "
    "micro-batch): training depends on micro_batch_size, and the compared steps use the first buffers",
    LossTrait.TRAINS_ONLY: "there is none in evaluation mode, so the compared steps run in training mode with fixed seeds",
}
