"""The physics of LLM serving, as code: roofline, prefill and decode, KV memory, a paged decoder.

Each room of the package imports only the rooms below it; see ``CONTRIBUTING.md`` for the order.
"""

__version__ = "0.1.0"
