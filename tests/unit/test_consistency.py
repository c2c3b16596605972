"""Requests for a checkpoint at once: what answers them."""

import threading

from siltstone.run.consistency import ConsistencyRequests, DrainResult

LIMIT_S = 20.0


def test_a_request_is_answered_by_the_first_checkpoint_prepared_after_it() -> None:
    requests = ConsistencyRequests()
    requests.note_prepared(1)
    request = requests.add()
    assert requests.is_waiting and request.wait(until_complete=False, timeout_s=0) is None
    requests.note_completed(1)
    assert request.result is None
    requests.note_prepared(2)
    assert not requests.is_waiting
    assert request.wait(until_complete=False) is DrainResult.CHECKPOINT_PENDING
    assert request.wait(until_complete=True, timeout_s=0) is DrainResult.CHECKPOINT_PENDING
    requests.note_completed(2)
    assert request.wait(until_complete=True) is DrainResult.COMPLETED


def test_who_waits_is_woken() -> None:
    requests, found = ConsistencyRequests(), list[DrainResult | None]()
    request = requests.add()
    waiting = threading.Thread(target=lambda: found.append(request.wait(until_complete=True, timeout_s=LIMIT_S)))
    waiting.start()
    requests.note_prepared(1)
    requests.note_completed(1)
    waiting.join(LIMIT_S)
    assert found == [DrainResult.COMPLETED]


def test_a_reset_fails_what_was_asked_before_and_an_end_all_that_is_asked_after() -> None:
    requests = ConsistencyRequests()
    prepared = requests.add()
    requests.note_prepared(1)
    waiting = requests.add()
    requests.note_failed()
    assert prepared.result is waiting.result is DrainResult.FAILED and not requests.is_waiting
    later = requests.add()
    requests.note_prepared(1)
    requests.note_completed(1)
    assert later.result is DrainResult.COMPLETED
    requests.note_failed(ended=True)
    assert requests.add().result is DrainResult.FAILED


def test_where_all_is_complete_already_there_is_nothing_to_do() -> None:
    requests = ConsistencyRequests()
    request = requests.add()
    requests.note_caught_up()
    assert request.result is DrainResult.COMPLETED and not requests.is_waiting
