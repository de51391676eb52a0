"""What an engine honours: declared by each engine in a file that does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from search_spaces.trial_config import TrialConfig, Value

_DEFAULTS = TrialConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """The values of each knob that an engine honours, knob by knob.

    A knob that is not named here is honoured at its default alone.
    """

    engine: str
    knobs: Mapping[str, tuple[Value, ...] | None]
    """Knob -> the values that are honoured; None: its whole domain."""

    def honours(self, name: str, value: Value) -> bool:
        """Whether the engine does what this value of the knob says."""
        honoured = self._honoured(name)
        return honoured is None or value in honoured

    def refusal(self, config: TrialConfig) -> str | None:
        """Why the engine refuses `config`, or None where it honours every knob's value."""
        for name, value in config.values().items():
            honoured = self._honoured(name)
            if honoured is not None and value not in honoured:
                return f"the {self.engine} engine does not honour {name}={value} (it honours {_listed(honoured)})"
        return None

    def _honoured(self, name: str) -> tuple[Value, ...] | None:
        return self.knobs.get(name, (getattr(_DEFAULTS, name),))


def _listed(values: tuple[Value, ...]) -> str:
    return ", ".join(str(value) for value in values)
