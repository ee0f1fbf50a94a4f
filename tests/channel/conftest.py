"""One live run and its prepared features for every test of the folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from command import draftline_here
from offline import prepare
from runs import write_recipe


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A live run, and the features of its recipe in `features`."""
    home = tmp_path_factory.mktemp("offline")
    recipe = write_recipe(home)
    assert prepare(recipe, home / "features").code == 0
    assert draftline_here("train", recipe).code == 0
    return home


@pytest.fixture
def copy(home: Path, tmp_path: Path) -> Path:
    """The features again, to be harmed."""
    return Path(shutil.copytree(home / "features", tmp_path / "features"))
