"""What Chromium, without a window, measures of a page. `make browser` installs it."""

import html
import json
import pathlib
import re
import shutil
import subprocess

_FLAGS = (
  "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking "
  "--disable-component-update --disable-sync --no-first-run --hide-scrollbars --dump-dom "
  "--allow-file-access-from-files"  # a frame of another file may be asked
).split()


def path():
  """The program, or None."""
  return shutil.which("chromium") or shutil.which("chromium-browser")


def ask(expression, file, widths, folder):
  """The value of a JavaScript expression over `document` of a file, for each width in pixels."""
  uri = pathlib.Path(file).resolve().as_uri()
  frames = "".join(f'<iframe src="{uri}" width={width} height=900></iframe>' for width in widths)
  script = f"""onload = () => {{
    const ask = document => {expression};
    const frames = [...document.querySelectorAll('iframe')];
    document.title = JSON.stringify(frames.map(frame => ask(frame.contentDocument)));
  }}"""
  page = pathlib.Path(folder) / "frames.html"
  page.write_text(f"<style>iframe{{border:0}}</style><body>{frames}<script>{script}</script>")
  command = [path(), *_FLAGS, f"--user-data-dir={folder}/profile", page.as_uri()]
  done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
  return json.loads(html.unescape(re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)[1]))
