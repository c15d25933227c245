"""The documents agree with the code: links, Python blocks, commands, files, messages, metrics and options."""

import dataclasses
import functools
import importlib
import inspect
import json
import re
import subprocess
import sys

import pytest

from sglang_reshard import SenderOptions, UpdateOptions, WeightSender, errors
from sglang_reshard.engine.context import Phase
from sglang_reshard.patches import metrics
from sglang_reshard.patches.metrics import METRICS
from sglang_reshard.protocol.weights_info import WeightsInfo
from sglang_reshard.route_table import ROUTES
from support.documents import (
    DOCUMENTS,
    EXAMPLES,
    ROOT,
    anchors,
    commands,
    links,
    names_of_the_code,
    strings_of_the_code,
    table,
    text,
)

OBSERVABILITY, OPTIONS, TROUBLESHOOTING = "docs/observability.md", "docs/usage/options.md", "docs/troubleshooting.md"
FOLDERS = "test|benchmark|docs|examples|patches|python|tools|verl_integration"
TARGETS = sorted({m for d in DOCUMENTS for c in commands(d) for m in re.findall(r"\bmake ([a-z][\w-]*)", c)})
# The changelog names what has gone, too.
TODAY = [document for document in DOCUMENTS if document != "CHANGELOG.md"]
MODULES = sorted({m for d in TODAY for c in commands(d) for m in re.findall(r"python -m ([\w.]+)", c)})


def coded(cell):
    """The parts of a cell that are set as code."""
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    for link in links(document):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        there = (ROOT / document).parent / path if path else ROOT / document
        assert there.exists(), link
        if anchor:
            assert anchor in anchors(str(there.resolve().relative_to(ROOT))), link


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d != "CHANGELOG.md"])
def test_links_are_labelled_by_titles_and_tables_have_heads(document):
    assert re.findall(r"\[`?[\w/.-]+\.md(?:#[\w-]+)?`?\]\(", text(document)) == []
    heads = re.findall(r"^(\|.*\|)\n\|[-: |]+\|$", text(document), re.MULTILINE)
    assert [head for head in heads if re.search(r"\|\s*\|", head)] == []


def test_each_section_of_promises_has_tests_and_these_exist():
    rows = table("docs/testing.md", "## Promises")
    sections = set(re.findall(r"^##+ (.*)$", text("docs/reliability.md"), re.M))
    with_tables_of_their_own = {"Rules of GPUs", "Rules of GPUs, second reading", "Snapshot folders", "Measured"}
    assert {section for section, *_ in rows if section} == sections - with_tables_of_their_own
    for named in (name for *_, tests in rows for name in coded(tests)):
        path, _, function = named.partition("::")
        assert re.search(rf"^(async )?def {function}\(", text(path), re.M), named


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_the_target(target):
    found = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("module", MODULES)
def test_the_module_is_there(module):
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document):
    for name in re.findall(rf"`((?:{FOLDERS})/[\w/.-]+)`", text(document)):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_modules_that_are_named_exist(document):
    """Also those that a document names within the package, such as `routes/strategy.py`; NAME stands for any."""
    for name in re.findall(r"`((?!sglang/)[\w.-]+/[\w/.-]+\.py)\b", text(document)):
        found = (ROOT / name, ROOT / "python" / "sglang_reshard" / name)
        assert "NAME" in name or any(path.exists() for path in found), name


@pytest.mark.parametrize(("document", "lines"), [("README.md", 130), ("RESHARDING_GUIDE.md", 300)])
def test_the_first_documents_stay_short(document, lines):
    assert len(text(document).splitlines()) < lines


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_document_can_be_reached_from_the_readme(document):
    assert document in reachable()


@functools.cache
def reachable():
    found, new = set(), {"README.md"}
    while new:
        found |= new
        linked = {(ROOT / d).parent / link.partition("#")[0] for d in new for link in links(d) if "://" not in link}
        inside = {str(path.resolve().relative_to(ROOT)) for path in linked if path.suffix == ".md"}
        new = inside - found
    return found


def test_every_page_of_results_has_a_generated_table():
    pages = {path for path in (ROOT / "docs" / "results").glob("*.md") if path.name != "README.md"}
    assert {path for path in pages if f"<!-- {path.stem}: begin -->" in path.read_text()} == pages


