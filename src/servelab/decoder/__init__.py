"""The decoder in torch: a dense one first, the oracle for everything that is faster."""

from servelab.decoder.cache import DenseCache
from servelab.decoder.dense import DenseDecoder, greedy

__all__ = ["DenseCache", "DenseDecoder", "greedy"]
