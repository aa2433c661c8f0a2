"""The one error of this room: a configuration that cannot be read without guessing."""


class UnsupportedConfig(ValueError):
    """A configuration that cannot be read without guessing.

    Parameters: ``key`` the key at fault; ``why`` it cannot be used.

    >>> UnsupportedConfig("num_hidden_layers", "is missing").key
    'num_hidden_layers'
    """

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key}: {why}")
        self.key = key
        self.why = why
