from __future__ import annotations

import copy
import json
import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from tools.benchmark import figures, plots, reading
from tools.benchmark.checks import Check, as_report, at_least, at_most
from tools.benchmark.figures import Line, Panel, Point
from tools.benchmark.html import Bar, bar_of, plot_sections, render_html

VOID = {"meta"}
CODE = ("script", "style")
VERDICTS = {True: '<b class="met">✓ met</b>', False: '<b class="not-met">✗ not met</b>'}


class Page(HTMLParser):
    """Reads a page whose elements are all closed, in order; `text` is what a reader sees."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not any(tag in self.open for tag in CODE):
            self.text += data


def figures_in(page: str) -> list[dict[str, Any]]:
    """The figures in a page, as plotly's library gets them."""
    scripts = re.findall(r"<script>\{const figure = (.*?);\nPlotly", page, re.DOTALL)
    return [json.loads(script) for script in scripts]


def shown(page: str) -> str:
    """The page without its scripts."""
    return re.sub("<script>.*?</script>", "", page, flags=re.DOTALL)


def figure_of_section(results: list[dict[str, Any]], heading: str) -> Any:
    """The figure of a section of the page."""
    [found] = [section.plots for section in plot_sections(results) if section.title == heading]
    assert found.figure is not None
    return found.figure


def hovers(figure: Any) -> list[str]:
    """What pointing at the points and bars of a figure shows."""
    return [text for trace in figure.data for text in trace.hovertext or ()]


def panels(figure: Any) -> int:
    return sum(1 for _ in figure.select_xaxes())


def section(page: str, heading: str) -> str:
    return page.partition(f"<h2>{heading}</h2>")[2].partition("<h2>")[0]


def stats(middle: float) -> dict[str, float]:
    return {
        "mean": middle,
        "min": middle / 2,
        "max": middle * 4,
        "p50": middle,
        "p90": middle * 2,
        "p99": middle * 3,
    }


def result(
    target: str = "ensemble", load: float = 4, *, mode: str = "closed", **other: Any
) -> dict[str, Any]:
    return {
        "target": target,
        "baseline": False,
        "mode": mode,
        "concurrency": load if mode == "closed" else None,
        "request_rate": load if mode == "open" else None,
        "input_tokens_mean": 256.0,
        "output_tokens_mean": 128.0,
        "requests": 50,
        "errors": {},
        "duration_s": 12.5,
        "output_tokens": 4000,
        "output_tokens_per_s": 100.0 * load,
        "requests_per_s": 4.0,
        "ttft_ms": stats(20.0 + load),
        "itl_ms": stats(5.0 + load),
        "chunk_gap_ms": stats(6.0),
        "e2e_ms": stats(700.0),
        "tokens_per_chunk": {**stats(1.0), "one_token_fraction": 0.93},
        "ttft_samples_ms": [10.0, 20.0, 30.0, 40.0],
        "processes": [
            {"role": "predictor", "cpu_s": 2.0, "rss_mb": 300.0, "uss_mb": None},
            {"role": "tritonserver", "cpu_s": 6.0, "rss_mb": 900.0, "uss_mb": 700.0},
        ],
        "load_generator_cpu_share": 0.21,
        "ratio_to_baseline": {},
        **other,
    }


