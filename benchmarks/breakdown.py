"""Where the time of a decode step goes, by torch's profiler.

Models: the time inside torch's operators, by what they do for the step, and the rest: Python,
scheduler, and the way into and out of each operator.

Assumes: the profiler lengthens all operators by about the same; shares are what to read.

Ignores: compiled steps, whose kernels have no names of their own.
"""

from __future__ import annotations

from time import perf_counter

from engines import engine_for, greedy, random_prompts, say
from torch.profiler import ProfilerActivity, profile

from servelab.decoder import TorchRunner

KINDS = {
    "linears": ("aten::mm", "aten::addmm", "aten::linear", "mkldnn::_linear_pointwise"),
    "gathering": ("aten::index_select",),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    "sampling": ("aten::max",),
}


def shares(runner: TorchRunner, batch: int, steps: int = 10) -> dict[str, float]:
    """Return the share of each kind in the time of a step at a context of about 140."""
    say(f"profile of a step, batch {batch}")
    engine = engine_for(runner, [(128, steps + 8)] * batch, batch, 128 * batch)
    for prompt in random_prompts(batch, 128, seed=0):
        engine.add(prompt, greedy(steps + 8))
    for _ in range(4):
        engine.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        began = perf_counter()
        for _ in range(steps):
            engine.step()
        whole = perf_counter() - began
    inside = {
        event.key: event.self_cpu_time_total / 1e6
        for event in profiler.key_averages()
        if "::" in event.key
    }
    found = {
        kind: sum(inside.get(name, 0.0) for name in names) / whole for kind, names in KINDS.items()
    }
    found["norms, rotation, gates, copies"] = sum(inside.values()) / whole - sum(found.values())
    found["Python and the rest"] = 1 - sum(inside.values()) / whole
    return found
