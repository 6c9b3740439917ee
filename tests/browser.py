"""A real browser for tests: Chromium, without a window, driven over DevTools by a pair of pipes.

`make browser` installs it on Debian and Ubuntu.
"""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess

_FLAGS = (
  "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking "
  "--disable-component-update --disable-sync --no-first-run --remote-debugging-pipe"
).split()


_SMALLEST = """Math.min(...[...document.querySelectorAll("body *")].filter(e =>
  [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()) && e.getClientRects().length
).map(e => parseFloat(getComputedStyle(e).fontSize) * (e.ownerSVGElement ?
  e.ownerSVGElement.getBoundingClientRect().width / e.ownerSVGElement.viewBox.baseVal.width
  : 1)))"""
_OUTSIDE = """[...document.querySelectorAll("svg text")].filter(t => {
  const a = t.getBoundingClientRect(), b = t.closest("figure").getBoundingClientRect();
  return a.left < b.left || a.right > b.right || a.bottom > b.bottom
}).map(t => t.textContent)"""


def path():
  """The program, or None."""
  return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
  """One tab; requests and console messages are noted.

  Attributes:
    requests: addresses that it asked for.
    messages: errors and warnings of scripts, styles and policies.
  """

  def __init__(self, write, read):
    self._write, self._read, self._last = write, read, 0
    self.requests, self.messages, self._buffer, self._events = [], [], b"", []
    target = self._call("Target.createTarget", url="about:blank")["targetId"]
    self._session = None
    self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Page", "Network", "Runtime", "Log"):
      self._call(f"{domain}.enable")

  def open(self, file, width, height=900, dark=False):
    """Loads a file in a window of so many pixels."""
    self.resize(width, height)
    feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    self._call("Emulation.setEmulatedMedia", features=[feature])
    self._events.clear()
    self._call("Page.navigate", url=pathlib.Path(file).resolve().as_uri())
    while "Page.loadEventFired" not in self._events:
      self._note(self._next())

  def resize(self, width, height=900):
    """Makes the window so large, around the page that it shows."""
    self._call(
      "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
      mobile=width < 600,
    )  # fmt: skip

  def look(self, file, width, dark=False):
    """Opens a file, and fails where it cannot be read at that width."""
    self.open(file, width, dark=dark)
    assert self.ask("innerWidth") == width
    assert self.ask("document.documentElement.scrollWidth") <= width  # nothing sticks out
    assert self.ask(_SMALLEST) >= 9  # pixels, of text and of text in a drawing
    assert self.ask(_OUTSIDE) == []  # no text of a drawing leaves its card

  def ask(self, expression):
    """The value of an expression in the page."""
    found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
    assert "exceptionDetails" not in found, found
    return found["result"].get("value")

  def _call(self, method, **params):
    self._last += 1
    message = {"id": self._last, "method": method, "params": params}
    if getattr(self, "_session", None):
      message["sessionId"] = self._session
    os.write(self._write, json.dumps(message).encode() + b"\0")
    while (answer := self._next()).get("id") != self._last:
      self._note(answer)
    assert "error" not in answer, answer
    return answer["result"]

  def _next(self):
    while b"\0" not in self._buffer:
      data = os.read(self._read, 1 << 16)
      assert data, "the browser has gone"
      self._buffer += data
    message, _, self._buffer = self._buffer.partition(b"\0")
    return json.loads(message)

  def _note(self, event):
    method, params = event.get("method", ""), event.get("params", {})
    self._events.append(method)
    if method == "Network.requestWillBeSent":
      self.requests.append(params["request"]["url"])
    elif method == "Log.entryAdded":
      self.messages.append(params["entry"]["text"])
    elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
      self.messages.append(json.dumps(params))


@contextlib.contextmanager
def page(profile):
  """A `Page` of a browser that keeps what it keeps in the folder `profile`."""
  to_browser, from_browser = os.pipe(), os.pipe()

  # DevTools reads file descriptor 3 and writes 4.
  shell = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null'
  command = ["sh", "-c", shell, path(), *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
  process = subprocess.Popen(
    command, stdin=to_browser[0], stdout=from_browser[1], stderr=subprocess.DEVNULL
  )
  os.close(to_browser[0])
  os.close(from_browser[1])
  try:
    yield Page(to_browser[1], from_browser[0])
  finally:
    os.close(to_browser[1])  # it ends with its pipe
    os.close(from_browser[0])
    try:
      process.wait(10)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
