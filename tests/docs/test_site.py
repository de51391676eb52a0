"""The pages: each in the navigation of the site, each public name in the reference, in plain English."""

import json
import re
from pathlib import Path

import autotune
import autotune.client
import autotune.notebook

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
# Of each, the standard term is shorter and clearer: report, return, learned, predicted, only, "there is not".
AVOIDED = re.compile(
    r"\b(told|tells?|telling|taught|teach(?:es)?|foreseen|such as one has|whatever comes of it)\b", re.IGNORECASE
)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"[\w/-]+\.(?:md|ipynb)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted([*PAGES, *(str(notebook.relative_to(DOCS)) for notebook in NOTEBOOKS)])


def test_notebooks_have_the_outputs_of_a_whole_run() -> None:
    for notebook in NOTEBOOKS:
        cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)], notebook.name
        outputs = [output for cell in cells for output in cell["outputs"]]
        assert not any(output["output_type"] == "error" for output in outputs)
        assert outputs


def test_every_public_name_is_in_the_reference() -> None:
    """Each of these modules is rendered whole, with what its `__all__` names."""
    page = (DOCS / "python.md").read_text(encoding="utf-8")
    for module in (autotune, autotune.client, autotune.notebook):
        assert f"::: {module.__name__}\n" in page
        assert all(hasattr(module, name) for name in module.__all__)


def test_pages_are_in_plain_english() -> None:
    """Those that people write; pages of results quote what programs print."""
    for name in ("README.md", "CONTRIBUTING.md", *(f"docs/{page}" for page in PAGES)):
        text = (ROOT / name).read_text(encoding="utf-8")
        if re.search("written by", text[:1500], re.IGNORECASE):
            continue
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
        assert AVOIDED.findall(prose) == [], name


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 80
