import json
from itertools import pairwise

import pytest

from secure_fedclust import FKM, PrivacySpec
from secure_fedclust.audit.report.content import report_of
from secure_fedclust.audit.report.folder import write_report
from secure_fedclust.audit.report.page import render

from .browser import Browser, find_browser
from .report_world import audit_of, finding, fit, fitted, new_ledger, spec, unprotected

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium: install one, or name it in CHROMIUM"
)

ON_SCREEN = """(() => {
  const element = document.getElementById('verdict');
  const box = element.getBoundingClientRect(), style = getComputedStyle(element);
  const top = document.elementFromPoint(box.x + box.width / 4, box.y + box.height / 2);
  return {
    text: element.innerText, verdict: element.dataset.verdict,
    size: parseFloat(style.fontSize), shown: top === element,
    inside: box.y >= 0 && box.bottom <= innerHeight && box.width > 100,
    claim: document.getElementById('claim').innerText,
    color: style.color, background: getComputedStyle(element.parentElement).backgroundColor,
  };
})()"""

TOO_WIDE = """[...document.querySelectorAll('body *')].filter(element => {
  if (element.closest('.scroll') && !element.matches('.scroll')) return false;
  return element.getBoundingClientRect().right > document.documentElement.clientWidth + 1;
}).map(element => element.outerHTML.slice(0, 80))"""

CONTRASTS = """(() => {
  const light = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(v => v / 255).map(
      v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if (!color.startsWith('rgba(0, 0, 0, 0')) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const low = new Set();
  for (const e of document.querySelectorAll('p,li,td,th,h1,h2,h3,a,span,caption,figcaption,code')) {
    if (!e.innerText || !e.getClientRects().length) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.add(e.tagName + ' ' + e.className);
  }
  return [...low];
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(find_browser(), tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Reports that claim, do not, or lost their claim."""
    folder = tmp_path_factory.mktemp("pages")
    found = {}

    def put(name, content):
        found[name] = folder / f"{name}.html"
        found[name].write_text(render(content), encoding="utf-8")

    for protection in ("none", "masking", "ckks"):
        model = fitted("FKM", protection)
        audit = audit_of(model)
        put(protection, report_of(model.result_, ledger=model.ledger_, audit=audit))
    put("unprotected", report_of(unprotected("FKM").result_))
    model = fitted("FKM")
    failed = finding(figure=9.0, interval=(9.0, 11.0), verdict="FAIL", words="Epsilon is above 9.")
    put("failed", report_of(model.result_, ledger=model.ledger_, audit=audit_of(model, failed)))
    fast = fit(FKM(2, sampler="fast"), spec())
    put("fast", report_of(fast.result_))
    long = json.loads(json.dumps(report_of(model.result_, ledger=model.ledger_)))
    row = long["ledger"]["book"]["rows"][0]
    long["ledger"]["book"]["rows"] = [row | {"row": i} for i in range(1000)]
    long["run"]["feature_names"] = ["a_feature_with_a_very_long_name_" * 4] * 2
    put("long", long)
    evil = fit(FKM(2), PrivacySpec.none(reason="<script>document.title='caught'</script>"))
    put("evil", report_of(evil.result_, names=True, command="<img src=http://example.org/x>"))
    return found


NAMES = ["none", "masking", "ckks", "unprotected", "failed", "fast", "long", "evil"]


@pytest.mark.parametrize("width", [360, 1100])
@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_its_verdict_asks_for_nothing_and_fits(browser, pages, name, width):
    browser.open(pages[name], width=width, height=800)
    seen = browser.run(ON_SCREEN)
    claimed = name in ("none", "masking", "ckks", "long")
    assert seen["verdict"] == ("DP CLAIM" if claimed else "NO DP CLAIM")
    assert ("NO DP CLAIM" in seen["text"]) != claimed
    assert seen["shown"] and seen["inside"] and seen["size"] >= 20
    assert seen["claim"] and seen["color"] != seen["background"]
    assert ("differential privacy for each" in seen["claim"]) == claimed
    assert claimed or "epsilon" not in browser.run("document.querySelector('.lead').innerText")
    assert browser.run("document.documentElement.clientWidth") == width
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(TOO_WIDE) == []
    assert browser.complaints == []
    assert browser.requests == [pages[name].resolve().as_uri()]


