"""Weight bytes of a quantised configuration, by its own keys."""
from servelab.models.reader.keys import Keys
from servelab.models.spec import ModelSpec


def published_weight_bytes(spec: ModelSpec, outer: Keys, text: Keys) -> ModelSpec | None:
    outer.skip("quantization_config"); text.skip("quantization_config")
    return None
