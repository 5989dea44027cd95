from hypothesis import given
from hypothesis import strategies as st

from cache.expiry import ExpiryQueue


def test_keys_fall_due_in_the_order_of_their_deadlines():
    queue = ExpiryQueue()
    for key, deadline in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        queue.add(key, deadline)
    assert queue.take_due(0.5) == []
    assert queue.take_due(2.0) == ["b", "c"]
    assert len(queue) == 1


def test_a_removed_key_never_falls_due():
    queue = ExpiryQueue()
    queue.add("a", 1.0)
    queue.remove("a")
    assert queue.take_due(9.0) == []


def test_a_later_deadline_replaces_the_earlier_one():
    queue = ExpiryQueue()
    queue.add("a", 1.0)
    queue.add("a", 5.0)
    assert queue.take_due(2.0) == []
    assert queue.take_due(5.0) == ["a"]


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "take"]), st.integers(0, 8),
                          st.integers(0, 50)), max_size=300))  # fmt: skip
def test_any_series_of_changes_matches_a_dictionary(changes):
    queue, deadlines = ExpiryQueue(), {}
    for action, key, time in changes:
        if action == "add":
            queue.add(str(key), time)
            deadlines[str(key)] = time
        elif action == "remove" and str(key) in deadlines:
            queue.remove(str(key))
            del deadlines[str(key)]
        elif action == "take":
            due = {name for name, deadline in deadlines.items() if deadline <= time}
            assert set(queue.take_due(time)) == due
            for name in due:
                del deadlines[name]
        assert len(queue) == len(deadlines)
