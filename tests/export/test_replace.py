import sys
import threading
from pathlib import Path

import pytest

from draftline.export import replace
from draftline.export.replace import exchanged, replace_folder, step_aside


def make(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "file").write_text(text)
    return folder


@pytest.mark.parametrize("swap", [replace_folder, step_aside])
def test_the_earlier_folder_ends_up_where_the_fresh_one_was(tmp_path: Path, swap: object) -> None:
    fresh, place = make(tmp_path / "fresh", "new"), make(tmp_path / "place", "old")
    assert callable(swap)
    swap(fresh, place)
    assert ((place / "file").read_text(), (fresh / "file").read_text()) == ("new", "old")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "place"]


def test_the_earlier_folder_comes_back_when_the_fresh_one_cannot_take_its_place(tmp_path: Path) -> None:
    place = make(tmp_path / "place", "old")
    with pytest.raises(FileNotFoundError):
        step_aside(tmp_path / "not there", place)
    assert (place / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs renameat2")
def test_a_reader_never_finds_the_place_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 times, without waiting for the disk: what a reader sees does not depend on it."""
    monkeypatch.setattr(replace, "sync", lambda _: None)
    fresh, place = make(tmp_path / "fresh", "new"), make(tmp_path / "place", "old")
    if not exchanged(fresh, place):
        pytest.skip("this filesystem cannot exchange two names")
    done, absent = threading.Event(), 0

    def swap_often() -> None:
        for _ in range(2000):
            replace_folder(fresh, place)
        done.set()

    thread = threading.Thread(target=swap_often)
    thread.start()
    while not done.is_set():
        absent += not (place / "file").exists()
    thread.join()
    assert absent == 0
