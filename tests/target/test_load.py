"""Loading a target says nothing on its own and leaves transformers' switches alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils import logging

from builders import open_target, save_target


@pytest.mark.parametrize("shown", [True, False])
def test_no_bar_over_a_folder_and_the_switch_as_it_was(
    shown: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    save_target(tmp_path)
    switches = {True: logging.enable_progress_bar, False: logging.disable_progress_bar}
    request.addfinalizer(switches[logging.is_progress_bar_enabled()])
    switches[shown]()
    capfd.readouterr()
    open_target(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled() is shown
