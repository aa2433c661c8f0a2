"""Mutated configurations: a spec with whole, non-negative bytes, or `UnsupportedConfig`."""

import copy
import json
from importlib import resources

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servelab.models import ModelSpec, UnsupportedConfig
from servelab.roofline import step_cost

CASES = json.loads(
    (resources.files("servelab") / "data/cases/config_cases.json").read_text(encoding="utf-8")
)
CONFIGS = [case["config"] for case in CASES]
KEYS = sorted({k for c in CONFIGS for k in {**c, **c.get("text_config", {})}})


def nested(depth):
    value = 1
    for _ in range(depth):
        value = {"layers": value}
    return value


VALUES = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, 1, 2, 3, 7, 10**9, 10**30, 10**5000, 1.5, float("nan"), "",
         float("inf"), "12", "auto", "MEM*E-", [], [1], [None], [[]], {}, {"a": 1}, nested(3000)]
    ),
    st.integers(),
    st.lists(st.integers(0, 3), max_size=4),
    st.text(max_size=8),
)  # fmt: skip


@st.composite
def mutated(draw):
    config = copy.deepcopy(draw(st.sampled_from(CONFIGS)))
    for _ in range(draw(st.integers(1, 3))):
        section = config
        if isinstance(config.get("text_config"), dict) and draw(st.booleans()):
            section = config["text_config"]
        action = draw(st.sampled_from(["drop", "set", "add", "rename", "shorten", "type"]))
        key = draw(st.sampled_from(sorted(section))) if section else "model_type"
        if action == "drop":
            section.pop(key, None)
        elif action == "set":
            section[key] = draw(VALUES)
        elif action == "add":
            section[draw(st.sampled_from(KEYS))] = draw(VALUES)
        elif action == "rename":
            section[key + draw(st.sampled_from(["_", "s", "_per_layer"]))] = section.pop(key, 1)
        elif action == "shorten" and isinstance(section.get(key), (list, str)):
            section[key] = section[key][:-1]
        elif action == "type":
            section["model_type"] = draw(
                st.sampled_from([c.get("model_type") for c in CONFIGS] + ["mystery"])
            )
    return config


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(mutated())
def test_a_spec_or_a_refusal(config):
    try:
        spec = ModelSpec.from_config(config)
    except UnsupportedConfig as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.key
        assert len(str(refused)) < 2000
        return
    sizes = [
        spec.kv_bytes_per_token(),
        spec.kv_bytes_per_token("fp8", "reserved"),
        spec.state_bytes_per_sequence,
        spec.sequence_bytes(0),
        spec.sequence_bytes(100_000),
    ]
    assert all(type(size) is int and size >= 0 for size in sizes)
    assert sizes[4] >= sizes[3] == sizes[2]
    assert spec.kv_bytes_per_token() <= spec.kv_bytes_per_token(view="reserved")
    assert spec.provenance
    if spec.unknown:
        return
    assert 0 < spec.params_active <= spec.params_total
    assert spec.weight_bytes() > 0
    assert step_cost(spec, [(1, 100)]).flop > 0


def test_order_of_keys_does_not_matter():
    for config in CONFIGS:
        turned = dict(reversed(config.items()))
        try:
            expected = ModelSpec.from_config(config)
        except UnsupportedConfig:
            continue
        assert ModelSpec.from_config(turned) == expected
