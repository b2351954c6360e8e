"""The panel's looks: themes, width, keyboard, screen reader, colours, and no word to anybody outside."""

import io
import itertools
import math
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.browser.pages import LOAD, SIMULATE, Notebook
from tests.browser.server import Server

Open = Callable[..., Notebook]
START = SIMULATE.format(devices=2) + f"\n{LOAD}\nx = [torch.ones(1 << 26, device=d) for d in (0, 1)]"

THEMES = ("JupyterLab Light", "JupyterLab Dark")

# WCAG's contrast of a text against the first opaque background behind it
_CONTRAST = """node => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(v => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  let behind = node;
  while (behind && (parse(getComputedStyle(behind).backgroundColor)[3] ?? 1) < 1) behind = behind.parentElement;
  const pair = [light(parse(getComputedStyle(node).color)), light(parse(getComputedStyle(behind).backgroundColor))];
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
}"""


def change_theme(notebook: Notebook, theme: str) -> None:
    notebook.command("apputils:change-theme", theme=theme)
    light = "true" if theme.endswith("Light") else "false"
    expect(notebook.page.locator(f"body[data-jp-theme-light='{light}']")).to_have_count(1)


@pytest.fixture
def drawn(lab: Server, open_notebook: Open) -> Notebook:
    slow = "import time; time.sleep(2)  # " + "x" * 80
    notebook = open_notebook(lab, START, "y = torch.ones(1 << 28, device='cuda')", slow)
    notebook.run(0)
    notebook.expect_panel()
    expect(notebook.panel.locator(".gm-sizes")).to_contain_text("256 MiB")
    return notebook


def test_every_text_stands_out_in_both_themes(drawn: Notebook) -> None:
    drawn.button("Find leaks").click()
    expect(drawn.panel.locator(".gm-row").first).to_be_visible(timeout=20_000)
    for theme in THEMES:
        change_theme(drawn, theme)
        expect_contrast(drawn)


def expect_contrast(drawn: Notebook) -> None:
    texts = drawn.panel.locator("b, span, code, button, select, h3, strong, small, .gm-sizes div, .gm-names div")
    seen = [text for text in texts.all() if text.is_visible() and text.inner_text().strip()]
    assert len(seen) > 20
    poor = {text.inner_text(): ratio for text in seen if (ratio := text.evaluate(_CONTRAST)) < 4.5}
    assert poor == {}


def test_nothing_is_cut_off_at_250_pixels(drawn: Notebook) -> None:
    drawn.button("Find leaks").click()
    expect(drawn.panel.locator(".gm-row").first).to_be_visible(timeout=20_000)
    drawn.page.evaluate("() => { document.querySelector('#jupyter-gpumem-sidebar').style.width = '250px' }")
    wide = drawn.panel.evaluate(
        """panel => {
          const edge = panel.getBoundingClientRect().right + 1;
          return [...panel.querySelectorAll('*')].filter(node => !node.closest('label') && !node.closest('svg'))
            .filter(node => node.getBoundingClientRect().right > edge).map(node => node.outerHTML.slice(0, 120));
        }"""
    )
    assert wide == []
    for name in ("Free memory", "Find leaks", "Pause"):
        button = drawn.button(name)
        assert button.evaluate("node => node.scrollWidth <= node.clientWidth + 1")


def test_figures_change_in_place(drawn: Notebook) -> None:
    def place() -> dict[str, float]:
        return drawn.panel.locator(".gm-sizes div").first.bounding_box()  # type: ignore[return-value]  # visible

    before, chart = place(), drawn.panel.locator(".gm-plot").bounding_box()
    button = drawn.button("Free memory").bounding_box()
    drawn.start(2)
    expect(drawn.panel.locator(".gm-busy")).to_be_visible()
    assert drawn.button("Free memory").bounding_box() == button
    drawn.run(1)
    expect(drawn.panel.locator(".gm-sizes div").first).to_have_text("1.25 GiB")
    assert place() == before
    assert drawn.panel.locator(".gm-plot").bounding_box() == chart


def test_every_control_is_reached_by_tab_and_pressed_by_keyboard(drawn: Notebook) -> None:
    drawn.panel.get_by_label("Device").focus()
    reached = []
    for _ in range(5):
        reached.append(
            drawn.page.evaluate(
                """() => {
                  const active = document.activeElement;
                  const named = active.tagName === 'BUTTON' ? active : active.labels[0];
                  return named.textContent.trim();
                }"""
            )
        )
        drawn.page.keyboard.press("Tab")
    assert reached == ["Device", "Time shown", "Pause", "Free memory", "Find leaks"]
    drawn.button("Free memory").focus()
    drawn.page.keyboard.press("Space")
    expect(drawn.answer).to_contain_text("device", timeout=20_000)
    drawn.button("Pause").focus()
    drawn.page.keyboard.press("Enter")
    expect(drawn.button("Resume")).to_be_focused()


