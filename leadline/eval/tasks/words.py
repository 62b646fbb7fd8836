"""Word lists. Their combinations are far too many to be learnt by heart."""

from __future__ import annotations

import random


def of(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


COLOURS = of(
    "red blue green yellow black white grey brown pink purple orange violet gold silver copper "
    "crimson scarlet amber olive teal navy ivory beige turquoise maroon indigo"
)

ADJECTIVES = of(
    "old new small big long short heavy light round flat square narrow wide tall thin thick "
    "soft hard smooth rough clean dirty wet dry warm cold broken shiny dusty rusty wooden iron "
    "glass plastic paper stone cheap costly plain fancy quiet loud fast slow empty full open "
    "closed hidden lost spare first second last left right upper lower front back inner outer "
    "northern southern eastern western early late modern ancient simple strange bright dark "
    "deep shallow steep gentle wild calm busy lazy proud shy brave clever curious happy sad "
    "angry hungry tired lucky famous secret local foreign royal public private rare common "
    "sharp blunt curved straight striped spotted painted folded frozen burnt polished leather "
    "woollen linen golden tiny huge"
)

OBJECTS = of(
    "box door lamp chair table key clock book bag bottle cup plate spoon fork knife bowl basket "
    "bucket barrel crate drawer shelf cabinet safe chest trunk suitcase wallet purse coat hat "
    "shoe boot glove scarf belt ring necklace watch mirror comb brush towel blanket pillow "
    "curtain rug candle lantern torch match stove kettle pot pan oven fridge toaster blender "
    "mixer sink tap hammer saw drill wrench screw nail rope chain ladder wheel engine pump pipe "
    "valve tank battery cable plug switch bulb fan heater radio camera phone tablet laptop "
    "printer keyboard screen speaker microphone guitar piano violin drum flute trumpet harp "
    "bell whistle ball bat racket net kite doll puzzle card coin stamp letter envelope parcel "
    "ticket map compass globe telescope microscope notebook pencil pen eraser ruler scissors "
    "stapler folder file desk bench sofa bed stool cradle tent backpack helmet saddle sled boat "
    "canoe raft anchor oar sail bicycle scooter truck van bus train tram wagon cart plough "
    "shovel rake axe spade hose broom mop gate fence bridge tower well statue fountain flag "
    "banner badge medal trophy crown sword shield bow arrow drone robot sensor magnet lens "
    "prism filter funnel jar tin tray vase wreath quilt apron"
)

ANIMALS = of(
    "cat dog horse cow sheep goat pig hen duck goose rabbit mouse rat fox wolf bear deer elk "
    "moose badger otter beaver squirrel hedgehog mole bat owl hawk eagle crow raven magpie "
    "robin sparrow swan heron stork crane pelican penguin seal whale dolphin shark salmon trout "
    "carp eel crab lobster shrimp snail frog toad newt lizard snake turtle tortoise lion tiger "
    "leopard panther zebra giraffe camel llama donkey mule monkey gorilla elephant rhino hippo "
    "kangaroo koala bee wasp ant beetle moth spider worm parrot falcon ferret lynx bison yak"
)

FOODS = of(
    "apple pear plum peach cherry grape lemon orange melon banana mango fig date olive nut "
    "almond carrot potato tomato onion garlic leek pea bean lentil cabbage spinach lettuce "
    "cucumber pumpkin radish beet celery pepper mushroom rice pasta noodle bread roll cake pie "
    "tart biscuit waffle pancake honey jam butter cheese cream yogurt egg soup stew salad "
    "sandwich pizza burger curry chocolate vanilla cinnamon ginger mint basil coffee tea cocoa "
    "juice milk"
)

PLACES = of(
    "kitchen garage cellar attic office library garden hall lobby workshop barn stable school "
    "museum theatre station harbour airport hospital bakery market church castle hotel factory "
    "laboratory gym park forest beach valley island mill studio gallery pharmacy bank warehouse "
    "chapel courtyard balcony terrace greenhouse shed tunnel lighthouse archive canteen"
)

JOBS = of(
    "teacher doctor nurse baker farmer driver pilot sailor painter writer singer dancer actor "
    "cook waiter tailor plumber carpenter mason miner judge lawyer clerk banker chemist "
    "engineer programmer designer gardener fisher hunter guard soldier firefighter librarian "
    "translator reporter editor photographer mechanic electrician architect dentist surgeon vet "
    "florist jeweller potter weaver shoemaker"
)

FIRST_NAMES = of(
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Karen Leo Maria Nina Oscar Paul Quinn "
    "Rosa Sam Tina Ulla Victor Wendy Xenia Yara Zoe Adam Bella Carl Diana Eric Fiona George "
    "Hannah Ivan Julia Kevin Laura Martin Nora Oliver Petra Ralf Sara Tom Ursula Vera Walter "
    "Alice Boris Cora Dean Ella Frank Gina Hugo Iris James Kate Liam Mona Noah Olga Peter Ruth "
    "Simon Thea Uwe Viola Will Amir Bianca Chen Dara Elias Farah Goran Hiro Inga Jonas Kofi "
    "Lena Mateo Nadia Omar Priya Ravi Sofia Tariq Uma Vikram Wei Yuki Zara Aisha Bruno Carmen "
    "Diego Elena Fatima Gustav Helga Ilse Jorge Kenji Lucia Marco Naomi Otto Pablo Rita Sven "
    "Tessa Umar Vince Wanda Yusuf Zelda Agnes Albert Beth Conrad Doris Edgar Flora Gloria "
    "Harold Irene Jasper Klara Louis Mabel Nigel"
)

LAST_NAMES = of(
    "Smith Jones Brown Taylor Wilson Clark Lewis Walker Hall Young King Wright Hill Green Adams "
    "Baker Nelson Carter Mitchell Roberts Turner Phillips Campbell Parker Evans Edwards Collins "
    "Stewart Morris Rogers Reed Cook Morgan Bell Murphy Bailey Cooper Ward Cox Gray Fisher "
    "Weber Keller Schmidt Wagner Becker Hoffmann Koch Richter Wolf Novak Horvat Kovac Ivanov "
    "Petrov Popov Rossi Ferrari Russo Costa Silva Santos Lopez Garcia Perez Torres Flores "
    "Rivera Gomez Diaz Ortiz Tanaka Suzuki Sato Mori Kim Park Lee Wang Li Zhang Liu Chen Singh "
    "Patel Shah Khan Ali Hassan Okafor Mensah Diallo Larsen Hansen Berg Lund Dahl Nilsson "
    "Virtanen Dubois Laurent Moreau Petit"
)

CITIES = of(
    "Oslo Paris Berlin London Rome Madrid Lisbon Vienna Prague Warsaw Dublin Athens Helsinki "
    "Stockholm Copenhagen Brussels Amsterdam Zurich Geneva Milan Naples Venice Turin Munich "
    "Hamburg Cologne Frankfurt Leipzig Dresden Lyon Nice Bordeaux Toulouse Barcelona Seville "
    "Valencia Porto Budapest Belgrade Zagreb Sofia Bucharest Riga Tallinn Vilnius Kyiv Ankara "
    "Istanbul Cairo Tunis Algiers Rabat Dakar Accra Lagos Nairobi Kampala Harare Durban Tehran "
    "Baghdad Amman Beirut Doha Dubai Muscat Karachi Lahore Delhi Mumbai Chennai Kolkata Dhaka "
    "Colombo Bangkok Hanoi Manila Jakarta Singapore Taipei Seoul Busan Tokyo Osaka Kyoto Nagoya "
    "Sapporo Beijing Shanghai Shenzhen Sydney Melbourne Perth Brisbane Auckland Wellington "
    "Honolulu Seattle Portland Denver Dallas Austin Houston Chicago Boston Atlanta Miami "
    "Toronto Montreal Vancouver Calgary Havana Bogota Lima Quito Santiago Montevideo Brasilia "
    "Recife Bergen Uppsala Tampere Graz Basel Bern"
)

COUNTRIES = of(
    "Norway France Germany England Italy Spain Portugal Austria Poland Ireland Greece Finland "
    "Sweden Denmark Belgium Hungary Serbia Croatia Bulgaria Romania Latvia Estonia Ukraine "
    "Turkey Egypt Morocco Senegal Ghana Nigeria Kenya Uganda Iran Iraq Jordan Oman Pakistan "
    "India Nepal Thailand Vietnam Japan Korea China Mongolia Australia Canada Mexico Cuba Peru "
    "Chile Brazil Iceland"
)

MONTHS = of("January February March April May June July August September October November December")
WEEKDAYS = of("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
LANGUAGES = of(
    "French German Spanish Italian Portuguese Dutch Swedish Polish Czech Greek Turkish Arabic "
    "Hindi Japanese Korean Chinese Russian Finnish Danish Hungarian"
)
MATERIALS = of(
    "wood iron glass steel paper stone clay wool cotton silk leather rubber copper brass tin "
    "lead marble granite sand plastic"
)
SUBJECTS = of(
    "history physics music art biology chemistry geography literature astronomy law economics "
    "medicine philosophy geology botany sports trade travel cooking gardening weather energy "
    "farming sailing chess painting poetry architecture mathematics robots"
)
VERBS = of(
    "open close move clean paint repair lift carry push pull find lose buy sell send keep hide "
    "lend borrow build break wash fold cut measure weigh count check watch follow visit leave"
)
ADVERBS = of(
    "slowly quickly quietly carefully often rarely again soon today early late together alone "
    "gladly badly well twice finally usually always"
)

_ONSETS = of("b c d f g h j k l m n p r s t v w z br dr gr kl pl sh st tr")
_VOWELS = of("a e i o u")
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "k", "x"]


def digits(rng: random.Random, count: int) -> str:
    """A number of ``count`` digits that does not begin with 0."""
    return str(rng.randrange(10 ** (count - 1), 10**count))


def hex_id(rng: random.Random, count: int) -> str:
    """``count`` hexadecimal digits."""
    return f"{rng.getrandbits(4 * count):0{count}x}"


def coined(rng: random.Random) -> str:
    """A word of two or three syllables that no list holds."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.choice((2, 2, 3)))
    )


def coined_place(rng: random.Random) -> str:
    """A name on no map."""
    return coined(rng).capitalize()


def full_name(rng: random.Random) -> str:
    """First and last name."""
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def thing(rng: random.Random) -> str:
    """A described object, such as ``dusty blue lamp``: millions of them."""
    shape = rng.random()
    noun = rng.choice(OBJECTS)
    if shape < 0.45:
        return f"{rng.choice(COLOURS)} {noun}"
    if shape < 0.85:
        return f"{rng.choice(ADJECTIVES)} {noun}"
    return f"{rng.choice(ADJECTIVES)} {rng.choice(COLOURS)} {noun}"


def with_article(noun: str) -> str:
    """``a box``, ``an oven``."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def capital(text: str) -> str:
    """With a capital first letter, the rest unchanged."""
    return text[:1].upper() + text[1:]


def listed(items: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
