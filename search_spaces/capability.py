"""What an engine honours: declared by each engine in a file that does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from search_spaces.trial_config import TrialConfig, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """The values of each knob that an engine honours.

    A knob that is not named here is honoured at its default alone.
    """

    engine: str
    knobs: Mapping[str, tuple[Value, ...] | None]
    """Knob -> the values that are honoured; None: its whole domain."""

    def refusal(self, config: TrialConfig) -> str | None:
        """Why the engine refuses `config`, or None where it honours every knob's value."""
        default = TrialConfig()
        for name, value in config.values().items():
            honoured = self.knobs.get(name, (getattr(default, name),))
            if honoured is not None and value not in honoured:
                return f"the {self.engine} engine does not honour {name}={value} (it honours {_listed(honoured)})"
        return None


def _listed(values: tuple[Value, ...]) -> str:
    return ", ".join(str(value) for value in values)
