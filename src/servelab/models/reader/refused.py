"""Model types that are known not to follow the ordinary rules, with what is in the way.

Models: nothing: a configuration of these is refused, although its keys may look ordinary.

Assumes: the model code of transformers 5.24, with which the ordinary rules were compared.

Ignores: types nobody has compared; those are read by the ordinary rules and marked.
"""

_WEIGHTS = "its weights differ from the ordinary rules in ways that no key states"

REFUSED: dict[str, str] = {
    "deepseek_v4": "compressed attention: one entry per 4 or 128 tokens (compress_ratios)",
    "deepseek_ref": "compressed attention, as DeepSeek-V4",
    "longcat_flash": "two attentions per layer and experts that do nothing",
    "zamba": "layers that share weights",
    "zamba2": "layers that share weights",
    "jetmoe": "a mixture of attention heads",
    "rwkv": "a recurrent state of its own",
    "xlstm": "a recurrent state of its own",
    "bailing_hybrid": "a recurrent state of its own",
    "olmo_hybrid": "a recurrent state of its own",
    **dict.fromkeys(
        (
            "afmoe", "aria", "biogpt", "bitnet", "cohere2_moe", "diffllama", "doge",
            "gpt_neox_japanese",
            "granite_swa", "hunyuan_v1_moe", "hy_v3", "jais2", "mellum", "nanochat", "sarvam_mla",
            "sarvam_moe", "xglm", "ctrl", "xlnet", "cpmant", "reformer", "openai-gpt",
            "bert-generation", "git",
        ),
        _WEIGHTS,
    ),
}  # fmt: skip