def report(*results: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {
        "title": "Streaming",
        "command": "python scripts/benchmark.py --concurrency 1 4",
        "date": "2026-01-12T14:03:11+00:00",
        "machine": {
            "cpu": "EPYC",
            "cores": 16,
            "memory_gb": 125.8,
            "gpu": None,
            "python": "3.12.3",
        },
        "versions": {"tritonserver": "2.61.0"},
        "settings": {"COG_TRITON_ENGINE": "simulated"},
        "results": list(results),
        **other,
    }


SWEEP = [
    result(target, load, baseline=target == "other")
    for target in ("ensemble", "other")
    for load in (1, 4, 16)
]
OPEN = [result(load=load, mode="open") for load in (0.5, 2.0)]


@pytest.mark.parametrize(
    "results",
    [[], SWEEP[:1], SWEEP, OPEN, SWEEP + OPEN, SWEEP + SWEEP],
    ids=["none", "one", "closed", "open", "both", "repeated"],
)
def test_page_is_well_formed_and_needs_nothing_else(results: list[dict[str, Any]]) -> None:
    page = render_html(report(*results))
    elements = Page(page).elements
    tags = [tag for tag, _ in elements]
    attributes = {name for _, attributes in elements for name in attributes}
    count = len(figures_in(page))
    assert tags.count("script") == (count + 1 if count else 0)  # and the library, once
    assert page.count(get_plotlyjs()) == bool(count)
    assert {f"plot-{i}" for i in range(1, 6)} >= {a["id"] for _, a in elements if "id" in a}
    assert not {*tags} & {"link", "img", "iframe", "object"}
    assert not attributes & {"src", "href", "srcset"}
    assert "url(" not in shown(page)
    assert "://" not in shown(page)
    assert "default-src 'none'" in page  # the browser lets the library load nothing
    assert not any("://" in json.dumps(figure) for figure in figures_in(page))


def test_header_says_what_was_measured_where() -> None:
    seen = Page(render_html(report())).text
    for said in ("Streaming", "2026-01-12T14:03:11+00:00", "--concurrency 1 4", "EPYC", "126 GB"):
        assert said in seen
    for said in ("GPUnone", "tritonserver2.61.0", "COG_TRITON_ENGINEsimulated"):
        assert said in seen


def test_checks_tell_met_from_not_met() -> None:
    checks = [
        {"name": "TTFT p50", "measured": "33 ms", "bound": "≤ 50 ms", "met": True},
        {"name": "tokens/s", "measured": "0.88", "bound": "≥ 0.95", "met": False},
    ]
    page = render_html(report(*SWEEP, checks=checks))
    assert "<h2>Targets: 1 of 2 met</h2>" in page
    assert page.index("Targets:") < page.index("<h2>Results")
    assert "TTFT p50</th><td>33 ms</td><td>≤ 50 ms</td><td>" + VERDICTS[True] in page
    assert "tokens/s</th><td>0.88</td><td>≥ 0.95</td><td>" + VERDICTS[False] in page
    assert "Targets:" not in render_html(report(*SWEEP))


@pytest.mark.parametrize(
    ("check", "percent", "text"),
    [
        (at_least("rate", 45, 30), 75, "1.50 × the bound"),
        (at_least("rate", 15, 30), 25, "0.500 × the bound"),
        (at_least("rate", 300, 30), 100, "10.0 × the bound"),  # and no longer than its track
        (at_most("delay", 20, 20), 50, "1.00 × the bound"),
        (at_most("delay", -2, 20), 0, "-0.100 × the bound"),
        (at_most("processes", 0, 0), 0, ""),
        (at_most("processes", 1, 0), 100, ""),
    ],
)
def test_a_bar_is_half_its_track_at_the_bound(check: Check, percent: float, text: str) -> None:
    [reported] = as_report([check])
    assert bar_of(reported) == Bar(percent, text)
    seen = shown(render_html(report(checks=[reported])))
    kind = "met" if check.met else "not-met"
    assert f'<div class="bar {kind}" style="width:{percent:.1f}%"></div>' in seen
    assert "the line across it is the bound" in seen


def test_a_promise_without_a_number_has_no_bar() -> None:
    [reported] = as_report([at_most("delay", math.nan, 20)])
    assert (reported["value"], reported["met"]) == (None, False)
    assert 'class="bar' not in shown(render_html(report(checks=[reported])))


LONG = "cog-sse, one token a response, 4,096 tokens"


def test_no_table_is_wider_than_a_window_of_1280_pixels() -> None:
    """Counted in characters of at most 7 pixels, with the padding: no cell is broken, headings are."""
    figures = stats(98_765.4)
    keys = ("ttft_ms", "itl_ms", "chunk_gap_ms", "e2e_ms")
    latencies: dict[str, Any] = dict.fromkeys(keys, figures)
    wide = result(
        LONG, output_tokens_per_s=123_456.0, ratio_to_baseline={LONG: 12.34, "b": 1.0}, **latencies
    )
    page = shown(render_html(report(wide)))
    assert "overflow-x" not in page
    tables = re.findall(r'<table class="results">(.*?)</table>', page, re.DOTALL)
    assert len(tables) == 3  # throughput, latency, processes
    for table in tables[:2]:
        row = table.rpartition("<tr>")[2]
        cells = [len(cell) * 7 for cell in re.findall("<td>(.*?)</td>", row)]
        heads = 130  # the name of the target, at least
        assert heads + 16 + sum(max(44, cell) + 16 for cell in cells) < 1232


def test_legends_say_what_their_entries_are() -> None:
    titles = {
        one.title: one.plots.figure.layout.legend.title.text
        for one in plot_sections(SWEEP)
        if one.plots.figure
    }
    assert len(titles) == 5
    assert titles.pop("CPU time") == "Process: "
    assert set(titles.values()) == {"Target: "}
    seen = Page(render_html(report(*SWEEP))).text
    for said in ("TTFT: from a request's start", "p50 is the median", "Throughput: output tokens"):
        assert said in seen


def test_text_of_others_cannot_leave_its_place() -> None:
    evil = "\"'><script>alert(1)</script>&amp;\x1b\ud800"
    results = [
        result(
            evil,
            load,
            errors={evil: 2},
            processes=[{"role": evil, "cpu_s": 1.0, "rss_mb": 1.0, "uss_mb": 1.0}],
            ratio_to_baseline={evil: 1.5},
        )
        for load in (1, 4)
    ]
    named = {"title": evil, "command": evil, "date": evil, "versions": {evil: evil}}
    checks = [{"name": evil, "measured": evil, "bound": evil, "met": True}]
    page = render_html(
        report(*results, **named, settings={evil: evil}, machine={"cpu": evil}, checks=checks)
    )
    page.encode()
    found = figures_in(page)
    assert [tag for tag, _ in Page(page).elements].count("script") == len(found) + 1 == 6
    assert "\"'><script>alert(1)</script>&amp;\ufffd\ufffd" in Page(page).text
    names = [trace["name"] for figure in found for trace in figure["data"] if "name" in trace]
    assert len(names) > 5
    # Plotly reads tags in a name, of which none is left.
    evil_name = "\"'&gt;&lt;script&gt;alert(1)&lt;/script&gt;&amp;amp;\ufffd\ufffd"
    assert all(name.startswith(evil_name) for name in names)


def test_table_has_every_result() -> None:
    failed = result(
        load=16, errors={"timed out": 3, "refused": 1}, ratio_to_baseline={"old": 1.254}
    )
    page = render_html(report(result(load=1), failed))
    cells = [
        re.findall("<td>(.*?)</td>", row) for row in shown(page).split("<tr>") if "<td>" in row
    ]
    head = ["256", "128", "50"]
    low, high, low_latency, high_latency = cells[:4]
    assert low == ["1", *head, "0", "12.5", "100", "4.00", "21 %", "–"]
    assert " ".join(high) == "16 256 128 50 4 12.5 1,600 4.00 21 % 1.25×"
    assert low_latency[:4] == ["1", "21.0", "42.0", "63.0"]
    assert " ".join(high_latency[:4]) == "16 36.0 72.0 108"
    assert high_latency[-2:] == ["1.00", "93 %"]
    assert "ensemble, concurrency 16: 3 × timed out" in Page(page).text


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([3.0], "linear"),
        ([0.0], "linear"),
        ([0.0, 7.3], "linear"),
        ([99.0, 101.0], "linear"),
        ([0.002, 90000.0], "log"),
        ([1.0, 5.0], "log"),
    ],
)
def test_axes_hold_their_values(values: list[float], kind: str) -> None:
    linear, fitting = figures.linear_axis("t"), figures.fitting_axis("t", values)
    assert linear["rangemode"] == "tozero"
    assert fitting["type"] == kind
    assert fitting["title"]["text"] == ("t, log scale" if kind == "log" else "t")
    assert "range" not in {*linear, *fitting}  # plotly's, which holds all of them


