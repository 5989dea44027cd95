import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.key import make_key, normalise, partition_digest

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip

TENANTS = [
    "red", "blue", "red|blue", "re*", "red} @x:{blue", "Red", "red ", " red", "red\0", "réd",
    "re\u0301d", "team:eu/1", "HuggingFaceTB/SmolLM2-135M-Instruct", '","model":"m',
]  # fmt: skip


def key_of(text="hello", **parts):
    return make_key(
        {"tenant": "a", "model": "m", **parts}, text, max_tokens=None, allow_semantic=True
    )


def test_every_tenant_name_has_its_own_partition():
    assert len({key_of(tenant=tenant).partition for tenant in TENANTS}) == len(TENANTS)
    assert len({key_of(tenant=tenant).exact for tenant in TENANTS}) == len(TENANTS)


def test_a_text_cannot_imitate_another_partition():
    one, other = key_of("x"), key_of("y", system="s")
    assert key_of(other.partition + "y").exact != other.exact
    assert key_of(one.partition + "x").exact != one.exact


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"n": 1}, {"n": 1.0}),
        ({"n": 0.0}, {"n": -0.0}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"stop": ("a", "b")}, {"stop": ["a", "b"]}),
    ],
)
def test_equal_values_make_equal_partitions(a, b):
    assert partition_digest(a) == partition_digest(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"n": 1}, {"n": True}),
        ({"n": 0}, {"n": False}),
        ({"n": 0}, {"n": None}),
        ({"n": None}, {}),
        ({"n": 1}, {"n": "1"}),
        ({"n": 2**53 + 1}, {"n": float(2**53)}),
        ({"n": 0.1}, {"n": math.nextafter(0.1, 1)}),
        ({"stop": ["a", "b"]}, {"stop": ["b", "a"]}),
        ({"stop": ["ab"]}, {"stop": ["a", "b"]}),
        ({"system": "You are a pirate."}, {"system": "You are a pirate. "}),
        ({"system": "caf\u00e9"}, {"system": "cafe\u0301"}),
        ({"system": "\ud800\udc00"}, {"system": "\U00010000"}),
        ({"a": {"b": 1}}, {"a": {}, "b": 1}),
    ],
)
def test_different_values_make_different_partitions(a, b):
    assert partition_digest(a) != partition_digest(b)


@given(json_values, json_values)
def test_partitions_are_equal_exactly_when_the_parts_are(a, b):
    # repr keeps apart what Python's == merges: True and 1.
    def typed(value):
        match value:
            case dict():
                return {name: typed(item) for name, item in value.items()}
            case list():
                return [typed(item) for item in value]
            case bool() | None | str():
                return repr(value)
            case _:
                return value

    same = partition_digest({"v": a}) == partition_digest({"v": b})
    assert same == (typed(a) == typed(b))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="finite"):
        partition_digest({"temperature": value})


@pytest.mark.parametrize("value", [b"bytes", {1: 2}, {"a", "b"}, object()])
def test_what_is_not_json_is_refused(value):
    with pytest.raises(TypeError):
        partition_digest({"value": value})


def test_parts_without_a_tenant_are_refused():
    with pytest.raises(ValueError, match="tenant"):
        make_key({"model": "m"}, "hi", max_tokens=None, allow_semantic=True)


def test_max_tokens_among_the_parts_is_refused():
    with pytest.raises(ValueError, match="max_tokens"):
        key_of(max_tokens=5)


def test_max_tokens_does_not_change_the_key():
    def key(limit):
        return make_key({"tenant": "a"}, "hi", max_tokens=limit, allow_semantic=True)

    assert key(5).exact == key(None).exact


def test_outer_white_space_and_composition_do_not_change_the_question():
    assert key_of("  caf\u00e9?\n").exact == key_of("cafe\u0301?").exact


def test_case_and_inner_white_space_change_the_exact_question():
    assert len({key_of(t).exact for t in ("a b", "a  b", "A b", "a b.")}) == 4


def test_a_completion_is_kept_to_the_byte_and_never_matched_by_meaning():
    def key(text):
        return make_key({"tenant": "a"}, text, max_tokens=1, allow_semantic=True, completion=True)

    assert key("def f():\n    ").exact != key("def f():\n").exact
    assert not key("x").allow_semantic
    chat = make_key({"tenant": "a"}, "x", max_tokens=1, allow_semantic=True)
    assert key("x").exact != chat.exact


@given(st.text())
def test_normalising_twice_changes_nothing(text):
    once = normalise(text)
    assert normalise(once) == once
