"""A generation has the steps that the decoder runs; the figures of work draw the same counts."""

import pytest
import torch
from matplotlib import pyplot as plt

from servelab import models
from servelab.decoder import DenseDecoder, greedy
from servelab.models import ModelSpec
from servelab.plots import work
from servelab.roofline import causal_pairs, generation_steps, step_cost

SMALL = ModelSpec.from_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 50,
    }
)


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.mark.parametrize("cached", [True, False])
def test_greedy_runs_exactly_the_steps_of_a_generation(cached):
    model = DenseDecoder(SMALL)
    seen = []
    model.register_forward_pre_hook(
        lambda _, arguments: seen.append(
            [(arguments[0].shape[1], arguments[1].length if arguments[1] else 0)]
        )
    )
    greedy(model, torch.tensor([[1, 2, 3, 4, 5]]), 4, cached)
    assert seen == generation_steps(5, 4, cached)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("prompt_tokens", "new_tokens"), [(1, 1), (1, 6), (7, 1), (5, 4)])
def test_pair_counts_add_up_to_the_pairs_of_the_steps(prompt_tokens, new_tokens, cached):
    steps = generation_steps(prompt_tokens, new_tokens, cached)
    expected = sum(causal_pairs(*pair) for step in steps for pair in step)
    counts = work.pair_counts(prompt_tokens, new_tokens, cached)
    assert sum(map(sum, counts)) == expected
    assert [len(row) for row in counts] == list(range(1, prompt_tokens + new_tokens))


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, None])
def test_generation_steps_refuses_what_is_not_a_count(bad):
    with pytest.raises((TypeError, ValueError), match="prompt_tokens must be"):
        generation_steps(bad, 4)
    with pytest.raises((TypeError, ValueError), match="new_tokens must be"):
        generation_steps(4, bad)


def test_cumulative_work_ends_at_the_sum_of_the_steps():
    (axes,) = work.cumulative_work(SMALL, 9, 6).axes
    drawn = [line.get_ydata()[-1] for line in axes.lines[:2]]
    expected = [
        sum(step_cost(SMALL, step).flop for step in generation_steps(9, 6, cached))
        for cached in (False, True)
    ]
    assert drawn == expected


def test_work_per_token_marks_the_crossing_only_where_it_is_in_view():
    spec = models.get("qwen3-8b")
    crossing = 2 * spec.matmul_params / (4 * 36 * 32 * 128)
    (axes,) = work.work_per_token(spec, 65536).axes
    (mark,) = [text for text in axes.texts if "=" in text.get_text()]
    assert mark.get_position()[0] == pytest.approx(crossing, abs=2 * 65536 / 100)
    (axes,) = work.work_per_token(spec, 16384).axes
    assert not [text for text in axes.texts if "=" in text.get_text()]


def test_pair_grid_writes_both_totals():
    titles = [axes.get_title() for axes in work.pair_grid(5, 4).axes]
    assert titles == ["Without a cache: 100 pairs", "With a cache: 36 pairs"]
