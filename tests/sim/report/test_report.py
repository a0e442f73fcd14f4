"""The report in a real browser: it shows the rows' numbers, and fetches nothing."""

import contextlib
import re
import shutil

import pytest

from jenga.cli import main
from jenga.sim.results.rows import write_rows
from tests.sim.made_rows import made_run, made_steps, made_summary, write_runs

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(name="browser", scope="module")
def browser_or_skip():
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    with contextlib.ExitStack() as stack:
        playwright = stack.enter_context(api.sync_playwright())
        try:
            # None takes the browser that `playwright install chromium` puts in place.
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except api.Error as error:
            if path is not None:
                raise
            pytest.skip(f"no browser: apt install chromium ({str(error).splitlines()[0]})")
        stack.callback(browser.close)
        yield browser


@pytest.fixture(name="open_page")
def open_page(browser):
    """Open a file; at the end nothing may have been fetched and no script may have failed."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.set_default_timeout(0)
    requested, complaints = [], []
    page.on("request", lambda request: requested.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    opened = []

    def open_file(file):
        opened.append(file.as_uri())
        page.goto(file.as_uri())
        return page

    yield open_file
    page.close()
    assert requested == opened
    assert complaints == []


def write_report(tmp_path, *rows, title="Replays"):
    out = tmp_path / "report.html"
    assert main(["report", *map(str, rows), "--out", str(out), "--title", title]) == 0
    return out


def hover(page, chart, share):
    """Move the pointer over a chart at a share of its axis; get the lines shown."""
    svg = page.locator(f"#{chart}")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    left, right = 52 / 560, 1 - 12 / 560
    page.mouse.move(box["x"] + box["width"] * (left + (right - left) * share), box["y"] + 40)
    return page.locator("#tip").inner_text().splitlines()


def test_report_shows_the_numbers_of_every_run(tmp_path, open_page):
    page = open_page(write_report(tmp_path, write_runs(tmp_path / "rows.jsonl")))

    ours, stock = (row.inner_text() for row in page.locator("table.summary tbody tr").all())
    assert re.split(r"\t", ours.strip())[:4] == ["jenga", "0.10 %", "50.00 %", "5.39"]
    assert re.split(r"\t", stock.strip())[:4] == ["vllm", "40.00 %", "50.00 %", "2.69"]
    # What is best of the runs of a model and trace is bold.
    assert page.locator("tbody tr.run-0 td.best").all_inner_texts()[0] == "0.10 %"
    assert page.locator("svg.chart").count() == 5
    assert page.locator(".bar").count() == 8


def test_runs_can_be_chosen(tmp_path, open_page):
    page = open_page(write_report(tmp_path, write_runs(tmp_path / "rows.jsonl")))
    card = page.locator("section.run-1")
    assert card.is_visible()

    page.get_by_label("vllm").uncheck()

    assert not card.is_visible()
    assert not page.locator("#batch polyline.run-1").is_visible()
    assert not page.locator("tbody tr.run-1").is_visible()
    assert page.locator("section.run-0").is_visible()
    assert [line for line in hover(page, "batch", 0.25) if "vllm" in line] == []

    page.get_by_role("button", name="none").click()
    assert not page.locator("section.run-0").is_visible()
    page.get_by_role("button", name="all").click()
    assert card.is_visible()


def test_values_of_the_rows_are_under_the_pointer(tmp_path, open_page):
    rows = write_runs(tmp_path / "rows.jsonl")
    steps = list(made_steps(num_steps=200, waste=0.4))
    page = open_page(write_report(tmp_path, rows))

    lines = hover(page, "class-1", 0.5)

    assert lines[0].split("\t") == ["step", "100"]
    shown = dict(line.split("\t") for line in lines[1:])
    assert shown["used by the next tokens"] == f"{steps[99].used_bytes / 1e9:.4g} GB"
    assert shown["held but useless"] == f"{steps[99].useless_bytes / 1e9:.4g} GB"

    lines = hover(page, "table-1", 0.5)
    shown = dict(line.split("\t") for line in lines[1:])
    assert shown["full"] == f"{steps[99].tables['full'].used_bytes / 1e9:.4g} GB"

    page.mouse.move(1, 1)
    assert not page.locator("#tip").is_visible()


def test_charts_are_drawn_to_scale(tmp_path, open_page):
    page = open_page(write_report(tmp_path, write_runs(tmp_path / "rows.jsonl")))

    widths = page.locator("#class-0 polygon").evaluate_all("all => all.map(p => p.getBBox().width)")
    full = page.locator("#class-1 polygon").evaluate_all("all => all.map(p => p.getBBox().width)")

    # The first run has half as many steps, and both axes run equally far.
    assert widths[0] / full[0] == pytest.approx(99 / 199, abs=0.01)


def test_hit_rate_is_drawn_where_the_number_of_articles_differs(tmp_path, open_page):
    rows = tmp_path / "rows.jsonl"
    for manager in ("jenga", "vllm"):
        for number in (3, 24):
            run = f"{manager}-{number}"
            write_rows(
                rows,
                [
                    made_run(run, manager=manager, trace=f"articles:n={number}"),
                    made_summary(run, hit_rate=0.9 if manager == "jenga" else 0.3),
                ],
            )
    page = open_page(write_report(tmp_path, rows))

    lines = hover(page, "against", 0.98)

    assert lines[0].split("\t") == ["number of articles", "24"]
    assert [line.split("\t")[1] for line in lines[1:]] == [
        "90 % of prompt tokens hit",
        "30 % of prompt tokens hit",
    ]


def test_names_cannot_break_the_page(tmp_path, open_page):
    rows = tmp_path / "rows.jsonl"
    evil = "</script><script>window.broken = true</script>\"'&<b>"
    for run in ("a", "b"):
        write_rows(
            rows,
            [
                made_run(run, manager=f"{evil}{run}", trace=evil),
                *made_steps(run, num_steps=3),
                made_summary(run),
            ],
        )
    page = open_page(write_report(tmp_path, rows, title=evil))

    assert page.evaluate("window.broken") is None
    assert page.title() == evil
    assert page.locator("h3", has_text=f"{evil}a").count() == 1
    assert any(f"{evil}a" in line for line in hover(page, "batch", 0.5))


def test_report_can_be_read_without_scripts(tmp_path, browser):
    out = write_report(tmp_path, write_runs(tmp_path / "rows.jsonl"))
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(out.as_uri())

    assert page.locator("section.run").count() == 2
    assert page.locator("section.run-1 svg").first.is_visible()
    context.close()


def test_run_that_did_not_end_is_shown_as_such(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, [made_run(), *made_steps(num_steps=5)])

    page = write_report(tmp_path, rows).read_text()

    assert "did not end" in page
    assert 'id="class-0"' in page
    assert capsys.readouterr().out.strip().endswith("report.html")


def test_report_needs_no_other_file(tmp_path):
    page = write_report(tmp_path, write_runs(tmp_path / "rows.jsonl")).read_text()

    assert re.findall(r"(?:src|href)\s*=|url\(|@import|https?://", page) == []


def test_command_refuses_rows_that_are_none(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("[]\n")

    assert main(["report", str(rows), "--out", str(tmp_path / "x.html")]) == 2
    assert "rows.jsonl:1" in capsys.readouterr().err
