"""Checks that documents, docstrings, messages and log lines read like English that a maintainer of torch would write.

python -m tools.prose            # file:line, what was found, what to write; exits 1 if there is any
python -m tools.prose docs/verl.md patches    # only these files and folders

The rules are the table below. Markdown is checked outside of code blocks, inline code and generated tables, whose text
is in benchmark/templates. Of Python, every string of three words or more is checked: docstrings, errors, log lines.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARKDOWN = ("README.md", "RESHARDING_GUIDE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "examples", "benchmark")
PYTHON = ("python/sglang_reshard", "patches", "verl_integration")


@dataclass(frozen=True)
class Rule:
    """A pattern that is not written, and the substitute.

    found: a regular expression over a text without line breaks. ^ is the begin of a sentence, heading or cell.
    example: a text in which the rule finds something.
    plain: the same text as it should be.
    titles: whether it applies to headings only, or to all but headings; None: to both. exact: case matters.
    """

    name: str
    found: str
    instead: str
    example: str
    plain: str
    titles: bool | None = None
    exact: bool = False


CODED = r"`(?:ipc|p2p|nixl|broadcast)[^`]*`"
RULES = (
    Rule(
        "a noun clause as subject",
        # A question ends with a question mark, and "what to do" is an infinitive.
        r"^(?:What|Whatever|How|Whether|Whose|Who) (?!to\b)(?![^.!]*\?)[^.!]*",
        "a sentence whose subject acts: the tensors, the engine rank, this page",
        "What it lacks is sent by others.",
        "Other ranks send the missing boxes.",
        titles=False,
        exact=True,
    ),
    Rule(
        "a clause as title",
        r"^(?:What|Where|When|How|Whether|Who|Why) (?!to\b)[^?\n]*$",
        "a noun or an imperative: Failures, Source files, Limits",
        "What it lacks",
        "Limits",
        titles=True,
    ),
    Rule(
        "'what' as noun",
        r"\b(?:of|than|from|with|by|into|in|on|for|about|beyond|over|and|but|to|nor|or|as|is|are|was|after|before|"
        r"reads?|writes?|sends?|gets?|takes?|keeps?|makes?|holds?) what (?!to\b|if\b)",
        "the noun: tensors, bytes, options, ranks",
        "It receives exactly a copy of what it lacks.",
        "It receives exactly the missing boxes.",
    ),
    Rule(
        "of which, in which, by which",
        # torch's and NCCL's documents write "in which case" and "the order in which".
        r"(?<!\border )(?<!\bway )\b(?:of|in|by) which\b(?! case\b)",
        "two sentences, or 'whose', 'where', 'that ... in'",
        "a buffer, of which each rank has a part",
        "a buffer; each rank has a part",
    ),
    Rule(
        "beside",
        r"\bbeside\b",
        "next to, together with, compared with",
        "It runs beside SGLang.",
        "It runs with SGLang.",
    ),
    Rule("anew", r"\banew\b", "again; re-plans, reconnects", "The plan is made anew.", "The rank plans again."),
    Rule(
        "by a transport",
        rf"\bby (?:{CODED}|transport=|(?-i:ipc|p2p|nixl)\b)",
        'over `p2p`, with transport="p2p"',
        "sent by `p2p`",
        "sent over `p2p`",
    ),
    Rule(
        "of its own",
        # "of its own tensors" is a plain possessive: a noun follows.
        r"\b(?:of|on) (?:its|their|one's|your|his|our) own\b"
        r"(?! (?!(?:and|or|but|that|which|when|for|in|to|with|as|at|is|are|has|have|from|on|by|if)\b)[\w`])",
        "separate, dedicated, private; for 'on its own': alone",
        "in a thread of its own.",
        "in a separate thread.",
    ),
    Rule(
        "whoever, whatever, whichever",
        r"\b(?:whoever|whatever|whichever|whomever|wherever)\b",
        "a named actor: the caller, any rank",
        "whoever calls it",
        "the caller",
    ),
    Rule(
        "meanwhile, final then",
        r"\bmeanwhile\b|(?<=\w) then\.(?=\s|$)",
        "while ...; leave out 'then' at the end",
        "The old ones serve meanwhile.",
        "The old weights serve until the update commits.",
    ),
    Rule(
        "an old turn of phrase",
        r"\bas (?:ever|always)\b|\bin vain\b|\bhad better\b|\bis obeyed\b|\bin silence\b|\ball the while\b|"
        r"\b(?:therein|thereof|thereby|hereby|herein|wherein|whereby|whereof|hitherto|thenceforth|likewise|lest)\b|"
        r"\bas it were\b|\bfor want of\b|\bunbeknown",
        "still, fails, should, takes precedence, silently, throughout",
        "Hybrid replicas are synced as ever.",
        "Hybrid replicas are still synced.",
    ),
    Rule(
        "wants, cure",
        r"\bwants?(?= (?:a|an|the|its|no|to be|of|it|them|two|one|more|all|every|other|another)\b|[.,;])|"
        # `cure` is a field of errors and of the doctor's JSON: renaming it would break the programs that read it. It is
        # an identifier in code (`cure`, "cure", error.cure, cure=) and in the description of the field (two blanks).
        r"(?<![\"`.])\bcure\b(?![\"`=]|  )|\bcure[sd]\b",
        "needs, requires; fix",
        "The version that torchrl wants.",
        "The version that torchrl requires.",
    ),
    Rule(
        "a test log without a verb",
        r"^(?:Run|Not run|Not tried|Tried|Seen|Measured)(?:, (?:live|by hand|once))?:",
        "a 'Tested on' table, or a sentence with a verb",
        "Run, live: Qwen3 with TP=2.",
        "Tested with a live Qwen3, TP=2.",
    ),
    Rule(
        "a page that has",
        r"\.md\)? (?:has|have|says?|counts?|knows?|tells?)\b",
        "See results/x.md for ...",
        "[results/x.md](x.md) has the seconds.",
        "See [results/x.md](x.md) for timings.",
    ),
    Rule(
        "a ... one at the end",
        r"\bis (?:a|an) \w+ one\.",
        "the verb: 'falls back to a full update'",
        "the update is a full one.",
        "the update falls back to full weights.",
    ),
    Rule("which is why", r"\bwhich is why\b|\bthis is why\b", "so, therefore", "which is why it fails", "so it fails"),
    Rule(
        "turned round",
        r"\bturn(?:s|ed|ing)? (?:\w+ ){0,3}round\b",
        "inverts, reverses",
        "its program turned round",
        "the inverse of its program",
    ),
    Rule(
        "otherwise than, no more",
        r"\botherwise than\b|\bno more\b(?! than\b| \w+s\b)|\bany more\b",
        "differently from; no longer",
        "It is updated no more.",
        "It is no longer updated.",
    ),
    Rule(
        "says of, says it in",
        r"\b(?:says?|said|tells?|told) (?:of|it in|no more)\b|\bspeaks? the same\b",
        "reports, publishes, states",
        "how far it is, it says it in a word",
        "it publishes its progress in a word",
    ),
    Rule(
        "made use of, gives up",
        r"\bmade use of\b|\bmakes? use of\b|\bhas (?:no|a) word of\b|\bis none of\b",
        "used, applied; discards",
        "it arrives whole and is then made use of",
        "it is received whole, then applied",
    ),
    Rule(
        "those that there are",
        r"\b(?:that|which|what) there (?:is|are|was|were)\b",
        "the existing ..., or leave it out",
        "all ranks that there are",
        "all ranks",
    ),
    Rule(
        "others other ones",
        r"\bothers other ones\b|\bnot the others\b|\bthe others'? ones\b",
        "name them",
        "and others other ones",
        "and ranks may pass different tensors",
    ),
)
_HEADING = re.compile(r"#+ (.*)")
_GENERATED = re.compile(r"<!-- ([\w-]+): begin -->.*?<!-- \1: end -->", re.S)
_FENCE = re.compile(r"^( *)```.*?^ *```$", re.M | re.S)
_COMMENT = re.compile(r"<!--.*?-->", re.S)
_INLINE = re.compile(r"`[^`]+`")
_TARGET = re.compile(r"(?<=\])\(([^()\s]+)\)")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.|>)\s+")
_LEAD = r"(?:\A|(?<=[.!?:] ))[*_\[(]*"


@dataclass(frozen=True)
class Unit:
    """A paragraph, list item, table cell or heading. line: of the file, from 1. text: its lines, stripped."""

    line: int
    text: str
    heading: bool = False


@dataclass(frozen=True)
class Finding:
    """A place where a rule is broken. path: relative to the repository. line: from 1."""

    path: str
    line: int
    rule: Rule
    words: str

    def __str__(self) -> str:
        words = " ".join(self.words.split())
        return f"{self.path}:{self.line}: {self.rule.name}: {words[:70]!r}. Write: {self.rule.instead}"


def markdown(text: str) -> Iterator[Unit]:
    """Yields the prose of a document. Code in a line is masked, unless a rule needs it."""
    for pattern in (_GENERATED, _FENCE, _COMMENT):
        text = pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    text = _INLINE.sub(lambda m: m.group() if re.fullmatch(CODED, m.group()) else _masked(m.group()), text)
    # The end of a target stays, so that a page that is the subject of a sentence is seen.
    text = _TARGET.sub(lambda m: "(.md)" if ".md" in m.group() else "()", text)
    paragraph: list[str] = []
    begin = 1
    for number, line in enumerate([*text.splitlines(), ""], 1):
        heading = _HEADING.match(line)
        table = line.startswith("|")
        item = _ITEM.match(line)
        if paragraph and (heading or table or item or not line.strip()):
            yield Unit(begin, "\n".join(paragraph))
            paragraph = []
        if heading:
            yield Unit(number, heading[1], heading=True)
        elif table:
            yield from (Unit(number, cell.strip()) for cell in line.split("|") if cell.strip(" -:"))
        elif line.strip():
            begin = begin if paragraph else number
            paragraph.append((line[item.end() :] if item else line).strip())


def _masked(code: str) -> str:
    return "`" + re.sub(r"[^\n]", "x", code[1:-1]) + "`"


def python(source: str) -> Iterator[Unit]:
    """Yields the strings of a module that have three words or more; a field of an f-string is an x."""
    tree = ast.parse(source)
    inner = {id(v) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for v in ast.walk(node)} - {
        id(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else "x" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            text = node.value
        else:
            continue
        if len(re.findall(r"[A-Za-z]{2,}", text)) < 3:
            continue
        line = node.lineno
        for part in re.split(r"(\n\s*\n)", text):
            if part.strip():
                lead = len(part) - len(part.lstrip("\n"))
                yield Unit(line + lead, re.sub(r" *\n *", "\n", part.strip()))
            line += part.count("\n")


def findings(units: Iterator[Unit], path: str = "") -> Iterator[Finding]:
    for unit in units:
        for rule, pattern in _PATTERNS:
            if rule.titles is None or rule.titles == unit.heading:
                for match in pattern.finditer(unit.text.replace("\n", " ")):
                    yield Finding(path, unit.line + unit.text.count("\n", 0, match.start()), rule, match.group())


def _pattern(rule: Rule) -> re.Pattern[str]:
    return re.compile(re.sub(r"^\^", lambda _: _LEAD, rule.found), 0 if rule.exact else re.I)


_PATTERNS = [(rule, _pattern(rule)) for rule in RULES]


def files(paths: list[str]) -> Iterator[Path]:
    """Yields the Markdown and Python files among files and folders, relative to the repository."""
    for path in (ROOT / name for name in paths):
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in found if file.suffix in (".md", ".py"))


def check(file: Path) -> list[Finding]:
    read = markdown if file.suffix == ".md" else python
    return list(findings(read(file.read_text()), str(file.relative_to(ROOT))))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.prose", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", help="files and folders of the repository; all that are checked by default")
    given = parser.parse_args()
    markdowns = [file for file in files(list(MARKDOWN)) if file.suffix == ".md"]
    found = [
        f for file in (files(given.paths) if given.paths else [*markdowns, *files(list(PYTHON))]) for f in check(file)
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
