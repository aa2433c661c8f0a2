"""The trained small checkpoint: its files, and whether what it tells keeps to its grammar."""

from __future__ import annotations

import doctest
import json
import re

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from servelab.models import ModelSpec
from tools.train_checkpoint import check, stories, train

torch.set_num_threads(1)

README = (check.CHECKPOINT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def loaded() -> tuple[check.DenseDecoder, check.Tokenizer]:
    return check.load(check.CHECKPOINT)


@pytest.fixture(scope="module")
def told(loaded) -> list[check.Told]:
    return check.tell(*loaded, check.openings(100))


# --- The grammar -----------------------------------------------------------------------------


def test_the_reader_follows_the_writer() -> None:
    for seed in range(500):
        written = stories.generate(seed, held_out=seed % 2 == 0)
        read = stories.parse(written.text)
        assert (read.kind, read.name) == (written.kind, written.name)
        assert stories.is_held_out(read.kind, read.name) == (seed % 2 == 0)
        assert read.log_probability == pytest.approx(written.log_probability)


def test_the_examples_of_the_grammar_hold() -> None:
    result = doctest.testmod(stories, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert not result.failed


def test_stories_differ_and_are_short() -> None:
    texts = [stories.generate(seed).text for seed in range(500)]
    assert len(set(texts)) == 500
    assert {len(text.split()) // 30 for text in texts} <= {2, 3, 4}  # 60 to 149 words


STORY = (
    "Once there was a fox named Pip. Pip had a red kite. One sunny morning he took the kite "
    "to the hill. There he met a mole named Dora. Dora had never seen a red kite before. "
    "Together they flew the kite until the sun was low. Then the string broke, and the kite "
    "was gone. Dora looked under the oak but found nothing. Then Pip looked beside the gate, "
    'and there lay the red kite. "Keep it," said Pip, "it is yours." Dora was so happy that '
    "she hugged the kite. Now the red kite belongs to Dora, and the two friends meet on the "
    "hill every morning."
)


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        ("Pip had a red", "Tom had a red"),  # another name
        ("Then Pip looked", "Then Dora looked"),  # who looked already
        ("belongs to Dora", "belongs to Pip"),  # who gave it away
        ("morning he took", "morning she took"),
        ("that she hugged", "that he hugged"),
        ("took the kite to", "took the drum to"),  # a thing that was never there
        ("hugged the kite", "hugged the boat"),
        ("lay the red kite", "lay the blue kite"),
        ("flew the kite", "rode the kite"),
        ("to the hill", "to the cave"),  # no place for a kite
        ("meet on the hill", "meet on the beach"),
        ("beside the gate", "under the pier"),  # a spot of another place
        ("beside the gate", "under the oak"),  # where it was not
        ("every morning", "every evening"),
        ("a mole named Dora", "a mole named Pip"),
        ("a fox named", "a wolf named"),  # no word of the grammar
        ("kite. One", "kite One"),  # a full stop missing
        ("every morning.", "every morning"),
        ("every morning.", ""),
        ("every morning.", "every morning. "),
        ("Dora looked", "dora looked"),
        ("Then the string broke, and the kite was gone. ", ""),  # found, yet not lost
        ("There he met a mole named Dora. ", ""),
        ("Pip had a red kite. ", "Pip had a red kite. Pip had a red kite. "),  # said twice
        ("Dora had never seen a red kite before. ", "Dora had never seen a red kite before. " * 2),
        ('"it is yours."', '"it is mine."'),
    ],
)
def test_a_mutilated_story_is_none(said: str, instead: str) -> None:
    stories.parse(STORY)
    assert said in STORY
    with pytest.raises(stories.NotAStory):
        stories.parse(STORY.replace(said, instead, 1))


def test_no_sentence_can_go_or_come_twice() -> None:
    sentences = re.findall(r".+?\.\"? ?", STORY)
    assert "".join(sentences) == STORY
    for place in range(len(sentences)):
        for times in (0, 2):
            text = "".join(
                sentence * (times if at == place else 1) for at, sentence in enumerate(sentences)
            )
            with pytest.raises(stories.NotAStory):
                stories.parse(text)


def test_the_error_says_where() -> None:
    with pytest.raises(stories.NotAStory, match=r"after '': got '', not 'Once there was '"):
        stories.parse("")
    with pytest.raises(
        stories.NotAStory, match=r"got 'Dora was so h.*', not 'Dora was so .* kite\. '"
    ):
        stories.parse(STORY.replace("hugged the kite", "hugged the boat"))


def test_openings_are_new_and_differ() -> None:
    openings = check.openings(100)
    assert len(set(openings)) == 100
    trained = {
        stories.opening(story.kind, story.name) for story in map(stories.generate, range(2000))
    }
    assert len(trained) > 300
    assert not trained & set(openings)


# --- The files -------------------------------------------------------------------------------


def test_the_folder_is_small_and_complete() -> None:
    sizes = {path.name: path.stat().st_size for path in check.CHECKPOINT.iterdir()}
    assert set(sizes) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) < 5_000_000


