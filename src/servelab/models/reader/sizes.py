"""The keys of sizes and heads under all their names, and a family's rules where a file is silent.

Models: width, depth and the flags of a decoder.

Assumes: two names of one thing say the same.

Ignores: what the layers are made of.
"""

from __future__ import annotations

from dataclasses import dataclass

from servelab.models.errors import UnsupportedConfig
from servelab.models.reader.family import Family, Flag
from servelab.models.reader.keys import MAX_LAYERS, Keys

HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model", "model_dim")
LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers",
)  # fmt: skip
Q_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num",
    "num_key_value_heads_per_layer", "n_kv_heads", "num_query_groups",
)  # fmt: skip
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim", "head_size")
#: Where a family states its heads or is refused, as `Family.stated`: hybrids and others.
KV_STATED = (KV_HEADS[0],)
HEADS_STATED = (KV_HEADS[0], HEAD_DIM[0])
MLP_WIDTH = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "d_ff")
CONTEXT = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length",
    "model_max_length", "max_context_length",
)  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_topk",
    "top_k_experts", "moe_top_k",
)  # fmt: skip
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_NO_TABLE = ("rope", "rotary", "nope", "alibi", "rope_gptj", "relative")
PREDICTION_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class Sizes:
    """What every decoder has: its width, its depth, and its family's rules."""

    keys: Keys
    family: Family
    hidden: int
    layers: int

    def flag(self, rule: Flag) -> bool:
        """Return a family's flag: fixed, or read from its key."""
        if isinstance(rule, bool):
            return rule
        key, otherwise = rule
        return self.keys.flag(key, otherwise, f"absent: {otherwise} ({self.family.source})")


def read_sizes(keys: Keys, family: Family) -> Sizes:
    """Return width and depth; refuse what the family's rules do not cover."""
    keys.must_be("add_cross_attention", (False,), "cross attention")
    if family.position_offset is None:
        keys.must_be("position_embedding_type", _NO_TABLE, "a table of positions")
    for key in family.stated:
        names = KV_HEADS if key == KV_HEADS[0] else HEAD_DIM if key == HEAD_DIM[0] else (key,)
        if not keys.mentions(*names):
            raise UnsupportedConfig(key, f"is missing, and no rule replaces it ({family.source})")
    if family.qkv_bias is False and family.out_bias is False:
        keys.must_be("attention_bias", (False,), f"no such biases: {family.source}")
    if family.mlp_bias is False:
        keys.must_be("mlp_bias", (False,), f"no such biases: {family.source}")
    for key, value in family.fixed:
        keys.must_be(key, (value,), family.source)
    return Sizes(keys, family, keys.count(*HIDDEN), keys.count(*LAYERS, maximum=MAX_LAYERS))
