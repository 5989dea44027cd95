"""The contract of every store of the cold tier. A new one joins by its name in `STORES`."""

import itertools
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.cold import ColdStore, MemoryColdStore
from cache.cold_redis import redis_store
from cache.cold_sqlite import sqlite_store

P, Q = "a" * 64, "b" * 64
numbers = itertools.count()


class ClosedMemoryStore(MemoryColdStore):
    def close(self):
        pass


def a_redis_store(request, folder):
    url = request.getfixturevalue("redis_url")
    return redis_store(url, name=f"contract-{next(numbers)}", timeout_s=5.0)


STORES = {
    "memory": lambda request, folder: ClosedMemoryStore(),
    "sqlite": lambda request, folder: sqlite_store(
        folder / f"{next(numbers)}.sqlite3", max_bytes=2**24
    ),
    "redis": a_redis_store,
}


@pytest.fixture(params=STORES.values(), ids=STORES.keys())
def store(request, tmp_path) -> ColdStore:
    with closing(request.param(request, tmp_path)) as store:
        yield store


@pytest.fixture(params=["waiting", "written"])
def settle(request, store):
    """What is read must not depend on whether it was written yet."""
    return getattr(store, "flush", lambda: True) if request.param == "written" else lambda: True


def test_what_was_put_is_read_back_to_the_byte(store, settle):
    data = bytes(range(256)) * 10
    store.put(P, "1", data)
    settle()
    assert store.get(P, "1") == data
    store.put(P, "2", b"")
    assert store.get(P, "2") == b""


def test_what_was_never_put_is_not_there(store, settle):
    store.put(P, "1", b"x")
    settle()
    assert store.get(P, "2") is None
    assert store.get(Q, "1") is None
    store.delete(P, "2")
    store.delete(Q, "1")
    assert store.get(P, "1") == b"x"


def test_a_second_record_takes_the_place_of_the_first(store, settle):
    store.put(P, "1", b"old")
    settle()
    store.put(P, "1", b"new")
    assert store.get(P, "1") == b"new"
    assert list(store.scan()) == [(P, "1", b"new")]


def test_a_deleted_record_is_gone(store, settle):
    store.put(P, "1", b"x")
    settle()
    store.delete(P, "1")
    assert store.get(P, "1") is None
    settle()
    assert store.get(P, "1") is None
    assert list(store.scan()) == []


def test_partitions_are_scanned_apart_and_together(store, settle):
    store.put(P, "1", b"x")
    store.put(Q, "1", b"y")
    store.put(Q, "2", b"z")
    settle()
    assert list(store.scan(P)) == [(P, "1", b"x")]
    assert sorted(store.scan(Q)) == [(Q, "1", b"y"), (Q, "2", b"z")]
    assert sorted(store.scan()) == [(P, "1", b"x"), (Q, "1", b"y"), (Q, "2", b"z")]
    assert list(store.scan("c" * 64)) == []


def test_a_scan_may_be_followed_by_changes_of_what_it_gave(store, settle):
    for number in range(5):
        store.put(P, str(number), b"x")
    settle()
    for partition, record_id, _ in store.scan():
        store.delete(partition, record_id)
    assert list(store.scan()) == []


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "delete", "get", "flush"]),
            st.sampled_from([P, Q]),
            st.sampled_from("123"),
            st.binary(max_size=20),
        ),
        max_size=40,
    )
)
@pytest.mark.parametrize("make", STORES.values(), ids=STORES.keys())
def test_any_series_of_calls_matches_a_dictionary(request, make, tmp_path_factory, series):
    records = {}
    with closing(make(request, tmp_path_factory.mktemp("store"))) as store:
        for action, partition, record_id, data in series:
            if action == "put":
                store.put(partition, record_id, data)
                records[partition, record_id] = data
            elif action == "delete":
                store.delete(partition, record_id)
                records.pop((partition, record_id), None)
            elif action == "flush":
                getattr(store, "flush", lambda: True)()
            else:
                assert store.get(partition, record_id) == records.get((partition, record_id))
        assert {(place, name): data for place, name, data in store.scan()} == records
