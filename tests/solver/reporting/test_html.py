"""The page: one file that needs no network, says what the report says, and fits a phone."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from checkpoint_solver.cli.command import main
from graphs.graph import Graph
from graphs.synthetic.nets import residual
from solver.chain.blocks import split_into_blocks
from solver.plan_analysis.advice import advise
from solver.plan_analysis.by_block import block_rows
from solver.plan_analysis.largest_batch import Candidate, SizeSearch
from solver.plan_analysis.pareto import Curve, sweep
from solver.reporting.html import bound_text, page
from solver.reporting.report_data import Report
from solver.reporting.rows import headline
from solver.schedule import Request
from solver.schedule.solution import Solution
from solver.sizes_deadlines_progress.format import format_share, format_time
from solver.sizes_deadlines_progress.sizes import format_size
from solver.solving import solve
from tests.solver.reporting.test_report import report_of, verified
from tests.support import browser
from tests.support.paths import GPT2

N_WIDTHS = 2
"""Each picture is there for a page and for a phone."""
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Reads a page strictly: every tag is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] != "style":
            self.text += data + "\n"


@pytest.fixture(scope="module")
def planned() -> Solution:
    return solve(Graph.load(GPT2), budget="4GB", method="sqrt")


@pytest.fixture(scope="module")
def curve(planned) -> Curve:
    budgets = [3 * 10**9, 35 * 10**8, 5 * 10**9]
    return sweep(
        planned.graph,
        budgets=budgets,
        methods=["sqrt"],
        like=Request(0, time_limit_s=600),
        known=[planned],
    )


@pytest.fixture(scope="module")
def whole(planned, curve) -> str:
    """A page with every section that a page can have."""
    other = solve(planned.graph, budget="4GB", method="every_block")
    report = report_of(
        planned,
        other,
        refused=(("ilp", "364 ops are too many"),),
        notes=("A note.",),
        advice=advise(planned),
        verification=verified(),
        files=(("page", Path("out.html")),),
        curve=curve,
    )
    return page(report, command="solve --budget 4GB --report out.html g.json")


def words(text: str) -> str:
    return " ".join(Page(text).text.split())


@pytest.mark.slow
def test_it_is_one_well_formed_file_that_asks_for_nothing(whole):
    read = Page(whole)
    assert read.tags["svg"] == 2 * N_WIDTHS
    assert read.tags["script"] == read.tags["link"] == read.tags["img"] == 0
    assert "http" not in whole
    assert "@import" not in whole
    addresses = [v for _, name, v in read.attributes if name in ("href", "src", "xlink:href")]
    assert addresses
    assert all(address.startswith("#") for address in addresses)
    assert whole.count("url(") == whole.count("url(#") > 0


@pytest.mark.slow
def test_every_id_is_there_once_and_every_reference_has_one(whole):
    read = Page(whole)
    ids = Counter(value for _, name, value in read.attributes if name == "id")
    assert max(ids.values()) == 1
    assert {v[1:] for _, name, v in read.attributes if name == "href"} <= set(ids)


def test_it_says_what_the_report_says(whole, planned):
    text = words(whole)
    for title in (
        "Answer",
        "Memory over the step",
        "Memory at the peak",
        "Overhead against budget",
        "Blocks",
        "Methods",
        "Lower bound",
        "Advice",
        "Verification",
        "Notes",
        "Command",
    ):
        assert f"<h2>{title}</h2>" in whole
    assert f"overhead {100 * planned.overhead:+.2f} %" in text
    assert "4.00 GB (3.73 GiB)" in text
    assert "baseline: 5.24 GB" in text  # in the picture
    assert "solve --budget 4GB --report out.html g.json" in text
    assert "Refused by ilp: 364 ops are too many" in text
    assert all(advice.text in text for advice in advise(planned))


def test_the_tables_rows_are_the_blocks_and_the_methods(whole, planned):
    rows = whole.count("<tr") - whole.count("<thead>")
    n_categories, n_measured, n_methods = 8, 2, 3
    assert rows == split_into_blocks(planned.graph).n_blocks + n_categories + n_measured + n_methods
    widest = max(block_rows(planned), key=lambda row: row.dropped_bytes)
    cells = [str(widest.n_ops), format_size(widest.kept_bytes), format_size(widest.dropped_bytes)]
    cells += [str(widest.n_recomputed), format_time(widest.recompute_s)]
    plain = re.sub(r' data-head="[^"]*"', "", whole)
    assert "".join(f'<td class="number">{cell}</td>' for cell in cells) in plain


@pytest.mark.slow
def test_each_block_of_a_model_has_a_name(planned):
    """Operators of the model's own code are in no submodule."""
    graph = planned.graph
    nodes = tuple(
        dataclasses.replace(node, module="body" if at < 60 else "")
        for at, node in enumerate(graph.nodes)
    )
    solution = solve(dataclasses.replace(graph, nodes=nodes), budget="4GB", method="sqrt")
    text = page(report_of(solution), command="")
    names = re.findall(r'<td data-head="module">([^<]*)</td>', text)
    assert {"body", graph.meta.model} == set(names)


