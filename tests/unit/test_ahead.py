"""Objects are read ahead, and come in order."""

import threading

import pytest

from siltstone.errors import CorruptObject
from siltstone.store.ahead import AT_ONCE, read_ahead


@pytest.mark.parametrize("items", [0, 1, 2, AT_ONCE, 5 * AT_ONCE])
def test_results_come_in_the_order_of_the_items(items: int) -> None:
    assert list(read_ahead(str, range(items))) == list(map(str, range(items)))


def test_as_many_are_read_at_once_as_may_be() -> None:
    together = threading.Barrier(AT_ONCE, timeout=30)

    def read(item: int) -> int:
        together.wait()
        return item

    assert list(read_ahead(read, range(2 * AT_ONCE))) == list(range(2 * AT_ONCE))


def test_an_error_comes_in_place_of_its_result_and_no_further_one_is_read() -> None:
    begun = []

    def read(item: int) -> int:
        begun.append(item)
        if item == 2:
            raise CorruptObject("damaged")
        return item

    found = read_ahead(read, range(10 * AT_ONCE))
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(CorruptObject, match="damaged"):
        next(found)
    assert len(begun) <= 2 + 1 + AT_ONCE


def test_no_more_are_read_than_are_used_and_those_ahead() -> None:
    begun = []
    found = read_ahead(begun.append, range(10 * AT_ONCE))
    next(found)
    found.close()
    assert len(begun) <= 1 + AT_ONCE


def test_what_is_still_read_is_not_waited_for_in_the_end() -> None:
    answered = threading.Event()
    found = read_ahead(lambda item: item == 0 or answered.wait(60), range(3))
    assert next(found)
    closing = threading.Thread(target=found.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive() and not answered.is_set()
    answered.set()
