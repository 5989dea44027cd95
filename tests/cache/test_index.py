import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache import buckets
from cache.index import VectorIndex

DIMENSION = 8
FLAT_ROWS = 24


def unit(seed, dimension=DIMENSION):
    vector = np.random.default_rng(seed).standard_normal(dimension).astype(np.float32)
    return vector / np.linalg.norm(vector)


def wordings(rng, num_topics, num_questions, num_each, dimension):
    """Unit rows as of sentences: topics, questions of each at cosine 0.5, wordings at 0.85 to 1."""

    def noise(*shape):
        vectors = rng.standard_normal((*shape, dimension))
        return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)

    questions = noise(num_topics, 1, 1) + noise(num_topics, num_questions, 1)
    questions /= np.linalg.norm(questions, axis=-1, keepdims=True)
    rows = questions + 0.4 * noise(num_topics, num_questions, num_each)
    rows = rows.reshape(-1, dimension).astype(np.float32)
    return rng.permutation(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def filled(rows, **options):
    index = VectorIndex(**options)
    for number, row in enumerate(rows):
        index.add("p", str(number), row)
    return index


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
    index = filled([unit(seed) for seed in range(200)], flat_rows=FLAT_ROWS)
    for row_id in ("1", "199"):
        with pytest.raises(ValueError, match="there already"):
            index.add("p", row_id, unit(2))
    assert len(index) == 200


def test_a_vector_of_another_dimension_is_refused():
    index = VectorIndex()
    index.add("p", "1", unit(1))
    other = np.ones(1, dtype=np.float32)
    with pytest.raises(ValueError, match="1 dimensions"):
        index.add("p", "2", other)
    with pytest.raises(ValueError, match="1 dimensions"):
        index.search("p", other)


@pytest.mark.parametrize("num_rows", [20, 300])
def test_an_empty_partition_is_freed(num_rows):
    index = filled([unit(seed) for seed in range(num_rows)], flat_rows=FLAT_ROWS)
    for number in range(num_rows):
        index.remove("p", str(number))
    assert index.num_partitions == len(index) == index.size_bytes == 0
    assert not index.maintain(1)
    with pytest.raises(KeyError):
        index.remove("p", "1")


def test_a_partition_is_removed_as_a_whole():
    index = filled([unit(seed) for seed in range(300)], flat_rows=FLAT_ROWS)
    index.add("q", "1", unit(1))
    assert index.remove_partition("p") == 300
    assert index.remove_partition("p") == 0
    assert index.search("p", unit(1)) == []
    assert (len(index), index.num_partitions) == (1, 1)
    assert not index.maintain(1)


class AnyChanges(RuleBasedStateMachine):
    """With as many probes as buckets every search is exact, whatever moves meanwhile."""

    @initialize(seed=st.integers(0, 5))
    def start(self, seed):
        self.probes = pytest.MonkeyPatch()
        self.probes.setattr(buckets, "NUM_PROBES", 1000)
        self.index = VectorIndex(flat_rows=FLAT_ROWS, seed=seed)
        self.held = {}
        self.next_id = 0

    @rule(partition=st.sampled_from("pq"), count=st.integers(1, 60), is_equal=st.booleans())
    def add(self, partition, count, is_equal):
        for _ in range(count):
            self.next_id += 1
            vector = unit(3 if is_equal else self.next_id)
            self.index.add(partition, str(self.next_id), vector)
            self.held[partition, str(self.next_id)] = vector

    @rule(data=st.data(), count=st.integers(1, 60))
    def remove(self, data, count):
        for _ in range(min(count, len(self.held))):
            row = data.draw(st.sampled_from(sorted(self.held)))
            self.index.remove(*row)
            del self.held[row]

    @rule(data=st.data())
    def add_again(self, data):
        if self.held:
            row = data.draw(st.sampled_from(sorted(self.held)))
            self.index.remove(*row)
            self.held[row] = unit(int(row[1]) + 5000)
            self.index.add(*row, self.held[row])

    @rule(partition=st.sampled_from("pq"))
    def remove_partition(self, partition):
        gone = [row for row in self.held if row[0] == partition]
        assert self.index.remove_partition(partition) == len(gone)
        for row in gone:
            del self.held[row]

    @rule(steps=st.integers(1, 20))
    def maintain(self, steps):
        ticks = iter(range(10_000))
        self.index.maintain(steps, clock=lambda: float(next(ticks)))

    @invariant()
    def finds_what_brute_force_finds(self):
        assert len(self.index) == len(self.held)
        assert self.index.num_partitions == len({partition for partition, _ in self.held})
        for partition in "pq":
            rows = {r: vector for (p, r), vector in self.held.items() if p == partition}
            query = unit(99)
            found = self.index.search(partition, query, top=4)
            expected = sorted((float(vector @ query) for vector in rows.values()), reverse=True)[:4]
            assert np.allclose([similarity for _, similarity in found], expected, atol=1e-5)
            assert len({row for row, _ in found}) == len(found)
            for row, similarity in found:
                assert similarity == pytest.approx(float(rows[row] @ query), abs=1e-5)

    def teardown(self):
        if hasattr(self, "probes"):
            self.probes.undo()


TestAnyChanges = AnyChanges.TestCase


def test_near_rows_are_found_among_many():
    rng = np.random.default_rng(0)
    rows = wordings(rng, 60, 25, 5, 384)
    index = filled(rows[1500:], flat_rows=1000)
    hits = total = 0
    for query in rows[:1500]:
        similarities = rows[1500:] @ query
        wanted = [row for row in np.argsort(-similarities)[:4] if similarities[row] >= 0.85]
        found = {row for row, _ in index.search("p", query, top=4)}
        total += len(wanted)
        hits += len(found & {str(row) for row in wanted})
    assert total > 1000
    assert hits / total >= 0.999


@given(st.integers(1, 12))
def test_rows_that_are_all_the_same_are_found_and_removed(num_kinds):
    rows = [unit(number % num_kinds) for number in range(400)]
    index = filled(rows, flat_rows=FLAT_ROWS)
    for kind in range(num_kinds):
        found = index.search("p", unit(kind), top=4)
        assert len(found) == 4
        assert all(similarity == pytest.approx(1.0, abs=1e-5) for _, similarity in found)
    for number in range(400):
        index.remove("p", str(number))
    assert len(index) == 0


def test_rows_can_be_found_in_every_moment_of_a_training():
    rows = [unit(seed) for seed in range(2000)]
    index = VectorIndex(flat_rows=FLAT_ROWS)
    for number, row in enumerate(rows):
        index.add("p", str(number), row)
        # The newest, one that has settled, and the oldest, which moved most often.
        for wanted in {number, number // 2, 0}:
            assert index.search("p", rows[wanted], top=1)[0][0] == str(wanted)


def test_a_partition_that_shrinks_is_searched_row_by_row_again():
    rows = [unit(seed) for seed in range(300)]
    index = filled(rows, flat_rows=FLAT_ROWS)
    for number in range(296):
        index.remove("p", str(number))
    while index.maintain(1):
        pass
    index.add("p", "0", rows[0])
    while index.maintain(1):
        pass
    assert index.size_bytes <= 4 * 8 * DIMENSION * 4
    assert {row for row, _ in index.search("p", unit(1), top=9)} == {
        "0",
        "296",
        "297",
        "298",
        "299",
    }


def test_maintenance_keeps_to_its_budget_and_comes_to_an_end():
    index = filled([unit(seed) for seed in range(FLAT_ROWS + 1)], flat_rows=FLAT_ROWS)
    ticks = iter(range(100_000))
    spent = 0
    while index.maintain(3, clock=lambda: float(next(ticks))):
        spent += 1
    assert 1 < spent < 100
    assert not index.maintain(3, clock=lambda: float(next(ticks)))


def test_matrices_hold_little_more_than_their_rows():
    rng = np.random.default_rng(0)
    rows = wordings(rng, 20, 25, 8, 64)
    index = filled(rows, flat_rows=500)
    assert index.size_bytes <= 1.75 * rows.nbytes
    for number in range(3500):
        index.remove("p", str(number))
    assert index.size_bytes <= 4 * rows[3500:].nbytes + 200 * 64 * 4
    # As many come and go as ever: nothing piles up.
    for number in range(4000, 12_000):
        index.add("p", str(number), rows[number % 4000])
        index.remove("p", str(number - 500))
    assert index.size_bytes <= 4 * rows[3500:].nbytes + 200 * 64 * 4


def test_the_same_seed_makes_the_same_index():
    rows = [unit(seed) for seed in range(400)]
    one, other = (filled(rows, flat_rows=FLAT_ROWS, seed=1) for _ in range(2))
    for seed in range(400, 500):
        assert one.search("p", unit(seed)) == other.search("p", unit(seed))
