"""A step made from rows and block tables is the step that the runner stages for the device."""

from __future__ import annotations

import pytest
import torch

from servelab.decoder import PagedDecoder, StepBatch, TorchRunner
from servelab.models import ModelSpec
from servelab.paging import BlockPool, BlockTable
from servelab.serving import Engine, Plan, SamplingParams, StepResult

SPEC = ModelSpec.from_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "vocab_size": 30,
    }
)


class Watched(TorchRunner):
    """Rebuilds each batch from its plan and compares it with the one that is computed."""

    steps = 0

    def execute(self, plan: Plan) -> StepResult:
        ordered = sorted(plan.rows, key=lambda row: row[1] > 1)
        pairs = [(new, cached) for _, new, cached, _ in ordered]
        tables = [sequence.table for sequence, *_ in ordered]
        assert all(table is not None for table in tables)
        self.expected = StepBatch.of(pairs, [table for table in tables if table is not None])
        return super().execute(plan)

    def logits(self, batch: StepBatch, last: torch.Tensor) -> torch.Tensor:
        for name in ("positions", "slots", "block_tables", "query_starts", "context_lens"):
            found, expected = getattr(batch, name), getattr(self.expected, name)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert batch.rows == self.expected.rows
        assert batch.tokens.shape == self.expected.tokens.shape
        self.steps += 1
        return super().logits(batch, last)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_every_step_of_an_engine_is_rebuilt_from_its_rows_and_tables(block_size: int) -> None:
    runner = Watched(PagedDecoder(SPEC).initialise())
    engine = Engine(runner, num_blocks=60, block_size=block_size, max_num_batched_tokens=7)
    prompts = [list(range(1, n)) for n in (3, 12, 18, 9)]
    answers = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=5))
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [5] * 4
    assert runner.steps >= 8


def test_a_row_without_a_table_and_a_position_without_a_block_are_refused() -> None:
    table = BlockTable(BlockPool(num_blocks=4, block_size=4))
    table.append(6)
    with pytest.raises(ValueError, match="zip"):
        StepBatch.of([(1, 5), (1, 2)], [table])
    with pytest.raises(ValueError, match="positions 4 to 7 are not in 0 to 6"):
        StepBatch.of([(3, 4)], [table])
