"""Programs of an earlier run of the tests: whole ones are kept, for this kind of processor."""

import jax
import programs
from jax._src import compilation_cache


def entry(folder, name, content):
  folder.mkdir(exist_ok=True)
  (folder / f"{name}-cache").write_bytes(content)


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def test_whole_programs_are_kept_and_taken(tmp_path, monkeypatch):
  monkeypatch.setenv("NM_TEST_PROGRAMS", str(tmp_path / "kept"))
  content = compilation_cache.compress_executable(b"a program" * 100)
  entry(tmp_path / "first", "whole", content)
  entry(tmp_path / "first", "cut", content[:-5])  # its process was killed
  programs.give(tmp_path / "first")
  programs.take(tmp_path / "second")
  assert names(tmp_path / "second") == names(programs.store()) == ["whole-cache"]
  assert (tmp_path / "second/whole-cache").read_bytes() == content

  monkeypatch.setattr(programs, "MOST", 10)  # bytes: too large now
  entry(tmp_path / "second", "later", content)
  (tmp_path / "second/whole-cache").unlink()
  programs.give(tmp_path / "second")
  assert names(programs.store()) == ["later-cache"]


def test_nothing_is_kept_where_that_is_not_wanted(tmp_path, monkeypatch):
  monkeypatch.setenv("NM_TEST_PROGRAMS", "")
  entry(tmp_path / "first", "whole", compilation_cache.compress_executable(b"a program"))
  programs.give(tmp_path / "first")
  programs.take(tmp_path / "second")
  assert programs.store() is None and names(tmp_path / "second") == []


def test_workers_of_a_run_give_each_other_what_they_compiled(tmp_path):
  content = compilation_cache.compress_executable(b"a program" * 100)
  place, first, second = (tmp_path / name for name in ("all", "first", "second"))
  entry(first, "one", content)
  entry(first, "cut", content[:-5])
  entry(second, "two", content)
  one, two = (programs.Exchange(place, [folder]) for folder in (first, second))
  one.meet(), two.meet(), one.meet()
  assert names(place) == names(second) == ["one-cache", "two-cache"]
  assert names(first) == ["cut-cache", "one-cache", "two-cache"]
  entry(first, "later", content)
  one.meet(), two.meet()
  assert (second / "later-cache").read_bytes() == content


def test_a_program_has_one_name_in_every_folder(programs_of_this_worker):
  """Else no folder would serve another: jax would write a path of the folder into the name."""
  del programs_of_this_worker
  assert jax.config.values["jax_persistent_cache_enable_xla_caches"] == "none"