def test_no_line_ends_between_a_number_and_its_unit(whole):
    prose = "".join(re.findall(r"<(?:p|dd)>.*?</(?:p|dd)>", whole))
    assert re.findall("[0-9]\u00a0(?:[kMG]B|[MG]iB|%|ms)", prose)
    assert not re.findall(r"[0-9] (?:[kMG]i?B|%|m?s)\b", prose)
    assert "th, td { white-space: normal" not in whole  # of numbers in tables, in print


def test_the_bound_in_words(planned):
    says, why = bound_text(planned)
    assert f"takes less than {format_time(planned.lower_bound_s)} per step" in says
    assert f"{100 * planned.gap:.2f} % of the baseline" in says
    assert "integer program" in why
    (nothing,) = bound_text(dataclasses.replace(planned, lower_bound_s=math.inf, simulation=None))
    assert "proven" in nothing
    unsolved = dataclasses.replace(planned, schedule=None, simulation=None)
    assert "no other plan can save" not in bound_text(unsolved)[0]


@pytest.mark.slow
def test_a_page_without_a_plan_says_why():
    graph = Graph.load(GPT2)
    solution = solve(graph, budget="2GB", method="sqrt")
    report = report_of(solution, advice=advise(solution), verify_error="no <memory>")
    text = page(report, command="solve")
    assert "no schedule fits below 2.80 GB" in words(text)
    assert "<h2>Blocks</h2>" not in text
    assert '<p class="infeasible">infeasible</p>' in text
    assert "FAILED: no &lt;memory&gt;" in text
    assert Page(text).tags["svg"] == N_WIDTHS


HOSTILE = "<script>alert(1)</script>\"'&$\\frac{ ]]> \ud800\x00 $"


@pytest.mark.slow
def test_everything_from_outside_is_escaped():
    plain = residual(n_blocks=4)
    node_of = {node.name: node.name + HOSTILE for node in plain.nodes}
    nodes = tuple(
        dataclasses.replace(node, name=node_of[node.name], op=HOSTILE, module=HOSTILE)
        for node in plain.nodes
    )
    graph = dataclasses.replace(plain, nodes=nodes, meta={"model": HOSTILE})
    budget_bytes = int(0.9 * solve(plain, budget="1GB", method="none").baseline.peak_bytes)
    solution = solve(graph, budget=budget_bytes, method="sqrt")
    assert solution.schedule is not None
    report = Report(
        problem=HOSTILE,
        device=HOSTILE,
        costs=HOSTILE,
        solutions=(solution,),
        refused=((HOSTILE, HOSTILE),),
        files=((HOSTILE, Path(HOSTILE.replace("/", ""))),),
        notes=(HOSTILE,),
        advice=advise(solution),
        verify_error=HOSTILE,
    )
    text = page(report, command=HOSTILE)
    text.encode()
    read = Page(text)
    assert read.tags["script"] == 0
    assert "<script" not in text
    assert read.text.count("<script>alert(1)</script>") >= 10


@pytest.mark.slow
def test_the_command_writes_it_with_a_quick_curve(tmp_path, capsys):
    graph = residual(n_blocks=6)
    graph.save(tmp_path / "g.json")
    budget_bytes = int(0.8 * solve(graph, budget="1GB", method="none").baseline.peak_bytes)
    out = tmp_path / "out.html"
    argv = ["--budget", str(budget_bytes), "--method", "sqrt", str(tmp_path / "g.json")]
    assert main([*argv, "--report", str(out)]) == 0
    assert str(out) in capsys.readouterr().out.replace("\n", "").replace(" ", "")
    text = out.read_text()
    assert f"solve --budget {budget_bytes} --method sqrt" in words(text)
    assert Page(text).tags["svg"] == 2 * N_WIDTHS
    first = text
    curve = tmp_path / "curve.svg"
    assert main([*argv, "--report", str(out), "--pareto", str(curve), "--quiet"]) == 0
    assert curve.exists()
    points = [t.count('href="#budgets-') for t in (first, out.read_text())]
    assert points[0] < points[1]  # the curve that was asked for has more budgets


@pytest.mark.slow
def test_a_page_is_written_where_nothing_fits(tmp_path, capsys):
    out = tmp_path / "out.html"
    assert main(["--budget", "2GB", "--method", "none", "--report", str(out), str(GPT2)]) == 3
    capsys.readouterr()
    assert "infeasible" in words(out.read_text())


# In a real browser.


