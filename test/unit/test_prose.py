"""The prose checker finds what it should, where it is, and nothing in code, quotations of runs or plain sentences."""

import pytest

from tools import prose
from tools.prose import RULES, findings, markdown, python

RULE = pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])


def in_document(text):
    return list(findings(markdown(text), "x.md"))


def in_module(text):
    return list(findings(python(text), "x.py"))


def as_sentence(rule, text):
    return f"# {text}" if rule.titles else text


@RULE
def test_a_rule_finds_its_example_and_accepts_the_substitute(rule):
    assert rule in {f.rule for f in in_document(as_sentence(rule, rule.example))}
    assert in_document(as_sentence(rule, rule.plain)) == []


@RULE
def test_a_rule_finds_its_example_broken_over_two_lines_and_in_the_middle_of_a_document(rule):
    if rule.titles:
        pytest.skip("a heading is one line")
    broken = rule.example.replace(" ", "\n", 1)
    found = [f for f in in_document(f"# Title\n\nA sentence.\n\n- {broken}\n") if f.rule is rule]
    assert [f.line in (5, 6) for f in found] == [True]


@RULE
def test_a_rule_finds_its_example_in_docstrings_errors_and_log_lines(rule):
    if rule.titles or "`" in rule.example or ".md" in rule.example:
        pytest.skip("only documents have these")
    example = rule.example + " Three more words."
    for source in (
        f'def f():\n    """Does something.\n\n    {example}\n    """\n',
        f'def f(n):\n    raise ValueError(f"{{n}} is wrong. "\n        "{example}")\n',
        f'\n\nlog.info("%d ranks are ready. {example}", n)\n',
    ):
        assert rule in {f.rule for f in in_module(source)}, source


def test_code_generated_tables_comments_and_link_targets_are_not_prose():
    assert not in_document("```python\n# what it lacks is beside it\n```\n")
    assert not in_document("Run `python beside.py anew` twice.\n")
    assert not in_document("<!-- cases: begin -->\n| case | is made anew |\n<!-- cases: end -->\n")
    assert not in_document("<!-- beside -->\nSee [the page](beside.md#anew).\n")
    assert in_document("<!-- cases: begin -->\n<!-- cases: end -->\n\nIt is made anew.\n")


def test_a_finding_says_where_and_what_to_write():
    (found,) = in_document("# Title\n\nOne.\nIt runs beside SGLang.\n")
    assert str(found).startswith("x.md:4: beside: 'beside'. Write: next to")
    (found,) = in_module('"""Module of one thing.\n\nIt runs beside SGLang.\n"""\n')
    assert str(found).startswith("x.py:3: beside")


@pytest.mark.parametrize("fault", ["README.md", "patches/engine.py"])
def test_the_command_prints_findings_and_exits_with_one_until_they_are_mended(fault, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    for name in (*prose.MARKDOWN, *prose.PYTHON, "patches/engine.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _ = path.write_text('"""Does one thing."""\n') if path.suffix else path.mkdir(exist_ok=True)
    monkeypatch.setattr("sys.argv", ["prose"])
    assert prose.main() == 0
    (tmp_path / fault).write_text((tmp_path / fault).read_text().replace(".", ", made anew by two ranks."))
    assert prose.main() == 1
    assert capsys.readouterr().out.startswith(f"{fault}:1: anew")