@pytest.mark.parametrize("document", ["README.md", "RESHARDING_GUIDE.md", "docs/features.md"])
def test_the_number_of_architectures_is_that_of_the_results(document):
    passed = sum(map(int, re.findall(r"(\d+) pass at tp 1, 2 and 4", text("docs/results/architectures.md"))))
    assert re.search(rf"\b{passed}\s(are|of)\b", text(document))


def recorded(name):
    """The rows of a file of results, its header first."""
    return json.loads((ROOT / "benchmark" / "results" / f"{name}.json").read_text())


STATUS = [
    "README.md",
    "RESHARDING_GUIDE.md",
    *(f"docs/{d}.md" for d in ["alternatives", "which-api", "compatibility", "faq"]),
]


@pytest.mark.parametrize("document", [*STATUS, "docs/usage/gpus.md"])
def test_the_gpus_that_have_run_this_are_those_of_the_results(document):
    gpus = {gpu.split()[1] for name in ("gpu", "gpu-h100", "one-gpu") for gpu in recorded(name)[0]["host"]["gpus"]}
    assert gpus == {"H200", "H100"}
    words = " ".join(text(document).split())
    assert re.search("[Aa]n H200 and an H100", words)
    assert not re.search(r"\bon one GPU, and|One GPU has run|that GPUs have not run", words)


def test_the_engine_on_a_gpu_is_as_fast_as_the_results_say():
    header, *rows = recorded("one-gpu")
    (row,) = (r for r in rows if (r["case"], r["step"]) == ("dense", "warm update"))
    said = [found for d in DOCUMENTS for found in re.findall(r"3\.4 GB\s+in\s(\d+) ms", text(d))]
    assert "H100" in header["host"]["gpus"][0]
    assert f"{row['received_bytes'] / 1e9:.1f}" == "3.4"
    assert set(said) == {f"{row['seconds'] * 1000:.0f}"}


def test_the_table_of_weights_info_has_all_fields():
    rows = table("docs/usage/server.md", "## Live weights")
    assert sorted(name for row in rows for name in coded(row[0])) == sorted(WeightsInfo.__struct_fields__)


def test_the_rows_of_a_plan_are_those_that_it_prints():
    for name in (part for row in table("docs/usage/planning.md", "## Output") for part in row[0].split(", messages ")):
        name = name.removesuffix(" (a column)").removeprefix("messages ")
        assert any(name in words for words in strings_of_the_code()), name


def test_the_figures_of_deepseek_v3_are_those_of_its_plan():
    plan = json.loads((ROOT / "benchmark/results/plan-deepseek-v3.json").read_text())
    section = " ".join(text("docs/usage/planning.md").partition("## DeepSeek-V3")[2].split())
    engine, trainer, gather = plan["engine_ranks"], plan["trainer_ranks"], plan["gather"]
    importing, building, choosing, cutting = plan["seconds_by_step"].values()
    for figure in (
        f"{plan['tensors']:,} tensors, {plan['model_bytes'] / 1e9:.1f} GB in {plan['layout_pieces'] / 1e6:.1f} million",
        f"`{plan['transport']}`, in {plan['messages']:,} messages",
        f"predicted transfer time of {plan['predicted_seconds']:.2f} s",
        f"receives | {max(r['received_bytes'] for r in engine) / 1e9:.1f} GB, exactly the elements it lacks",
        f"holds | {max(r['shard_bytes'] for r in trainer) / 1e9:.1f} GB",
        f"sends | {max(r['sent_bytes'] for r in trainer) / 1e9:.1f} GB",
        f"nothing | {gather['trainer_received_bytes'] / 1e9:.1f} GB",
        f"engine rank | {max(r['extra_bytes'] for r in engine) / 1e6:.0f} MB | {gather['extra_bytes'] / 1e9:.2f} GB",
        f"trainer rank | {max(r['extra_bytes'] for r in trainer) / 1e6:.0f} MB",
        f"takes {importing + building + choosing + cutting:.0f} s on 2 quiet cores: {importing:.0f} s to import SGLang",
        f"{building:.0f} s to build",
        f"{choosing:.0f} s to choose and {cutting:.0f} s to cut",
    ):
        assert figure in section, figure


def glossary():
    """The terms of the glossary, each by itself."""
    return [term for row in table("docs/glossary.md", "# Glossary") for term in row[0].split(", ")]


