"""The table of ordinary families: one line per ``model_type``, each with where its rules stand.

Models: decoders that differ from Llama in biases, norms, gates, windows, ties and experts only.

Assumes: the model code of transformers 5.24 (or the repository's own, where named) is what the
published files were trained with; a row was compared with that code on the meta device where the
library has it.

Ignores: class defaults for sizes and heads: a file that leaves those out is refused.
"""

from dataclasses import replace

from servelab.models.reader.family import Family, Mixture


def _hf(model_type: str) -> str:
    return f"transformers modeling_{model_type}.py, configuration_{model_type}.py"


_LLAMA = Family(_hf("llama"))

# fmt: off
#: An unknown model_type whose keys are the ordinary ones.
ORDINARY = replace(_LLAMA, source="the ordinary rules: Llama's shape", tied=None,
    qk_norm_key=("use_qk_norm", False))
_LAYER_NORM = replace(_LLAMA, norm="layer", gated=False)
_BIASED = replace(_LAYER_NORM, qkv_bias=True, out_bias=True, mlp_bias=True)
_NO_BIAS = replace(_LLAMA, qkv_bias=False, out_bias=False, mlp_bias=False)
_QWEN = replace(_NO_BIAS, qkv_bias=True, window="switched")
_QWEN3 = replace(_LLAMA, source=_hf("qwen3"), mlp_bias=False, qk_norm="head", window="switched",
    fixed=(("qkv_bias", False), ("use_qk_norm", True)))
_GPT2 = replace(_BIASED, tied=True, mlp_factor=4, position_offset=0, source=_hf("gpt2"))
_GPTJ = replace(_LAYER_NORM, source=_hf("gptj"), norms=1, qkv_bias=False, out_bias=False,
    mlp_bias=True, lm_head_bias=True, mlp_factor=4)
_GEMMA = replace(_LLAMA, tied=True, mlp_bias=False, source=_hf("gemma"))
_GEMMA3 = replace(_GEMMA, norms=4, qk_norm="head", full_every=6, source=_hf("gemma3"))
_COHERE = replace(_GEMMA, source=_hf("cohere"), norm="layer_no_bias", norms=1, qk_norm="heads",
    qk_norm_key=("use_qk_norm", False))
_OLMO2 = replace(_LLAMA, mlp_bias=False, qk_norm="width", source=_hf("olmo2"))
_DEEPSEEK_MOE = Mixture(shared="counted", router_bias=True)
_QWEN_MOE = Mixture(shared="gated")
_WIDE = Mixture(width="intermediate_size")
_FALCON = replace(_LAYER_NORM, source=_hf("falcon"), tied=True, qkv_bias=("bias", False),
    out_bias=("bias", False), mlp_bias=("bias", False), mlp_factor=4)
_STARCODER2 = replace(_LAYER_NORM, source=_hf("starcoder2"), tied=True,
        qkv_bias=("use_bias", True), out_bias=("use_bias", True), mlp_bias=("use_bias", True),
        window="everywhere",
    fixed=(("norm_type", "layer_norm"), ("mlp_type", "default")))
_GLM = replace(_LLAMA, source=_hf("glm"), qkv_bias=("attention_bias", True), out_bias=False,
    mlp_bias=False)
_GRANITE_MOE = replace(_LLAMA, source=_hf("granitemoe"), mlp_bias=False, mixture=_WIDE)
_APERTUS = replace(_LLAMA, source=_hf("apertus"), gated=False, mlp_bias=False,
        qk_norm="head", mlp_extra_params=2)
_STABLELM = replace(_LLAMA, source=_hf("stablelm"), norm="layer",
        qkv_bias=("use_qkv_bias", False), out_bias=False, mlp_bias=False, fixed=(("qk_layernorm",
        False),))
_ERNIE = replace(_LLAMA, source=_hf("ernie4_5"), tied=True, qkv_bias=("use_bias", False),
    out_bias=("use_bias", False), mlp_bias=("use_bias", False))

