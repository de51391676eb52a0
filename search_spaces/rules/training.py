"""Rules of adapters, virtual tokens, attention windows and multi-token prediction."""

from search_spaces.context import SpaceContext
from search_spaces.knobs.conditions import METHODS, VIRTUAL_TOKENS
from search_spaces.models.command import CommandModel
from search_spaces.rules.rule import Rule
from search_spaces.training import adapters, token_prediction
from search_spaces.training.windows import window_problem
from search_spaces.trial_config import TrialConfig

WINDOW, MODULES, BIAS = "attention_window", "mtp_layers", "router_bias_update_rate"
SCHEDULES = ("curriculum_start_length", "random_ltd_start_tokens")


def _attention_window(config: TrialConfig, context: SpaceContext) -> str | None:
    return window_problem(config, context.model, context.workload.sequence_length)


def _adapters(config: TrialConfig, context: SpaceContext) -> str | None:
    return adapters.adapters_problem(config, context.model)


def _adapters_together(config: TrialConfig, context: SpaceContext) -> str | None:
    return None if isinstance(context.model, CommandModel) else adapters.together_problem(config)


def _virtual_tokens(config: TrialConfig, context: SpaceContext) -> str | None:
    if isinstance(context.model, CommandModel):
        return None
    return adapters.tokens_problem(config, context.workload.sequence_length)


def _prediction(config: TrialConfig, context: SpaceContext) -> str | None:
    return token_prediction.prediction_problem(config, context.model)


def _prediction_together(config: TrialConfig, context: SpaceContext) -> str | None:
    return None if isinstance(context.model, CommandModel) else token_prediction.together_problem(config)


def _router_bias_padding(config: TrialConfig, context: SpaceContext) -> str | None:
    if not config.router_bias_update_rate or not context.workload.document_lengths:
        return None
    return "loads of experts, which the biases of routers follow, would count the padding of documents"


TRAINING_RULES: tuple[Rule, ...] = (
    Rule("adapters", (*METHODS, "lora_targets"), adapters.ADAPTERS_REMEDY, _adapters),
    Rule("adapters-together", METHODS, adapters.TOGETHER_REMEDY, _adapters_together),
    Rule("virtual-tokens", VIRTUAL_TOKENS, adapters.TOKENS_REMEDY, _virtual_tokens),
    Rule("attention-window", (WINDOW, "attention_global_tokens"), "lower them, or set attention_window=0", _attention_window),
    Rule("mtp-model", (MODULES,), token_prediction.MODEL_REMEDY, _prediction),
    Rule(
        "router-bias-padding", (BIAS,), f"set {BIAS}=0, or train on whole samples (no document_lengths)", _router_bias_padding
    ),
    Rule("mtp-together", (MODULES, *METHODS, *SCHEDULES), token_prediction.TOGETHER_REMEDY, _prediction_together),
)