def test_classes_and_functions_of_the_glossary_exist():
    named = {name for row in table("docs/glossary.md", "# Glossary") for name in re.findall(r"`(\w+)`", row[1])}
    assert named <= set(names_of_the_code())


@pytest.mark.parametrize("term", glossary())
def test_a_term_of_the_glossary_is_used(term):
    """In another document, or in a docstring or message of the code; in its plural, too."""
    pages = [text(d) for d in DOCUMENTS if d not in ("docs/glossary.md", "CHANGELOG.md")]
    words = re.compile(rf"\b{re.escape(term)}(s|es|d|ed)?\b".replace(r"\ ", r"\s+"), re.IGNORECASE)
    assert any(words.search(page) for page in (*pages, *strings_of_the_code()))


@pytest.mark.parametrize("document", ["RESHARDING_GUIDE.md", "docs/architecture.md", "docs/reliability.md"])
def test_a_term_that_a_document_introduces_is_in_the_glossary(document):
    """Such a term is set in italics, or is one of the guide's words in bold."""
    italic = re.findall(r"(?<![*\w])\*([a-z][a-z ]+)\*(?!\*)", re.sub(r"`[^`]*`", "", text(document)))
    bold = re.findall(r"^\| \*\*(\w+)\*\* ", text(document), re.MULTILINE)
    bold += re.findall(r"\*\*((?:trainer|engine|global) rank)\*\*", text(document))
    introduced = {word.lower() for word in (*italic, *bold)}
    assert {word.removesuffix("s") for word in introduced - PLAIN} <= {term.removesuffix("s") for term in glossary()}


PLAIN = {"all ranks are ready"}  # a moment in a table, not a term


def test_the_phases_of_the_glossary_are_the_codes_own():
    (row,) = (row for row in table("docs/glossary.md", "# Glossary") if row[0] == "phase")
    assert re.findall(r"\w+", row[2].partition(";")[0]) == [phase.value for phase in Phase]


@pytest.mark.parametrize(
    ("document", "heading"),
    [("docs/architecture.md", "## Routes"), ("RESHARDING_GUIDE.md", "## One update")],
)
def test_the_strategies_of_a_table_can_be_requested_or_are_said_to_be_autos_alone(document, heading):
    listed = {coded(row[0])[0]: row for row in table(document, heading)}
    assert listed.keys() >= ROUTES.keys()
    for name in listed.keys() - ROUTES.keys():
        assert "only `auto` chooses it" in " ".join(listed[name]), name


def messages():
    """The fragments in the first column of the table of messages."""
    return [
        fragment for row in table(TROUBLESHOOTING, "## Error messages") for fragment in re.findall(r"`([^`]+)`", row[0])
    ]


@pytest.mark.parametrize("fragment", messages())
def test_a_message_of_the_table_is_the_codes_own(fragment):
    assert any(fragment in words for words in strings_of_the_code())


def test_the_table_of_metrics_is_the_metrics():
    told = [[cell.strip("`") for cell in row] for row in table(OBSERVABILITY, "## Metrics of a server")]
    assert told == [[m.name, m.kind.replace("version", "gauge"), ", ".join(m.labels), m.help] for m in METRICS]


def test_the_table_of_phases_is_the_label_of_failures():
    told = [phase for row in table(OBSERVABILITY, "### Phases of failures") for phase in re.findall(r"`(\w+)`", row[0])]
    assert sorted(told) == sorted(metrics.FAILURE_PHASES)


def test_the_table_of_errors_has_all_of_them():
    there = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and kind.__bases__ != (RuntimeError,)
    }
    assert {row[0].strip("`") for row in table(OPTIONS, "## Errors")} == there


@pytest.mark.parametrize(
    ("heading", "function", "options"),
    [
        ("## `WeightSender(...)`", WeightSender.__init__, SenderOptions),
        ("## `WeightSender.update(...)`", WeightSender.update, UpdateOptions),
    ],
)
def test_the_tables_of_options_have_all_of_them_and_their_defaults(heading, function, options):
    told = {row[0].strip("`"): row[1].strip("`") for row in table(OPTIONS, heading)}
    parameters = inspect.signature(function).parameters.values()
    there = {p.name: p.default for p in parameters if p.name not in ("self", "options", "given")}
    there |= {field.name: field.default for field in dataclasses.fields(options)}
    assert told.keys() == there.keys()
    for name, default in there.items():
        if default not in (None, inspect.Parameter.empty):  # what None stands for is told in words
            assert told[name] == str(default).removesuffix(".0")


