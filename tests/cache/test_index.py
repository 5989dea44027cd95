import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.index import VectorIndex

DIMENSION = 8


def unit(seed):
    vector = np.random.default_rng(seed).standard_normal(DIMENSION).astype(np.float32)
    return vector / np.linalg.norm(vector)


def test_the_nearest_come_first():
    index = VectorIndex()
    for seed in range(50):
        index.add("p", str(seed), unit(seed))
    found = index.search("p", unit(7), top=4)
    assert len(found) == 4
    assert found[0] == ("7", pytest.approx(1.0, abs=1e-5))
    assert [similarity for _, similarity in found] == sorted((s for _, s in found), reverse=True)


def test_partitions_do_not_see_each_other():
    index = VectorIndex()
    index.add("p", "1", unit(1))
    assert index.search("q", unit(1)) == []


def test_a_row_cannot_be_added_twice():
    index = VectorIndex()
    index.add("p", "1", unit(1))
    with pytest.raises(ValueError, match="there already"):
        index.add("p", "1", unit(2))


def test_a_vector_of_another_dimension_is_refused():
    index = VectorIndex()
    index.add("p", "1", unit(1))
    other = np.ones(1, dtype=np.float32)
    with pytest.raises(ValueError, match="1 dimensions"):
        index.add("p", "2", other)
    with pytest.raises(ValueError, match="1 dimensions"):
        index.search("p", other)


def test_an_empty_partition_is_freed():
    index = VectorIndex()
    for seed in range(20):
        index.add("p", str(seed), unit(seed))
    for seed in range(20):
        index.remove("p", str(seed))
    assert index.num_partitions == 0
    assert len(index) == 0
    with pytest.raises(KeyError):
        index.remove("p", "1")


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("pq"), st.integers(0, 20)), max_size=120))
def test_any_series_of_changes_finds_what_brute_force_finds(changes):
    index, held = VectorIndex(), {}
    for is_add, partition, seed in changes:
        row = partition, str(seed)
        if is_add and row not in held:
            index.add(*row, unit(seed))
            held[row] = unit(seed)
        elif not is_add and row in held:
            index.remove(*row)
            del held[row]
    assert len(index) == len(held)
    assert index.num_partitions == len({partition for partition, _ in held})
    for partition in "pq":
        query = unit(99)
        expected = sorted((-float(v @ query), r) for (p, r), v in held.items() if p == partition)[
            :4
        ]
        found = index.search(partition, query, top=4)
        assert [row for row, _ in found] == [row for _, row in expected]
        assert np.allclose([s for _, s in found], [-s for s, _ in expected], atol=1e-5)
