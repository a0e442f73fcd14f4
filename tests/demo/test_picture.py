from xml.etree import ElementTree as ET

from jenga.demo.picture import Bar, bars_svg, bars_text

BARS = [
    Bar(name="vLLM", found_tokens=25, computed_tokens=75),
    Bar(name="Jenga & co", found_tokens=80, computed_tokens=20),
]


def test_bars_in_the_terminal_are_as_long_as_their_tokens():
    lines = bars_text(BARS)

    assert lines[0] == f"vLLM        {'#' * 12}{'.' * 38}  25 found, 75 computed"
    assert lines[1] == f"Jenga & co  {'#' * 40}{'.' * 10}  80 found, 20 computed"
    assert all(line.isascii() for line in lines)


def test_bars_of_the_picture_are_as_wide_as_their_tokens():
    root = ET.fromstring(bars_svg("Tokens < all", BARS))

    bars = [each for each in root if each.tag.endswith("rect") and each.get("height") == "30"]
    widths = [float(each.get("width")) for each in bars]
    assert widths == [127.5, 382.5, 408.0, 102.0]
    texts = [each.text for each in root if each.tag.endswith("text")]
    assert {"Tokens < all", "Jenga & co", "25", "75", "80", "20"} <= set(texts)


def test_a_bar_without_found_tokens_has_no_number_there():
    svg = bars_svg("Tokens", [Bar(name="vLLM", found_tokens=0, computed_tokens=10)])

    assert ">0</text>" not in svg
    assert ">10</text>" in svg
