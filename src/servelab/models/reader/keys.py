"""A configuration with a memory: what was asked of it, which key answered, and what nobody asked.

Models: one flat section of a ``config.json``. Every value is taken through it, so that at the end
the keys that nobody read can be named: one that speaks of attention, cache, layers or experts stops
the reading.

Assumes: a null is an absent key.

Ignores: the meaning of a key; that is the families' business.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from servelab.models.errors import UnsupportedConfig
from servelab.models.reader.harmless import bears_on_shape

#: No published model has a count near these; beyond them a file is wrong, not large.
MAX_COUNT = 10**9
MAX_LAYERS = 10_000


class Keys:
    """One section of a configuration, read strictly.

    Parameters: ``config`` the section; ``provenance``, ``unknown`` to write into (those of the
    whole reading, where the section is a nested one).

    >>> keys = Keys({"n_layer": 12, "n_head": 12, "num_heads": 16})
    >>> keys.count("num_hidden_layers", "n_layer")
    12
    >>> keys.provenance["num_hidden_layers"]
    'n_layer = 12'
    >>> keys.count("num_attention_heads", "n_head", "num_heads")
    Traceback (most recent call last):
    ...
    servelab.models.errors.UnsupportedConfig: num_heads: is 16, but n_head is 12
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        provenance: dict[str, str] | None = None,
        unknown: dict[str, str] | None = None,
    ) -> None:
        self._config = config
        self._read: set[str] = set()
        self._settled: dict[str, Any] = {}
        self._rules: dict[str, str] = {}
        self.provenance: dict[str, str] = {} if provenance is None else provenance
        self.unknown: dict[str, str] = {} if unknown is None else unknown

    # --- finding --------------------------------------------------------------------------------

    def has(self, *names: str) -> bool:
        """Return whether any of the names is given and not null."""
        return any(self._config.get(name) is not None or name in self._settled for name in names)

    def mentions(self, *names: str) -> bool:
        """Return whether any of the names is there; null is an answer, absence is not."""
        return any(name in self._config or name in self._settled for name in names)

    def _find(self, names: Sequence[str]) -> tuple[str, Any]:
        """Return the first name given, with its value; other spellings must not contradict it."""
        self._read.update(names)
        for name in names:
            if name in self._settled:
                return name, self._settled[name]
        given = [(name, self._config[name]) for name in names if self._config.get(name) is not None]
        if not given:
            return names[0], None
        first, value = given[0]
        for other, same in given[1:]:
            if type(same) is not type(value) or same != value:
                raise UnsupportedConfig(other, f"is {show(same)}, but {first} is {show(value)}")
        return first, value

    def names(self) -> list[str]:
        """Return the names of all keys, in order."""
        return [name for name in self._config if isinstance(name, str)]

    def raw(self, name: str) -> Any:
        """Return a value as it stands, where its type decides how it is to be read."""
        return self._find((name,))[1]

    def state(self, name: str, rule: str) -> None:
        """Put where a value comes from into the provenance."""
        self.provenance[name] = self._rules.get(name, rule)

    def settle(self, name: str, value: object, rule: str) -> None:
        """Fix a value that a family derives from other keys; it overrides what the file says."""
        self._settled[name] = value
        self._rules[name] = rule

    # --- values ---------------------------------------------------------------------------------

    def count_or_none(
        self, *names: str, rule: str = "absent", minimum: int = 1, maximum: int = MAX_COUNT
    ) -> int | None:
        """Return a whole number, or None by a stated ``rule`` where the key is absent or null."""
        name, value = self._find(names)
        if value is None:
            self.state(names[0], rule)
            return None
        whole = as_count(name, value, minimum, maximum)
        self.state(names[0], f"{name} = {whole}")
        return whole

    def count(self, *names: str, minimum: int = 1, maximum: int = MAX_COUNT) -> int:
        """Return a required whole number."""
        value = self.count_or_none(*names, minimum=minimum, maximum=maximum)
        if value is None:
            raise UnsupportedConfig(names[0], "is missing")
        return value

    def count_or(self, default: int, *names: str, rule: str, minimum: int = 1) -> int:
        """Return a whole number, or ``default`` by a stated ``rule``."""
        value = self.count_or_none(*names, rule=rule, minimum=minimum)
        return default if value is None else value

    def count_for_weights(self, *names: str) -> int | None:
        """Return a whole number that only the weights depend on; None, and noted, where absent."""
        value = self.count_or_none(*names, rule="absent: the weights are not known")
        if value is None:
            self.unknown.setdefault(names[0], "is missing")
        return value

    def flag(self, name: str, otherwise: bool, rule: str) -> bool:
        """Return true or false; absent or null: ``otherwise``, by a stated ``rule``."""
        _, value = self._find((name,))
        if value is None:
            self.state(name, rule)
            return otherwise
        if not isinstance(value, bool):
            raise UnsupportedConfig(name, f"must be true or false, got {show(value)}")
        self.state(name, f"{name} = {json.dumps(value)}")
        return value

    def text(self, name: str) -> str | None:
        """Return a string, or None where absent."""
        _, value = self._find((name,))
        if value is not None and not isinstance(value, str):
            raise UnsupportedConfig(name, f"must be a string, got {show(value)}")
        if value is not None:
            self.state(name, f"{name} = {show(value)}")
        return value

    def listing(self, *names: str, length: int | None = None) -> list[Any] | None:
        """Return a list, of ``length`` entries if that is given, or None where absent."""
        name, value = self._find(names)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise UnsupportedConfig(name, f"must be a list, got {show(value)}")
        if length is not None and len(value) != length:
            raise UnsupportedConfig(name, f"has {len(value)} entries, the model {length} layers")
        self.state(names[0], f"{name}, {len(value)} entries")
        return list(value)

    def counts(self, *names: str, length: int, minimum: int = 1) -> list[int] | None:
        """Return one whole number per layer, given as a list or as one number for all."""
        name, value = self._find(names)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            return [self.count(*names, minimum=minimum)] * length
        listed = self.listing(*names, length=length) or []
        return [as_count(name, entry, minimum, MAX_COUNT) for entry in listed]

    def words(self, name: str, length: int, known: Mapping[str, str]) -> list[str] | None:
        """Return one word per layer, translated by ``known``; others are refused."""
        listed = self.listing(name, length=length)
        if listed is None:
            return None
        for word in listed:
            if not isinstance(word, str) or word not in known:
                raise UnsupportedConfig(
                    name, f"{show(word)} is not understood; known: {', '.join(sorted(known))}"
                )
        return [known[word] for word in listed]

    def first(self, *names: str) -> int | None:
        """Return the whole number under the first name given; others may say something else."""
        given = next((name for name in names if self.has(name)), names[0])
        self.skip(*names)
        value = self.count_or_none(given, rule="absent: not stated")
        self.state(names[0], self.provenance[given])
        return value

    def section(self, name: str) -> Keys | None:
        """Return a nested section as keys of its own, or None where absent."""
        _, value = self._find((name,))
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise UnsupportedConfig(name, f"must be an object, got {show(value)}")
        return Keys(value, self.provenance, self.unknown)

    # --- refusing -------------------------------------------------------------------------------

    def must_be(self, name: str, allowed: Sequence[object], why: str) -> None:
        """Refuse a value that would change the shape in a way that is not modelled here."""
        _, value = self._find((name,))
        if value is not None and not any(
            type(value) is type(one) and value == one for one in allowed
        ):
            raise UnsupportedConfig(name, f"{show(value)} is not modelled here ({why})")

    def skip(self, *names: str) -> None:
        """Mark keys as understood and without effect here."""
        self._read.update(names)

    def refuse_unread(self, where: str = "") -> None:
        """Raise for the first key that nobody read although it speaks of the model's shape."""
        for name, value in self._config.items():
            if name in self._read or not bears_on_shape(name, value):
                continue
            raise UnsupportedConfig(
                f"{where}{name}",
                f"{show(value)} is not understood, and by its name it bears on attention, cache, "
                f"layers or experts",
            )


def as_count(name: str, value: object, minimum: int = 1, maximum: int = MAX_COUNT) -> int:
    """Return ``value`` if it is a whole number within bounds.

    Raises: ``UnsupportedConfig`` naming the key.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnsupportedConfig(
            name, f"must be a whole number of at least {minimum}, got {show(value)}"
        )
    if not minimum <= value <= maximum:
        raise UnsupportedConfig(name, f"must be from {minimum} to {maximum:,}, got {show(value)}")
    return int(value)


def show(value: object) -> str:
    """Return a value as short text, whatever it is: a huge number, a deep nest, a long list."""
    try:
        return reprlib.repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints
        return f"a value of type {type(value).__name__}"
