"""English word lists; `cache.senses` says what each is for."""

from __future__ import annotations

from cache.english_synonyms import SAME
from cache.senses import Senses, groups, words

ENGLISH = Senses(
    telltale=words(
        """the of what how is are does did my your you which who where when why and with for this
        that should could would will can do i a an to in at on from it its me we our has have had
        was were be been not if or but by about than before after there please need want any"""
    ),
    function=words(
        """a an the this that these those is are am was were be been being do does did done have
        has had there here please to s of just so then also it its as such some any what which how
        whats can could may might would will shall i'd able possible let lets ll ve d kindly
        whether if when where who whom whose why while tell and"""
    ),
    filler=words(
        """actually literally really truly indeed somehow fact basically simply currently quickly
        exactly maybe perhaps anyway though now um uh er erm hmm yeah hello hi hey ok okay thanks cheers"""
    ),
    light=words(
        """get have make take go way thing method process step steps procedure available
        kind type sort offer provide exist there use work happen city want like know help
        find stay remain request allow allowed permit permitted"""
    ),
    negation=words(
        """not no never without none nobody nothing nowhere neither nor hardly non cannot unable
        except unless fail refuse avoid stop prevent ban forbid prohibit lack zero"""
    ),
    markers=groups(
        """
        before, prior to, ahead of, in advance of, earlier than
        after, following, later than, once i have, afterwards
        since
        until, till, up to
        during, while
        more, greater, higher, bigger, larger
        less, fewer, lower, smaller
        most, maximum, max, highest, largest, biggest, at most
        least, minimum, min, lowest, smallest, at least
        over, above, exceed
        under, below, beneath
        first, initial
        last, final, latest
        second
        third
        next, upcoming
        previous, earlier
        only, solely, exclusively
        all, every, each
        both, simultaneously
        either
        always
        often, frequently
        sometimes, occasionally
        rarely, seldom
        too
        enough
        again
        still
        already
        yet
        else, other, another, different
        instead, rather than
        same
        half
        double, twice
        triple
        dozen
        hundred, hundreds
        thousand, thousands
        million, millions
        billion, billions
        shall
        used to, use to
        today
        tomorrow
        yesterday
        tonight, this evening
        morning
        afternoon
        evening
        night
        week, weekly, per week
        month, monthly, per month
        year, annual, annually, yearly, per year
        daily, per day
        hour, hourly, hours, hrs, hr
        minute, minutes, mins, min
        second, seconds, secs, sec
        weekday, weekdays
        weekend, weekends
        better
        worse
        best, top
        worst
        online
        offline
        inside, indoors, indoor
        outside, outdoors, outdoor
        if
        because
        against
        between
        within
        out of
        near, close to
        alone
        together
        almost, nearly
        partly, partially
        per
        vs, versus
        """
    ),
    persons={
        "i": "me:does",
        "we": "me:does",
        "me": "me:gets",
        "us": "me:gets",
        "my": "me:has",
        "our": "me:has",
        "mine": "me:has",
        "ours": "me:has",
        "myself": "me:gets",
        "you": "you",
        "your": "you:has",
        "yours": "you:has",
        "yourself": "you",
        "he": "he",
        "him": "he",
        "his": "he",
        "she": "she",
        "her": "she",
        "hers": "she",
        "they": "they",
        "them": "they",
        "their": "they",
        "theirs": "they",
    },
    relations=words(
        """of for in on at from to by with into onto about through via towards toward across
        along off around as per"""
    ),
    same=SAME,
    opposite=groups(
        """
        buy, sell
        give, take, receive
        borrow, lend
        send, receive
        import, export
        upload, download
        enable, disable
        open, close
        begin, end
        lock, unlock
        archive, unarchive
        mute, unmute
        accept, decline
        allow, ban
        increase, decrease, reduce, lower
        upgrade, downgrade
        benefit, drawback, risk
        backup, restore
        include, exclude
        arrive, depart, leave
        arrival, departure
        add, remove, delete
        create, delete
        install, uninstall
        connect, disconnect
        pause, resume
        grant, revoke
        spicy, mild
        cheap, expensive
        hot, cold, warm, cool
        fast, slow
        large, small
        old, new, young
        good, bad
        long, short
        tall, short
        wide, narrow
        deep, shallow
        thick, thin
        heavy, light
        dark, bright, light
        strong, weak
        hard, soft
        wet, dry
        full, empty
        early, late
        public, private
        legal, illegal
        safe, dangerous
        win, lose, draw
        pass, fail
        love, hate
        save, spend
        earn, spend
        push, pull
        raise, lower
        rise, fall
        ascending, descending
        encrypt, decrypt
        compress, extract, decompress
        encode, decode
        lossy, lossless
        read, write
        get, set
        input, output
        client, server
        source, destination, target
        parent, child
        husband, wife
        mother, father
        son, daughter
        brother, sister
        uncle, aunt
        king, queen
        male, female
        man, woman
        men, women
        boy, girl
        boys, girls
        full-time, part-time
        employed, self-employed, unemployed
        landlord, tenant
        employer, employee
        teacher, student
        doctor, patient, nurse
        buyer, seller
        debit, credit
        landline, mobile
        profit, loss
        income, expense
        asset, liability
        gross, net
        fixed, variable
        domestic, international
        urban, rural
        vegan, vegetarian
        front, back, rear
        left, right
        top, bottom
        up, down
        in, out
        north, south, east, west
        northern, southern, eastern, western
        before, after
        more, less
        most, least
        over, under
        first, last
        always, never
        freeze, unfreeze, thaw
        follow, unfollow
        subscribe, unsubscribe
        hire, fire
        attack, defend
        question, answer
        sunrise, sunset
        day, night
        summer, winter, spring, autumn
        vertical, horizontal
        internal, external
        positive, negative
        maximum, minimum, average, median
        numerator, denominator
        prefix, suffix
        ancestor, descendant
        lend, borrow
        liquid, solid, gas
        acid, base
        protect, harm
        clockwise, counterclockwise, anticlockwise
        eat, drink, avoid
        popular, unpopular
        claim, approve, reject
        visitor, resident
        gift, gift card
        part, labour
        """
    ),
    kinds=(
        words(
            """dog cat bird fish horse cow pig sheep goat lion tiger bear monkey rat mouse rabbit
            hamster turtle snake lobster duck chicken turkey frog elephant wolf fox deer lizard
            spider bee crab shark whale puppy kitten parrot donkey camel"""
        ),
        words("""red blue green yellow black white brown purple orange pink grey gray violet"""),
        words(
            """january february march april may june july august september october november
            december jan feb mar apr jun jul aug sep sept oct nov dec"""
        ),
        words(
            """monday tuesday wednesday thursday friday saturday sunday mon tue wed thu fri sat
            sun"""
        ),
        words("windows linux macos mac android ios ubuntu debian fedora chrome firefox safari"),
        words(
            """python java javascript typescript rust go ruby php swift kotlin c++ c# perl scala
            haskell sql html css bash"""
        ),
        words(
            """pdf word excel csv json xml png jpeg jpg gif mp3 mp4 wav zip html markdown yaml"""
        ),
        words(
            """second minute hour day week month year decade century meter mile kilometer inch
            foot yard centimeter millimeter gram kilogram pound ounce liter gallon pint cup ton
            celsius fahrenheit kelvin dollar euro yen byte kilobyte megabyte gigabyte terabyte
            watt kilowatt volt amp teaspoon tablespoon hectare acre knot"""
        ),
        words(
            """beef chicken pork lamb fish rice pasta bread cheese egg milk sugar salt butter tea
            coffee beer wine water juice apple banana lemon potato tomato onion garlic"""
        ),
        words(
            """france germany spain italy england scotland wales ireland uk usa china japan india
            russia brazil mexico canada australia austria switzerland poland portugal greece
            turkey egypt sweden norway denmark finland belgium netherlands london paris rome
            berlin madrid tokyo beijing moscow dublin"""
        ),
        words(
            """english french german spanish italian chinese japanese korean russian portuguese
            arabic dutch latin greek polish"""
        ),
        words(
            """doctor nurse lawyer teacher engineer writer author actor singer dancer journalist
            economist historian analyst editor architect accountant auditor"""
        ),
        words("breakfast lunch dinner brunch supper"),
        words("knee ankle hip elbow wrist shoulder neck back head foot hand arm leg eye ear"),
        words("flu cold measles covid malaria diabetes asthma cancer"),
        words("train bus car plane ferry taxi tram bike boat"),
        words("savings current joint student"),
        words("single double return triple"),
        words("parent child mother father brother sister friend colleague partner"),
    ),
    negative_prefixes=("un", "dis", "in", "im", "il", "ir", "non", "non-", "mis", "de", "anti"),
    interchangeable=(
        words("get have request find"),
        words("offer provide have exist available there"),
        words("way thing method process step procedure"),
        words("kind type sort"),
        words("stay remain"),
        words("make take have"),
        words("allow allowed permit permitted"),
    ),
)
