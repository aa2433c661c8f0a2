"""The appendix says what the package and the pages say: names, verdicts, glued numbers."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import servelab

ROOT = Path(__file__).resolve().parents[1]
SYMBOLS = (ROOT / "appendix/symbols.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "appendix/glossary.md").read_text(encoding="utf-8")
API = (ROOT / "appendix/api.md").read_text(encoding="utf-8")
CLAIMS = (ROOT / "chapters/91_claims.md").read_text(encoding="utf-8")


def public_modules() -> set[str]:
    found = {m.name for m in pkgutil.walk_packages(servelab.__path__, "servelab.")}
    # Reached through others.
    inside = ("servelab.cli", "servelab.models.reader", "servelab.logs.", "servelab.check.chapter")
    return {n for n in found if "._" not in n and not n.startswith(inside)}


def test_the_api_page_shows_every_public_module():
    assert set(re.findall(r"automodule:: (\S+)", API)) == public_modules()


def symbol_rows() -> list[list[str]]:
    table = SYMBOLS.split("## Symbols")[1].split("## Units")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [row for row in rows if len(row) == 4 and row[0].startswith("$")]


def test_no_symbol_has_two_meanings():
    symbols = [s for row in symbol_rows() for s in re.sub(r"[$ ]", "", row[0]).split(",")]
    assert len(symbols) > 30
    assert len(set(symbols)) == len(symbols)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+\.\w+)`", SYMBOLS))))
def test_the_names_beside_the_symbols_exist(name: str):
    owner, attribute = name.split(".")
    rooms = [importlib.import_module(f"servelab.{r}") for r in ("hardware", "models", "roofline")]
    owners = [getattr(room, owner) for room in rooms if hasattr(room, owner)]
    found = owners[0] if owners else importlib.import_module(f"servelab.{owner}")
    fields = getattr(found, "__dataclass_fields__", {})
    assert attribute in fields or hasattr(found, attribute)


def glossary_terms() -> list[str]:
    return re.findall(r"^\w.*", GLOSSARY.split("```{glossary}")[1], re.MULTILINE)


def test_glossary_terms_are_unique_and_in_order():
    terms = glossary_terms()
    assert len(terms) >= 45
    assert [t.lower() for t in terms] == sorted({t.lower() for t in terms})


def test_each_glossary_entry_names_its_chapter():
    entries = re.split(r"\n\n", GLOSSARY.split("```{glossary}\n")[1].rsplit("```", 1)[0].strip())
    assert len(entries) == len(glossary_terms())
    for entry in entries:
        assert re.search(r"Chapter \d+", entry.splitlines()[-1]), entry


def test_the_claims_table_repeats_the_verdicts_of_the_sections():
    row = r"\| \{ref\}`(\d+)\. .*? <claim-(\d+)>` \| (.*?) \|"
    section = r"\(claim-(\d+)\)=\n### (\d+)\. .*?\n\n\*\*Verdict: (holds if|holds|wrong)\b"
    in_table, in_sections = re.findall(row, CLAIMS), re.findall(section, CLAIMS)
    assert in_table == in_sections
    assert [int(number) for number, _, _ in in_table] == list(range(1, CLAIMS.count("\n### ") + 1))


def test_every_claim_is_decided_by_an_assertion():
    for text in CLAIMS.split("\n### ")[1:]:
        cells = re.findall(r"```\{code-cell\} ipython3\n(.*?)```", text, re.DOTALL)
        assert any(re.search(r"^assert ", cell, re.MULTILINE) for cell in cells), text.splitlines()[
            0
        ]


def test_every_number_glued_on_the_claims_page_is_shown_there():
    results = CLAIMS.split("results = {")[1].split("\n}")[0]
    glued = set(re.findall(r'"([\w-]+)": (?:f"|units\.)', results))
    assert glued == set(re.findall(r"`c91-([\w-]+)`", CLAIMS))


#: What must be examined, by words of its title: sentences that introductions to serving repeat.
SUBJECTS = {
    "attention without a mask": "softmax(QKᵀ/√d)V",
    "the token's own key": "attends to tokens 1 to t−1",
    "no cache: quadratic": "O((N+M)²)",
    "cache: constant": "a step costs O(1)",
    "floating point dearer than integer": "more than an integer one",
    "peak rate: dense or sparse": "data sheet is the chip's peak",
    "2P per token": "2P FLOP per token",
    "least time from FLOP alone": "FLOP divided by FLOP/s",
    "bytes read, or moved": "FLOP per byte read",
    "intensity and batch": "proportional to the batch",
    "a single user": "1 FLOP per byte",
    "batch 64": "close to the compute roof",
    "bound or performance": "roofline gives the performance",
    "two phases": "Prefill is compute-bound",
    "a large batch": "makes decode compute-bound",
    "the bottleneck": "bottleneck of",
    "the exact formula": "formula",
    "width of a head": "width of a head|head_dim is",
    "128K on one device": "fills an 80 GB GPU",
    "contiguous reservation": "reserved",
    "fragmentation": "no fragmentation",
    "4 per cent": "4 %",
    "when a block is copied": "is copied when",
    "speculative decoding": "Speculative decoding",
    "samples, beams, trees": "share its blocks",
    "paging and batching": "continuous batching",
    "shared prefixes": "[Pp]refix(es)?.* blocks",
    "training systems": "DeepSpeed",
    "live code": "in your browser",
}


def test_every_claim_that_was_promised_is_examined():
    titles = re.findall(r"^### \d+\. (.*)$", CLAIMS, re.MULTILINE)
    assert len(titles) == len(SUBJECTS) == 29
    for title, (subject, words) in zip(titles, SUBJECTS.items(), strict=True):
        assert any(each in title or re.search(each, title) for each in words.split("|")), (
            subject,
            title,
        )
