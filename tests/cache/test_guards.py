import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.guards import disagreement

PAIRS = json.loads((Path(__file__).parent / "pairs.json").read_text(encoding="utf-8"))["pairs"]

DIFFERENT = {
    "numbers": [
        ("What is 17 times 23?", "What is 17 times 28?"),
        ("What changed in Python 3.8?", "What changed in Python 3.9?"),
        ("What is 1.10 of this?", "What is 1.1 of this?"),
        ("Can I swim after seven?", "Can I swim after eight?"),
        ("What is -5 plus 3?", "What is 5 plus 3?"),
        ("What is 5!?", "What is 5?"),
        ("Simplify n!/(n-1)!", "Simplify n!/(n-1)"),
        ("Is n! even?", "Is n even?"),
        ("How large is n!!?", "How large is n!?"),
        ("How much is five!", "How much is five"),
        ("How much is 5 !?", "How much is 5?"),
        ("How many vowels are in twelve?", "How many vowels are in 12?"),
        ("What is 2 + 3?", "What is 2 - 3?"),
        ("What is 23 minus 17?", "What is 17 minus 23?"),
        ("Pay £50 to the bank", "Pay $50 to the bank"),
        ("Wie viel ist 5 mal 7?", "Wie viel ist 5 mal 8?"),
        ("Wie viel sind 1,000 Kilo?", "Wie viel sind 1000 Kilo?"),
        ("三加五等于多少？", "三加六等于多少？"),
    ],
    "units": [
        ("Convert 5 miles to kilometres", "Convert 5 metres to kilometres"),
        ("Remind me in 10 minutes", "Remind me in 10 hours"),
        ("Is 80 km/h too fast?", "Is 80 mph too fast?"),
        ("Convert 5 um to mm", "Convert 5 to mm"),
        ("what is 5 mw in w", "What is 5 MW in W"),
        ("how many mb are in a gb", "How many Mb are in a Gb"),
        ("How many metres are in a mile?", "How many miles are in a metre?"),
    ],
    "dates": [
        ("Is the shop open on Monday?", "Is the shop open on Tuesday?"),
        ("What happened in March?", "What happened in May?"),
        ("Meet on 2024-01-02", "Meet on 2024-02-01"),
        ("Remind me at 7am", "Remind me at 7pm"),
        ("Remind me at 7:30", "Remind me at 7:35"),
    ],
    "negation": [
        ("Can I eat this?", "Can I not eat this?"),
        ("Do you love me?", "Don't you love me?"),
        ("Is it ever safe?", "Is it never safe?"),
        ("How do I travel with a visa?", "How do I travel without a visa?"),
        ("How do I lock my card?", "How do I unlock my card?"),
        ("Is this legal?", "Is this illegal?"),
        ("Kann ich das essen?", "Kann ich das nicht essen?"),
        ("¿Puedo cancelar mi cuenta?", "¿No puedo cancelar mi cuenta?"),
        ("我可以吃这个吗？", "我不可以吃这个吗？"),
    ],
    "opposites": [
        ("How do I turn on automatic backups?", "How do I turn off automatic backups?"),
        ("How do I enable automatic backups?", "How do I disable automatic backups?"),
        ("How do I enable automatic backups?", "How do I turn off automatic backups?"),
        ("Can I swim before lunch?", "Can I swim after lunch?"),
        ("How can I eat more sugar?", "How can I eat less sugar?"),
        ("Who was the first king of Spain?", "Who was the last king of Spain?"),
    ],
    "identifiers": [
        ("Explain what `git stash pop` does", "Explain what `git stash drop` does"),
        ("Write a Python function total_cost(items)", "Write a Python function total_count(items)"),
        ("What does the option --max-age do in curl?", "What does the option --max-time do in curl?"),
        ("What does sort -r do?", "What does sort -R do?"),
        ("What is in /usr/bin?", "What is in /usr/sbin?"),
        ("Who owns bob@example.com?", "Who owns rob@example.com?"),
        ("What does parseJson do?", "What does parseXml do?"),
        ("Explain `a b`", "Explain `a  b`"),
        ('What does "let it go" refer to?', 'What does "let it be" refer to?'),
        ("What is C++?", "What is C?"),
        ("What is C", "what is c"),
        ("What does JS do on ??", "What does JS do on ?"),
        ("reverse hello", "Reverse Hello"),
        ("What is .NET?", "What is NET?"),
        ("Fix this:\nif a:\n    b()\n    c()", "Fix this:\nif a:\n    b()\nc()"),
    ],
    "names": [
        ("What is the capital of France?", "What is the capital of Germany?"),
        ("What is Polish food?", "What is polish food?"),
        ("tell me about cobra", "Tell me about Cobra"),
        ("what is a can bus", "What is a CAN bus"),
        ("How do I set up US accounts?", "how do i set up us accounts"),
        ("Hello Kitty history of the brand", "Kitty history of the brand"),
        ("法国的首都是哪里？", "德国的首都是哪里？"),
        ("Wie heißen Sie?", "Wie heißen sie?"),
    ],
    "order and roles": [
        ("Does Alice love Bob?", "Does Bob love Alice?"),
        ("How do I convert a PNG to a JPEG?", "How do I convert a JPEG to a PNG?"),
        ("Only I can go with you?", "I can only go with you?"),
        ("Is Bob's dog fond?", "Is the dog fond of Bob?"),
        ("Before lunch, who spoke to the man that left?", "Who spoke to the man that left before lunch?"),
    ],
    "meaning": [
        ("Tell me a joke", "What is a joke?"),
        ("What is the matter?", "What is matter?"),
        ("Who is the president?", "Who was the president?"),
        ("How can I be sure?", "How can you be sure?"),
        ("How do I look?", "How to look?"),
        ("I should quit my job?", "I should quit my job."),
        ("Let's eat, grandma, with the others", "Let's eat grandma, with the others"),
        ("Translate to French: I can't go", "Translate to French: I cannot go"),
        ("How many letters are in can't?", "How many letters are in cannot?"),
        ("What does the symbol ! stand for here !", "What does the symbol ! stand for here"),
        ("What is the species of this?", "What are the species of this?"),
    ],
}  # fmt: skip

