"""The daemon's cycle collector: seldom, but not never."""

import gc

import pytest

from hoststage.server import app


@pytest.fixture
def collector():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_what_is_there_from_the_start_is_never_looked_at_and_cycles_are_still_freed(collector):
    app._tame_collector()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000
    first = app.COLLECTOR_THRESHOLDS[0]
    before = gc.get_stats()[0]["collections"]
    for _ in range(2 * first):
        cycle = []
        cycle.append(cycle)
    assert gc.get_stats()[0]["collections"] > before
    assert gc.get_count()[0] <= first
