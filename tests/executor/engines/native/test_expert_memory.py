"""What a rank holds where ranks divide the experts, on four real ranks, against docs/closed-forms.md."""

import dataclasses
from collections.abc import Callable

import pytest
from closed_forms import BYTES, RANKS, SHORT, Layout

from search_spaces.trial import TrialResult

pytestmark = pytest.mark.nightly
"""`make oldest` runs these too."""

Count = Callable[..., TrialResult]

SPEC = dataclasses.replace(SHORT, num_experts=4, experts_per_token=2)
EXPERTS = SPEC.expert_parameters
COMMON = SPEC.parameter_count - EXPERTS
LARGEST = SPEC.vocab_size * SPEC.hidden_size
"""Elements of the largest parameter: the most that one gradient adds before it is moved into its bucket."""
COUNTERS = 2
"""Steps that AdamW counts: once for what is common, once for experts."""
UNIT = SPEC.layer_parameters


WHOLE = SPEC.num_layers * (SPEC.layer_norms * SPEC.hidden_size + SPEC.num_experts * SPEC.hidden_size) + SPEC.hidden_size
"""Elements of norms and routers, which every tensor rank has whole."""


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_whole_experts_are_sharded_over_tensor_ranks_too(count: Count, stage: int, ranks: int, sequence: bool) -> None:
    layout = Layout(
        SPEC, zero_stage=stage, tensor_parallel_size=2, sequence_parallel=sequence, expert_tensor_parallel_size=1,
        expert_parallel_size=ranks, micro_batch_size=2,
    )  # fmt: skip
    common, own = (COMMON - WHOLE) // 2 + WHOLE, EXPERTS // ranks
    share = common // 2 + EXPERTS // RANKS if stage else common + own
    moments = 2 if stage == 0 else 3
    for rank in count(layout, memory=True).ranks:
        peaks = rank.tag_peak_bytes
        assert peaks["optimizer_state"] == BYTES * (moments * share + COUNTERS)
        if stage < 3:
            assert peaks["parameters"] == BYTES * (common + own)
        held = common + own if stage < 2 else share
        beside = 2 * LARGEST + (0, share, UNIT, UNIT)[stage]
        assert BYTES * held <= peaks["gradients"] <= BYTES * (held + beside)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_its_share_of_what_is_common_and_of_its_own_experts(count: Count, stage: int, ranks: int) -> None:
    layout = Layout(SPEC, zero_stage=stage, expert_parallel_size=ranks, micro_batch_size=2)
    own = COMMON + EXPERTS // ranks
    # So many hold the same experts, and divide them: of everything together each rank has its part of all.
    share = (COMMON + EXPERTS) // RANKS if stage else own
    moments = 2 if stage == 0 else 3  # at stage 0 the parameters are the master
    for rank in count(layout, memory=True).ranks:
        peaks = rank.tag_peak_bytes
        assert peaks["optimizer_state"] == BYTES * (moments * share + COUNTERS)
        if stage < 3:
            assert peaks["parameters"] == BYTES * own
        else:
            gathered = UNIT - EXPERTS // SPEC.num_layers * (ranks - 1) // ranks
            assert 0 < peaks["parameters"] <= BYTES * (gathered + LARGEST + SPEC.hidden_size)
        held = own if stage < 2 else share
        # Beside them gradients that wait to be moved, of what is common and of experts; what is reduced, at stage 1; those of
        # the block that runs, from 2 on.
        beside = 2 * LARGEST + (0, share, UNIT, UNIT)[stage]
        assert BYTES * held <= peaks["gradients"] <= BYTES * (held + beside)


def test_a_rank_keeps_the_rows_that_its_experts_get(count: Count) -> None:
    """Of a row in fp32 its input, and of the hidden layer the gate, the activated gate, the other part and their product."""
    knobs = {"zero_stage": 1, "expert_parallel_size": 2, "micro_batch_size": 2}
    even, uneven = (
        count(Layout(dataclasses.replace(SPEC, expert_loads=(loads,)), **knobs), memory=True).ranks
        for loads in ((1.0, 1.0, 1.0, 1.0), (2.0, 2.0, 1.0, 1.0))
    )
    # Two ranks exchange the rows of two samples each; of each row of choices a third is two experts', not a half.
    choices = 2 * 2 * SPEC.sequence_length * SPEC.experts_per_token
    rows = choices * (2 / 3 - 1 / 2)
    kept = SPEC.num_layers * rows * BYTES * (SPEC.hidden_size + 4 * SPEC.ffn_hidden_size)
    for rank, (plain, loaded) in enumerate(zip(even, uneven, strict=True)):
        more = loaded.tag_peak_bytes["activations"] - plain.tag_peak_bytes["activations"]
        assert more == pytest.approx(kept if rank % 2 == 0 else -kept, rel=0.15)
