"""English wordings that ask for the same thing almost everywhere, a group a line."""

from __future__ import annotations

from cache.senses import groups

SAME = groups(
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
)
