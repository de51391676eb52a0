"""What trials find in their environment."""

import pytest
from runner_contract import ENVIRONMENT, TRIAL_FUNCTION, run

from executor.runners.local import LocalRunner
from executor.runners.rank_process import PASSED_VARIABLE, for_trials, is_listed, passed_variables
from search_spaces.environment import VARIABLES


@pytest.mark.parametrize(
    "name",
    ["AUTOTUNE_DB", "AUTOTUNE_API_KEY", "AUTOTUNE_SERVER", "PGPASSWORD", "AWS_ACCESS_KEY_ID", "HF_TOKEN", "WANDB_API_KEY",
     "RAY_AUTH_TOKEN", "TORCH_SECRET", "SLURM_JWT", "SLURM_JWT_AUTH", "KUBERNETES_SERVICE_HOST", "OTEL_EXPORTER_OTLP_HEADERS",
     "path"],
)  # fmt: skip
def test_what_is_not_listed(name: str) -> None:
    assert not is_listed(name)


@pytest.mark.parametrize(
    "name", ["PATH", "HOME", "LC_ALL", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "HF_HOME", "https_proxy",
             "TOKENIZERS_PARALLELISM", "PYTHONPATH", *VARIABLES],
)  # fmt: skip
def test_what_is(name: str) -> None:
    assert is_listed(name)


def test_further_names_are_passed_where_they_are_set() -> None:
    environment = {"PATH": "/bin", "MINE": "1", "OTHER": "2", PASSED_VARIABLE: "MINE NOT_SET"}
    assert for_trials(environment) == {"PATH": "/bin", "MINE": "1"}
    assert passed_variables(environment) == {"MINE": "1"}


@pytest.mark.prove
def test_a_named_variable_reaches_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSED_VARIABLE, "MINE")
    with LocalRunner(1, environment=ENVIRONMENT, trial_function=TRIAL_FUNCTION, device="cpu") as runner:
        assert run(runner, world_size=1).environment["secrets"] == "MINE"
