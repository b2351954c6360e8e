import html.parser

from jupyter_gpumem.render.layout import (
    Bar,
    Block,
    Page,
    Span,
    code,
    delta,
    quiet,
    shorten,
    shorten_path,
    size,
    to_html,
    to_text,
)

PAGE = Page(
    (
        Block(((Span("GPU 0", style="strong"), size(1 << 30), delta(-512)), ("a longer name", size(17), quiet("why")))),
        Block((("fix", code("del <x>")),), indent=2),
    )
)


class Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.titles += [value or "" for name, value in attrs if name == "title"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: Page) -> Reader:
    reader = Reader()
    reader.feed(to_html(page))
    reader.close()
    assert not reader.open
    return reader


def test_columns_line_up_and_the_last_one_runs_on() -> None:
    assert to_text(PAGE).splitlines() == [
        "GPU 0           1.00 GiB   −512 B",
        "a longer name       17 B   why",
        "",
        "  fix   → del <x>",
    ]


def test_html_has_the_same_words_in_the_same_order_as_text() -> None:
    words = "".join(read(PAGE).text).replace("→ ", "→")
    for part in to_text(PAGE).replace("→ ", "→").split("   "):
        for word in part.split("\n"):
            assert word.strip() in words


def test_exact_bytes_are_tooltips() -> None:
    assert "1,073,741,824 bytes" in read(PAGE).titles


def test_every_text_is_escaped() -> None:
    hostile = '<img src=x onerror="alert(1)">&"\''
    page = Page((Block(((Span(hostile, hostile, "code"),),), picture=Bar(((hostile, 3, "red", "█"),), 3)),))
    assert "<img" not in to_html(page)
    assert hostile in "".join(read(page).text)
    assert "img" not in read(page).open


def test_a_bar_fills_its_width_in_proportion() -> None:
    bar = Bar(
        (("a", 1, "red", "█"), ("b", 1, "blue", "▓"), ("none", 0, "green", "x"), ("rest", 2, "grey", "─")), 4, width=8
    )
    assert to_text(Page((Block((), picture=bar),))) == "██▓▓────"


def test_a_long_path_keeps_both_ends() -> None:
    assert shorten("model.layers[17].attention.weight", 21) == "model.laye…ion.weight"
    assert shorten("short", 21) == "short"


def test_an_indented_cell_keeps_its_blanks_in_html() -> None:
    assert "white-space:nowrap" not in to_html(Page((Block((("  part", size(3), "why"),)),)))


def test_a_remark_longer_than_a_narrow_page_goes_on_below() -> None:
    page = to_html(
        Page((Block((("GPU 0", size(3)), (quiet("a remark that is longer than a narrow page is"),)), flow=True),))
    )
    assert page.count("white-space:pre-wrap") == 1
    assert page.count("white-space:pre;") == 2
    assert page.count("min-width:min(100%,") == 3


def test_a_shortened_path_keeps_its_function_and_line() -> None:
    path = "local batch of train() line 7, kept by the last error (ValueError, cell 12) through its context (KeyError)"
    assert shorten_path(path, 200) == path
    assert shorten_path(path, 50) == "local batch of train() line 7…s context (KeyError)"
    assert shorten_path("model.layers[0].attention.weight", 20) == shorten("model.layers[0].attention.weight", 20)