FAMILIES: dict[str, Family] = {
    # --- Llama and those that only rename it ------------------------------------------------------
    "llama": _LLAMA,
    "code_llama": _LLAMA,
    "hyperclovax": replace(_LLAMA, source=_hf("hyperclovax")),
    "hunyuan_v1_dense": replace(_LLAMA, source=_hf("hunyuan_v1_dense"), mlp_bias=False,
        qk_norm="head", fixed=(("use_qk_norm", True), ("use_cla", False))),
    "deci": replace(_LLAMA, source="Deci modeling_decilm.py"),
    "cwm": replace(_NO_BIAS, source=_hf("cwm")),
    "granite": replace(_LLAMA, source=_hf("granite")),
    "helium": replace(_LLAMA, source=_hf("helium")),
    "smollm3": replace(_LLAMA, source=_hf("smollm3"), tied=True, window="switched"),
    "ministral3": replace(_NO_BIAS, source=_hf("ministral3"), window="everywhere"),
    "mistral": replace(_NO_BIAS, source=_hf("mistral"), window="everywhere"),
    "ministral": replace(_NO_BIAS, source=_hf("ministral"), window="everywhere"),
    "phi3": replace(_LLAMA, source=_hf("phi3"), qkv_bias=False,
        out_bias=("attention_bias", False), mlp_bias=False, window="everywhere"),
    "seed_oss": replace(_LLAMA, source=_hf("seed_oss"), qkv_bias=("attention_bias", True),
        out_bias=("attention_out_bias", False)),
    "minicpm": replace(_LLAMA, source="openbmb configuration_minicpm.py", tied=True),
    "qwen": replace(_NO_BIAS, source="Qwen modeling_qwen.py", qkv_bias=True,
        fixed=(("no_bias", True),)),
    "chatglm": replace(_LLAMA, source="THUDM modeling_chatglm.py",
        qkv_bias=("add_qkv_bias", False), out_bias=("add_bias_linear", False),
        mlp_bias=("add_bias_linear", False),
        fixed=(("rmsnorm", True), ("post_layer_norm", True))),
    "dbrx": replace(_NO_BIAS, source=_hf("dbrx"), norm="layer_no_bias",
        mixture=Mixture(width="ffn_hidden_size")),
    "baichuan": replace(_NO_BIAS,
        source="baichuan-inc modeling_baichuan.py: fused W_pack, no biases, own lm_head"),
    "internlm": replace(_NO_BIAS, source="internlm modeling_internlm.py",
        qkv_bias=("bias", True), out_bias=("bias", True)),
    "internlm2": replace(_NO_BIAS, source="internlm modeling_internlm2.py",
        qkv_bias=("bias", True), out_bias=("bias", True)),
    "internlm3": replace(_LLAMA, source=_hf("internlm3"), qkv_bias=("qkv_bias", False),
        out_bias=("bias", False), mlp_bias=("bias", False)),
    "arcee": replace(_LLAMA, source=_hf("arcee"), gated=False),
    "apertus": _APERTUS,
    "apertus1p5": replace(_APERTUS, source=_hf("apertus1p5")),
    "ernie4_5": _ERNIE,
    "exaone": replace(_LLAMA, source=_hf("exaone"), mlp_bias=False),
    "exaone4": replace(_NO_BIAS, source=_hf("exaone4"), qk_norm="head"),
    "olmo": replace(_LLAMA, source=_hf("olmo"), norm="none", mlp_bias=False),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, source=_hf("olmo3"), full_every=4),
    # --- Qwen, MiMo -------------------------------------------------------------------------------
    "qwen2": replace(_QWEN, source=_hf("qwen2")),
    "qwen2_vl": replace(_QWEN, tied=None, source=_hf("qwen2_vl")),
    "qwen2_5_vl": replace(_QWEN, tied=None, source=_hf("qwen2_5_vl")),
    "mimo": replace(_QWEN, source="XiaomiMiMo modeling_mimo.py: Qwen2 with prediction layers",
        fixed=(("attention_bias", True),)),
    "qwen3": _QWEN3,
    "qwen3_vl": replace(_QWEN3, tied=None, source=_hf("qwen3_vl")),
    "qwen2_moe": replace(_QWEN, source=_hf("qwen2_moe"), qkv_bias=("qkv_bias", True),
        mixture=_QWEN_MOE),
    "qwen3_moe": replace(_QWEN3, source=_hf("qwen3_moe"), mixture=Mixture()),
    "qwen3_vl_moe": replace(_QWEN3, tied=None, source=_hf("qwen3_vl_moe"), mixture=Mixture()),
    # --- Gemma, Cohere ----------------------------------------------------------------------------
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, source=_hf("gemma2"), norms=4, full_every=2),
    "gemma3": _GEMMA3,
    "vaultgemma": replace(_GEMMA, source=_hf("vaultgemma"), full_every=2),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, source=_hf("cohere2"), qk_norm="none", full_every=4),
    # --- GLM --------------------------------------------------------------------------------------
    "glm": _GLM,
    "glm4": replace(_GLM, source=_hf("glm4"), norms=4),
    "glm4v": replace(_GLM, tied=None, source=_hf("glm4v"), norms=4),
    "glm4_moe": replace(_GLM, source=_hf("glm4_moe"), qkv_bias=("attention_bias", False),
        qk_norm="head", qk_norm_key=("use_qk_norm", False), mixture=_DEEPSEEK_MOE),
    # --- GPT and its heirs: LayerNorm, two matrices -----------------------------------------------
    "gpt2": _GPT2,
    "gpt_bigcode": replace(_GPT2, source=_hf("gpt_bigcode")),
    "gptj": _GPTJ,
    "codegen": replace(_GPTJ, source=_hf("codegen")),
    "gpt_neo": replace(_GPT2, source=_hf("gpt_neo"), qkv_bias=False, out_bias=True,
        mlp_bias=True),
    "gpt_neox": replace(_BIASED, source=_hf("gpt_neox"), qkv_bias=("attention_bias", True),
        out_bias=("attention_bias", True)),
    "bloom": replace(_BIASED, source=_hf("bloom"), tied=True, mlp_factor=4,
        embedding_norm=True),
    "opt": replace(_BIASED, source=_hf("opt") + "; Zhang et al. (2022)", tied=True,
        qkv_bias=("enable_bias", True), out_bias=("enable_bias", True),
        mlp_bias=("enable_bias", True), position_offset=2, fixed=(("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False), ("layer_norm_elementwise_affine", True),
        ("output_projection", True)), weight_dtype="fp16"),
    "falcon": _FALCON,
    "RefinedWeb": _FALCON,
    "RefinedWebModel": _FALCON,
    "mpt": replace(_LAYER_NORM, source=_hf("mpt"), norm="layer_no_bias", tied=True,
        qkv_bias=False, out_bias=False, mlp_bias=False, mlp_factor=4),
    "phi": replace(_BIASED, source=_hf("phi"), norms=1, lm_head_bias=True,
        fixed=(("qk_layernorm", False),)),
    "persimmon": replace(_BIASED, source=_hf("persimmon"), qk_norm="head",
        qk_norm_key=("qk_layernorm", True)),
    "nemotron": replace(_LAYER_NORM, source=_hf("nemotron")),
    "starcoder2": _STARCODER2,
    "stablelm": _STABLELM,
    "stablelm_epoch": replace(_STABLELM, source="stabilityai modeling_stablelm_epoch.py"),
    # --- mixtures of experts ----------------------------------------------------------------------
    "mixtral": replace(_NO_BIAS, source=_hf("mixtral"), window="everywhere", mixture=_WIDE),
    "phimoe": replace(_LLAMA, source=_hf("phimoe"), norm="layer", mlp_bias=False,
        lm_head_bias=("lm_head_bias", False), window="everywhere", mixture=_WIDE),
    "olmoe": replace(_OLMO2, source=_hf("olmoe"), mixture=_WIDE),
    "flex_olmo": replace(_OLMO2, source=_hf("flex_olmo"), mixture=_WIDE),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": replace(_GRANITE_MOE, source=_hf("granitemoeshared"),
        mixture=replace(_WIDE, shared="width")),
    "gpt_oss": replace(_LLAMA, source=_hf("gpt_oss"), qkv_bias=("attention_bias", True),
        out_bias=("attention_bias", True), mlp_bias=True, full_every=2, sinks=True,
        mixture=replace(_WIDE, router_bias=True)),
    "ernie4_5_moe": replace(_ERNIE, source=_hf("ernie4_5_moe"), mixture=_DEEPSEEK_MOE),
    "exaone_moe": replace(_NO_BIAS, source=_hf("exaone_moe"), qk_norm="head",
        mixture=_DEEPSEEK_MOE),
    "solar_open": replace(_NO_BIAS, source=_hf("solar_open"), mixture=_DEEPSEEK_MOE),
    "dots1": replace(_LLAMA, source=_hf("dots1"), mlp_bias=False, qk_norm="head",
        mixture=_DEEPSEEK_MOE),
    "deepseek": replace(_LLAMA, source="deepseek-ai modeling_deepseek.py (DeepSeekMoE-16B)",
        mlp_bias=False, mixture=Mixture(shared="counted")),
    "minimax_m2": replace(_NO_BIAS, source=_hf("minimax_m2"), qk_norm="width",
        qk_norm_key=("use_qk_norm", True), mixture=replace(_WIDE,
        router_bias=("use_routing_bias", True))),
}
# fmt: on

#: Keys whose absence the model code fills with a size of its own class, of another model.
_STATED = {
    "num_key_value_heads": """
        cwm helium smollm3 ministral3 mistral ministral seed_oss internlm3 ernie4_5 exaone exaone4
        qwen2 qwen2_vl qwen2_5_vl qwen2_moe qwen3 qwen3_moe qwen3_vl qwen3_vl_moe gemma gemma2
        gemma3 vaultgemma glm glm4 glm4v glm4_moe starcoder2 stablelm stablelm_epoch
        mixtral phimoe gpt_oss
        ernie4_5_moe exaone_moe solar_open dots1 minimax_m2""",
    "head_dim": """
        cwm helium ministral3 seed_oss internlm3 ernie4_5 qwen3 qwen3_vl gemma gemma2 gemma3
        vaultgemma glm glm4 gpt_oss solar_open minimax_m2""",
    "sliding_window": """
        cwm mistral ministral exaone4 olmo3 gemma2 gemma3 vaultgemma cohere2 gpt_oss""",
}
for _key, _types in _STATED.items():
    for _type in _types.split():
        FAMILIES[_type] = replace(FAMILIES[_type], stated=(*FAMILIES[_type].stated, _key))
