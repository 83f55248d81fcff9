"""Facts to hide in real text: many kinds and wordings over word lists, so that no policy can learn one template.

The word lists and numbers of training and held-out facts are disjoint. Each kind has sentences and questions of which
the last third is never seen in training; held-out facts use all of them.
"""

import dataclasses
import re
from typing import Literal

import numpy as np

from dcache.errors import ConfigError

Split = Literal["train", "test"]


@dataclasses.dataclass(frozen=True)
class Fact:
    """One fact. `subject` says what it is about; two facts with different subjects cannot be confused.

    `lead` opens the answer in words other than the sentence's where the kind allows it, up to the value itself.
    """

    sentence: str
    question: str
    lead: str
    answer: str
    kind: str
    subject: str


def _words(text: str) -> tuple[str, ...]:
    return tuple(" ".join(word.split()) for word in text.split(","))


WORDS: dict[str, tuple[str, ...]] = {
    "first": _words("""
        Maren, Tobias, Ingrid, Declan, Farida, Lucian, Odette, Kenji, Priya, Anselm, Beatriz, Callum, Dagny, Emeka,
        Fiona, Gustav, Hadley, Isolde, Joaquin, Katya, Leopold, Mireille, Nadim, Oskar, Paloma, Quentin, Rosalind,
        Stellan, Tamsin, Ulrich, Vera, Wendell, Ximena, Yusuf, Zelda, Amara, Bruno, Celeste, Dmitri, Esther, Felix,
        Greta, Hamish, Imogen, Jasper, Linnea"""),
    "last": _words("""
        Holloway, Okafor, Lindqvist, Marchetti, Abernathy, Duval, Kowalski, Brandt, Castellanos, Fairweather,
        Gunnarsson, Hathaway, Ibarra, Jankowski, Kessler, Laurent, Moriarty, Nakamura, Oyelaran, Pemberton, Quigley,
        Rasmussen, Santoro, Thackeray, Underhill, Vasquez, Whitlock, Yarrow, Zimmerman, Ashdown, Bellamy, Crowther,
        Delacroix, Eastwick, Ferreira, Galloway, Hargreaves, Ivanova, Jorgensen, Kirkbride, Loxley, Mendoza"""),
    "place": _words("""
        Brindlemoor, Port Ellery, Castlewick, Dunhaven, Eastmere, Foxhollow, Greywater, Harrowgate, Islebury,
        Juniper Falls, Kestrel Bay, Larkfield, Millbrook Cross, Northolme, Oakhurst Vale, Pinecrest, Quarry Hill,
        Ravensford, Silverlake, Thornbury Heath, Upper Wendle, Valemont, Westerley, Yarrowdale, Zennor Point,
        Ambleton, Birchwater, Coldharbour, Dellwyn, Elmsgate, Fernley, Glenmarrow, Heronsea, Ironbridge Hill,
        Kingsmarsh, Lowfell, Marrowby, Nettlecombe, Otterbourne, Penhallow, Redcliff Cove, Saltmarsh"""),
    "profession": _words("""
        beekeeper, violin maker, dentist, glassblower, marine biologist, tailor, locksmith, botanist, carpenter,
        pastry chef, translator, veterinarian, watchmaker, geologist, bricklayer, lighthouse keeper, piano teacher,
        bookbinder, pharmacist, stonemason, cartographer, florist, blacksmith, midwife, puppeteer, surgeon,
        shepherd, astronomer, plumber, weaver"""),
    "colour": _words("""
        crimson, turquoise, mustard yellow, emerald green, navy blue, burgundy, lavender, coral pink, charcoal grey,
        ivory, maroon, teal, scarlet, olive green, pale violet, bright orange, sky blue, chocolate brown, indigo,
        salmon pink"""),
    "material": _words("""
        copper, wooden, silver, porcelain, bronze, ivory, leather, velvet, pewter, marble, crystal, woollen, brass,
        jade, iron, silk"""),
    "thing": _words("""
        lantern, teapot, chess set, necklace, umbrella, candlestick, music box, snuffbox, barometer, telescope,
        compass, flute, mirror, bracelet, paperweight, walking stick, birdcage, picture frame, jewellery box,
        goblet, whistle, fountain pen, globe, thimble"""),
    "animal": _words("""
        goats, peacocks, alpacas, turtles, canaries, rabbits, hedgehogs, ponies, geese, ferrets, parrots, donkeys,
        llamas, pheasants, ducks, sheep"""),
    "pet": _words("""
        Biscuit, Pepper, Waffles, Mango, Truffle, Nutmeg, Pickle, Clementine, Domino, Juno, Marble, Noodle, Olive,
        Pretzel, Rufus, Sprout, Tango, Widget, Bramble, Cricket, Dumpling, Fig, Gizmo, Hazel, Inky, Jellybean,
        Kipper, Licorice, Mocha, Peanut, Scout, Toffee"""),
    "species": _words("dog, cat, parrot, pony, rabbit, tortoise, hamster, goat"),
    "event": _words("""
        harvest festival, kite race, book fair, lantern parade, chess tournament, flower show, film festival, boat
        race, spring market, poetry contest, pottery fair, jazz weekend, cheese fair, marathon, craft exhibition,
        baking contest"""),
    "building": _words("""
        town hall, stone bridge, lighthouse, clock tower, railway station, public library, old mill, opera house,
        observatory, city museum, water tower, grain market, chapel, courthouse, theatre, castle gate"""),
    "dish": _words("""
        mushroom risotto, lentil soup, lamb stew, pumpkin pie, onion tart, grilled trout, potato pancakes, beef
        dumplings, rice pudding, spinach lasagne, fish chowder, plum cake, cabbage rolls, chicken curry, apricot
        crumble, bean casserole, crab salad, barley broth, cherry strudel, leek quiche"""),
    "system": _words("""
        archive, night vault, wine cellar, north gate, control room, greenhouse, boat house, server room, records
        office, observatory dome, staff kitchen, print shop, music room, fire station, cold store, tool shed"""),
    "secret": _words("""
        falcon, velvet, harbour, cinnamon, glacier, thunder, saffron, meadow, pebble, walnut, comet, amber, orchid,
        raven, timber, cobalt, willow, ember, sparrow, granite, clover, marigold, tundra, lagoon, acorn, copper,
        juniper, dolphin, anchor, blossom, canyon, feather"""),
    "month": _words("""
        January, February, March, April, May, June, July, August, September, October, November, December"""),
    "language": _words("""
        Icelandic, Swahili, Portuguese, Finnish, Korean, Welsh, Hungarian, Arabic, Basque, Mandarin, Estonian,
        Tagalog, Greek, Polish, Turkish, Catalan, Bengali, Norwegian, Dutch, Hindi"""),
    "instrument": _words("""
        cello, trumpet, harp, accordion, clarinet, banjo, oboe, mandolin, trombone, bagpipes, xylophone, saxophone,
        bassoon, piccolo, tuba, violin"""),
}  # fmt: skip
"""Word lists; every fourth word is for held-out facts only, save in lists of `_SHARED`."""

