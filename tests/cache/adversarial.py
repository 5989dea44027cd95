"""Pairs of prompts that look alike and need different answers, by kind and language.

One line is a sentence with a slot, `[x|y]`: its two fillings are the pair. Written for this
project; nothing here was used to train the verifier (`bench/train_verifier.py` has its own).
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Trap(NamedTuple):
    language: str
    kind: str
    a: str
    b: str


LINES = """
# en negation
[|Do not ]book the meeting room for Thursday
Which vaccines are [|not ]required for Kenya?
Is it safe to drive [with|without] glasses after surgery?
Why does my printer [|not ]connect to the network?
Can I [|never ]eat sushi while breastfeeding?
Which plants [need|do not need] direct sunlight?
List countries that [are|are not] members of NATO
How do I stay awake [|without coffee ]during a night shift?
What happens if I [take|skip] a dose of my antibiotic?
Should I [|avoid ]exercise with a sore throat?
Which roads are [open|closed] after the storm?
Is gluten [present|absent] in oats?
Who is [|not ]allowed to vote in local elections?
What foods [contain|lack] iron?
Are tips [included|excluded] in the bill?
Are refunds possible [with|without] a receipt?
Do I [|no longer ]need a visa for Brazil?
Explain why the test [passed|did not pass]
Which students [have|have not] submitted the essay?
Can the dog [|not ]be left alone at night?
# en numbers
How many calories are in [2|3] slices of pizza?
What is the square root of [144|169]?
Give me [five|six] facts about Saturn
What comes after chapter [9|19] in the book?
Set a timer for [15|50] minutes
How do I split a bill of 90 between [4|6] people?
What is [12|21] percent of 350?
Who was president in [1988|1998]?
Is [37|39] degrees a fever?
How far is [10|100] miles on foot?
What is [1.5|15] liters in cups?
Which bus goes to terminal [1|2]?
Summarize page [four|fourteen]
What is the visa fee for [one|two] adults?
Solve [3|8]x + 4 = 20
Recommend a laptop under [$500|$1500]
Is a score of [60|90] good for this exam?
What is the flight time of flight [BA117|BA171]?
How much paint do I need for [20|200] square meters?
What is the [third|fifth] amendment?
Is a fee of [€30|€300] normal for a locksmith?
How old is someone born in [1970|1907]?
Divide [84|48] by 12
What does error [404|403] mean for my shop?
Can I bring [two|ten] bottles of wine into Norway?
Which room is free at [8:30|9:30]?
Explain step [2|12] of the recipe
# en units
How heavy is 12 [kilograms|pounds] of rice?
How warm is 25 degrees [Celsius|Fahrenheit]?
How far can I run in 30 [minutes|seconds]?
Is 5 [grams|milligrams] of salt too much?
How tall is 180 [cm|inches]?
How many people fit into 100 square [feet|meters]?
How fast is 90 [km/h|mph]?
Is 2 [GB|TB] enough for my photos?
Wake me up in 2 [hours|days]
How long is a [light year|leap year]?
What does 3 [cups|tablespoons] of flour weigh?
Is 500 [watts|kilowatts] enough for a heater?
How much is 80 [dollars|euros] in yen?
Deliver it within 3 [days|weeks]
# en dates
Is the museum open on [Monday|Wednesday]?
What events take place in [June|July]?
Where can I celebrate [Christmas|Easter] in Rome?
How was the weather [yesterday|last week]?
Book a dentist for [tomorrow|Friday] afternoon
Which stars are visible in [winter|summer]?
What is due on [1 May|1 March]?
Summarize the news of [2021|2022]
When is the [next|last] train to Oxford?
Do I work on [Saturday|Sunday] night?
What was on the menu [today|yesterday]?
Remind me in the [morning|evening]
Is the office closed on [2025-04-01|2025-01-04]?
What did people wear in the [1920s|1950s]?
Is there a match [tonight|tomorrow night]?
# en versions and identifiers
What is new in Node [18|20]?
How do I migrate from Django [3.2|4.2]?
Does the [X200|X300] support fast charging?
What does `git [reset|revert]` do?
What does `rm [-r|-f]` do?
Explain the function get_[user|group]_id
What is stored in /etc/[passwd|shadow]?
Why does [foo.py|bar.py] fail to import?
Look up order [A-1042|A-1024]
What is port [443|8443] used for?
Does [HTTP/1.1|HTTP/2] allow multiplexing?
How do I set MAX_[SIZE|COUNT] in the config?
Is [example.com|example.org] down?
What is the difference between C and [C++|C#]?
Open ticket [#811|#118]
What does the --[dry-run|force] flag do?
Is CVE-2021-[44228|45046] fixed in our build?
What does the header X-[Request|Trace]-Id carry?
Email the draft to [ann|dan]@example.com
Run the script with [Python|Ruby] instead of bash
# en quotes
Who said "[less|more] is a bore"?
Who wrote "The Old [Man|House] and the Sea"?
What is the synonym of "[big|small]"?
Search the log for "[timeout|refused]"
# en before and after
Should I stretch [before|after] running?
What did Rome look like [before|after] the fire?
Do I pay [before|after] the meal arrives?
Can I eat two hours [before|after] a blood test?
What should I do [before|after] moving house?
Which king ruled [before|after] Henry VIII?
Do I add salt [before|after] the water boils?
Can I apply [until|from] the end of May?
Who spoke [first|last] at the debate?
Which chapter comes [earlier|later]?
Is it brighter at dawn [than|or] at dusk?
# en roles
Did [Anna invite Tom|Tom invite Anna]?
Does [Peru border Chile|Chile border Peru] in the south?
Is [the cat chasing the dog|the dog chasing the cat]?
Who sued whom: did [Apple sue Samsung|Samsung sue Apple]?
Translate this letter from [German into Polish|Polish into German]
How do I fly from [Lima to Quito|Quito to Lima]?
How do I convert [feet to meters|meters to feet]?
Did [Brutus kill Caesar|Caesar kill Brutus]?
Can [a bank sue a customer|a customer sue a bank]?
Does [my tenant owe me money|me owe my tenant money]?
Is [silver heavier than gold|gold heavier than silver]?
Was [Ben hired by Mia|Mia hired by Ben]?
Do I report to [Jo about Sam|Sam about Jo]?
Is [Venus closer than Mars|Mars closer than Venus]?
Move the files from [backup to archive|archive to backup]
Did [the police arrest the mayor|the mayor arrest the police]?
Can [children teach adults|adults teach children]?
Is [a house boat|a boat house] expensive?
Is [Leo faithful to Eva|Eva faithful to Leo]?
Should I replace [butter with oil|oil with butter]?
Who lent money: did [Carl lend to Rita|Rita lend to Carl]?
Did [the student criticize the professor|the professor criticize the student]?
# en comparisons
Which phone has the [largest|smallest] battery?
What is the [fastest|cheapest] way to Berlin?
Which planet is [hotter|colder] than Venus?
Who earns [more|less] than a nurse?
Is the rate [above|below] the average?
What costs [over|under] ten euros here?
Which bread has the [most|least] sugar?
Name the [best|worst] film of Kubrick
Which city is [older|younger] than Rome?
Is my blood pressure too [high|low]?
What is the [minimum|maximum] age for pilots?
Which river is [longer|shorter] than the Rhine?
Is the new tax [higher|lower] than before?
# en antonyms
How do I [increase|decrease] the brightness?
How do I [open|close] a business account?
How do I [subscribe to|unsubscribe from] the newsletter?
How do I [install|uninstall] the driver?
How do I [freeze|thaw] bread?
How do I [import|export] my bookmarks?
What are the [advantages|disadvantages] of solar panels?
How do I [hide|show] the toolbar?
How do I [gain|lose] weight?
How do I [follow|unfollow] a page?
When does the sun [rise|set] in Oslo?
Is the valve [open|shut] by default?
What are the [strengths|weaknesses] of the team?
How do I [lengthen|shorten] a dress?
How do I [encrypt|decrypt] a folder?
Where do flights [arrive|depart]?
Is the report [public|confidential]?
How do I [tighten|loosen] the chain?
Who [won|lost] the final?
Can I [lend|borrow] a bike here?
How do I [zip|unzip] this folder?
How do I [raise|lower] the blinds?
Is this mushroom [edible|poisonous]?
How do I [accept|reject] an offer?
How do I [join|leave] the group?
# en modifiers
What is the refund policy for [|damaged ]goods?
Can [|underage ]drivers rent a car?
Is [|raw ]milk safe?
What does a [|senior ]developer earn?
What are the rules of [|beach ]volleyball?
How much is a [|child ]ticket?
Who is the [|deputy ]mayor of Lyon?
Is [|decaf ]coffee good for me?
How do I cook [brown|white] rice?
What is a [green|white] card?
Is the [front|back] door locked?
How do I clean a [leather|cotton] jacket?
Is [baking soda|baking powder] acidic?
What is [machine|deep] learning?
Is [|second-hand ]smoke harmful?
How long do [fresh|dried] figs keep?
What does an [inner|outer] join return?
Who owns the [only|other] bridge?
Is a [direct|indirect] tax fair?
Can [some|all] snakes swim?
How do I renew a [|diplomatic ]passport?
Is a [former|future] president immune?
Do [both|either] of them pay rent?
# en entities
What is the capital of [Peru|Chile]?
Who founded [Intel|Nvidia]?
What is the currency of [Norway|Denmark]?
Is [aspirin|ibuprofen] safe for children?
How do I get from [Boston|Chicago] to Denver?
How do I dye [wool|silk]?
Who wrote [Emma|Dracula]?
What do [owls|hawks] eat?
How deep is Lake [Como|Garda]?
What is the plot of [Hamlet|Macbeth]?
How do I prune [roses|lilacs]?
Is [zinc|copper] magnetic?
When was [Mozart|Haydn] born?
How do I install [Docker|Podman]?
Does [Lufthansa|Ryanair] charge for bags?
How long do [hamsters|tortoises] live?
What is the weather in [Turin|Naples]?
How do I tune a [violin|guitar]?
What is the boiling point of [ethanol|methanol]?
Is [Tesla|Ford] hiring?
How do I file taxes in [Texas|Ohio]?
Which [Monet|Manet] hangs in Paris?
Is [Sweden|Switzerland] in the EU?
What are symptoms of [hyperthyroidism|hypothyroidism]?
Show me the email from [Karl|Carla]
Is a [whale|shark] a mammal?
Who leads the [Senate|House]?
How do I contact [the bank|the insurer]?
Is [my brother|my cousin] insured on my policy?
What does [a notary|a paralegal] do?
# en scope
[Can|Should] I take vitamin D every day?
[Why|How] do leaves change color?
[When|Where] was the treaty signed?
[Who|What] killed the dinosaurs in that film?
How [long|often] should I boil eggs?
How [much|many] chocolate is in stock?
[Is|Was] the bridge open to cars?
[Did|Will] the price go up?
Can [I|you] change the booking?
Is [his|her] passport valid?
Which laws apply to [me|them] in Spain?
Tell me [a|every] reason to learn Latin
Can I pay with card [only|too]?
Is my [landlord|tenant] responsible for mold?
Do [I|we] have [a|another] meeting on Monday?
What is it like to [visit|live in] Iceland?
How do I [start|restart] the server?
How do I [write|rewrite] this test?
Is it [ever|always] windy there?
[Only Ann may sign|Ann may only sign] the form
# en small differences
Is the oven [on|off]?
Do you like [tea|mate]?
Do you [like|want] tea?
Can I change [my|your] address?
Can [you|I] send the parcel back?
What is [|not ]covered by the guarantee?
How do I [log in|log out]?
Is Mary [being bullied|bullying] at school?
Did the company [hire|acquire] a startup?
I live on Abbey [Road|Street], is that zone 2?
A present [for|from] my aunt
Is this book [by|for] Jane Austen?
What is the [price|weight] of a bag of cement?
[Who|Whose] is the coat?
How do I make [a fire|fire] [alarm|escape] plans?
Where is the [entrance|exit]?
How do I speed [up|down] the fan?
Is a tomato a [fruit|vegetable]?
What does [US|us] mean here
What is the right [answer|way]?
Which [side|size] is it?
How do I [back up|restore] my phone?
Explain [how|why] engines overheat
How do I get [to|from] the airport?
Is the left or the [right|wrong] tire flat?
Do [cats|dogs] see colors?
Is [half|double] the dose enough?
How do I write a [cover|resignation] letter?
What time does the pool [open|close]?
How much [does it cost|time does it take] to tile a floor?
What is my [balance|limit]?
Does the train [arrive|depart] at platform 4?
How do I merge [main into dev|dev into main]?
How do I sort in [ascending|descending] order?
Is it [legal|ethical] to record a call?
How do I speak to a [manager|lawyer]?
What is the [cause|cure] of scurvy?
Turn the heater [on|off] at noon
Is [rice|wheat] gluten-free?
How do I treat a [burn|bruise]?
# es negación
¿Puedo [|no ]pagar con tarjeta?
¿Qué alimentos [debo|no debo] comer con diabetes?
¿Se puede viajar [con|sin] pasaporte?
¿Por qué mi pedido [|no ]ha llegado?
¿[Siempre|Nunca] abre el domingo?
¿Es legal conducir [con|sin] seguro?
¿Qué países [son|no son] miembros de la OTAN?
¿Hay [algún|ningún] vuelo directo?
# es números
¿Cuánto es el [10|20] por ciento de 450?
¿Quién ganó el mundial de [2010|2014]?
Pon una alarma a las [7|8]
¿Cuánto cuestan [dos|tres] entradas?
¿Qué dice el artículo [4|14]?
¿Cuántos metros son [5|50] millas?
¿Es normal una fiebre de [38|40] grados?
¿Cómo llego a la puerta [B12|B21]?
Resume el capítulo [tres|trece]
¿Cuánto pesa una caja de [6|16] botellas?
# es unidades y fechas
¿Cuánto son 20 [metros|millas] en pies?
Avísame en 10 [minutos|horas]
¿Está abierto el [lunes|martes]?
¿Qué tiempo hace en [enero|julio]?
¿Qué pasó [ayer|hoy] en la bolsa?
¿Llueve mucho en [invierno|verano]?
¿Cuándo es el [próximo|último] tren a Sevilla?
¿Tengo cita por la [mañana|noche]?
¿Cuánto cuesta en [euros|dólares]?
¿Abren el 3 de [mayo|marzo]?
# es antes y después
¿Debo comer [antes|después] de correr?
¿Se paga [antes|después] de la comida?
¿Qué había [antes|después] de la guerra?
¿Puedo beber agua [antes|después] de la operación?
¿Quién habló [primero|último]?
¿Está abierto [desde|hasta] las diez?
¿Cierran [dos horas|tres horas] al mediodía?
¿Puedo ir [contigo|con ellos] al médico?
¿Es [tu|su] casa?
# es papeles
¿[Ana quiere a Luis|Luis quiere a Ana]?
¿Cómo viajo de [Lima a Cuzco|Cuzco a Lima]?
Traduce del [inglés al francés|francés al inglés] este texto
¿[El perro persigue al gato|El gato persigue al perro]?
¿[Marta debe dinero a Juan|Juan debe dinero a Marta]?
¿Es [Madrid más grande que Roma|Roma más grande que Madrid]?
# es comparaciones y opuestos
¿Cuál es el coche más [rápido|barato]?
¿Qué río es [más|menos] largo?
¿Cuál es la edad [mínima|máxima]?
¿Cómo [activo|desactivo] las notificaciones?
¿Cómo [abro|cierro] una cuenta?
¿Dónde puedo [comprar|vender] libros usados?
¿Cómo [subo|bajo] el volumen?
¿Cómo [enciendo|apago] la calefacción?
¿Es [legal|ilegal] acampar aquí?
¿Es el [mejor|peor] hotel de la ciudad?
¿Cómo [aumento|reduzco] el brillo?
¿Qué [ventajas|desventajas] tiene el teletrabajo?
¿Cómo [instalo|desinstalo] el programa?
¿Está el agua [fría|caliente]?
# es entidades y modificadores
¿Cuál es la capital de [Perú|Bolivia]?
¿Quién pintó [Guernica|Las Meninas]?
¿Es seguro el [paracetamol|ibuprofeno] en el embarazo?
¿Cuánto vive un [loro|gato]?
¿Cómo se cocina el arroz [integral|blanco]?
¿Cuánto cuesta una entrada [|infantil ]de cine?
¿Cómo renuevo mi [pasaporte|carnet]?
¿Qué tiempo hace en [Bilbao|Málaga]?
¿Qué gana un médico [|jubilado]?
¿Cómo limpio una chaqueta de [cuero|lana]?
¿Puedo cambiar [mi|tu] reserva?
¿Qué hace el comando `git [push|pull]`?
¿Qué novedades tiene Python [3.11|3.12]?
¿[Cuándo|Dónde] nació Cervantes?
¿[Cómo|Por qué] se forma el hielo?
¿Vuela [Iberia|Vueling] a Oslo?
# de Verneinung
Darf ich das Auto [|nicht ]hier parken?
Welche Pflanzen brauchen [viel|kein] Licht?
Kann ich [mit|ohne] Visum einreisen?
Warum startet mein Rechner [|nicht]?
Ist das Museum am Montag [immer|nie] offen?
Welche Länder sind [|nicht ]in der EU?
Soll ich bei Fieber Sport [machen|vermeiden]?
Gibt es hier [einen|keinen] Aufzug?
# de Zahlen
Was sind [15|25] Prozent von 80?
Wer war [1990|1999] Kanzler?
Stelle einen Wecker auf [6|7] Uhr
Wie viel kosten [zwei|drei] Karten?
Was steht in Paragraf [5|15]?
Ist ein Puls von [60|160] normal?
Welcher Zug fährt von Gleis [3|13]?
Fasse Kapitel [vier|vierzehn] zusammen
Wie viele Zoll sind [30|300] Zentimeter?
Was kostet ein Brief mit [20|50] Gramm?
# de Einheiten und Daten
Erinnere mich in 5 [Minuten|Stunden]
Wie weit sind 10 [Meilen|Kilometer]?
Habt ihr am [Dienstag|Donnerstag] offen?
Was kann man im [Januar|Juni] ernten?
Wie war das Wetter [gestern|heute]?
Wann fährt der [nächste|letzte] Zug nach Bonn?
Was kostet das in [Euro|Dollar]?
Ist der Laden am 3. [Mai|März] zu?
Was blüht im [Frühling|Herbst]?
Wie schwer sind 2 [Kilo|Pfund] Mehl?
# de vorher und nachher
Soll ich [vor|nach] dem Essen laufen?
Was war [vor|nach] dem Krieg hier?
Zahle ich [vor|nach] der Lieferung?
Wer regierte [vor|nach] Karl dem Großen?
Gilt das Ticket [ab|bis] zehn Uhr?
Wer kam [zuerst|zuletzt] an?
Fährt der Bus [um|bis] acht?
Heißen [Sie|sie] Weber?
Ist das [dein|mein] Platz?
# de Rollen
Liebt [Anna Paul|Paul Anna]?
Wie komme ich von [Köln nach Bonn|Bonn nach Köln]?
Jagt [der Hund die Katze|die Katze der Hund]?
Schuldet [Eva Jan|Jan Eva] das Geld?
Ist [Rom älter als Athen|Athen älter als Rom]?
Übersetze das vom [Deutschen ins Englische|Englischen ins Deutsche]
# de Vergleiche und Gegensätze
Wie [aktiviere|deaktiviere] ich den Flugmodus?
Wie kann ich ein Konto [öffnen|schließen]?
Wo kann ich Bücher [kaufen|verkaufen]?
Wie kann ich die Lautstärke [erhöhen|senken]?
Was ist das [Mindestalter|Höchstalter] für Piloten?
Welcher Fluss ist [länger|kürzer] als der Rhein?
Was sind die [Vorteile|Nachteile] von Solarzellen?
Wie kann ich die Karte [sperren|entsperren]?
Ist das Wasser [warm|kalt]?
Welches Handy hat den [größten|kleinsten] Akku?
Welcher Tarif kostet [mehr|weniger]?
Ist dieser Pilz [essbar|giftig]?
Wo [kommen|fliegen] die Gäste an?
Ist die Tür [auf|zu]?
# de Namen und Zusätze
Was ist die Hauptstadt von [Peru|Chile]?
Wer schrieb [Faust|Woyzeck]?
Ist [Aspirin|Paracetamol] in der Schwangerschaft sicher?
Wie alt werden [Hamster|Katzen]?
Was kostet eine Karte [|für Kinder]?
Was verdient ein Arzt [|in Rente]?
Fliegt [Lufthansa|Ryanair] nach Oslo?
Wie reinige ich eine Jacke aus [Leder|Wolle]?
Kann ich [meinen|deinen] Termin ändern?
Was macht `git [add|commit]`?
Was ist neu in Python [3.10|3.13]?
[Wann|Wo] wurde Bach geboren?
[Wie|Warum] entsteht Nebel?
Wer leitet [Siemens|Bosch]?
Muss [der Mieter|der Vermieter] das bezahlen?
Wie koche ich [braunen|weißen] Reis?
# zh 否定
我[可以|不可以]带狗上火车吗？
哪些水果[含|不含]糖？
为什么我的电脑[|不]能开机？
[有|没有]护照能坐飞机吗？
这个药[能|不能]和酒一起吃吗？
哪些国家[是|不是]欧盟成员？
周末图书馆[开|不开]门吗？
发烧时[应该|不应该]运动吗？
# zh 数字
[15|25]的平方是多少？
帮我定[6|7]点的闹钟
[三|四]个人分90元怎么分？
谁是[1990|1998]年的总统？
第[五|八]章讲什么？
体温[37|39]度算发烧吗？
[两|三]张票多少钱？
[5|50]英里是多少米？
买[10|100]股要多少钱？
房间[201|210]在哪里？
# zh 单位和日期
5[分钟|小时]后提醒我
十[米|英里]有多远？
[周一|周二]开门吗？
[六月|七月]天气怎么样？
[昨天|今天]的新闻是什么？
这个多少[美元|欧元]？
[春天|秋天]种什么菜？
[上午|下午]有车吗？
[明天|后天]下雨吗？
三[公斤|斤]米多少钱？
# zh 前后
饭[前|后]吃药吗？
手术[之前|之后]能喝水吗？
跑步[以前|以后]要拉伸吗？
[首|末]班车几点？
搬家[之前|之后]要做什么？
谁[先|后]到的？
他[吃了|没吃]药吗？
你[去过|想去]长城吗？
这是[你的|我的]票吗？
# zh 角色
[小明喜欢小红|小红喜欢小明]吗？
从[上海到北京|北京到上海]怎么走？
把这段话从[英文翻译成中文|中文翻译成英文]
[狗追猫|猫追狗]吗？
[老师批评学生|学生批评老师]吗？
[张三欠李四|李四欠张三]多少钱？
# zh 比较和反义
怎么[打开|关闭]通知？
怎么[增加|减少]亮度？
哪里可以[买|卖]旧书？
哪条河更[长|短]？
[最高|最低]温度是多少？
这个菜[贵|便宜]吗？
太阳能的[优点|缺点]是什么？
水是[冷|热]的吗？
怎么[安装|卸载]软件？
怎么[加入|退出]群聊？
哪个城市[大|小]一些？
怎么[存|取]钱？
蘑菇[有毒|没毒]吗？
怎么[上传|下载]文件？
# zh 实体和修饰
[秘鲁|智利]的首都是哪里？
[红楼梦|西游记]是谁写的？
孕妇能吃[阿司匹林|布洛芬]吗？
[仓鼠|乌龟]能活多久？
[儿童|成人]票多少钱？
[上海|广州]天气怎么样？
怎么煮[白|糙]米饭？
[莫扎特|巴赫]什么时候出生？
[华为|小米]在招人吗？
[房东|房客]要付修理费吗？
`git [add|rm]`是做什么的？
Python [3.8|3.9]有什么新功能？
[为什么|怎么]会下雪？
他的[哥哥|姐姐]多大了？
[我|他]的护照过期了吗？
怎么洗[皮|棉]外套？
"""

_SLOT = re.compile(r"\[([^\[\]|]*)\|([^\[\]]*)\]")


def traps() -> list[Trap]:
    """All pairs; both orders are meant."""
    found: list[Trap] = []
    language = kind = ""
    for line in LINES.strip().splitlines():
        if line.startswith("# "):
            language, kind = line[2:].split(" ", 1)
            continue
        a = " ".join(_SLOT.sub(lambda slot: slot[1], line).split())
        b = " ".join(_SLOT.sub(lambda slot: slot[2], line).split())
        found.append(Trap(language, kind, a, b))
    return found
