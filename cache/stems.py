"""Words without inflection."""

from __future__ import annotations

IRREGULAR = {
    form: base
    for base, forms in {
        "be": "", "become": "became", "begin": "began begun", "bite": "bit bitten",
        "blow": "blew blown", "break": "broke broken", "bring": "brought", "build": "built",
        "buy": "bought", "catch": "caught", "choose": "chose chosen", "come": "came",
        "deal": "dealt", "draw": "drew drawn", "drink": "drank drunk", "drive": "drove driven",
        "eat": "ate eaten", "fall": "fell fallen", "feed": "fed", "feel": "felt",
        "fight": "fought", "find": "found", "fly": "flew flown", "forget": "forgot forgotten",
        "freeze": "froze frozen", "get": "got gotten", "give": "gave given", "go": "went gone",
        "grow": "grew grown", "hear": "heard", "hide": "hid hidden", "hold": "held",
        "keep": "kept", "know": "knew known", "lead": "led", "leave": "left", "lend": "lent",
        "lose": "lost", "make": "made", "mean": "meant", "meet": "met", "pay": "paid",
        "ride": "rode ridden", "run": "ran", "say": "said", "see": "saw seen",
        "sell": "sold", "send": "sent", "shake": "shook shaken", "shoot": "shot",
        "sing": "sang sung", "sit": "sat", "sleep": "slept", "speak": "spoke spoken",
        "spend": "spent", "stand": "stood", "steal": "stole stolen", "swim": "swam swum",
        "take": "took taken", "teach": "taught", "tell": "told", "think": "thought",
        "throw": "threw thrown", "understand": "understood", "wake": "woke woken",
        "wear": "wore worn", "win": "won", "write": "wrote written",
        "child": "children", "man": "men", "woman": "women", "person": "people",
        "foot": "feet", "tooth": "teeth", "mouse": "mice", "goose": "geese", "life": "lives",
        "knife": "knives", "wife": "wives", "leaf": "leaves", "half": "halves",
    }.items()
    for form in forms.split()
}  # fmt: skip
_PARTICIPLES = frozenset(IRREGULAR) | {"put", "cut", "hit", "hurt", "read", "set", "let", "cost"}
_KEPT = frozenset(
    """is was has does this us bus gas news plus less yes always perhaps species series need speed
    bed red feed seed bleed weed shed sled hundred kindred embed during morning evening ceiling king
    ring sing thing bring spring string wing nothing something anything everything wedding building
    paste bathe breathe clothe tense lens physics maths mathematics politics economics diabetes
    measles rabies texas paris james wales fastest""".split()  # noqa: SIM905
)
_VOWELS = frozenset("aeiou")


def stem(word: str, language: str) -> str:
    """A word without inflection, near enough that two forms of one word are equal.

    English: Porter's steps 1a, 1b and 5, after irregular forms. Spanish: plural ending.
    """
    if language == "es":
        return _spanish_stem(word)
    if language != "en" or len(word) < 3 or not word.isascii():
        return word
    word = IRREGULAR.get(word, word)
    if word in _KEPT:
        return word
    return _without_e(_american(_without_past(_without_plural(word))))


def _american(word: str) -> str:
    """ "organise" as "organize", "harbour" as "harbor"; it is no matter that "exercize" is none."""
    if len(word) < 6:
        return word
    for ending, other in (("ise", "ize"), ("yse", "yze"), ("is", "iz"), ("our", "or")):
        if word.endswith(ending):
            return word[: -len(ending)] + other
    return word


def _spanish_stem(word: str) -> str:
    if len(word) > 4 and word.endswith("es") and word[-3] not in _VOWELS:
        return word[:-2]
    if len(word) > 3 and word.endswith("s") and word[-2] in _VOWELS:
        return word[:-1]
    return word


def _without_plural(word: str) -> str:
    if word.endswith("sses") or (len(word) > 4 and word.endswith(("xes", "ches", "shes", "zes"))):
        return word[:-2]
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > 3:
        return word[:-1]
    return word


def _without_past(word: str) -> str:
    if word.endswith("ied") and len(word) > 4:
        return word[:-3] + "y"
    for ending in ("ing", "ed"):
        base = word[: -len(ending)]
        if word.endswith(ending) and len(base) > 2 and any(c in "aeiouy" for c in base):
            if word.endswith("eed"):
                return word
            if base.endswith(("at", "bl", "iz")):
                return base + "e"
            if base[-1] == base[-2] and base[-1] not in "lszaeiou":
                return base[:-1]
            return base + "e" if _is_short(base) else base
    return word


def _without_e(word: str) -> str:
    if len(word) > 4 and word.endswith("e") and not word.endswith("ee"):
        base = word[:-1]
        return word if _is_short(base) else base
    return word[:-1] if len(word) > 5 and word.endswith("ll") else word


def _is_short(base: str) -> bool:
    """Whether it has one syllable and ends consonant, vowel, consonant: "hop", "fil"."""
    if len(base) < 3 or base[-1] in "aeiouwxy" or base[-2] not in "aeiouy" or base[-3] in _VOWELS:
        return False
    return sum(c in _VOWELS and base[i - 1] not in _VOWELS for i, c in enumerate(base) if i) <= 1


def is_participle(word: str) -> bool:
    return (word.endswith("ed") and len(word) > 3) or word in _PARTICIPLES