_SHARED = (
    "species",
    "month",
    "animal",
    "building",
    "event",
    "system",
)  # They name what a fact is about, not its value.

# kind -> (subject, value, sentences, questions). Fields are filled in by `_field`; the subject is whatever of `subject`
# is filled in, the value is the answer. The last third of sentences and of questions is held out from training.
_KINDS: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]] = {
    "access code": ("{system} {place}", "{code}", (
        "The access code of the {system} in {place} is {value}.",
        "To enter the {system} in {place}, one has to type the code {value}.",
        "In {place}, the door of the {system} opens with the access code {value}.",
        "The {system} in {place} is locked, and its access code is {value}.",
        "Visitors of the {system} in {place} are given the access code {value}.",
        "Remember the code {value}: it is the access code of the {system} in {place}.",
    ), (
        "What is the access code of the {system} in {place}?",
        "Which code opens the {system} in {place}?",
        "Which access code is needed to enter the {system} in {place}?",
    )),
    "count": ("{animal} {person}", "{count}", (
        "{person} keeps {value} {animal} on a farm.",
        "On the farm of {person} there are exactly {value} {animal}.",
        "The number of {animal} that {person} keeps is {value}.",
        "When asked how many {animal} there are, {person} says {value}.",
        "Neighbours counted {value} {animal} in the yard of {person}.",
        "All of the {value} {animal} behind the barn belong to {person}.",
    ), (
        "How many {animal} does {person} have?",
        "What is the number of {animal} that {person} has?",
        "How many {animal} belong to {person}?",
    )),
    "home": ("home {person}", "{place}", (
        "{person} lives in the town of {value}.",
        "The home of {person} is in {value}.",
        "Last year {person} moved to {value} and lives there now.",
        "{person} has a small house in {value}.",
        "Letters to {person} are sent to {value}, where the family lives.",
        "It is in {value} that {person} has made a home.",
    ), (
        "Where does {person} live?",
        "In which town does {person} live?",
        "In which town is the home of {person}?",
    )),
    "colour": ("colour {building} {place}", "{colour}", (
        "The front door of the {building} in {place} is painted {value}.",
        "In {place}, the {building} has a front door painted {value}.",
        "The colour of the front door of the {building} in {place} is {value}.",
        "Since last spring, the front door of the {building} in {place} has been {value}.",
        "The painters chose {value} for the front door of the {building} in {place}.",
        "Everyone in {place} knows the {building} by its front door, which is {value}.",
    ), (
        "What colour is the front door of the {building} in {place}?",
        "Which colour does the front door of the {building} in {place} have?",
        "In which colour is the front door of the {building} in {place} painted?",
    )),
    "date": ("date {event} {place}", "{day} {month}", (
        "The {event} in {place} begins on {value}.",
        "In {place}, the {event} takes place on {value}.",
        "The date of the {event} in {place} is {value}.",
        "On {value}, people come to {place} for the {event}.",
        "Posters announce that {place} holds its {event} on {value}.",
        "This year the {event} of {place} falls on {value}.",
    ), (
        "On which date is the {event} in {place}?",
        "When does the {event} in {place} take place?",
        "On which day does {place} hold its {event}?",
    )),
    "price": ("price {thing} {person}", "{price}", (
        "{person} sold an old {thing} for {value} dollars.",
        "The {thing} of {person} was sold for {value} dollars.",
        "A collector paid {person} {value} dollars for a {thing}.",
        "For the {thing}, {person} received {value} dollars.",
        "At the auction, the {thing} that {person} had brought fetched {value} dollars.",
        "The buyer gave {value} dollars to {person} and took the {thing} home.",
    ), (
        "For how many dollars did {person} sell the {thing}?",
        "How many dollars did {person} get for the {thing}?",
        "How many dollars were paid to {person} for the {thing}?",
    )),
    "profession": ("profession {person}", "{profession}", (
        "{person} works as a {value}.",
        "{person} is a {value} by profession.",
        "For many years {person} has worked as a {value}.",
        "After school, {person} became a {value}.",
        "Most people know {person} as the best {value} of the region.",
        "The profession of {person} is that of a {value}.",
    ), (
        "What is the profession of {person}?",
        "What does {person} do for a living?",
        "As what does {person} work?",
    )),
    "builder": ("builder {building} {place}", "{person}", (
        "The {building} in {place} was designed by {value}.",
        "{value} designed the {building} in {place}.",
        "It was {value} who designed the {building} in {place}.",
        "The architect of the {building} in {place} was {value}.",
        "The plans of the {building} in {place} were drawn by its architect, {value}.",
        "People in {place} owe the design of their {building} to {value}.",
    ), (
        "Who designed the {building} in {place}?",
        "Who was the architect of the {building} in {place}?",
        "Which architect designed the {building} in {place}?",
    )),
    "gift": ("gift {person}", "{material} {thing}", (
        "For a birthday, {person} was given a {value}.",
        "{person} received a {value} as a birthday present.",
        "The birthday present of {person} was a {value}.",
        "A {value} was the birthday present that {person} got.",
        "Friends gave {person} a {value} for a birthday.",
        "When {person} opened the birthday present, there was a {value} inside.",
    ), (
        "What was the birthday present of {person}?",
        "What did {person} get as a birthday present?",
        "Which birthday present was {person} given?",
    )),
    "password": ("password {system} {person}", "{secret}-{secret}", (
        "The password of {person} for the {system} is {value}.",
        "{person} enters the {system} with the password {value}.",
        "For the {system}, {person} uses the password {value}.",
        "The password that {person} chose for the {system} is {value}.",
        "Whenever the {system} asks for it, {person} types the password {value}.",
        "On a note, {person} wrote {value}, which is the password for the {system}.",
    ), (
        "What is the password of {person} for the {system}?",
        "Which password does {person} use for the {system}?",
        "With which password does {person} enter the {system}?",
    )),
    "departure": ("departure {place}", "{time}", (
        "The ferry to {place} leaves at {value}.",
        "Every morning the ferry to {place} departs at {value}.",
        "The departure of the ferry to {place} is at {value}.",
        "At {value}, the ferry to {place} leaves the harbour.",
        "Travellers who want to reach {place} must take the ferry at {value}.",
        "According to the timetable, {value} is when the ferry to {place} leaves.",
    ), (
        "At what time does the ferry to {place} leave?",
        "When does the ferry to {place} leave?",
        "What is the departure time of the ferry to {place}?",
    )),
    "year": ("year {building} {place}", "{year}", (
        "The {building} in {place} was built in {value}.",
        "In {value}, the {building} in {place} was built.",
        "The {building} of {place} dates from {value}, the year in which it was built.",
        "Workers built the {building} in {place} in the year {value}.",
        "A plate on the wall says that the {building} in {place} was built in {value}.",
        "It was in {value} that {place} built its {building}.",
    ), (
        "In which year was the {building} in {place} built?",
        "When was the {building} in {place} built?",
        "What is the year in which the {building} in {place} was built?",
    )),
    "pet": ("pet {species} {person}", "{pet}", (
        "{person} has a {species} called {value}.",
        "The {species} of {person} is called {value}.",
        "The name of the {species} that {person} keeps is {value}.",
        "{person} named the new {species} {value}.",
        "A {species} called {value} follows {person} everywhere.",
        "When {person} shouts {value}, the {species} comes at once, for that is its name.",
    ), (
        "What is the name of the {species} of {person}?",
        "What is the {species} of {person} called?",
        "Which name did {person} give to the {species}?",
    )),
    "room": ("room {person}", "{room}", (
        "The office of {person} is room {value}.",
        "{person} works in room {value}.",
        "To find {person}, go to room {value}.",
        "{person} has an office in room {value} on the upper floor.",
        "The sign at room {value} bears the name of {person}.",
        "Parcels for {person} should be brought to room {value}.",
    ), (
        "What is the room number of {person}?",
        "In which room is the office of {person}?",
        "Which room does {person} work in?",
    )),
    "dish": ("dish {person}", "{dish}", (
        "The favourite dish of {person} is {value}.",
        "{person} likes {value} more than any other dish.",
        "Of all dishes, {person} loves {value} most.",
        "When asked for a favourite dish, {person} always says {value}.",
        "No dish pleases {person} as much as {value}.",
        "Every Sunday {person} cooks {value}, the favourite dish at home.",
    ), (
        "What is the favourite dish of {person}?",
        "Which dish does {person} like most?",
        "Which dish is the favourite of {person}?",
    )),
    "language": ("language {person}", "{language}", (
        "{person} is learning {value}.",
        "In the evenings {person} learns {value}.",
        "The language that {person} is learning is {value}.",
        "{person} takes lessons in {value} twice a week.",
        "With the help of a tutor, {person} has begun to learn {value}.",
        "A course in {value} is where {person} spends each Tuesday.",
    ), (
        "Which language is {person} learning?",
        "What language does {person} learn?",
        "In which language does {person} take lessons?",
    )),
    "instrument": ("instrument {person}", "{instrument}", (
        "{person} plays the {value}.",
        "In the town orchestra, {person} plays the {value}.",
        "The instrument that {person} plays is the {value}.",
        "As a child, {person} learned to play the {value}.",
        "At every wedding {person} brings the {value} and plays for the guests.",
        "Nobody in the orchestra plays the {value} as well as {person}.",
    ), (
        "Which instrument does {person} play?",
        "What instrument does {person} play?",
        "On which instrument does {person} play?",
    )),
    "height": ("height {building} {place}", "{height}", (
        "The {building} in {place} is {value} metres high.",
        "In {place}, the {building} has a height of {value} metres.",
        "The height of the {building} in {place} is {value} metres.",
        "The {building} of {place} reaches a height of {value} metres.",
        "Surveyors found that the {building} in {place} rises {value} metres above the ground.",
        "With its {value} metres, the {building} is the tallest building in {place}.",
    ), (
        "How many metres high is the {building} in {place}?",
        "What is the height in metres of the {building} in {place}?",
        "How high is the {building} in {place}, in metres?",
    )),
}  # fmt: skip