SAME = [
    ("What is the capital of France?", "Tell me the capital of France."),
    ("What is the capital of France?", "what's France's capital?"),
    ("What is the capital of France?", "Could you please tell me what the capital of France is?"),
    ("What is the capital of France?", "WHAT IS THE CAPITAL OF FRANCE"),
    ("How do I reset my password?", "how to reset my password"),
    ("How do I reset my password?", "Hi! Tell me how I can reset my password, please. Thanks!"),
    ("On the menu, what vegan options do you have?", "What vegan options do you have on the menu?"),
    ("Explain what `git stash pop` does", "Explain  what `git stash pop` does."),
    ("What is 17 times 23?", "what's 17 times 23"),
    ("Can I carry 1,000 of the twenty-one?", "Can I carry 1000 of the 21?"),
    ("Why can't I log in?", "Why can’t I log in?"),
    ("What is the colour of the sky?", "What is the color of the sky?"),
    ("How do I top up my SIM?", "How do I  top up my SIM ?!"),
    ("Name a green vegetable.", "Please name a green vegetable"),
    ("法国的首都是哪里？", "请问法国的首都是哪里？"),
    ("Wo ist der Bahnhof?", "Wo ist  der Bahnhof ?"),
]

words = st.sampled_from(
    """what is the capital of france france's how do can i to tell me please not n't can't on off
    , . ? ! : ' " ` `x` "y z" 5 5,000 5.0 -5 twenty twenty-one one um hi thanks US us Polish polish
    Hello what's 's --flag a_b A/B 不 Sie and or in a menu""".split()  # noqa: SIM905
)
prompts = st.lists(words, max_size=9).map(" ".join) | st.lists(words, max_size=9).map("".join)
anything = prompts | st.text(max_size=60)


@pytest.mark.parametrize(
    ("a", "b"), [pair for pairs in DIFFERENT.values() for pair in pairs], ids=lambda text: text[:40]
)
def test_prompts_that_ask_different_things_disagree(a, b):
    assert disagreement(a, b) is not None
    assert disagreement(b, a) is not None


@pytest.mark.parametrize(("a", "b"), SAME, ids=lambda text: text[:40])
def test_plain_rewordings_agree(a, b):
    assert disagreement(a, b) is None
    assert disagreement(b, a) is None


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair['kind']}: {pair['b'][:40]}")
def test_published_pairs_are_told_apart_as_people_did(pair):
    assert (disagreement(pair["a"], pair["b"]) is None) == pair["same_answer"]


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ("What is 17 times 23?", "What is 17 times 28?", "numbers differ: 23 / 28"),
        ("Remind me in 10 minutes", "Remind me in 10 hours", "units differ: minutes / hours"),
        ("Is it open in May?", "Is it open in June?", "dates differ: May / June"),
        ("Can I go?", "Can I not go?", "negation differs: none / not"),
        ("How do I turn it on?", "How do I turn it off?", "opposites: on / off"),
        ("How do I lock it?", "How do I unlock it?", "opposites: lock / unlock"),
        ("What is `a`?", "What is `b`?", "quotes differ: `a` / `b`"),
        ("What does --a do?", "What does --b do?", "identifiers differ: --a / --b"),
        ("Who is Ann?", "Who is Bob?", "names differ: Ann / Bob"),
        ("Does Ann love Bob?", "Does Bob love Ann?", "word order differs"),
        ("What is a cat?", "What is a dog?", "words differ: cat / dog"),
        ("What is the UN?", "What is the un?", "capitals differ: UN / un"),
        ("I can go to the shop.", "I can go to the shop?", "one asks, one tells"),
        ("What is it, love?", "What is it love?", "punctuation differs: , / none"),
    ],
)
def test_the_reason_names_the_difference(a, b, reason):
    assert disagreement(a, b) == reason


@given(anything)
def test_a_prompt_agrees_with_itself(prompt):
    assert disagreement(prompt, prompt) is None
    assert disagreement(prompt, f"  {prompt} ") is None


@settings(max_examples=400)
@given(anything, anything)
def test_disagreement_is_symmetric(a, b):
    assert (disagreement(a, b) is None) == (disagreement(b, a) is None)


@given(prompts, st.integers(0, 99), st.integers(0, 99))
def test_a_different_number_always_disagrees(prompt, one, other):
    agreed = disagreement(f"{prompt} {one}", f"{prompt} {other}") is None
    assert agreed == (one == other)


@given(prompts)
def test_a_prompt_and_its_negation_disagree(prompt):
    assert disagreement(prompt, f"{prompt} not") is not None


@pytest.mark.parametrize(
    "unit", ["`", "``a`", "'", " 'a", '"', "“", "„", "(", "a'", "a-", "1,", "!", "? ", "um ", "hi ",
             "please ", "thanks ", "'s "],
)  # fmt: skip
def test_repetitive_prompts_do_not_hang_the_reader(unit):
    prompt = unit * (4000 // len(unit))
    assert disagreement(prompt, prompt + "x") is not None


def test_a_very_long_prompt_agrees_only_with_itself():
    prompt = "What is the capital of France? " * 1000
    assert disagreement(prompt, prompt.upper()) == "prompt has 31000 characters, the limit is 4096"
    assert disagreement(prompt, prompt) is None