def test_after_a_release_the_keyboard_is_at_the_next_row(lab: Server, open_notebook: Open) -> None:
    notebook = open_notebook(lab, START, *(f"torch.ones({4 - n} << 20, device='cuda:0')" for n in range(3)))
    notebook.run(0, 1, 2, 3)
    notebook.expect_panel()
    release = notebook.panel.get_by_title
    notebook.button("Find leaks").focus()
    notebook.page.keyboard.press("Enter")
    release("Release Out[3]").focus(timeout=20_000)
    # the next row, the last one left, and the words of the answer where no row is left
    for focused in (release("Release Out[4]"), release("Release Out[2]"), release("Release x").last):
        notebook.page.keyboard.press("Enter")
        expect(focused).to_be_focused(timeout=20_000)
        # so soon after an answer a second press is taken for a part of the first
        notebook.page.wait_for_timeout(500)
    notebook.page.keyboard.press("Enter")
    expect(notebook.panel.locator(".gm-row")).to_have_count(0, timeout=20_000)
    expect(notebook.panel.locator(".gm-answer")).to_be_focused()


@pytest.mark.parametrize("name", ["Free memory", "Find leaks", "Pause"])
def test_a_pressed_button_keeps_the_keyboard(drawn: Notebook, name: str) -> None:
    button = drawn.button(name)
    button.focus()
    drawn.page.keyboard.press("Enter")
    drawn.execute("x.append(x[0] + 1)")
    expect(drawn.panel.locator(".mod-active")).to_have_count(1 if name == "Pause" else 0, timeout=20_000)
    drawn.page.wait_for_timeout(700)
    expect(drawn.button("Resume" if name == "Pause" else name)).to_be_focused()


def test_a_screen_reader_finds_region_names_figures_and_answers(drawn: Notebook) -> None:
    expect(drawn.page.get_by_role("region", name="GPU memory")).to_have_count(1)
    expect(drawn.panel.get_by_role("combobox", name="Device")).to_be_visible()
    expect(drawn.panel.get_by_role("combobox", name="Time shown")).to_be_visible()
    labels = [image.get_attribute("aria-label") or "" for image in drawn.panel.get_by_role("img").all()]
    assert labels[0].startswith("allocated 256 MiB, cached")
    assert labels[1] == "GPU 0: 256 MiB, GPU 1: 256 MiB"
    assert labels[2].startswith("GPU 0 from ")
    drawn.button("Free memory").click()
    expect(drawn.panel.get_by_role("status")).to_contain_text("device", timeout=20_000)
    assert (
        drawn.panel.get_by_role("button").evaluate_all("nodes => nodes.filter(n => !n.textContent.trim()).length") == 0
    )


def test_the_colours_differ_for_colour_blind_people(drawn: Notebook) -> None:
    eyes = drawn.page.context.new_cdp_session(drawn.page)
    close = {}
    for theme, kind in itertools.product(THEMES, ("none", "deuteranopia", "protanopia", "tritanopia")):
        change_theme(drawn, theme)
        eyes.send("Emulation.setEmulatedVisionDeficiency", {"type": kind})
        colours = {key: _mean_colour(drawn, key) for key in ("a", "r", "x", "o", "f")}
        for first, second in itertools.combinations(colours, 2):
            distance = math.dist(colours[first], colours[second])
            if distance < 15:
                close[theme, kind, first, second] = round(distance)
    assert close == {}


def test_nothing_is_asked_of_any_other_machine(lab: Server, open_notebook: Open, page: Page) -> None:
    asked: set[str | None] = set()
    page.on("request", lambda request: asked.add(urlsplit(request.url).hostname))
    page.on("websocket", lambda socket: asked.add(urlsplit(socket.url).hostname))
    notebook = open_notebook(lab, START, "z = y = x")
    notebook.run(0)
    notebook.expect_panel()
    notebook.button("Find leaks").click()
    expect(notebook.answer).to_contain_text("searched", timeout=20_000)
    assert asked - {None} == {"127.0.0.1"}


def _mean_colour(notebook: Notebook, key: str) -> tuple[float, float, float]:
    """Return the colour of a part's key as it is seen, in CIE L*a*b*."""
    image = Image.open(io.BytesIO(notebook.panel.locator(f".gm-key.gm-s{key}").first.screenshot())).convert("RGB")
    width, height = image.size
    image = image.crop((2, 2, width - 2, height - 2)).resize((1, 1), Image.Resampling.BOX)
    red, green, blue = (_linear(value / 255) for value in image.getpixel((0, 0)))  # type: ignore[union-attr, misc]  # RGB
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