def test_loads_are_the_ticks_of_their_axis() -> None:
    figure = figure_of_section(SWEEP, "Scaling")
    axis = figure.layout.xaxis
    assert axis.title.text == "Concurrency (requests in flight), log scale"
    assert (axis.type, axis.tickvals, axis.ticktext) == ("log", (1, 4, 16), ("1", "4", "16"))
    assert (figure.layout.yaxis.type, figure.layout.yaxis.tickvals) == ("log", None)
    assert figure.layout.yaxis.title.text == "Throughput (output tokens/s), log scale"


def test_numbers_are_short() -> None:
    values = [None, 0.0, 0.00123, 0.5, 1.234, 12.34, 123.4, 1234.5, -3.0]
    shown = ["–", "0", "0.00123", "0.500", "1.23", "12.3", "123", "1,234", "-3.00"]
    assert [reading.format_number(value) for value in values] == shown
    assert reading.shorten("abcdefghij", 5) == "ab…ij"
    assert reading.shorten("abc", 5) == "abc"


def test_figure_puts_points_where_the_numbers_say() -> None:
    x, y = figures.log_axis("x", [1, 10, 100]), figures.linear_axis("y")
    points = (Point(1, 0, "", "low"), Point(10, 25, "", "middle"), Point(100, 50, "", "high"))
    figure = figures.figure_of([[Panel([Line("one", 0, False, points)], x, y)]])
    [trace] = figure.data
    assert (trace.x, trace.y) == ((1, 10, 100), (0, 25, 50))
    assert trace.hovertext == ("low", "middle", "high")
    assert (trace.name, trace.mode, trace.line.dash) == ("one", "lines+markers+text", "solid")
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "linear")


