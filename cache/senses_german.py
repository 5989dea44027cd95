"""German word lists; `cache.senses` says what each is for."""

from __future__ import annotations

from cache.senses import Senses, groups, words

GERMAN = Senses(
    telltale=words(
        """der die das und nicht ist ein eine einen wie sie ich mein meine meinen wo wann warum
        was wer kann muss mit für von zu zum zur auf im am den dem des sind hat welche welcher
        gibt es wird viel viele"""
    ),
    function=words(
        """der die das den dem des ein eine einen einem einer eines ist sind bin es gibt wie was
        kann können bitte zu man welche welcher welches und wird werden habe hat denn mal doch
        möchte"""
    ),
    filler=words("eigentlich wirklich gerade einfach hallo danke"),
    light=words("weg möglichkeit"),
    negation=words(
        """nicht kein keine keinen keiner keinem keines nie niemals ohne nichts niemand weder außer
        vermeiden"""
    ),
    markers=groups(
        """
        vor, bevor, vorher
        nach, nachdem, danach
        seit
        bis
        während
        mehr
        weniger
        besser
        schlechter
        größer, höher
        kleiner, niedriger
        am meisten, höchste, größte, maximal, maximale
        am wenigsten, niedrigste, kleinste, minimal, minimale
        über
        unter
        erste, ersten, erster, erstes
        letzte, letzten, letzter, letztes
        zweite, zweiten, zweiter
        nächste, nächsten, nächster, nächstes
        vorherige, vorherigen
        nur, ausschließlich
        alle, jede, jeder, jedes, jeden, allen
        beide
        immer
        halb, halbe
        doppelt, doppelte
        heute
        morgen
        gestern
        war, waren, hatte, wurde, wurden
        muss, müssen
        soll, sollte, sollen
        darf, dürfen
        innerhalb
        außerhalb
        mit
        gegen
        zwischen
        wenn, falls
        """
    ),
    persons={
        "ich": "me",
        "mir": "me:gets",
        "mich": "me:gets",
        "mein": "me:has",
        "meine": "me:has",
        "meinen": "me:has",
        "meinem": "me:has",
        "meiner": "me:has",
        "wir": "me",
        "unser": "me:has",
        "unsere": "me:has",
        "du": "you",
        "dein": "you:has",
        "deine": "you:has",
        "er": "he",
        "ihn": "he",
        "sein": "he:has",
        "seine": "he:has",
        "sie": "they",
        "ihr": "they:has",
        "ihre": "they:has",
    },
    relations=words("von vom zu zum zur aus in im an am auf für bei durch nach mit"),
    same=groups(
        """
        kündigen, kündige, stornieren, storniere, abbestellen
        ändern, ändere, wechseln, wechsle, anpassen
        aktivieren, aktiviere, einschalten, anschalten
        deaktivieren, deaktiviere, ausschalten, abschalten
        zurücksetzen, setze zurück
        kaufen, kaufe, erwerben
        preis, kosten, kostet, wie viel kostet
        passwort, kennwort
        handy, mobiltelefon, smartphone
        lieferung, versand
        bestellung, auftrag
        rechnung, abrechnung
        öffnungszeiten, geschäftszeiten
        geschäft, laden
        wagen, auto
        bahnhof, hauptbahnhof der stadt
        """
    ),
    opposite=groups(
        """
        aktivieren, deaktivieren
        kaufen, verkaufen
        öffnen, schließen
        erhöhen, senken, verringern
        ein, aus
        gut, schlecht
        groß, klein
        heiß, kalt
        links, rechts
        importieren, exportieren
        sperren, entsperren
        """
    ),
    negative_prefixes=("un", "ent", "de", "in", "miss"),
    movable=words("kündigen ändern aktivieren deaktivieren zurücksetzen kaufen"),
)
