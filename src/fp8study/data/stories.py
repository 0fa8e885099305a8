"""Our own children's stories, from a seeded grammar: text for machines without a data hub.

Each story keeps its hero, friend, thing and place to the end, so a model first learns words,
then sentence frames, then to carry names across sentences: the loss falls for hundreds of
steps instead of collapsing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

_NAMES = """Ada Ben Cora Dino Elsa Finn Gita Hugo Iris Jomo Kaya Leon Mira Nils Olga Pavel Quin
Rosa Sami Tara Udo Vera Willem Xenia Yara Zeno Amos Bela Chloe Dario""".split()
_ANIMALS = """fox owl hedgehog rabbit otter badger mouse heron beaver squirrel frog goat pony
donkey crow swan hamster turtle""".split()
_THINGS = """lantern kite drum basket whistle map blanket boat button crown feather key marble
ribbon spoon wagon puzzle umbrella telescope sandwich""".split()
_PLACES = """forest meadow harbour kitchen garden attic orchard market river bridge lighthouse
library bakery hill cave station playground farm""".split()
_ADJECTIVES = """small bright dusty golden quiet shiny crooked warm heavy striped soft broken
purple tiny wonderful ordinary sticky wooden ancient round""".split()
_MOODS = """happy proud worried curious sleepy brave lonely excited patient grumpy surprised
grateful shy hungry calm""".split()
_WEATHER = """The sun was warm|Rain fell all morning|A soft wind blew|Snow lay on the roofs
|The fog was thick|Stars filled the sky|Clouds hurried past|It was a very hot day""".split("|")
_VERBS = """found lost painted carried repaired hid borrowed washed shared dropped traded
polished""".split()
_LESSONS = """asking is better than guessing|a promise is worth keeping
|two pairs of hands are quicker than one|waiting can be the hardest work
|the smallest friend may have the best idea|saying sorry makes room for laughing
|old things can still be useful|it is fine to be afraid and go on""".split("|")

_OPENINGS = (
    "Once there was a {mood} {animal} named {hero} who lived near the {place}.",
    "{hero} the {animal} woke up {mood} one morning and ran to the {place}.",
    "In a house by the {place}, {hero} kept a {adjective} {thing}.",
    "Every day {hero} and {friend} met at the {place}, whatever the weather.",
)
_MIDDLES = (
    "{weather}, and {hero} {verb} the {adjective} {thing}.",
    '"Where is my {thing}?" asked {friend}. "I think it is in the {place}," said {hero}.',
    "{friend} was {mood} because the {thing} was {adjective}.",
    "{hero} counted {number} steps to the {place} and {number2} steps back.",
    "Then {friend} {verb} the {thing}, and {hero} felt {mood}.",
    '"You can have half of it," said {hero}, and {friend} smiled.',
    "They looked behind the {place}, under the {thing2} and even inside the {thing3}.",
    "A {animal2} came by with a {adjective} {thing2} and wanted to trade it for the {thing}.",
    "{hero} said no {number} times, but {friend} said yes at last.",
    "If the {thing} had not been so {adjective}, {hero} would have left it in the {place}.",
)
_ENDINGS = (
    "That night {hero} told {friend} that {lesson}.",
    "From then on the {thing} stayed in the {place}, and {hero} was never {mood} again.",
    "{friend} hugged {hero}, and both knew that {lesson}.",
    'So {hero} went home with the {thing}, thinking: "{lesson}."',
)


def stories(seed: int, count: int) -> Iterator[str]:
    """Yield `count` stories of four to eleven sentences, the same for the same seed."""
    draw = random.Random(seed)
    for _ in range(count):
        yield _story(draw)


def _story(draw: random.Random) -> str:
    hero, friend = draw.sample(_NAMES, 2)
    animal, animal2 = draw.sample(_ANIMALS, 2)
    thing, thing2, thing3 = draw.sample(_THINGS, 3)
    cast = {
        "hero": hero, "friend": friend, "animal": animal, "animal2": animal2,
        "thing": thing, "thing2": thing2, "thing3": thing3, "place": draw.choice(_PLACES),
    }  # fmt: skip
    frames = [
        draw.choice(_OPENINGS),
        *draw.sample(_MIDDLES, draw.randint(2, 9)),
        draw.choice(_ENDINGS),
    ]
    return " ".join(_fill(frame, cast, draw) for frame in frames)


def _fill(frame: str, cast: dict[str, str], draw: random.Random) -> str:
    # The cast is the story's, everything else is drawn anew for each sentence.
    return frame.format(
        **cast,
        adjective=draw.choice(_ADJECTIVES),
        mood=draw.choice(_MOODS),
        weather=draw.choice(_WEATHER).strip(),
        verb=draw.choice(_VERBS),
        lesson=draw.choice(_LESSONS).strip(),
        number=draw.randint(2, 60),
        number2=draw.randint(2, 60),
    )
