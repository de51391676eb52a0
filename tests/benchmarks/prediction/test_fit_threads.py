"""The list of threads about memory, and some of them against `autotune fit`."""

from pathlib import Path

import pytest

from benchmarks.prediction.fit_threads import ENDS, read_threads, said_of

SOME = ("LlamaFactory/issues/5977", "LlamaFactory/issues/1158", "axolotl/pull/708")


def test_every_thread_has_an_address_an_end_and_words() -> None:
    threads, models = read_threads()
    assert len({thread.address for thread in threads}) == len(threads) >= 20
    for thread in threads:
        assert thread.address.startswith("https://")
        assert thread.asked and thread.ended and thread.checks
        for check in thread.checks:
            assert check.ends in ENDS
            assert "--on " in check.words and "--methods " in check.words
    assert set(models) <= {check.words.split()[0] for thread in threads for check in thread.checks}


@pytest.mark.prove
@pytest.mark.parametrize("name", SOME)
def test_the_answer_is_what_the_thread_ended_with(name: str, tmp_path: Path) -> None:
    threads, models = read_threads()
    thread = next(thread for thread in threads if thread.address.endswith(name))
    assert all(said_of(check, models, tmp_path).is_right for check in thread.checks)