def test_a_broken_page_would_have_been_noticed(browser, tmp_path):
    """What the tests above rely on: complaints, requests and width are really looked at."""
    page = tmp_path / "broken.html"
    page.write_text(
        "<!doctype html><meta name=viewport content='width=device-width,initial-scale=1'>"
        "<p id=verdict data-verdict=x style='width:900px'>x</p><p id=claim>y</p>"
        "<img src='missing.png'><script>console.error('no'); throw new Error('oh')</script>"
    )
    browser.open(page, width=360)
    assert browser.run("document.documentElement.scrollWidth") > 360
    assert len(browser.run(TOO_WIDE)) >= 1
    assert len(browser.complaints) >= 2 and len(browser.requests) == 2


def test_scripts_in_what_users_wrote_do_not_run(browser, pages):
    browser.open(pages["evil"])
    assert browser.run("document.title").startswith("NO DP CLAIM")
    assert browser.run("document.scripts.length + document.images.length") == 0
    assert "<script>document.title='caught'</script>" in browser.run("document.body.innerText")


def test_the_audit_stands_beside_the_verdict(browser, pages):
    for name, word in (("none", "PASS"), ("failed", "FAIL"), ("unprotected", "Not audited")):
        browser.open(pages[name])
        assert word in browser.run("document.getElementById('audited').innerText")


def test_headings_are_in_order_and_everything_has_a_name(browser, pages):
    browser.open(pages["masking"])
    levels = browser.run(
        "[...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))"
    )
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert browser.run("document.documentElement.lang") == "en"
    assert browser.run("[...document.querySelectorAll('table')].every(t => t.caption)")
    assert browser.run(
        "[...document.querySelectorAll('svg')].every(s => s.querySelector('title') && "
        "s.querySelector('desc') && s.getAttribute('role') === 'img')"
    )
    ids = browser.run("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    links = browser.run("[...document.querySelectorAll('nav a')].map(a => a.hash.slice(1))")
    assert len(links) == 10 and set(links) <= set(ids)


@pytest.mark.parametrize("name", ["masking", "failed"])
def test_text_stands_out_from_what_is_behind_it(browser, pages, name):
    browser.open(pages[name])
    assert browser.run(CONTRASTS) == []


def test_pictures_stay_within_their_frames(browser, pages):
    browser.open(pages["masking"])
    outside = """[...document.querySelectorAll('svg')].filter(svg => {
      const frame = svg.getBoundingClientRect();
      return [...svg.querySelectorAll('circle,polyline,line,rect,text')].some(mark => {
        const box = mark.getBoundingClientRect();
        return box.left < frame.left - 1 || box.right > frame.right + 1 ||
          box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
      });
    }).length"""
    assert browser.run("document.querySelectorAll('svg').length") >= 3
    assert browser.run(outside) == 0


def test_on_paper_the_verdict_is_on_the_first_page_and_no_table_is_cut(browser, pages):
    browser.open(pages["masking"], width=680, height=960, media="print")
    assert browser.run("document.getElementById('claim').getBoundingClientRect().bottom") < 960
    cut = """[...document.querySelectorAll('.scroll')].filter(
      box => box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).overflowX !== 'visible'
        || box.querySelector('table').offsetWidth > box.clientWidth + 1
    ).map(box => box.getAttribute('aria-label'))"""
    assert browser.run(cut) == []
    assert browser.paper().startswith(b"%PDF")


def test_a_report_written_into_a_folder_opens(browser, tmp_path):
    model = fit(FKM(2), spec(), new_ledger(tmp_path / "ledger.sqlite"))
    model.ledger_.close()
    model.result_.save(tmp_path / "result.json")
    browser.open(write_report(tmp_path))
    assert browser.run(ON_SCREEN)["verdict"] == "DP CLAIM"
    assert browser.complaints == []