def test_labels_of_different_lines_are_on_different_sides() -> None:
    figure = figure_of_section(SWEEP, "Throughput and latency")
    sides = {trace.textposition for trace in figure.data if trace.xaxis == "x"}
    assert len(sides) == 2
    assert [trace.text for trace in figure.data] == [("1", "4", "16")] * 4


def test_a_line_is_once_in_the_legend() -> None:
    figure = figure_of_section(SWEEP, "Inter-token latency")
    assert [(trace.name, trace.showlegend) for trace in figure.data] == [
        ("ensemble", True),
        ("other (baseline)", True),
        ("ensemble", False),
        ("other (baseline)", False),
    ]
    assert figure.layout.yaxis2.matches == "y"  # one range of values for both percentiles


def test_cdf_steps_at_each_sample() -> None:
    assert plots.cdf([30, 10]) == [(10, 0), (10, 50), (30, 50), (30, 100)]


def test_cdf_of_many_samples_ends_at_the_last() -> None:
    corners = plots.cdf([float(value) for value in range(10_001)], most=100)
    assert len(corners) == 200
    assert corners[-1] == (10_000, 100)
    for value, percent in corners[1::2]:
        assert percent == pytest.approx(100 * (value + 1) / 10_001)


def test_bars_are_as_long_as_their_seconds() -> None:
    figure = figure_of_section(SWEEP[:1], "CPU time")
    predictor, tritonserver, sums = figure.data
    assert (predictor.x, tritonserver.x) == ((0.5,), (1.5,))
    assert (predictor.name, tritonserver.name) == ("predictor", "tritonserver")
    assert figure.layout.barmode == "stack"
    assert (sums.x, sums.text) == ((2.0,), (" 2.00",))
    assert figure.layout.yaxis.ticktext == ("ensemble  1",)
    assert hovers(figure) == [
        "ensemble, concurrency 1<br>predictor: 0.500 s",
        "ensemble, concurrency 1<br>tritonserver: 1.50 s",
    ]


def test_processes_of_one_role_are_added() -> None:
    process = {"role": "rank", "cpu_s": 3.0}
    two = result(processes=[process, process, {"role": "rank", "cpu_s": None}], output_tokens=2000)
    assert reading.cpu_by_role(two) == {"rank": 3.0}
    assert reading.cpu_by_role(result(output_tokens=0)) == {}


def test_points_tell_their_numbers() -> None:
    figure = figure_of_section(SWEEP, "Throughput and latency")
    assert panels(figure) == 2
    assert hovers(figure)[0] == (
        "ensemble, concurrency 1<br>Throughput: 100 output tokens/s<br>TTFT p50: 21.0 ms"
    )
    assert len(hovers(figure)) == 2 * len(SWEEP)
    assert "16" in figure.data[0].text


