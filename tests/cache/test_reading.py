import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.guards import compare
from cache.reading import understand
from cache.spelling import KnownWords, english_words, is_slip
from cache.stems import stem

PARAPHRASES = [
    ("How do I turn on automatic backups?", "How do I enable automatic backups?"),
    ("How do I turn the heating off?", "How do I switch off the heating?"),
    ("Did Ada steal the car?", "Was the car stolen by Ada?"),
    ("Is Ann a poet and a judge?", "Is Ann a judge and a poet?"),
    ("Who do critics think is the best singer?", "Who is the best singer according to critics?"),
    ("What is the guest password?", "What is the password for guests?"),
    ("Is there a discount for students on trains?", "On trains, is there a discount for students?"),
    ("How much is delivery?", "What does delivery cost?"),
    ("How do I cancel my order?", "What's the process for cancelling my order?"),
    ("Is that owl on the roof?", "Is that owl really on the roof?"),
    ("How do I change my adress?", "How do I change my address?"),
    ("Can I pay in a shop?", "Is it possible to pay in a store?"),
    ("How come the sky is blue?", "Why is the sky blue?"),
    ("Where can I find a cash machine?", "Where is an ATM?"),
    ("¿Cómo puedo cancelar mi pedido?", "¿Cómo cancelo mi pedido?"),
    ("Wie kann ich mein Konto kündigen?", "Wie kündige ich mein Konto?"),
    ("怎么修改密码？", "如何更改密码？"),
]
VETOED = [
    ("How do I feed 3 cats?", "How do I feed 4 cats?", "numbers differ: 3 / 4"),
    ("Can I pay with `a`?", "Can I pay with `b`?", "identifiers differ: `a` / `b`"),
    ("Can I eat this?", "Can I not eat this?", "negation differs: 0 / 1"),
    ("Do I eat before running?", "Do I eat after running?", "turning words differ: after / before"),
    ("Is Ann here?", "Is Bob here?", "names differ: Ann / Bob"),
    ("How do I buy bonds?", "How do I sell bonds?", "opposites: buy / sell"),
    ("Can I feed my dog rice?", "Can I feed my cat rice?", "kinds differ: cat / dog"),
    ("Is her car red?", "Is my car red?", "persons differ: she / me"),
    ("Why do I cancel a card?", "How do I cancel a card?", "kinds of question differ: how / why"),
    ("How do I fly from Rome to Bonn?", "How do I fly from Bonn to Rome?", "roles differ: from Bonn / to Bonn"),
    ("Does Ann love Bob?", "Does Bob love Ann?", "word order differs: Ann / love"),
    ("Is Ann bullying?", "Is Ann bullied?", "voices differ: bullied / bullying"),
    ("What are symptoms of flu?", "What are symptoms of flu in babies?", "one adds: babies / none"),
    ("How do I grow figs?", "How do I grow leeks?", "words differ: figs / leeks"),
    ("Wo ist der Bahnhof?", "Where is the station?", "languages differ: en / de"),
    ("Hvor er stasjonen?", "Hvor er butikken?", "wording matters and differs"),
    ("Translate: I am ill", "Translate: I am sick", "wording matters and differs"),
]  # fmt: skip

texts = st.lists(
    st.sampled_from(
        """how do i the a of for from to Ann Bob love cancel order card 5 7 km not by was is on off
        before after my your what's who `x` , ? and or 3pm £5 dogs cats really price cost""".split()  # noqa: SIM905
    ),
    max_size=10,
).map(" ".join) | st.text(max_size=50)


@pytest.mark.parametrize(("a", "b"), PARAPHRASES, ids=lambda text: text[:40])
def test_paraphrases_of_known_kinds_leave_nothing_unexplained(a, b):
    comparison = compare(understand(a), understand(b))
    assert comparison.veto is None
    assert not any(comparison.alignment.only)


@pytest.mark.parametrize(("a", "b", "reason"), VETOED, ids=lambda text: text[:40])
def test_a_veto_names_what_it_found(a, b, reason):
    assert compare(understand(a), understand(b)).veto == reason


@given(texts, texts)
def test_a_comparison_does_not_depend_on_who_was_first(a, b):
    assert compare(understand(a), understand(b)) == compare(understand(b), understand(a))


@given(texts)
def test_a_prompt_has_no_veto_against_itself(text):
    reading = understand(text)
    assert reading.language is None or compare(reading, reading).veto is None


@given(texts, st.integers(0, 10**6), st.integers(0, 10**6))
def test_different_numbers_are_always_vetoed(text, one, other):
    a, b = (understand(f"how do i pay {text} {number}") for number in (one, other))
    assert one == other or compare(a, b).veto is not None


@given(
    texts,
    st.sampled_from(["km", "mg", "hours", "GB", "euros"]),
    st.sampled_from(["miles", "g", "days", "TB", "yen"]),
)
def test_different_units_are_always_vetoed(text, one, other):
    a, b = (understand(f"how long is it {text} 5 {unit}") for unit in (one, other))
    assert compare(a, b).veto is not None


@given(texts)
def test_a_negation_more_is_always_vetoed(text):
    a, b = understand(f"how do i pay {text}"), understand(f"how do i pay {text} never")
    assert compare(a, b).veto is not None


@pytest.mark.parametrize(
    ("text", "language"),
    [("How do I pay?", "en"), ("¿Cómo pago la cuenta?", "es"), ("Wie bezahle ich die Rechnung?", "de"),
     ("怎么付款？", "zh"), ("Come pago il conto?", None), ("支払い方法は？", None), ("Como pago uma conta?", None),
     ("Hvordan betaler jeg det?", None), ("", None), ("12 + 5", None)],
)  # fmt: skip
def test_the_language_is_told_or_left_open(text, language):
    assert understand(text).language == language


@pytest.mark.parametrize(
    ("one", "other"),
    [("cancel", "cancelling"), ("change", "changed"), ("city", "cities"), ("plan", "planned"),
     ("buy", "bought"), ("child", "children"), ("hope", "hoping"), ("box", "boxes")],
)  # fmt: skip
def test_inflections_share_a_stem(one, other):
    assert stem(one, "en") == stem(other, "en")


@pytest.mark.parametrize(
    ("one", "other"), [("plan", "plane"), ("car", "care"), ("new", "news"), ("rat", "rate"), ("past", "paste")]
)  # fmt: skip
def test_different_words_do_not(one, other):
    assert stem(one, "en") != stem(other, "en")


def test_a_slip_is_told_from_another_word():
    words = english_words()
    assert is_slip("chnage", "change", words)
    assert is_slip("bagage", "baggage", words)
    assert not is_slip("contact", "contract", words)
    assert not is_slip("sulfate", "sulfite", words)
    assert not is_slip("prednisone", "prednisolone", words)
    assert not is_slip("xqzzy", "xqzzz", words)


@given(st.sets(st.text("abcdef", min_size=1, max_size=8), max_size=50))
def test_the_word_list_forgets_no_word(words):
    known = KnownWords.of(sorted(words))
    assert all(word in known for word in words)
    assert all(word in KnownWords(known.bits) for word in words)
