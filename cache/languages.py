"""The languages that prompts can be read in, by their codes."""

from __future__ import annotations

from collections.abc import Mapping

from cache.senses import Senses, words
from cache.senses_chinese import CHINESE
from cache.senses_english import ENGLISH
from cache.senses_german import GERMAN
from cache.senses_spanish import SPANISH

BY_LANGUAGE: Mapping[str, Senses] = {
    "en": ENGLISH,
    "es": SPANISH,
    "de": GERMAN,
    "zh": CHINESE,
}

OTHER_TELLTALE = words(
    """il lo gli che di het een niet och não og ikke jeg det hvad är inte nie jest czy jak este nu
    și les une dans pour est pas je vous nous mon ma mes quel quelle comment où avec ce cette
    come posso mio mia sono perché dove quando e os as um uma meu minha você onde ik mijn hoe
    waar kan met voor van een zijn wat"""
)
"""Words of languages without senses; as many of these as of a known one make it unknown."""
