"""The tree in README.md is the tree on the disk, each entry with one sentence."""

import re
from pathlib import Path

import pytest

from source_tree import PACKAGE, ROOT

ENTRY = re.compile(r"^(?P<indent> *)(?P<name>[\w.]+/?)(?:\s{2,}(?P<sentence>\S.*))?$")
UNLISTED = ("__init__.py", "__pycache__", "py.typed")


def printed_tree(readme: str) -> dict[str, str]:
    """Path under src/draftline -> its sentence, from the first ```text fence after the heading "## Tree".

    The first line is the package folder; each level below is indented by two spaces more, folders end in "/".
    """
    _, heading, rest = readme.partition("\n## Tree\n")
    assert heading, 'README.md has no heading "## Tree"'
    fence = re.search(r"^```text\n(.*?)^```$", rest, re.DOTALL | re.MULTILINE)
    assert fence, "no ```text fence after the heading"
    first, *lines = fence[1].splitlines()
    assert first.split()[0] == "src/draftline/"
    entries: dict[str, str] = {}
    folders: list[str] = []
    for line in lines:
        match = ENTRY.match(line)
        assert match, f"not a tree entry: {line!r}"
        depth = len(match["indent"]) // 2 - 1
        folders = folders[:depth]
        assert len(match["indent"]) == 2 * (len(folders) + 1), f"wrong indent: {line!r}"
        path = "".join(folders) + match["name"]
        assert path not in entries, f"listed twice: {path}"
        entries[path] = match["sentence"] or ""
        if match["name"].endswith("/"):
            folders.append(match["name"])
    return entries


def tree_on_disk(package: Path) -> set[str]:
    """Folders (with "/") and modules under the package. What is in assets/ is data and not listed."""
    entries = set()
    for path in package.rglob("*"):
        parts = path.relative_to(package).parts
        if path.name in UNLISTED or "__pycache__" in parts or (parts[0] == "assets" and len(parts) > 1):
            continue
        entries.add("/".join(parts) + ("/" if path.is_dir() else ""))
    return entries


def test_the_printed_tree_is_the_tree_on_disk() -> None:
    printed = printed_tree((ROOT / "README.md").read_text(encoding="utf-8"))
    on_disk = tree_on_disk(PACKAGE)
    assert sorted(on_disk - set(printed)) == [], "on disk, not in README.md"
    assert sorted(set(printed) - on_disk) == [], "in README.md, not on disk"
    assert [path for path, sentence in printed.items() if not sentence] == [], "without a sentence"


GOOD = """# x

## Tree

```text
src/draftline/
  cli.py    verbs
  data/     stage
    rows.py  rows
  z.py      last
```
"""


def test_the_checker_reads_nesting_and_sentences() -> None:
    assert printed_tree(GOOD) == {"cli.py": "verbs", "data/": "stage", "data/rows.py": "rows", "z.py": "last"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (GOOD.replace("## Tree", "## Files"), "no heading"),
        (GOOD.replace("```text", "```"), "no ```text fence"),
        (GOOD.replace("    rows.py", "      rows.py"), "wrong indent"),
        (GOOD.replace("z.py      last", "cli.py    again"), "listed twice"),
        (GOOD.replace("cli.py    verbs", "cli.py verbs"), "not a tree entry"),
    ],
)
def test_the_checker_refuses(bad: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        printed_tree(bad)


def test_the_disk_side_lists_folders_and_modules_but_no_data(tmp_path: Path) -> None:
    for name in ("cli.py", "__init__.py", "py.typed", "data/rows.py", "data/__pycache__/rows.pyc", "assets/a/b.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert tree_on_disk(tmp_path) == {"cli.py", "data/", "data/rows.py", "assets/"}
