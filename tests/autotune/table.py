"""A table of measurements that a function makes: what the loop tests run on instead of ranks."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.request.request import JobRequest
from autotune.session.resolve import prepare
from autotune.session.session import Session
from executor.runners.replay import ReplayRunner
from search_spaces.outcome import Outcome
from search_spaces.trial import Interval, RankMeasurement, TrialRequest, TrialResult
from search_spaces.trial_config import TrialConfig

MODEL_CONFIG = """{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64,
"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,
"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false,
"hidden_act": "silu"}"""


def request(folder: Path, **changes: Any) -> JobRequest:
    """A small request whose model file lies in `folder`."""
    path = folder / "config.json"
    path.write_text(MODEL_CONFIG)
    fields: dict[str, Any] = {
        "model": str(path),
        "global_batch_size": 8,
        "sequence_length": 64,
        "trials": 6,
        "strategy": "random",
    }
    return JobRequest(**fields | changes)


def session(folder: Path, **changes: Any) -> Session:
    """What `prepare` makes of `request`."""
    return prepare(request(folder, **changes))


def measured(config: TrialConfig) -> TrialResult:
    """Larger micro-batches are faster and take more memory; higher stages are slower and take less."""
    rate = 100.0 * (1.0 + 0.3 * math.log2(config.micro_batch_size)) * (1.0 - 0.05 * config.zero_stage)
    memory = 1_000_000 * config.micro_batch_size + 4_000_000 // (1 + config.zero_stage)
    if config.activation_checkpointing == "full":
        rate, memory = rate * 0.75, memory - 400_000
    return ok(rate, memory)


def ok(rate: float, memory: int = 1_000_000, **changes: Any) -> TrialResult:
    """A measured result."""
    fields: dict[str, Any] = {
        "attempt": "",
        "outcome": Outcome.OK,
        "losses": (5.0, 4.5),
        "step_seconds": (8.0 / rate,) * 5,
        "samples_per_second": Interval(mean=rate, low=rate, high=rate),
        "within_relative_error": 0.005,
        "peak_memory_bytes": memory,
        "ranks": tuple(rank(number, memory) for number in range(2)),
        "tflops_per_device": 0.01,
        "mfu": 0.1,
        "hardware_tflops_per_device": 0.012,
        "hfu": 0.12,
        "environment": {"torch": "2"},
    }
    return TrialResult(**fields | changes)


def rank(number: int, memory: int) -> RankMeasurement:
    """One rank's share of a result."""
    return RankMeasurement(
        rank=number,
        host="host",
        peak_memory_bytes=memory,
        memory_by_tag={"parameters": memory // 2, "activations": memory - memory // 2},
        tag_peak_bytes={"parameters": memory // 2, "activations": memory - memory // 2},
        rss_peak_bytes=memory * 2,
        cpu_seconds_per_step=0.1,
        collectives=(),
    )


def ended(outcome: Outcome, message: str = "") -> TrialResult:
    """A result without a measurement."""
    return TrialResult(attempt="", outcome=outcome, message=message)


def runner(answer: Any = measured, **changes: Any) -> ReplayRunner:
    """A runner that answers at once."""
    return ReplayRunner(answer, **changes)


def answers(*results: TrialResult) -> Callable[[TrialConfig], TrialResult]:
    """The first results in turn, then the table's."""
    left = list(results)
    return lambda config: left.pop(0) if left else measured(config)


class Recorded(ReplayRunner):
    """Answers at once, and keeps every request."""

    def __init__(self, answer: Any = measured, **changes: Any) -> None:
        super().__init__(answer, **changes)
        self.requests: list[TrialRequest] = []

    def submit(self, request: TrialRequest) -> str:
        self.requests.append(request)
        return super().submit(request)