def test_the_default_of_interface_is_said_of_each_sender():
    """It differs from sender to sender, so that the table alone would be wrong."""
    (over,) = re.findall(r"`WeightSender\.over[^.]*?`[^.;]*; its default of `interface`\s+is ([\d.]+\d)", text(OPTIONS))
    assert over == inspect.signature(WeightSender.over).parameters["interface"].default
    assert inspect.signature(WeightSender).parameters["interface"].default is None


def test_the_order_of_engine_ranks_is_the_codes_own():
    formula = re.search(r"rank = (.*)", (ROOT / "patches" / "sglang_versions.py").read_text())[1]
    assert formula in text("docs/compatibility.md")
    short = {
        "data parallel rank": "dp",
        "pipeline stages": "stages",
        "parallel size": "",
        "tensor": "tp",
        "parallel rank": "rank",
    }
    for long, word in short.items():
        formula = formula.replace(long, word)
    for document in ("docs/glossary.md", "docs/architecture.md"):
        assert f"`{' '.join(formula.split())}`" in text(document)


def test_the_table_of_verls_settings_has_all_of_them_and_their_defaults(monkeypatch):
    told = {row[0].strip("`"): row[1].strip("`") for row in table("docs/verl.md", "## Settings")}
    # Without its package, which imports verl.
    spec = importlib.util.spec_from_file_location("verl_settings", ROOT / "verl_integration" / "settings.py")
    settings = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, settings)  # where dataclasses look for it
    spec.loader.exec_module(settings)
    there = {name: default for name, _, default in settings._table()}
    assert told.keys() == there.keys()
    others = there.keys() - {"ignore", "frozen", "interface"}
    assert {n: told[n] for n in others} == {n: str(there[n]).removesuffix(".0") for n in others}


@pytest.mark.parametrize("finding", [name for row in table(TROUBLESHOOTING, "## The doctor") for name in coded(row[0])])
def test_a_finding_of_the_doctor_is_the_codes_own(finding):
    assert any(finding in words for words in strings_of_the_code())


