"""The contract of every store of the cold tier. A new one joins by its name in `STORES`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.cold import ColdStore, MemoryColdStore

P, Q = "a" * 64, "b" * 64
STORES = {"memory": lambda folder: MemoryColdStore()}


@pytest.fixture(params=STORES.values(), ids=STORES.keys())
def store(request, tmp_path) -> ColdStore:
    return request.param(tmp_path)


def test_what_was_put_is_read_back_to_the_byte(store):
    data = bytes(range(256)) * 10
    store.put(P, "1", data)
    assert store.get(P, "1") == data
    store.put(P, "2", b"")
    assert store.get(P, "2") == b""


def test_what_was_never_put_is_not_there(store):
    store.put(P, "1", b"x")
    assert store.get(P, "2") is None
    assert store.get(Q, "1") is None
    store.delete(P, "2")
    store.delete(Q, "1")
    assert store.get(P, "1") == b"x"


def test_a_second_record_takes_the_place_of_the_first(store):
    store.put(P, "1", b"old")
    store.put(P, "1", b"new")
    assert store.get(P, "1") == b"new"
    assert list(store.scan()) == [(P, "1", b"new")]


def test_a_deleted_record_is_gone(store):
    store.put(P, "1", b"x")
    store.delete(P, "1")
    assert store.get(P, "1") is None
    assert list(store.scan()) == []


def test_partitions_are_scanned_apart_and_together(store):
    store.put(P, "1", b"x")
    store.put(Q, "1", b"y")
    store.put(Q, "2", b"z")
    assert list(store.scan(P)) == [(P, "1", b"x")]
    assert sorted(store.scan(Q)) == [(Q, "1", b"y"), (Q, "2", b"z")]
    assert sorted(store.scan()) == [(P, "1", b"x"), (Q, "1", b"y"), (Q, "2", b"z")]
    assert list(store.scan("c" * 64)) == []


def test_a_scan_may_be_followed_by_changes_of_what_it_gave(store):
    for number in range(5):
        store.put(P, str(number), b"x")
    for partition, record_id, _ in store.scan():
        store.delete(partition, record_id)
    assert list(store.scan()) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "delete", "get"]),
            st.sampled_from([P, Q]),
            st.sampled_from("123"),
            st.binary(max_size=20),
        ),
        max_size=40,
    )
)
@pytest.mark.parametrize("make", STORES.values(), ids=STORES.keys())
def test_any_series_of_calls_matches_a_dictionary(make, tmp_path_factory, series):
    store, records = make(tmp_path_factory.mktemp("store")), {}
    for action, partition, record_id, data in series:
        if action == "put":
            store.put(partition, record_id, data)
            records[partition, record_id] = data
        elif action == "delete":
            store.delete(partition, record_id)
            records.pop((partition, record_id), None)
        else:
            assert store.get(partition, record_id) == records.get((partition, record_id))
    assert {(place, name): data for place, name, data in store.scan()} == records
