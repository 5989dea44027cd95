"""Closed word lists by language that `cache.reading` reads prompts with. Data only, lower case.

`same` merges wordings that ask for the same thing almost everywhere, so a line must be dull
rather than clever: it is compared with its inflections evened out, and what it merges is still
scored and checked. `opposite` and `kinds` keep apart what must never be merged; `function`,
`filler` and `light` words add nothing that an answer depends on (one may be
exchanged for another only within a group of `interchangeable`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _groups(text: str) -> tuple[tuple[str, ...], ...]:
    """One group a line, its members apart by commas."""
    return tuple(
        tuple(member.strip() for member in line.split(","))
        for line in text.strip().splitlines()
        if line.strip()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Senses:
    """What is known of one language.

    `markers` are words that turn an answer: each group counts as one marker, and two prompts must
    hold the same ones. `persons` are pronouns by whom they stand for. `relations` are
    prepositions, which tell the part that the following words play. `movable` are concepts of verbs
    that stand second or last by rule, so that their place tells nothing.
    """

    telltale: frozenset[str]
    function: frozenset[str]
    filler: frozenset[str] = frozenset()
    light: frozenset[str] = frozenset()
    negation: frozenset[str] = frozenset()
    markers: tuple[tuple[str, ...], ...] = ()
    persons: Mapping[str, str] = field(default_factory=dict)
    relations: frozenset[str] = frozenset()
    same: tuple[tuple[str, ...], ...] = ()
    opposite: tuple[tuple[str, ...], ...] = ()
    kinds: tuple[frozenset[str], ...] = ()
    negative_prefixes: tuple[str, ...] = ()
    interchangeable: tuple[frozenset[str], ...] = ()
    movable: frozenset[str] = frozenset()


ENGLISH = Senses(
    telltale=_words(
        """the of what how is are does did my your you which who where when why and with for this
        that should could would will can do i a an to in at on from it its me we our has have had
        was were be been not if or but by about than before after there please need want any"""
    ),
    function=_words(
        """a an the this that these those is are am was were be been being do does did done have
        has had there here please to s of just so then also it its as such some any what which how
        whats can could may might would will shall i'd able possible let lets ll ve d kindly
        whether if when where who whom whose why while tell and"""
    ),
    filler=_words(
        """actually literally really truly indeed somehow fact basically simply currently quickly
        exactly maybe perhaps anyway though now um uh er erm hmm yeah hello hi hey ok okay thanks cheers"""
    ),
    light=_words(
        """get have make take go way thing method process step steps procedure available
        kind type sort offer provide exist there use work happen city want like know help
        find stay remain request allow allowed permit permitted"""
    ),
    negation=_words(
        """not no never without none nobody nothing nowhere neither nor hardly non cannot unable
        except unless fail refuse avoid stop prevent ban forbid prohibit lack zero"""
    ),
    markers=_groups(
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
    relations=_words(
        """of for in on at from to by with into onto about through via towards toward across
        along off around as per"""
    ),
    same=_groups(
        """
        enable, turn on, switch on, activate, go live
        disable, turn off, switch off, deactivate
        cancel, terminate, call off
        delete, erase, get rid of
        remove, take off
        add, insert
        create, set up, generate, establish
        build, construct
        change, modify, alter, edit
        update, bring up to date
        fix, repair, mend
        begin, start, commence
        end, finish
        close, shut, shut down
        stop, halt, cease
        buy, purchase
        sell, vend
        get, obtain, acquire, receive, get hold of
        need, require, must, have to, has to, need to, required to, obliged to
        show, display
        check, verify, look up
        choose, select, pick
        contact, get in touch with, reach out to, get in contact with
        call, telephone
        return, send back, give back
        refund, money back, reimbursement, get my money back
        deliver, delivery, shipping, shipment, ship, dispatch
        order, parcel, package
        cost, price, fee, pricing, how much does it cost, how much is it
        book, reserve, make a reservation
        booking, reservation
        store, shop
        supermarket, grocery store
        apartment, flat
        house, home
        street, road
        car, automobile, motor
        holiday, vacation, annual leave
        journey, trip
        plane, aeroplane, airplane, aircraft
        luggage, baggage
        doctor, physician, gp
        chemist, pharmacy, drugstore
        medicine, medication
        vaccine, jab, vaccination, immunisation, immunization, shot
        illness, disease, sickness
        child, kid, youngster
        children, kids
        baby, infant
        employee, worker, staff, staff member
        employer, company i work for
        firm, company
        job, occupation
        salary, wage, wages
        lawyer, attorney, solicitor
        film, movie
        picture, photo, image, photograph
        sofa, couch
        mobile, cell, cellphone, mobile phone, cell phone, smartphone
        phone number, telephone number, contact number
        email, e-mail
        broadband, internet connection
        wifi, wi-fi, wireless internet
        website, site, web site, webpage
        app, application
        repo, repository
        login, log in, sign in, log on, logging in
        logout, log out, sign out, log off
        signup, sign up, register, enrol, enroll
        password, passcode, login password
        two-factor, 2fa, two-step, two-factor authentication, two-step verification
        authentication, auth
        integration, connector
        settings, preferences, options
        notification, alert
        bug, defect
        error, fault, mistake
        quick, fast, rapid, speedy
        slow, sluggish
        large, big
        small, little
        simple, easy
        difficult, hard, tough
        broken, faulty, defective, damaged
        free, no cost, at no cost, free of charge, no charge, complimentary
        cheap, inexpensive, low cost
        expensive, pricey, costly
        correct, right answer
        happy, glad
        rich, wealthy
        ill, unwell
        wait, waiting
        guarantee, warranty
        drawback, downside, disadvantage, con
        benefit, advantage, pro, upside
        difference, distinction
        reason, cause
        result, outcome
        opening hours, opening times, when are you open, when do you open, business hours, hours of operation, hours of business, trading hours
        capital, capital city
        population, number of people, number of inhabitants
        car park, parking lot, parking
        bill, invoice
        cashpoint, atm, cash machine
        cash, money
        withdraw, withdrawing, withdrawal, take out
        pay, settle
        payment, paying
        transfer, move, send over
        debit card, bank card
        current account, checking account
        direct debit, standing payment
        overseas, abroad, foreign country
        colleague, coworker, co-worker
        team member, teammate
        workspace, work space
        invitation, invite
        decline, say no to, reject, turn down
        accept, say yes to, agree to
        include, come with, contain, be included
        allow, permit
        allowed, permitted
        allowance, entitlement
        limit, cap, quota
        length, duration
        height, how tall
        weight, how heavy
        age, how old
        area, region
        near, nearby, close by
        luggage, bags
        train ticket, rail ticket
        subscription, membership, plan subscription
        restaurant, eatery
        meal, dish
        menu, list of dishes
        takeaway, takeout, take-out, food to go
        table, seats
        vegan, plant-based
        nut allergy, allergic to nuts
        pool, swimming pool
        gym, fitness centre, fitness center, fitness room
        lift, elevator
        rubbish, trash, garbage, waste
        bin, trash can, dustbin
        tap, faucet
        petrol, gasoline, gas station fuel
        autumn, fall season
        football, soccer
        maths, mathematics, math
        university, college degree
        teacher, instructor
        exam, examination, test
        homework, assignment
        deadline, due date, cut-off date
        form, formation
        document, paperwork
        copy, duplicate
        weather, forecast, weather forecast
        boss, manager, line manager
        ceo, chief executive, chief executive officer, boss of
        founder, creator
        author, writer
        winner, champion
        learn, study
        explain, describe
        summarise, summarize, sum up
        list, enumerate
        write, compose, draft
        convert, turn into, change into
        calculate, compute, work out, figure out
        install, set up on
        uninstall, deinstall
        download, save locally
        upload, send up
        connect, link, hook up
        disconnect, unlink
        share, give access to
        archive, put away
        rename, change the name of
        reset, recover
        lock, block
        unlock, unblock, unfreeze
        freeze, put on hold
        upgrade, move to a higher plan
        downgrade, move to a lower plan
        expire, run out
        track, follow
        complain, make a complaint, file a complaint, lodge a complaint
        claim, make a claim, submit a claim, file a claim, put in a claim
        apply, submit an application, put in an application
        application, applying
        repeat, recurring
        dose, dosage
        painkiller, pain reliever
        pregnant, expecting a baby
        safe, harmless
        dangerous, unsafe, hazardous
        legal, lawful, legally allowed
        illegal, unlawful, against the law
        tenant, renter
        landlord, property owner
        tenancy, lease
        deposit, security deposit
        rent, rental payment
        property, premises
        mortgage, home loan
        insurance, insurance cover
        car insurance, motor insurance, motor policy, car policy
        cover, coverage
        tax return, self-assessment
        pension, retirement pot
        savings, savings account
        loan, credit
        borrow, take a loan
        electricity, power
        energy bill, gas and electricity bill
        boiler, heating system
        plumber, plumbing service
        cleaner, cleaning team, cleaning staff
        clean, cleaning
        fridge, refrigerator
        tv, television, telly
        laptop, notebook computer
        computer, pc
        folder, directory
        backup, back up
        file, document file
        function, method of a class
        variable, var
        database, db
        server, host machine
        deploy, roll out
        deployment, rollout
        roll back, revert
        environment, env
        config, configuration
        api key, access key
        admin, administrator
        user, account holder
        customer, client
        customer service, customer support, support team, help desk
        member of staff, employee
        feedback, review
        rating, score
        discount, reduction, money off
        voucher, coupon, promo code, discount code
        gift, present
        quantity, amount
        order minimum, minimum order, minimum order value
        phone, phone number
        average, mean
        percent, %, percentage, per cent
        kilometer, km, kilometre, kilometers, kms
        meter, metre, metres
        mile, miles
        kilogram, kg, kilo, kgs, kilograms
        gram, grams
        liter, litre, liters, litres
        pound, £, gbp, quid, pounds
        dollar, $, usd, bucks, dollars
        euro, €, eur, euros
        celsius, °c, centigrade
        fahrenheit, °f
        gigabyte, gb, gigabytes
        megabyte, mb, megabytes
        uk, united kingdom, great britain
        usa, united states, united states of america, us of a
        eu, european union
        un, united nations
        nyc, new york city
        la, los angeles
        bicycle, bike
        motorcycle, motorbike
        lorry, truck
        biscuit, cookie
        dessert, pudding
        wine, vino
        drink, beverage
        breakfast, morning meal
        dinner, evening meal
        lunch, midday meal
        tall, high
        wide, broad
        die, pass away
        marry, get married to, wed
        born, birth
        kill, murder
        steal, thieve
        hurt, injure
        ocean, sea
        forest, woods
        rock, stone
        dog-friendly, dogs allowed
        screen, display screen
        text, lettering
        typing, keyboarding
        touch typing, touch-typing
        photo, snapshot
        video call, video chat
        meeting, conference
        calendar, diary
        schedule, timetable
        month, calendar month
        poem, verse
        joke, funny story
        story, tale
        essay, composition
        recipe, cooking instructions
        ingredient, component
        symptom, sign of
        treatment, therapy
        remedy, cure
        headache, head pain
        fever, high temperature
        cold, common cold
        belly, stomach, tummy
        work from home, working from home, remote work, work remotely, working remotely, home working
        flexible working, flexible hours
        part-time staff, part-timers, part time staff
        non-member, not a member
        adult, grown-up
        dog, doggy
        plant, flora
        succulent, succulents
        sentence, line of text
        green, green colour
        nearest, closest
        increase, raise, put up
        reduce, decrease, cut down
        hire, rent out
        exchange, swap
        collect, pick up
        complete, fill in, fill out
        speak, talk
        see, view, look at
        submit, send in, hand in
        late, delayed
        lost, missing
        wrong, incorrect
        entire, whole
        earliest, soonest
        trousers, pants
        jumper, sweater
        nappy, diaper
        pavement, sidewalk
        motorway, freeway, highway
        postcode, zip code, postal code, zip
        surname, last name, family name
        forename, first name, given name
        cv, resume, curriculum vitae
        estate agent, realtor
        torch, flashlight
        aubergine, eggplant
        courgette, zucchini
        coriander, cilantro
        prawn, shrimp
        payslip, pay slip, wage slip, pay stub
        licence, license
        tyre, tire
        grey, gray
        mother, mum, mom
        father, dad
        jewellery, jewelry
        practise, practice
        enquiry, inquiry
        instalment, installment
        programme, program
        catalogue, catalog
        pyjamas, pajamas
        mould, mold
        defence, defense
        theatre, theater
        fibre, fiber
        judgement, judgment
        ageing, aging
        spectacles, glasses, eyeglasses
        toilet, restroom, lavatory
        queue, waiting line
        luggage storage, left luggage
        check-in, check in
        checkout, check out
        set-up, setup
        carpark, car park
        underground, subway, metro
        railway station, train station
        spouse, husband or wife
        grandma, grandmother, granny
        grandpa, grandfather, grandad
        dentist, dental surgeon
        surgery, operation
        blood test, blood work
        side effect, adverse effect
        sick pay, sickness pay
        sick leave, sickness leave
        maternity leave, maternity absence
        notice period, period of notice
        pay rise, raise in pay, salary increase
        overtime, extra hours
        trial, trial period
        free plan, free tier
        rate limit, request limit
        pull request, merge request
        bug report, issue report
        screen sharing, screen share
        dark mode, dark theme
        user name, username, login name
        credit score, credit rating
        overdraft, arranged overdraft
        contactless, tap to pay
        chargeback, payment reversal
        smart meter, smart energy meter
        power cut, power outage, blackout
        water bill, water charges
        blocked, clogged
        drain, drainpipe
        hoover, vacuum, vacuum cleaner
        washing machine, washer
        tumble dryer, dryer
        cooker, stove, hob
        leftovers, leftover food
        gluten-free, gluten free
        dairy-free, dairy free
        wheelchair accessible, accessible by wheelchair
        """
    ),
    opposite=_groups(
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
        _words(
            """dog cat bird fish horse cow pig sheep goat lion tiger bear monkey rat mouse rabbit
            hamster turtle snake lobster duck chicken turkey frog elephant wolf fox deer lizard
            spider bee crab shark whale puppy kitten parrot donkey camel"""
        ),
        _words("""red blue green yellow black white brown purple orange pink grey gray violet"""),
        _words(
            """january february march april may june july august september october november
            december jan feb mar apr jun jul aug sep sept oct nov dec"""
        ),
        _words(
            """monday tuesday wednesday thursday friday saturday sunday mon tue wed thu fri sat
            sun"""
        ),
        _words("windows linux macos mac android ios ubuntu debian fedora chrome firefox safari"),
        _words(
            """python java javascript typescript rust go ruby php swift kotlin c++ c# perl scala
            haskell sql html css bash"""
        ),
        _words(
            """pdf word excel csv json xml png jpeg jpg gif mp3 mp4 wav zip html markdown yaml"""
        ),
        _words(
            """second minute hour day week month year decade century meter mile kilometer inch
            foot yard centimeter millimeter gram kilogram pound ounce liter gallon pint cup ton
            celsius fahrenheit kelvin dollar euro yen byte kilobyte megabyte gigabyte terabyte
            watt kilowatt volt amp teaspoon tablespoon hectare acre knot"""
        ),
        _words(
            """beef chicken pork lamb fish rice pasta bread cheese egg milk sugar salt butter tea
            coffee beer wine water juice apple banana lemon potato tomato onion garlic"""
        ),
        _words(
            """france germany spain italy england scotland wales ireland uk usa china japan india
            russia brazil mexico canada australia austria switzerland poland portugal greece
            turkey egypt sweden norway denmark finland belgium netherlands london paris rome
            berlin madrid tokyo beijing moscow dublin"""
        ),
        _words(
            """english french german spanish italian chinese japanese korean russian portuguese
            arabic dutch latin greek polish"""
        ),
        _words(
            """doctor nurse lawyer teacher engineer writer author actor singer dancer journalist
            economist historian analyst editor architect accountant auditor"""
        ),
        _words("breakfast lunch dinner brunch supper"),
        _words("knee ankle hip elbow wrist shoulder neck back head foot hand arm leg eye ear"),
        _words("flu cold measles covid malaria diabetes asthma cancer"),
        _words("train bus car plane ferry taxi tram bike boat"),
        _words("savings current joint student"),
        _words("single double return triple"),
        _words("parent child mother father brother sister friend colleague partner"),
    ),
    negative_prefixes=("un", "dis", "in", "im", "il", "ir", "non", "non-", "mis", "de", "anti"),
    interchangeable=(
        _words("get have request find"),
        _words("offer provide have exist available there"),
        _words("way thing method process step procedure"),
        _words("kind type sort"),
        _words("stay remain"),
        _words("make take have"),
        _words("allow allowed permit permitted"),
    ),
)

SPANISH = Senses(
    telltale=_words(
        """el los las que como cómo qué una por para mi tu su del al es un con cuál cuánto cuándo
        dónde está puedo hay en se lo y o de la cuántos cuántas quién tengo hacer no me"""
    ),
    function=_words(
        """el la los las un una unos unas de del al que qué es son está están ser hay se lo le
        cómo como puedo puede por favor y a en cuál cuáles me gustaría quiero hago hacer"""
    ),
    filler=_words("realmente actualmente simplemente hola gracias oye"),
    light=_words("forma manera modo pasos"),
    negation=_words(
        """no nunca jamás sin ningún ninguna ninguno nada nadie tampoco ni excepto salvo evitar"""
    ),
    markers=_groups(
        """
        antes
        después, tras
        desde
        hasta
        durante
        más
        menos
        mejor
        peor
        mayor
        menor
        máximo, máxima
        mínimo, mínima
        sobre, encima
        bajo, debajo
        primero, primer, primera
        último, última
        segundo, segunda
        próximo, próxima, siguiente
        anterior
        solo, sólo, solamente, únicamente
        todo, todos, toda, todas, cada
        ambos, ambas
        siempre
        mitad
        doble
        medio, media
        hoy
        mañana
        ayer
        esta noche
        fue, era, fueron, eran
        será, serán
        debo, debe, tengo que, hay que
        debería
        dentro
        fuera
        con
        contra
        entre
        si
        """
    ),
    persons={
        "yo": "me",
        "mi": "me:has",
        "mis": "me:has",
        "nuestro": "me:has",
        "nuestra": "me:has",
        "tu": "you:has",
        "tus": "you:has",
        "usted": "you",
        "vuestro": "you:has",
        "él": "he",
        "ella": "she",
        "ellos": "they",
        "su": "they:has",
        "sus": "they:has",
    },
    relations=_words("de del a al en por para desde hasta hacia con sin sobre entre"),
    same=_groups(
        """
        cancelar, cancelo, anular, anulo, dar de baja, doy de baja, cancelación
        cambiar, cambio, modificar, modifico
        activar, activo, habilitar, habilito, encender, enciendo
        desactivar, desactivo, deshabilitar, deshabilito, apagar, apago
        restablecer, restablezco, reiniciar
        comprar, compro, adquirir
        coche, carro, auto
        ordenador, computadora, computador
        móvil, celular, teléfono móvil
        contraseña, clave
        tienda, comercio
        precio, coste, costo, cuánto cuesta, cuánto vale
        pedido, orden
        envío, entrega
        reembolso, devolución del dinero
        horario, horas de apertura, horario de apertura
        """
    ),
    opposite=_groups(
        """
        activar, desactivar
        comprar, vender
        abrir, cerrar
        subir, bajar
        encender, apagar
        entrar, salir
        aumentar, reducir, disminuir
        bueno, malo
        grande, pequeño
        frío, caliente
        importar, exportar
        izquierda, derecha
        """
    ),
    negative_prefixes=("des", "in", "im", "i"),
)

GERMAN = Senses(
    telltale=_words(
        """der die das und nicht ist ein eine einen wie sie ich mein meine meinen wo wann warum
        was wer kann muss mit für von zu zum zur auf im am den dem des sind hat welche welcher
        gibt es wird viel viele"""
    ),
    function=_words(
        """der die das den dem des ein eine einen einem einer eines ist sind bin es gibt wie was
        kann können bitte zu man welche welcher welches und wird werden habe hat denn mal doch
        möchte"""
    ),
    filler=_words("eigentlich wirklich gerade einfach hallo danke"),
    light=_words("weg möglichkeit"),
    negation=_words(
        """nicht kein keine keinen keiner keinem keines nie niemals ohne nichts niemand weder außer
        vermeiden"""
    ),
    markers=_groups(
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
    relations=_words("von vom zu zum zur aus in im an am auf für bei durch nach mit"),
    same=_groups(
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
    opposite=_groups(
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
    movable=_words("kündigen ändern aktivieren deaktivieren zurücksetzen kaufen"),
)

CHINESE = Senses(
    telltale=frozenset(),
    function=_words("的 吗 呢 啊 吧 请 请问 是 在 一下 地 得 可以 能 能否 能不能 我想 么"),
    filler=_words("其实 真的 到底 现在 谢谢 你好 您好"),
    light=_words("方法 办法 方式 步骤"),
    negation=_words("不 没 没有 无 非 别 未 勿 不能 不要 不可以 无法 不会 除了 避免 禁止 不可"),
    markers=_groups(
        """
        之前, 以前, 前
        之后, 以后, 后
        期间
        最多, 最大, 最高
        最少, 最小, 最低
        更多, 更大
        更少, 更小
        以上, 超过
        以下, 低于
        第一, 首
        最后
        下一个, 下个
        上一个, 上个
        只, 仅, 只有
        都, 所有, 全部, 每
        总是
        今天
        明天
        昨天
        必须, 得要
        应该
        如果
        多少
        几
        谁
        哪里, 哪儿, 在哪
        什么时候, 何时
        为什么, 为何
        多久, 多长时间
        比
        从
        到
        给
        被
        让
        向
        """
    ),
    persons={
        "我": "me",
        "我的": "me:has",
        "你的": "you:has",
        "您的": "you:has",
        "他的": "he:has",
        "她的": "she:has",
        "我们": "me",
        "你": "you",
        "您": "you",
        "你们": "you",
        "他": "he",
        "她": "she",
        "他们": "they",
    },
    relations=frozenset(),
    same=_groups(
        """
        怎么, 如何, 怎样, 怎么样才能, 怎么才能
        取消, 退订
        修改, 更改, 更换
        打开, 开启, 启用
        关闭, 关掉, 停用, 禁用
        密码, 口令
        手机, 移动电话
        购买, 买
        价格, 价钱, 多少钱
        订单, 订购单
        退款, 退钱
        电脑, 计算机
        什么, 啥, 哪个
        营业时间, 开门时间
        """
    ),
    opposite=_groups(
        """
        打开, 关闭
        购买, 卖, 出售
        增加, 减少
        上, 下
        左, 右
        大, 小
        多, 少
        高, 低
        长, 短
        冷, 热
        借, 还
        进, 出
        """
    ),
)

BY_LANGUAGE: Mapping[str, Senses] = {
    "en": ENGLISH,
    "es": SPANISH,
    "de": GERMAN,
    "zh": CHINESE,
}

OTHER_TELLTALE = _words(
    """il lo gli che di het een niet och não og ikke jeg det hvad är inte nie jest czy jak este nu
    și les une dans pour est pas je vous nous mon ma mes quel quelle comment où avec ce cette
    come posso mio mia sono perché dove quando e os as um uma meu minha você onde ik mijn hoe
    waar kan met voor van een zijn wat"""
)
"""Words of languages without senses; as many of these as of a known one make it unknown."""
