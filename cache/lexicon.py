"""Closed word lists that the guards read prompts with. Data only; all entries are lower case.

Lists under "changes" merge spellings, so each entry must be safe in every
context; a missing entry costs a hit, a wrong one a wrong answer. Lists under
"names of differences" only word the reason of a refusal.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _phrases(text: str) -> frozenset[tuple[str, ...]]:
    return frozenset(tuple(line.split()) for line in text.strip().splitlines())


# What a prompt is read as

ENGLISH_MARKERS = _words(
    """the of what how is are does did my your you which who where when why and with for this that
    should could would tell explain it whats please give make makes need needs want wants been about
    into than then there here they their them his her our not but because between create find
    write show help best first one two three name describe list convert compare from
    if change changed remind any some"""
)
FOREIGN_MARKERS = _words(
    """der das und nicht ist ein eine wie sie ich el los las que como una por para est les une des
    dans il lo gli che di het een niet och não og ikke jeg det hvad är inte nie jest czy jak este
    nu și"""
)
QUESTION_WORDS = _words(
    """what who whom whose which where when why how is are was were am do does did can could will
    would shall should may might must has have had"""
)
# The answer depends on the letters of such a prompt, not only on what it means.
SPELLING_CUES = _words(
    """letter letters spell spelled spelt spelling syllable syllables translate translation rewrite
    rephrase reword paraphrase grammar grammatical punctuation contraction contractions apostrophe
    uppercase lowercase capitalise capitalize capitalised capitalized character characters word
    words pronounce pronunciation rhyme rhymes proofread typo typos verbatim repeat echo say
    exactly tokenize tokenise token tokens regex palindrome anagram acronym mean means meaning
    define definition synonym synonyms antonym antonyms etymology plural noun verb adjective
    pronoun vowel vowels consonant consonants digit digits numeral numerals written alphabetical
    alphabetically reverse reversed backwards encode decode hash case english german spanish french chinese italian portuguese dutch japanese korean
    russian latin arabic"""
)
# Pairs of meanings that only a capital keeps apart, decided strictly even in careless writing.
CAPITAL_WORDS = _words(
    """us it who aids may march august polish turkey china apple python java rust go swift ruby
    windows office word excel access teams meta oracle shell target amazon mercury mars saturn
    earth reading nice bath mobile job rich bill mark will rose grace hope faith frank jack
    get put post delete head patch and or not ram rom pet cat sim lan app api mac can er im ive basic
    lisp scala perl julia flask spark react cobra jaguar puma dove slack zoom notion discord signal
    stripe square chase dodge cancer
    b c d e f g h j k l m n o p q r s t u v w x y z kb mb gb tb pb mw gw ma pa pm"""
)

# Changes

CONTRACTIONS = {
    "can't": ("can", "not"),
    "won't": ("will", "not"),
    "shan't": ("shall", "not"),
    "cannot": ("can", "not"),
    "dont": ("do", "not"),
    "doesnt": ("does", "not"),
    "didnt": ("did", "not"),
    "isnt": ("is", "not"),
    "arent": ("are", "not"),
    "wasnt": ("was", "not"),
    "werent": ("were", "not"),
    "couldnt": ("could", "not"),
    "shouldnt": ("should", "not"),
    "wouldnt": ("would", "not"),
    "hasnt": ("has", "not"),
    "havent": ("have", "not"),
    "hadnt": ("had", "not"),
    "whats": ("what", "is"),
    "wheres": ("where", "is"),
    "i'm": ("i", "am"),
    "im": ("i", "am"),
    "ive": ("i", "have"),
}
IS_HOSTS = _words("what who where when how why that there here it he she")
CONTRACTION_ENDINGS = {"'re": "are", "'ll": "will", "'ve": "have"}

SAME_SPELLINGS = {
    "an": "a",
    "colour": "color",
    "colours": "colors",
    "favourite": "favorite",
    "centre": "center",
    "neighbour": "neighbor",
    "neighbours": "neighbors",
    "behaviour": "behavior",
    "organise": "organize",
    "analyse": "analyze",
    "litre": "liter",
    "litres": "liters",
    "metre": "meter",
    "metres": "meters",
    "kilometre": "kilometer",
    "kilometres": "kilometers",
    "centimetre": "centimeter",
    "centimetres": "centimeters",
    "millimetre": "millimeter",
    "millimetres": "millimeters",
    "travelling": "traveling",
    "cancelled": "canceled",
    "e-mail": "email",
    "wi-fi": "wifi",
    "quickest": "fastest",
    "obtain": "get",
}

UNITS_OF_NUMBERS = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7,
    "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14,
    "fifteen": 15, "sixteen": 16, "seventeen": 17, "eighteen": 18, "nineteen": 19,
}  # fmt: skip
TENS_OF_NUMBERS = {
    "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70,
    "eighty": 80, "ninety": 90,
}  # fmt: skip

# Not "um", a micrometre, nor "erm", the exchange rate mechanism.
HESITATIONS = _words("uh uhm")
LEAD_INS = _phrases(
    """um
    uh
    uhm
    er
    erm
    hi
    hey
    hello
    hiya
    yeah
    ok
    okay
    so
    hi there
    hey there
    hello there
    hi team
    good morning
    good afternoon
    good evening
    quick one
    quick question
    just wondering
    just curious"""
)
# A lead-in is one only before these: "Hello" opens a greeting and "Hello Kitty" does not.
OPENERS = QUESTION_WORDS | _words(
    """um uh uhm er erm hi hey hello so please i just quick whats tell give explain describe list
    write show name what's who's where's how's can't don't"""
)
TRAILERS = _phrases(
    """thanks
    thank you
    thx
    cheers
    many thanks
    thanks a lot
    thanks so much
    thanks in advance
    thank you very much
    thank you so much
    please"""
)
# "How do you spell please" asks for the word.
NOT_BEFORE_PLEASE = _words(
    """for write type of with and or a the to as like is use without no yes me i you we pretty"""
)
REQUEST_VERBS = _words("tell explain describe list write give name compare summarize summarise")
SCOPE_WORDS = _words(
    """that which who whom whose where when while if because whether as than before after until
    since and or but not no never only just even also all every each any most few many both of in
    at for to from by with without during under over on about between"""
)
FRONTABLE = _words("on in at for to with during")
# "How do I look" is no instruction.
STATIVE_VERBS = _words(
    "look feel know sound seem appear compare be have differ rank score come end smell taste"
)
MODALS = _words("can could should must may might will would")
BE_FORMS = _words("is are was were")
DETERMINERS = _words("the my your his her our their this that")

# Names of differences

UNITS = _words(
    """mile miles meter meters metre metres kilometer kilometers kilometre kilometres km cm mm m
    foot feet inch inches yard yards second seconds minute minutes hour hours day days week weeks
    month months year years decade decades century centuries millisecond milliseconds ms gram
    grams kilogram kilograms kg mg g pound pounds ounce ounces oz lb lbs ton tons tonne tonnes
    liter liters litre litres ml gallon gallons pint pints cup cups teaspoon teaspoons tablespoon
    tablespoons celsius fahrenheit kelvin degree degrees percent percentage dollar dollars euro
    euros yen yuan peso pesos rupee rupees cent cents usd eur gbp jpy byte bytes kb mb gb tb bit
    bits watt watts kilowatt kilowatts volt volts amp amps hz khz mhz ghz mph kmh km/h
    stunde stunden minuten sekunden tage tag wochen woche monate jahre jahr meile meilen
    hora horas minuto minutos segundos día días semana semanas meses año años milla millas
    metro metros kilómetro kilómetros"""
)
DATES = _words(
    """january february march april may june july august september october november december
    monday tuesday wednesday thursday friday saturday sunday today tomorrow yesterday tonight
    januar februar märz mai juni juli oktober dezember montag dienstag mittwoch donnerstag freitag
    samstag sonntag heute morgen gestern enero febrero marzo abril mayo junio julio agosto
    septiembre octubre noviembre diciembre lunes martes miércoles jueves viernes sábado domingo
    hoy mañana ayer spring summer autumn winter"""
)
NUMBER_WORDS = _words(
    """hundred thousand million billion trillion dozen half double triple twice once first second
    third fourth fifth sixth seventh eighth ninth tenth ein zwei drei vier fünf sechs sieben acht
    neun zehn elf zwölf hundert tausend dos tres cuatro cinco seis siete ocho nueve diez once doce
    cien mil"""
)
NEGATIONS = _words(
    """not no never without none nobody nothing nowhere neither nor hardly avoid stop except unless
    non cannot nicht kein keine keinen keiner nie niemals ohne nunca jamás sin ningún ninguna
    nada"""
)
NEGATION_CHARACTERS = "不没沒無无非别別未勿"
NEGATIVE_PREFIXES = ("un", "dis", "in", "im", "il", "ir", "non", "non-", "mis", "de")
OPPOSITES = frozenset(
    frozenset(pair.split("/"))
    for pair in _words(
        """on/off enable/disable increase/decrease before/after more/less max/min
    maximum/minimum open/close buy/sell start/stop add/remove above/below with/without
    include/exclude allow/deny allow/block hot/cold first/last up/down in/out over/under
    left/right push/pull high/low higher/lower big/small large/small fast/slow faster/slower
    long/short longer/shorter old/new older/newer early/late earlier/later good/bad better/worse
    best/worst most/least many/few always/never all/none true/false yes/no accept/reject
    accept/decline import/export upload/download encrypt/decrypt encode/decode lock/unlock
    install/uninstall connect/disconnect log/unlog show/hide read/write send/receive give/take
    win/lose pass/fail love/hate hire/fire borrow/lend arrive/depart arrival/departure
    pros/cons benefits/drawbacks advantages/disadvantages profit/loss income/expense
    ascending/descending horizontal/vertical internal/external public/private positive/negative
    plus/minus multiply/divide save/delete create/delete create/destroy join/leave enter/exit
    wet/dry hard/soft light/dark light/heavy day/night morning/evening male/female man/woman
    husband/wife mother/father son/daughter brother/sister rich/poor safe/dangerous
    cheap/expensive inside/outside forward/backward raise/lower
    eat/avoid can/should and/or must/may should/may to/from now/then is/was are/were
    full-time/part-time am/pm"""
    )
)
