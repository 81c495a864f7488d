from __future__ import annotations

import copy
import math
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from tools.benchmark import html
from tools.benchmark.html import Axis, Line, Point, Scale, render_html

VOID = {"meta"}


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
        if "style" not in self.open:
            self.text += data


def plots(page: str) -> list[ElementTree.Element]:
    """The plots of a page, without the swatches of the legends."""
    found = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    return [svg for svg in found if svg.get("role") == "img"]


def titles(svg: ElementTree.Element) -> list[str]:
    return [title.text or "" for title in svg.iter("title")]


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
    tags = {tag for tag, _ in Page(page).elements}
    attributes = {name for _, attributes in Page(page).elements for name in attributes}
    plots(page)
    assert not tags & {"script", "link", "img", "iframe", "object"}
    assert not attributes & {"src", "href", "srcset"}
    assert "url(" not in page
    assert "://" not in page


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
    assert "TTFT p50</th><td>33 ms</td><td>≤ 50 ms</td><td>" + html._verdict(True) in page
    assert "tokens/s</th><td>0.88</td><td>≥ 0.95</td><td>" + html._verdict(False) in page
    assert "Targets:" not in render_html(report(*SWEEP))


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
    assert "script" not in {tag for tag, _ in Page(page).elements}
    assert "\"'><script>alert(1)</script>&amp;\ufffd\ufffd" in Page(page).text
    assert any("<script>" in title for svg in plots(page) for title in titles(svg))


def test_table_has_every_result() -> None:
    failed = result(
        load=16, errors={"timed out": 3, "refused": 1}, ratio_to_baseline={"old": 1.254}
    )
    page = render_html(report(result(load=1), failed))
    cells = [re.findall("<td>(.*?)</td>", row) for row in page.split("<tr>") if "<td>" in row]
    head = ["256", "128", "50"]
    assert cells[0][:9] == ["1", *head, "0", "12.5", "100", "4.00", "–"]
    assert " ".join(cells[1][:12]) == "16 256 128 50 4 12.5 1,600 4.00 1.25× 36.0 72.0 108"
    assert cells[1][-3:] == ["1.00", "93 %", "21 %"]
    assert "ensemble, concurrency 16: 3 × timed out" in Page(page).text


def test_scale_is_linear_or_logarithmic() -> None:
    linear = Scale(0, 200, 40, 440)
    assert [linear(value) for value in (0, 50, 200)] == [40, 140, 440]
    log = Scale(1, 1000, 300, 0, log=True)
    assert [log(value) for value in (1, 10, 1000)] == pytest.approx([300, 200, 0])


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 10, (0, 2, 4, 6, 8, 10)), (0, 0.3, (0, 0.1, 0.2, 0.3)), (23, 61, (30, 40, 50, 60))],
)
def test_linear_ticks(low: float, high: float, ticks: tuple[float, ...]) -> None:
    assert html.linear_ticks(low, high) == ticks


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (40, 1300, (50, 100, 200, 500, 1000)),
        (0.9, 110000, (1, 10, 100, 1000, 10000, 100000)),
        (55, 95, (60, 70, 80, 90)),
    ],
)
def test_log_ticks(low: float, high: float, ticks: tuple[float, ...]) -> None:
    assert html.log_ticks(low, high) == ticks


@pytest.mark.parametrize("values", [[3.0], [0.0], [0.0, 7.3], [0.002, 90000.0], [99.0, 101.0]])
def test_axes_hold_their_values(values: list[float]) -> None:
    for axis in [html.linear_axis("", values), html.fitting_axis("", values)]:
        assert axis.low <= min(values) <= max(values) <= axis.high
        assert axis.low < axis.high
        assert len(axis.ticks) > 1
        assert all(axis.low <= tick <= axis.high for tick in axis.ticks)


def test_numbers_are_short() -> None:
    values = [None, 0.0, 0.00123, 0.5, 1.234, 12.34, 123.4, 1234.5, -3.0]
    shown = ["–", "0", "0.00123", "0.500", "1.23", "12.3", "123", "1,234", "-3.00"]
    assert [html.format_number(value) for value in values] == shown
    assert html.shorten("abcdefghij", 5) == "ab…ij"
    assert html.shorten("abc", 5) == "abc"


def test_chart_puts_points_where_the_numbers_say() -> None:
    x, y = Axis("x", 1, 100, (1, 10, 100), log=True), Axis("y", 0, 50, (0, 50))
    points = (Point(1, 0, "", "low"), Point(10, 25, "", "middle"), Point(100, 50, "", "high"))
    svg = ElementTree.fromstring(html.chart([Line("one", 0, False, points)], x, y))
    marks = {group[0].text: group[1] for group in svg.iter("g")}
    at = {
        name: (float(mark.get("cx", "")), float(mark.get("cy", ""))) for name, mark in marks.items()
    }
    left, bottom = at["low"]
    right, top = at["high"]
    assert left < right
    assert top < bottom
    assert at["middle"] == pytest.approx(((left + right) / 2, (top + bottom) / 2), abs=0.1)
    polyline = svg.find("polyline")
    assert polyline is not None
    corners = [f"{x:.1f},{y:.1f}" for x, y in at.values()]
    assert polyline.get("points", "").split() == corners
    rules = {(line.get("x1"), line.get("x2")) for line in svg.iter("line")}
    assert (f"{left:.1f}", f"{left:.1f}") in rules


