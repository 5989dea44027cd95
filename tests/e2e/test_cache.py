"""What the prompt cache may serve, on the real model: a wrong answer is worse than a miss."""

from __future__ import annotations

import pytest

from tests.e2e.asking import Asker, nonce

SHORT = {"max_tokens": 24}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
async def test_the_opposite_instruction_is_never_answered_from_the_cache(
    asker: Asker, order: tuple[int, ...]
) -> None:
    word = nonce()
    questions = [
        f"How do I turn on automatic backups for {word}?",
        f"How do I turn off automatic backups for {word}?",
        f"How do I enable automatic backups for {word}?",
        f"How do I disable automatic backups for {word}?",
    ]
    same_action = {0: {0, 2}, 1: {1, 3}, 2: {0, 2}, 3: {1, 3}}
    given = {}
    for place, index in enumerate(order):
        answer = await asker.ws(questions[index], **SHORT)
        allowed = {given[other] for other in given if other in same_action[index]}
        if answer.mark == "miss":
            assert answer.text == asker.truth(questions[index], **SHORT)
        else:
            assert answer.text in allowed
        if place == 0:
            assert answer.mark == "miss"
            again = await asker.ws(questions[index], **SHORT)
            assert (again.mark, again.text) == ("exact", answer.text)
        given[index] = answer.text


async def test_a_repeat_is_an_exact_hit_on_every_transport(asker: Asker) -> None:
    question = f"Say hello to {nonce()} in one short sentence."
    fields = {"max_tokens": 200, "stop": [".", "!", " "]}
    first = asker.plain(question, **fields)
    assert first.finish_reason == "stop"
    assert first.mark == "miss"
    for again in (
        asker.plain(question, **fields),
        asker.sse(question, **fields),
        await asker.ws(question, **fields),
    ):
        assert (again.text, again.mark) == (first.text, "exact")
        assert again.completion_tokens == first.completion_tokens
        assert again.finish_reason == "stop"


async def test_an_answer_stored_from_a_stream_is_served_whole(asker: Asker) -> None:
    for _ in range(3):
        question = f"Say goodbye to {nonce()} in one short sentence."
        # The client closes its socket with the last frame: nobody is left to wait for the store.
        fields = {"max_tokens": 60, "stop": [".", "!", " "]}
        first = await asker.ws(question, **fields)
        assert first.finish_reason == "stop"
        again = [asker.sse(question, **fields), asker.plain(question, **fields)]
        assert [answer.text for answer in again] == [first.text, first.text]
        assert {answer.mark for answer in again} == {"exact"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 17 times 23?", "What is 17 times 28?"),
        ("Convert 5 miles to kilometres", "Convert 5 metres to kilometres"),
        ("What changed in Python 3.8?", "What changed in Python 3.9?"),
        ("Remind me in 10 minutes", "Remind me in 10 hours"),
        ("Explain what `git stash pop` does", "Explain what `git stash drop` does"),
        (
            "What does the option --max-age do in curl?",
            "What does the option --max-time do in curl?",
        ),
        ("Is the train before noon late?", "Is the train after noon late?"),
        ("Did Alice pay Bob?", "Did Bob pay Alice?"),
        ("Is it safe to drink tap water in Rome?", "Is it unsafe to drink tap water in Rome?"),
    ],
)
def test_one_word_that_decides_the_answer_makes_a_miss(asker: Asker, one: str, other: str) -> None:
    settings = {"max_tokens": 32, "seed": int(nonce(), 16)}
    for first, second in ((one, other), (other, one)):
        settings["seed"] += 1
        asker.plain(first, **settings)
        answer = asker.plain(second, **settings)
        assert answer.mark == "miss"


def test_a_reworded_question_under_other_instructions_is_a_miss(asker: Asker) -> None:
    word = nonce()
    question = f"Describe a bicycle in one sentence, {word}."
    reworded = f"Describe, in one sentence, a bicycle, {word}."
    pirate = {"role": "system", "content": "You are a pirate."}
    lawyer = {"role": "system", "content": "You are a lawyer."}
    function = {"type": "function", "function": {"name": "draw", "parameters": {"type": "object"}}}
    settings: list[tuple[list[dict[str, str]], dict[str, object]]] = [
        ([], {}),
        ([pirate], {}),
        ([lawyer], {}),
        ([], {"response_format": {"type": "json_object"}}),
        ([], {"tools": [function]}),
    ]
    for system, fields in settings:
        for text in (question, reworded):
            turns = [*system, {"role": "user", "content": text}]
            answer = asker.plain(turns, max_tokens=40, **fields)
            if text == question:
                assert answer.mark == "miss", (system, fields)


