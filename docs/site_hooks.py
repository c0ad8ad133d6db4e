"""Hooks of mkdocs: pages outside of docs/ become part of the site, and links between all of them are adjusted.

The sources stay plain markdown with links between files of the repository, which every viewer of a repository follows.
A link to a file that is no page, such as a source file, becomes plain text on the site.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "report.md",
} | {
    str(page.relative_to(ROOT)): f"papers/{page.parent.name}.md"
    for page in sorted(ROOT.glob("fleet/experiments/*/README.md"))
}
"""Page in the repository -> page of the site."""
INDEX = "decisions/index.md"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of docs/, and an index of the decisions."""
    for source, target in OUTSIDE.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    rows = [f"{page.name[:4]}. [{page.read_text().splitlines()[0].lstrip('# ')}]({page.name})" for page in decisions]
    content = "# Decisions\n\nReasons of the design, oldest first.\n\n" + "\n".join(f"- {row}" for row in rows) + "\n"
    files.append(File.generated(config, INDEX, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    origins = {target: source for source, target in OUTSIDE.items()}
    source = PurePosixPath(origins.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def adjust(match: re.Match[str]) -> str:
        mark, text, link = match.groups()
        path, hash_sign, anchor = link.partition("#")
        if not path or "://" in link:
            return match[0]
        repository_path = os.path.normpath(source.parent / path)
        target = OUTSIDE.get(repository_path, repository_path.removeprefix("docs/"))
        if repository_path == "docs/decisions":
            target = INDEX
        elif repository_path not in OUTSIDE and not repository_path.startswith("docs/"):
            return text
        return f"{mark}[{text}]({os.path.relpath(target, Path(page.file.src_uri).parent)}{hash_sign}{anchor})"

    parts = CODE.split(markdown)
    return "".join(part if number % 2 else LINK.sub(adjust, part) for number, part in enumerate(parts))