@pytest.fixture(scope="module")
def chromium() -> str:
    return browser.path_or_skip()


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> str:
    """A page with names as long as those of real models, copies, dtypes and sizes."""
    plain = residual(n_blocks=6)
    module = {n.name: f"model.backbone.encoder.layers.{i}.norm" for i, n in enumerate(plain.nodes)}
    nodes = [
        dataclasses.replace(n, module=module[n.name], op=f"aten.{n.op}_backward.default")
        for n in plain.nodes
    ]
    names = {t.name: f"{t.name}_of_a_long_name_without_a_blank" for t in plain.tensors}
    nodes = tuple(
        dataclasses.replace(
            n,
            inputs=tuple(map(names.__getitem__, n.inputs)),
            outputs=tuple(map(names.__getitem__, n.outputs)),
        )
        for n in nodes
    )
    made = {name for node in nodes for name in node.outputs}
    tensors = tuple(dataclasses.replace(t, name=names[t.name]) for t in plain.tensors)
    meta = {"model": "ALongNameOfAModelForCausalLM", "dtypes": {"bfloat16": sorted(made)}}
    graph = dataclasses.replace(
        plain,
        nodes=nodes,
        tensors=tensors,
        outputs=tuple(map(names.__getitem__, plain.outputs)),
        meta=meta,
    )
    budget_bytes = int(0.7 * solve(graph, budget="1GB", method="none").baseline.peak_bytes)
    solution = solve(graph, budget=budget_bytes, host_budget="64TB", host_link="1TB/s")
    assert solution.schedule.has_copies
    sizes = SizeSearch("batch_size", (Candidate(64, solution),))
    text = page(
        report_of(solution, solution, sizes=sizes, verification=verified()), command="solve"
    )
    for title in ("Copies to the host", "Batch sizes", "Methods"):
        assert f"<h2>{title}</h2>" in text
    assert "Activations by dtype" in text
    return text


@pytest.mark.slow
def test_the_headline_and_the_titles_name_step_and_device(planned, curve):
    costs = {"model": "roofline", "title": "NVIDIA H100"}
    meta = dataclasses.replace(planned.graph.meta, model="GPT2", costs=costs)
    graph = dataclasses.replace(planned.graph, meta=meta)
    solution = dataclasses.replace(planned, graph=graph, variants=None)
    curve = dataclasses.replace(curve, graph=graph)
    says = f"5.24 GB -> 3.94 GB, {format_share(planned.overhead)}"
    assert headline(solution) == says
    text = page(report_of(solution, curve=curve), command="solve")
    assert f"<title>GPT2 on NVIDIA H100: {says.replace('>', '&gt;')}</title>" in text
    told = words(text).replace("\u00a0", " ")
    assert f"model.py {says} a card" in told
    assert told.count(f"GPT2 on NVIDIA H100: {says}") == 1 + N_WIDTHS  # and in the picture
    assert told.count("GPT2 on NVIDIA H100: overhead against budget") >= 1


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_phone_shows_all_of_it(whole, wide, chromium, dark, width, tmp_path):
    for text in (whole, wide):
        seen = browser.look(chromium, text, tmp_path, width=width, dark=dark)
        assert seen["window"] == width
        assert seen["width"] <= width
        assert all(inner <= shown for shown, inner in seen["tables"])  # nothing is cut off
        assert 0 < max(shown for shown, _ in seen["tables"]) <= width
        heights = [height for height in seen["svgs"] if height]
        assert len(heights) == len(seen["svgs"]) / N_WIDTHS
        assert all(height > 200 for height in heights)
        assert seen["cut"] == []
        assert seen["least_font"] > 6  # pixels; 5 where the wide pictures are shrunk
        assert seen["contrast"] >= 4.5  # what WCAG asks of text
        assert (sum(seen["ground"][:3]) < 3 * 60) == dark
        assert (seen["n_loaded"], seen["n_scripts"]) == (0, 0)
        assert "GB -" in seen["title"] or "MB -" in seen["title"]
        assert seen["n_items"] > 200


@pytest.mark.slow
def test_paper_shows_all_of_it(whole, wide, chromium, tmp_path):
    """The rules for print, at the width of a page of A4 within its margins."""
    for text in (whole, wide):
        printed = text.replace("@media print", "@media all")
        assert printed != text
        seen = browser.look(chromium, printed, tmp_path, width=680, dark=False)
        assert seen["width"] <= 680
        assert seen["cut"] == []
        assert all(inner <= shown for shown, inner in seen["tables"])
        assert all(inner <= shown for shown, inner in seen["heights"])  # all rows, no scrolling


@pytest.mark.slow
def test_a_desk_shows_all_of_it(whole, chromium, tmp_path):
    seen = browser.look(chromium, whole, tmp_path, width=1400, dark=False)
    assert seen["width"] <= 1400
    assert all(inner <= shown for shown, inner in seen["tables"])
    assert seen["cut"] == []
    assert "Command" in seen["text"]
    assert "baseline: 5.24 GB" in seen["text"]


@pytest.mark.slow
def test_the_look_itself_can_fail(chromium, tmp_path):
    """A page that is too wide, too pale and asks for a picture is seen to be."""
    poor = (
        '<p style="width:900px;color:#ccc">pale</p><img src="data:image/gif;base64,R0lGODlhAQAB">'
    )
    poor += '<p style="color:#ccc">' + "w" * 500 + "</p>"
    seen = browser.look(chromium, poor, tmp_path, width=360, dark=False)
    assert seen["width"] > 360
    assert seen["contrast"] < 2
