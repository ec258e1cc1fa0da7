"""Headless Chromium, driven by chromedriver's HTTP interface, and what is wrong with a page it
shows.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
MISSING = (
    None
    if CHROMIUM and DRIVER
    else "no chromium with chromedriver is installed, so pages are not looked at"
)
WIDTHS, SCHEMES = (390, 820, 1440), ("light", "dark")
_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-sync", "--disable-background-networking", "--disable-component-update",
    "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND",
]  # fmt: skip

# Returns sentences. A scroll container may be wider inside if it says so in `data-hint`. Contrast
# is WCAG 2's.
_FIND_PROBLEMS = """
const problems = [], width = innerWidth;
if (document.scrollingElement.scrollWidth > width)
  problems.push(`the page is ${document.scrollingElement.scrollWidth} wide`);
const name = e => `<${e.tagName} ${e.getAttribute('class') || ''}> ${e.textContent.trim().slice(0, 40)}`;
const rgba = text => { const n = text.match(/[\\d.]+/g).map(Number); return [n[0], n[1], n[2], n[3] ?? 1]; };
const over = (top, below) => [0, 1, 2].map(i => top[3] * top[i] + (1 - top[3]) * below[i]).concat(1);
const background = e => {
  const layers = [];
  for (let at = e; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
  const canvas = matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18, 1] : [255, 255, 255, 1];
  return layers.reverse().reduce((below, top) => over(top, below), canvas);
};
const light = c => [0, 1, 2].map(i => c[i] / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
const check = (e, style) => {
  const back = background(e), ratio = contrast(over(rgba(style.color), back), back);
  if (ratio < 4.5) problems.push(`contrast ${ratio.toFixed(2)} of ${name(e)}`);
};
for (const e of document.body.querySelectorAll('*')) {
  const box = e.getBoundingClientRect(), style = getComputedStyle(e);
  if (!box.width || !box.height || style.visibility === 'hidden') continue;
  if ((box.right > width + 0.5 || box.left < -0.5) && !e.closest('[data-hint]')) problems.push(`outside: ${name(e)}`);
  if ([...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) check(e, style);
  const before = getComputedStyle(e, '::before');
  if (!['none', 'normal', '""'].includes(before.content)) check(e, before);
}
return problems;
"""


class Browser:
    """A window. `open` a page, `show` it in a width and a colour scheme, and look."""

    def __init__(self, address: str) -> None:
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._address = address
        options = {"binary": CHROMIUM, "args": _FLAGS}
        capabilities = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}
        self._address += (
            "/session/" + self._post("/session", {"capabilities": capabilities})["sessionId"]
        )

    def open(self, page: Path) -> None:
        self._post("/url", {"url": page.as_uri()})

    def show(self, width: int, scheme: str) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._devtools("Emulation.setEmulatedMedia", {"features": [feature]})

    def run(self, script: str) -> Any:
        return self._post("/execute/sync", {"script": script, "args": []})

    def problems(self) -> list[str]:
        """What does not fit, is hard to read, or overlaps, with all collapsed parts open."""
        self.run("document.querySelectorAll('details').forEach(e => e.open = true)")
        return list(self.run(_FIND_PROBLEMS))

    def quit(self) -> None:
        self._send(urllib.request.Request(self._address, method="DELETE"))

    def _devtools(self, command: str, parameters: Mapping[str, Any]) -> Any:
        return self._post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _post(self, path: str, content: Mapping[str, Any]) -> Any:
        body, header = json.dumps(content).encode(), {"Content-Type": "application/json"}
        return self._send(urllib.request.Request(self._address + path, body, header))

    def _send(self, request: urllib.request.Request) -> Any:
        with self._opener.open(request, timeout=60) as response:
            return json.load(response)["value"]


@contextmanager
def browser() -> Iterator[Browser]:
    process = subprocess.Popen(
        [str(DRIVER), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        port = next(
            line.split()[-1].rstrip(".")
            for line in process.stdout
            if "started successfully on port" in line
        )
        window = Browser(f"http://127.0.0.1:{port}")
        try:
            yield window
        finally:
            window.quit()
    finally:
        process.terminate()
        process.wait(timeout=30)