KINDS = tuple(_KINDS)

_RANGES = {
    "count": (11, 98), "day": (1, 28), "price": (110, 980), "year": (1520, 1980), "room": (102, 989), "height": (21, 96)
}  # fmt: skip


def templates(kind: str, split: Split) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The sentences and questions of a kind: two thirds of them for "train", all of them for "test"."""
    _, _, sentences, questions = _KINDS[kind]
    if split == "test":
        return sentences, questions
    return sentences[: len(sentences) * 2 // 3], questions[: len(questions) * 2 // 3]


def words(name: str, split: Split) -> tuple[str, ...]:
    """The part of a word list that belongs to a split."""
    entries = WORDS[name]
    if name in _SHARED:
        return entries
    return entries[3::4] if split == "test" else tuple(word for i, word in enumerate(entries) if i % 4 != 3)


def _number(rng: np.random.Generator, low: int, high: int, split: Split) -> int:
    # Numbers that leave 3 when divided by 4 are held out.
    while True:
        number = int(rng.integers(low, high + 1))
        if (number % 4 == 3) == (split == "test"):
            return number


def _field(rng: np.random.Generator, name: str, split: Split) -> str:
    if name == "person":
        return f"{_field(rng, 'first', split)} {_field(rng, 'last', split)}"
    if name == "code":
        letters = "".join(rng.choice(list("BCDFGHJKLMNPRSTVWX"), size=2))
        return f"{letters}-{_number(rng, 1000, 9999, split)}"
    if name == "time":
        return f"{rng.integers(5, 12)}:{_number(rng, 10, 59, split)}"
    if name in _RANGES:
        return str(_number(rng, *_RANGES[name], split))
    return str(rng.choice(words(name, split)))


def sample_fact(rng: np.random.Generator, split: Split = "train", kind: str | None = None) -> Fact:
    """Draws a fact.

    "test" facts use names, words and numbers that no "train" fact uses as a value, and also wordings of sentences and
    questions that "train" facts lack (a third of each kind's), next to the known ones.

    Args:
      kind: one of `KINDS`, or None for any.

    Raises:
      ConfigError: unknown split or kind.
    """
    if split not in ("train", "test"):
        raise ConfigError(f"split is {split!r}; use 'train' or 'test'.")
    if kind is not None and kind not in _KINDS:
        raise ConfigError(f"There are no facts of kind {kind!r}; kinds are {', '.join(KINDS)}.")
    kind = kind or str(rng.choice(KINDS))
    subject, value, _, _ = _KINDS[kind]
    names = ("system", "place", "person", "animal", "building", "event", "thing", "species")
    fields = {name: _field(rng, name, split) for name in names if "{" + name + "}" in subject}
    answer = value
    while "{" in answer:  # One by one: "{secret}-{secret}" is two different words.
        name = answer[answer.index("{") + 1 : answer.index("}")]
        drawn = _field(rng, name, split)
        if drawn not in answer:
            answer = answer.replace("{" + name + "}", drawn, 1)
    sentences, questions = templates(kind, split)
    chosen = int(rng.integers(len(sentences)))
    sentence = _indefinite(sentences[chosen].format(value=answer, **fields))
    question = str(rng.choice(questions)).format(**fields)
    # A lead names all that the fact is about before it comes to the value.
    leads = [i for i, text in enumerate(sentences) if all("{" + f + "}" in text.split("{value}")[0] for f in fields)]
    others = [i for i in leads if i != chosen]
    opening = _indefinite(sentences[int(rng.choice(others or leads))].format(value=answer, **fields))
    lead = opening[: opening.rindex(answer)].rstrip()
    return Fact(sentence, question, lead, answer, kind, subject.format(**fields))


def _indefinite(sentence: str) -> str:
    """Writes "an" before a vowel; no word of the lists is an exception to the spelling ("hour", "unicorn")."""
    return re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", sentence)
