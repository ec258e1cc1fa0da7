"""MkDocs hooks: put the repository's own pages (CONTRIBUTING, CHANGELOG, SECURITY) on the site and
mend their links.

Links are written as they work in the repository, so that pages can also be read there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# File at the root of the repository -> page of the site.
ROOT_PAGES = {
    "CONTRIBUTING.md": "developers/contributing.md",
    "CHANGELOG.md": "developers/changelog.md",
    "SECURITY.md": "developers/security.md",
}
_LINK = re.compile(r"(\]\()([^)#:\s]+\.md)")


def on_files(files: Any, config: Any) -> Any:
    """Add the root pages to the site."""
    for name, uri in ROOT_PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace repository links by site links."""
    uri = page.file.src_uri
    in_repository = {site: name for name, site in ROOT_PAGES.items()}.get(uri, f"docs/{uri}")

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), match[2]))
        site_uri = ROOT_PAGES.get(target, target.removeprefix("docs/"))
        return match[1] + posixpath.relpath(site_uri, posixpath.dirname(uri) or ".")

    return _LINK.sub(replace, markdown)
