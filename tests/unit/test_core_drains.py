"""The queue of commits for the store: order within a session, fairness between sessions, retries."""

from __future__ import annotations

from hoststage.core.commits import Commit, CommitPage, CommitState, DrainPolicy, DrainQueue
from hoststage.core.effects import Written


def commit(session: int, name: int, pages: int = 1) -> Commit:
    listed = [CommitPage(0, bytes([name]) + i.to_bytes(2, "big"), i) for i in range(pages)]
    return Commit(bytes([session, name]), session, "space", name, listed, b"", 0, 0.0, 30.0)


def queue(max_pages: int = 1) -> DrainQueue:
    return DrainQueue(DrainPolicy(max_pages=max_pages))


def end(drains: DrainQueue, ended: Commit, outcome: Written = Written.STORED) -> None:
    drains.ended(ended, [outcome] * len(ended.unstored))


def names(commits: list[Commit]) -> list[tuple[int, int]]:
    return [(c.session, c.request_id) for c in commits]


def run_out(drains: DrainQueue, now: float = 0.0) -> list[tuple[int, int]]:
    """Store everything, one after the other; return the order."""
    out = []
    while started := drains.start(now):
        for each in started:
            end(drains, each)
        out += names(started)
    return out


def test_commits_of_a_session_are_stored_in_their_order() -> None:
    drains = queue()
    for n in range(5):
        drains.add(commit(1, n))
    assert run_out(drains) == [(1, n) for n in range(5)]
    assert drains.pages_in_flight == 0


def test_no_more_starts_while_the_cap_of_pages_is_reached() -> None:
    drains = queue(max_pages=4)
    for n in range(4):
        drains.add(commit(1, n, pages=3))
    started = drains.start(0)
    assert names(started) == [(1, 0), (1, 1)]
    assert drains.start(0) == []
    end(drains, started[0])
    assert names(drains.start(0)) == [(1, 2)]


def test_a_session_with_few_pages_is_not_stuck_behind_one_with_many() -> None:
    drains = queue()
    for n in range(20):
        drains.add(commit(1, n, pages=32))
    drains.add(commit(2, 0, pages=1))
    assert run_out(drains).index((2, 0)) <= 2


def test_sessions_share_by_pages_and_not_by_commits() -> None:
    drains = queue()
    for n in range(40):
        drains.add(commit(1, n, pages=64))
        drains.add(commit(2, n, pages=4))
    order = run_out(drains)
    small_done = order.index((2, 39))
    pages_of_large = sum(64 for session, _ in order[:small_done] if session == 1)
    assert 64 <= pages_of_large <= 40 * 4 + 2 * 64


def test_a_commit_larger_than_every_quantum_still_starts() -> None:
    drains = queue()
    drains.add(commit(1, 0, pages=1000))
    drains.add(commit(2, 0, pages=1))
    assert set(run_out(drains)) == {(1, 0), (2, 0)}


def test_retries_keep_the_order_in_which_their_session_committed() -> None:
    drains = queue(max_pages=100)
    commits = [commit(1, n) for n in range(5)]
    for each in commits[:3]:
        drains.add(each)
    assert len(drains.start(0)) == 3
    for each, at in zip(commits, (1.0, 1.2, 1.1), strict=False):
        end(drains, each, Written.FAILED)
        drains.retry(each, at)
    drains.add(commits[3])
    drains.add(commits[4])
    assert drains.waiting == 3
    assert drains.next_retry == 1.0
    assert run_out(drains, now=2.0) == [(1, n) for n in range(5)]
    assert drains.waiting == 0


def test_a_retry_does_not_start_before_its_time() -> None:
    drains = queue()
    only = commit(1, 0)
    drains.add(only)
    drains.start(0)
    end(drains, only, Written.FAILED)
    drains.retry(only, 5.0)
    assert only.state is CommitState.WAITING
    assert drains.start(4.9) == []
    assert drains.start(5.0) == [only]


def test_pages_that_were_acknowledged_are_not_written_again() -> None:
    drains = queue(max_pages=10)
    mixed = commit(1, 0, pages=3)
    drains.add(mixed)
    drains.start(0)
    drains.ended(mixed, [Written.STORED, Written.FULL, Written.STORED])
    assert [p.key for p in mixed.unstored] == [bytes([0, 0, 1])]
    assert drains.pages_in_flight == 0
    drains.retry(mixed, 1.0)
    drains.start(1.0)
    assert drains.pages_in_flight == 1


def test_waiting_commits_can_be_taken_out_wherever_they_wait() -> None:
    drains = queue(max_pages=2)
    commits = [commit(1, n) for n in range(4)]
    for each in commits:
        drains.add(each)
    first, second = drains.start(0)
    for each in (first, second):
        end(drains, each, Written.FAILED)
        drains.retry(each, 1.0)
    drains.remove([first, commits[2]])
    assert list(drains.queued()) == [commits[3], second]
    assert run_out(drains, now=2.0) == [(1, 1), (1, 3)]


def test_backoff_doubles_up_to_its_bound() -> None:
    policy = DrainPolicy(retry_first=0.1, retry_most=1.0)
    assert [round(policy.backoff(n), 3) for n in (1, 2, 3, 4, 5, 10_000)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