def test_labels_cover_nothing() -> None:
    points = [(100.0 + step % 5 * 6, 100.0 + step // 5 * 9, "64") for step in range(25)]
    placed = html.place_labels(points, Scale(0, 1, 0, 400), Scale(0, 1, 300, 0))
    boxes = []
    for label in map(ElementTree.fromstring, placed):
        left, base = float(label.get("x", "")), float(label.get("y", ""))
        boxes.append((left, base - 9, left + 2 * html.CHARACTER, base))
    assert 0 < len(boxes) < len(points)
    for index, box in enumerate(boxes):
        assert not any(html.overlap(box, other) for other in boxes[:index])
        assert not any(html.overlap(box, (x - 4, y - 4, x + 4, y + 4)) for x, y, _ in points)


def test_cdf_steps_at_each_sample() -> None:
    assert html.cdf([30, 10]) == [(10, 0), (10, 50), (30, 50), (30, 100)]


def test_cdf_of_many_samples_ends_at_the_last() -> None:
    corners = html.cdf([float(value) for value in range(10_001)], most=100)
    assert len(corners) == 200
    assert corners[-1] == (10_000, 100)
    for value, percent in corners[1::2]:
        assert percent == pytest.approx(100 * (value + 1) / 10_001)


def test_bars_are_as_long_as_their_seconds() -> None:
    svg = plots(section(render_html(report(SWEEP[0])), "CPU time"))[0]
    widths = [float(bar.get("width", "")) for bar in svg.iter("rect")]
    assert widths[1] == pytest.approx(3 * widths[0], abs=0.3)
    assert "2.00" in [text.text for text in svg.iter("text")]
    assert titles(svg)[1:] == [
        "ensemble, concurrency 1\npredictor: 0.500 s",
        "ensemble, concurrency 1\ntritonserver: 1.50 s",
    ]


def test_processes_of_one_role_are_added() -> None:
    process = {"role": "rank", "cpu_s": 3.0}
    two = result(processes=[process, process, {"role": "rank", "cpu_s": None}], output_tokens=2000)
    assert html.cpu_by_role(two) == {"rank": 3.0}
    assert html.cpu_by_role(result(output_tokens=0)) == {}


def test_points_tell_their_numbers() -> None:
    ttft, e2e = plots(section(render_html(report(*SWEEP)), "Throughput and latency"))
    assert titles(ttft)[0] == (
        "ensemble, concurrency 1\nThroughput: 100 output tokens/s\nTTFT p50: 21.0 ms"
    )
    assert len(titles(ttft)) == len(titles(e2e)) == len(SWEEP)
    assert "16" in [text.text for text in ttft.iter("text") if text.get("class") == "label"]


def test_distribution_is_that_of_the_highest_load() -> None:
    sweep = [result(load=16), result(load=1), result(load=64, ttft_samples_ms=[])]
    shown = section(render_html(report(*sweep)), "Time to first token")
    (svg,) = plots(shown)
    name = "ensemble, concurrency 16"
    assert titles(svg) == [
        f"{name}\nTTFT p{percent}: {at} ms"
        for percent, at in ((50, "20.0"), (90, "40.0"), (99, "40.0"))
    ]


def test_one_result_says_what_is_not_plotted() -> None:
    page = render_html(report(SWEEP[0]))
    assert "TTFT p50 is not plotted" in section(page, "Throughput and latency")
    for heading in ("Scaling", "Inter-token latency"):
        assert "The closed loop is not plotted" in section(page, heading)
    assert len(plots(page)) == 2


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
    assert not any("broken" in title for svg in plots(page) for title in titles(svg))
    assert plots(render_html(report(broken))) == []


def test_open_loops_are_plotted_against_their_rate() -> None:
    page = render_html(report(*OPEN))
    scaling = section(page, "Scaling")
    assert "There are no closed-loop results" in scaling
    assert "The load of open-loop results (dashed) is their request rate." in scaling
    (svg,) = plots(scaling)
    assert "Request rate of the open loop (requests/s), log scale" in [
        text.text for text in svg.iter("text")
    ]
    assert titles(svg)[0].startswith("ensemble, open loop, 0.5 requests/s\n")
    polyline = svg.find("polyline")
    assert polyline is not None
    assert polyline.get("class") == "line c0 dashed"
    assert "<td>0.5/s</td>" in page


def test_closed_and_open_loops_have_panels_of_their_own() -> None:
    page = render_html(report(*SWEEP, *OPEN))
    assert len(plots(section(page, "Scaling"))) == 2
    assert len(plots(section(page, "Inter-token latency"))) == 4


def test_a_repeated_load_begins_another_line() -> None:
    again = [copy.deepcopy(one) | {"input_tokens_mean": 1024.0} for one in SWEEP]
    names = [(one.name, len(one.results)) for one in html.series_of(SWEEP + again)]
    assert names == [
        ("ensemble, run 1: 256 → 128 tokens", 3),
        ("other (baseline), run 1: 256 → 128 tokens", 3),
        ("ensemble, run 2: 1,024 → 128 tokens", 3),
        ("other (baseline), run 2: 1,024 → 128 tokens", 3),
    ]


def test_more_lines_than_colours_stay_apart() -> None:
    slots = [html._color(slot) for slot in range(2 * html.COLORS)]
    assert len(set(slots)) == len(slots)
