import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.answer import StoredAnswer
from cache.entries import Entry, decode_entry, encode_entry, from_record, to_record
from cache.key import make_key

VECTOR = np.array([0.6, 0.8], dtype=np.float32)


def entry_of(text="What?", payload=b"\x00\xff", *, vector=VECTOR, tags=("t",)):
    key = make_key({"tenant": "a"}, text, max_tokens=7, allow_semantic=True)
    return Entry(key, StoredAnswer(payload, 3, "r1"), 12.5, vector, "m", tags, hits=2)


def same(one, other):
    assert (one.key, one.answer, one.model, one.tags, one.hits) == (
        other.key, other.answer, other.model, other.tags, other.hits,
    )  # fmt: skip
    assert (one.vector is None) == (other.vector is None)
    assert one.vector is None or np.array_equal(one.vector, other.vector)


@given(st.text(), st.binary(), st.booleans())
def test_an_entry_comes_back_from_its_bytes(text, payload, has_vector):
    entry = entry_of(text, payload, vector=VECTOR if has_vector else None)
    again = decode_entry(encode_entry(entry))
    same(entry, again)
    assert again.created == 12.5


@given(st.data())
def test_damaged_bytes_are_never_an_entry(data):
    whole = encode_entry(entry_of())
    place = data.draw(st.integers(0, len(whole) - 1))
    bit = data.draw(st.integers(0, 7))
    damaged = bytearray(whole)
    damaged[place] ^= 1 << bit
    for rubbish in (bytes(damaged), whole[:place]):
        with pytest.raises(ValueError, match="record"):
            decode_entry(rubbish)


def test_a_record_keeps_its_age_on_another_clock():
    entry = entry_of()
    again = from_record(to_record(entry, now=20.0), now=1000.0)
    same(entry, again)
    assert again.created == 992.5


def test_a_record_from_the_future_is_new():
    record = {**to_record(entry_of(), now=20.0), "age_s": -50.0}
    assert from_record(record, now=1000.0).created == 1000.0


@pytest.mark.parametrize("change", [{"age_s": None}, {"payload": None}, {"hits": None}])
def test_a_record_that_lacks_something_is_refused(change):
    with pytest.raises(ValueError, match="not a record"):
        from_record({**to_record(entry_of(), now=20.0), **change}, now=0.0)


def test_an_id_is_short_and_the_same_for_an_equal_question():
    assert entry_of().id == entry_of(payload=b"other").id
    assert entry_of().id != entry_of("Who?").id
    assert len(entry_of().id) == 16