def test_the_spec_counts_the_stored_elements() -> None:
    spec = ModelSpec.from_config(check.CHECKPOINT)
    shapes, dtypes = {}, set()
    with safe_open(check.CHECKPOINT / "model.safetensors", "pt") as stored:
        for name in stored.keys():  # noqa: SIM118 - it is no mapping
            part = stored.get_slice(name)
            shapes[name] = torch.Size(part.get_shape()).numel()
            dtypes.add(part.get_dtype())
    assert dtypes == {"BF16"}
    assert sum(shapes.values()) == spec.params_total
    assert "lm_head.weight" not in shapes  # tied


def test_the_config_is_that_of_the_script() -> None:
    stored = json.loads((check.CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    assert stored == train.CONFIG
    tokenizer = check.Tokenizer.from_file(str(check.CHECKPOINT / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == stored["vocab_size"]
    assert tokenizer.token_to_id(check.BOS) == stored["bos_token_id"]
    assert tokenizer.token_to_id(check.EOS) == stored["eos_token_id"]


@given(text=st.text())
def test_any_text_comes_back(text: str) -> None:
    tokenizer = check.Tokenizer.from_file(str(check.CHECKPOINT / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_stories_come_back_and_fit(loaded) -> None:
    _, tokenizer = loaded
    longest = 0
    for seed in range(200):
        text = stories.generate(seed).text
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=False) == check.BOS + text
        longest = max(longest, len(ids) + 1)
    assert longest < check.MAX_TOKENS


def test_transformers_reads_the_folder(loaded, told) -> None:
    _, tokenizer = loaded
    peer_tokenizer = transformers.AutoTokenizer.from_pretrained(check.CHECKPOINT)
    assert peer_tokenizer(STORY)["input_ids"] == tokenizer.encode(STORY).ids
    assert peer_tokenizer.decode(told[0].ids, skip_special_tokens=True) == tokenizer.decode(
        told[0].ids
    )
    peer = transformers.AutoModelForCausalLM.from_pretrained(check.CHECKPOINT, dtype=torch.float32)
    prompt = torch.tensor([told[0].ids[: told[0].prompt_tokens]])
    with torch.no_grad():
        tokens = peer.generate(prompt, do_sample=False, max_length=check.MAX_TOKENS)
    assert tokens[0].tolist() == told[0].ids  # it stops at its end mark


# --- What it tells ---------------------------------------------------------------------------


def test_greedy_stories_keep_to_the_grammar(loaded, told) -> None:
    _, tokenizer = loaded
    good = sum(check.is_story(tokenizer, story.ids) for story in told)
    assert len(told) == 100
    assert good >= 90
    assert f"{good} of 100 greedy stories" in README


def test_a_cut_or_changed_story_is_none(loaded, told) -> None:
    _, tokenizer = loaded
    ids = next(story.ids for story in told if check.is_story(tokenizer, story.ids))
    assert not check.is_story(tokenizer, ids[:-1])
    assert not check.is_story(tokenizer, ids[:-2] + ids[-1:])
    assert not check.is_story(tokenizer, [*ids, ids[-1]])
    assert not check.is_story(tokenizer, ids[:40] + ids[41:])


def test_choices_are_clear_and_as_reported(told) -> None:
    wide, _ = check.load(check.CHECKPOINT, torch.float64)
    gap = check.smallest_gap(wide, told)
    assert gap > 1e-6  # the tie guard: float32 chose what float64 chooses
    assert f"smallest gap: {gap:.4f}" in README


def test_loss_is_near_the_grammar_and_as_reported(loaded) -> None:
    model, tokenizer = loaded
    loss, floor = check.loss_and_floor(model, tokenizer, 50)
    assert floor < loss < 1.2 * floor
