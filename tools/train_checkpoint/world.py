"""The words of the stories: who there is, what they own, where they go, what may happen there."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = (
    "fox", "mole", "hare", "owl", "badger", "otter", "hedgehog", "squirrel", "mouse", "frog",
    "heron", "beaver", "robin", "goat", "duck", "cat", "turtle", "bear", "crow", "hen",
)  # fmt: skip

_HE, _SHE = ("he", "his"), ("she", "her")

#: Names of heroes, each with pronoun and possessive.
NAMES = {
    "Pip": _HE, "Mia": _SHE, "Tom": _HE, "Ada": _SHE, "Ben": _HE, "Ruby": _SHE,
    "Hugo": _HE, "Clara": _SHE, "Oscar": _HE, "Elsa": _SHE, "Finn": _HE, "Hazel": _SHE,
    "Jasper": _HE, "Ivy": _SHE, "Leo": _HE, "Juno": _SHE, "Max": _HE, "Lily": _SHE,
    "Nils": _HE, "Nora": _SHE, "Otto": _HE, "Tilda": _SHE, "Rufus": _HE, "Wren": _SHE,
}  # fmt: skip

#: Names of friends, likewise.
FRIENDS = {
    "Bruno": _HE, "Celia": _SHE, "Emil": _HE, "Dora": _SHE, "Gus": _HE, "Flora": _SHE,
    "Henry": _HE, "Iris": _SHE, "Luke": _HE, "Kate": _SHE, "Sam": _HE, "Molly": _SHE,
}  # fmt: skip

COLOURS = ("red", "blue", "green", "yellow", "white", "silver", "brown", "purple")

WEATHER = ("sunny", "windy", "misty", "quiet", "cold")

PARTS_OF_DAY = ("morning", "afternoon", "evening")


@dataclass(frozen=True)
class Thing:
    """What can be done with a thing, where, and how it gets lost."""

    how: str
    did: str
    places: tuple[str, ...]
    mishaps: tuple[str, ...]


THINGS = {
    "kite": Thing(
        "fly it",
        "flew",
        ("hill", "beach", "meadow"),
        ("the string broke", "a gust of wind came"),
    ),
    "boat": Thing(
        "sail it",
        "sailed",
        ("pond", "river", "beach"),
        ("a wave came", "the rope slipped"),
    ),
    "drum": Thing(
        "play it",
        "played",
        ("market", "barn", "meadow"),
        ("the strap broke", "a cart came by"),
    ),
    "ball": Thing(
        "throw it",
        "threw",
        ("meadow", "garden", "beach"),
        ("it bounced too high", "a gust of wind came"),
    ),
    "lantern": Thing(
        "swing it",
        "swung",
        ("forest", "cave", "barn"),
        ("the wind blew out the flame", "the handle broke"),
    ),
    "basket": Thing(
        "fill it",
        "filled",
        ("orchard", "garden", "forest"),
        ("the handle broke", "it tipped over"),
    ),
    "flute": Thing(
        "play it",
        "played",
        ("river", "forest", "hill"),
        ("a magpie came by", "it slipped away"),
    ),
    "sled": Thing(
        "ride it",
        "rode",
        ("hill", "orchard", "meadow"),
        ("it slid too fast", "the rope slipped"),
    ),
    "wagon": Thing(
        "pull it",
        "pulled",
        ("market", "orchard", "garden"),
        ("a wheel came off", "it rolled away"),
    ),
    "umbrella": Thing(
        "spin it",
        "spun",
        ("beach", "market", "hill"),
        ("a gust of wind came", "a cart came by"),
    ),
    "whistle": Thing(
        "blow it",
        "blew",
        ("barn", "river", "pond"),
        ("a magpie came by", "the string broke"),
    ),
    "bell": Thing(
        "ring it",
        "rang",
        ("cave", "barn", "orchard"),
        ("it slipped away", "the strap broke"),
    ),
}


@dataclass(frozen=True)
class Place:
    """How one is there ("in", "on"), what one notices, and where things hide."""

    at: str
    remark: str
    spots: tuple[str, ...]


PLACES = {
    "hill": Place(
        "on",
        "From the top one could see the whole valley.",
        ("behind the old wall", "under the oak", "beside the gate"),
    ),
    "beach": Place(
        "on",
        "The sea was calm and the sand was warm.",
        ("behind a rock", "under the pier", "beside the dunes"),
    ),
    "meadow": Place(
        "in",
        "Bees hummed over the clover.",
        ("in the tall grass", "under the hedge", "beside the fence"),
    ),
    "pond": Place(
        "by",
        "The water was as still as glass.",
        ("among the reeds", "under the jetty", "behind the willow"),
    ),
    "river": Place(
        "by",
        "The water sang over the stones.",
        ("under the bridge", "among the stones", "behind the mill"),
    ),
    "market": Place(
        "at",
        "The air smelled of bread and apples.",
        ("behind the fountain", "under a stall", "beside the church"),
    ),
    "barn": Place(
        "in",
        "Swallows flew in and out of the door.",
        ("in the hay", "behind the ladder", "under the cart"),
    ),
    "garden": Place(
        "in",
        "The roses were in bloom.",
        ("among the beans", "under the bench", "behind the shed"),
    ),
    "forest": Place(
        "in",
        "The leaves whispered overhead.",
        ("in the ferns", "under a fallen tree", "behind a hollow log"),
    ),
    "orchard": Place(
        "in",
        "The plums were almost ripe.",
        ("under a plum tree", "in a pile of leaves", "behind the beehives"),
    ),
    "cave": Place(
        "in",
        "Every word came back as an echo.",
        ("behind a large stone", "in a dark corner", "beside the spring"),
    ),
}