# Commands as the documents give them, as patterns, and what runs them, or the code behind them on something smaller.
RUN_BY = {
    r"make (setup|lint|test|setup-newest|setup-nixl)": ".ci/run",
    r"make test PYTEST_ARGS=test/unit": ".ci/run",
    r"make demo( .*)?|(\.venv/bin/)?sglang-reshard selftest( .*)?": "test/engine/test_selftest_run.py",
    r"sglang-reshard selftest --verl( .*)?": "test/verl/test_selftest_verl.py",
    r"torchrun .* -m sglang_reshard\.selftest": "test/hosts/test_selftest_hosts.py",
    r"sglang-reshard (--version|--install-completion|COMMAND --help)": "test/unit/test_command_line.py",
    r"python -m sglang_reshard": "test/unit/test_command_line.py",
    r"sglang-reshard report( .*)?": "test/unit/test_report.py",
    r"make test-verl|\.venv/bin/python -m pytest test/verl/.*": "test/verl/test_megatron.py",
    r"make setup-diffusion": "test/other_engines/test_diffusion.py",
    r"make setup-vllm": "test/other_engines/test_vllm_engine.py",
    r"make setup-torchrl": "test/trainers/test_torchrl.py",
    r"make setup-bridge|.*pytest test/verl/test_megatron_bridge\.py": "test/verl/test_megatron_bridge.py",
    r"make test-trainers": "test/trainers/test_fsdp1.py",
    r".* -m pytest test/trainers/test_megatron_live\.py": "test/trainers/test_megatron_live.py",
    r"\.venv/bin/python examples/two_collectors\.py": "test/trainers/test_module_receiver.py",
    r"PYTHONPATH=\S+ \.venv/bin/python examples/torchrl_collector\.py": "test/trainers/test_torchrl.py",
    r"\.venv/bin/python examples/tiny_on_cpu\.py FOLDER .*": "test/verl/test_ppo.py",
    r"make setup-deepspeed": ".ci/run",
    r"(kubectl|sbatch) .*": "test/unit/test_pages_recipes.py",
    r"make test-hosts": "test/hosts/test_networks.py",
    r"make test-serving": "test/engine/live/test_many_ranks_server.py",
    r"make bench-deltas": "test/unit/test_delta_updates.py",
    r"make (test|bench)-async": "test/unit/test_update_async.py",
    r"torchrun --nproc-per-node N -m pytest test/multi_gpu": "test/engine/test_multi_gpu_rehearsal.py",
    r"make test-gpu-rules": "test/gpu_rules/test_the_harness.py",
    r"make test-all": "test/engine/architectures/test_architectures.py",
    r"make test-faults": "test/faults/test_storm.py",
    r"make test-newest": "test/engine/live/test_newest.py",
    r"make test-matrix": "test/matrix/test_releases.py",
    r"make fuzz|python -m benchmark\.fuzz .*": "test/fuzz/test_frames.py",
    r"make fuzz-deltas|python -m benchmark\.fuzz_deltas .*": "test/fuzz/test_hostile_deltas.py",
    r"make soak|python -m benchmark\.soak .*": "test/engine/live/test_soak_short.py",
    r"make (test-gpu|gpu-bundle)( .*)?|python -m benchmark\.gpu(\.record)?( .*)?": "test/unit/test_gpu_battery.py",
    r"python -m benchmark\.mesh_to_mesh": "test/trainers/test_mesh_to_mesh.py",
    r"python -m benchmark\.parameter_stream": "test/unit/test_parameter_stream.py",
    r"python -m benchmark\.block_fp8": "test/unit/test_block_fp8_updates.py",
    r"make bench.*|python -m benchmark(\.\w+)?( .*)?": "test/unit/test_benchmark.py",
    r"python -m pytest test/unit/test_derived_patterns\.py": "test/unit/test_derived_patterns.py",
    r"python -m tools\.prose( .*)?": "test/unit/test_prose.py",
    r"make docs(-serve)?": "test/unit/test_site.py",
    r"python -m tools\.website\.pages": "test/unit/test_reference_pages.py",
    r"make lock|pip (install|uninstall) .*|make (wheel|fork|test-fork)( .*)?": "test/engine/release/test_fork.py",
    r"sglang-reshard plan( .*)?": "test/engine/forecast/test_presets.py",
    r"sglang-reshard pull( .*)?|curl .*/pull_weights.*": "test/engine/live/test_pull.py",
    r"sglang-reshard follow( .*)?": "test/engine/live/test_server.py",
    r"sglang-reshard doctor( .*)?": "test/engine/live/test_metrics_live.py",
    r"sglang-reshard doctor --side \w+|python -m sglang_reshard\.cli\.doctor": "test/installed/test_bare_venv.py",
    r"python -m sglang\.launch_server|curl .*/weights_info": "test/engine/live/test_server.py",
    r".*\.venv/bin/(python|torchrun) .*(examples/http/|update\.py ).*": "test/engine/live/test_http_example.py",
}
# Of the reader's own containers and machines.
NOT_OURS = r"docker run --pid=host"


@pytest.mark.parametrize("command", sorted({c for d in (*DOCUMENTS, *EXAMPLES) for c in commands(d)}))
def test_a_command_is_run_by_a_test(command):
    assert not re.match(r"(\w+=\S+ )*(python|torchrun) .*examples/", command), "only .venv/bin has this package"
    if re.fullmatch(NOT_OURS, command):
        return
    tests = [test for pattern, test in RUN_BY.items() if re.fullmatch(pattern, command)]
    assert tests, "say in RUN_BY which test runs it"
    assert all((ROOT / test).exists() for test in tests)


def test_the_code_to_read_is_as_long_as_the_guide_says():
    """Line counts are rounded to tens."""
    guide = text("RESHARDING_GUIDE.md")
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", guide, re.MULTILINE)
    counted = {name: len((ROOT / "python/sglang_reshard" / name).read_text().splitlines()) for name, _ in rows}
    assert {name: int(said) for name, said in rows} == {name: round(n, -1) for name, n in counted.items()}
    in_all = re.search(r"These (\d+) files, about ([\d,]+) lines", guide)
    assert (len(rows), round(sum(counted.values()), -2)) == (int(in_all[1]), int(in_all[2].replace(",", "")))