def test_distribution_is_that_of_the_highest_load() -> None:
    sweep = [result(load=16), result(load=1), result(load=64, ttft_samples_ms=[])]
    figure = figure_of_section(sweep, "Time to first token")
    name = "ensemble, concurrency 16"
    assert hovers(figure) == [
        f"{name}<br>TTFT p{percent}: {at} ms"
        for percent, at in ((50, "20.0"), (90, "40.0"), (99, "40.0"))
    ]
    path, marks = figure.data
    assert list(zip(path.x, path.y, strict=True)) == plots.cdf([10.0, 20.0, 30.0, 40.0])
    assert (marks.x, marks.y) == ((20.0, 40.0, 40.0), (50.0, 100.0, 100.0))
    assert (marks.name, marks.showlegend, path.showlegend) == (name, True, False)


def test_one_result_says_what_is_not_plotted() -> None:
    page = render_html(report(SWEEP[0]))
    assert "TTFT p50 is not plotted" in section(page, "Throughput and latency")
    for heading in ("Scaling", "Inter-token latency"):
        assert "The closed loop is not plotted" in section(page, heading)
    assert len(figures_in(page)) == 2


@pytest.mark.parametrize("empty", [None, dict.fromkeys(("mean", "p50", "p90", "p99")), "nan"])
def test_missing_figures_are_dashes_and_left_out(empty: Any) -> None:
    lost = {"p50": math.nan, "p99": math.inf} if empty == "nan" else empty
    broken = result(
        "broken",
        ttft_ms=lost,
        itl_ms=lost,
        chunk_gap_ms=lost,
        e2e_ms=lost,
        tokens_per_chunk=lost,
        ttft_samples_ms=[],
        processes=[],
        output_tokens=0,
        output_tokens_per_s=0.0,
    )
    page = render_html(report(*SWEEP, broken))
    Page(page)
    assert "for TTFT p50: 1 result." in section(page, "Throughput and latency")
    assert "two samples: broken." in section(page, "Time to first token")
    assert "for Throughput: 1 result." in section(page, "Scaling")
    assert "CPU times or tokens: 1 result." in section(page, "CPU time")
    assert "for Inter-token latency p99: 1 result." in section(page, "Inter-token latency")
    drawn = [one.plots.figure for one in plot_sections([*SWEEP, broken])]
    assert len(drawn) == len(figures_in(page)) == 5
    assert not any("broken" in text for figure in drawn for text in hovers(figure))
    assert figures_in(render_html(report(broken))) == []


def test_open_loops_are_plotted_against_their_rate() -> None:
    page = render_html(report(*OPEN))
    scaling = section(page, "Scaling")
    assert "There are no closed-loop results" in scaling
    assert "The load of open-loop results (dashed) is their request rate." in scaling
    figure = figure_of_section(OPEN, "Scaling")
    assert panels(figure) == 1
    assert figure.layout.xaxis.title.text == "Request rate of the open loop (requests/s), log scale"
    assert hovers(figure)[0].startswith("ensemble, open loop, 0.5 requests/s<br>")
    [line] = figure.data
    assert (line.line.color, line.line.dash) == (figures.COLORS[0], "dash")
    assert "<td>0.5/s</td>" in page


def test_closed_and_open_loops_have_panels_of_their_own() -> None:
    assert panels(figure_of_section(SWEEP + OPEN, "Scaling")) == 2
    latency = figure_of_section(SWEEP + OPEN, "Inter-token latency")
    assert panels(latency) == 4
    assert (latency.layout.yaxis2.matches, latency.layout.yaxis4.matches) == ("y", "y3")


def test_a_repeated_load_begins_another_line() -> None:
    again = [copy.deepcopy(one) | {"input_tokens_mean": 1024.0} for one in SWEEP]
    names = [(one.name, len(one.results)) for one in reading.series_of(SWEEP + again)]
    assert names == [
        ("ensemble, run 1: 256 → 128 tokens", 3),
        ("other (baseline), run 1: 256 → 128 tokens", 3),
        ("ensemble, run 2: 1,024 → 128 tokens", 3),
        ("other (baseline), run 2: 1,024 → 128 tokens", 3),
    ]


def test_more_lines_than_colours_stay_apart() -> None:
    slots = [figures.color_of(slot) for slot in range(2 * len(figures.COLORS))]
    assert len(set(slots)) == len(slots)