def test_every_parameter_that_changes_the_reply_is_part_of_the_key(asker: Asker) -> None:
    prompt = f"Write about rivers. {nonce()}"
    pairs = [
        ({"max_tokens": 8}, {"max_tokens": 64}),
        ({"stop": ["."]}, {}),
        ({"n": 1}, {"n": 2}),
        ({"frequency_penalty": 0}, {"frequency_penalty": 1.5}),
        ({"temperature": 1.2, "seed": 3}, {"temperature": 1.2, "seed": 4}),
        ({"top_p": 1}, {"top_p": 0.5}),
    ]
    for index, (first, second) in enumerate(pairs):
        question = f"{prompt}{index}"
        asker.plain(question, **{"max_tokens": 64, **first})
        answer = asker.plain(question, **{"max_tokens": 64, **second})
        assert answer.mark == "miss", second
        if first == {"max_tokens": 8}:
            assert answer.completion_tokens > 8


def test_sampled_replies_are_not_replayed_unless_asked_for(asker: Asker) -> None:
    question = f"Invent a name for a cat. {nonce()}"
    marks = [asker.plain(question, temperature=None, max_tokens=20).mark for _ in range(3)]
    assert marks == ["miss"] * 3
    settings = {"temperature": 1.0, "seed": 7, "cache": "sampled", "stop": [" ", "."]}
    first = asker.plain(question, **settings)
    assert first.finish_reason == "stop"
    again = asker.plain(question, **settings)
    assert (again.mark, again.text) == ("exact", first.text)


def test_a_tenant_never_gets_what_another_asked(asker: Asker, other_tenant: Asker) -> None:
    code = f"ORCHID-{nonce()}"
    question = (
        f"My account code is {code}. In two sentences, describe how I should store my account "
        "code safely and repeat the code back to me."
    )
    without = question.replace(f"My account code is {code}. ", "")
    reworded = "Describe in two sentences how to keep my account code safe, and repeat it."
    asker.plain(question, max_tokens=60)
    first = other_tenant.plain(question, max_tokens=60)
    assert first.mark == "miss"
    for text in (without, reworded):
        answer = other_tenant.plain(text, max_tokens=60)
        assert answer.mark == "miss"
        assert code not in answer.text


def test_a_reply_that_was_cut_is_not_given_to_one_who_asked_for_more(asker: Asker) -> None:
    question = f"List the months of the year, one per line. {nonce()}"
    cut = asker.plain(question, max_tokens=5)
    assert (cut.finish_reason, cut.completion_tokens) == ("length", 5)
    again = asker.plain(question, max_tokens=5)
    assert (again.mark, again.text) == ("exact", cut.text)
    whole = asker.plain(question, max_tokens=200)
    assert whole.mark == "miss"
    assert whole.completion_tokens > 5


def test_a_refused_request_is_refused_again(asker: Asker) -> None:
    long = "word " * 9000
    for _ in range(2):
        reply = asker.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": long}], temperature=0
        )
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_the_cache_tells_why_a_near_question_was_not_a_hit(asker: Asker) -> None:
    word = nonce()
    asker.plain(f"How many legs has a {word} spider with 8 legs?", max_tokens=30)
    reply = asker.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": f"How many legs has a {word} spider with 9 legs?"}],
        temperature=0,
        max_tokens=30,
    )
    header = reply.headers["x-seedance-cache"]
    assert header.startswith("miss")
    assert "similarity=" in header or "no_candidate" in header


def test_only_answers_from_the_cache_or_not_at_all(asker: Asker) -> None:
    question = f"Greet {nonce()} in three words."
    refused = asker.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=60,
        cache="only",
    )
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "cache_miss"
    asker.plain(question, max_tokens=60)
    assert asker.plain(question, max_tokens=60, cache="only").mark == "exact"
