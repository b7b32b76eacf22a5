"""Hooks of mkdocs, when it builds the documentation's site (scripts/docs)."""

import pathlib
import posixpath
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
CODE_IN_CELL = re.compile(r"(?<=<td>)<code>.*?</code>")
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")


def on_config(config):
    """Lists the decisions, which are numbered, at the end of the navigation."""
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    config.nav.append({"Decisions": [f"decisions/{path.name}" for path in decisions]})
    return config


def on_page_markdown(markdown, page, config, files):
    """Leads links to files outside of docs/, which are none of the site's, to the repository. Those
    that are not there stay as they are, and mkdocs warns of them."""

    def led(match):
        path = posixpath.normpath(posixpath.join("docs", page.file.src_uri, "..", match[1]))
        outside = not path.startswith(("docs/", "..")) and (ROOT / path).exists()
        return f"{config.repo_url}/blob/main/{path}" if outside else match[1]

    return LINK.sub(led, markdown)


def on_page_content(html, page, config, files):
    """Lets specs in tables break between their parts, and nowhere else."""
    return CODE_IN_CELL.sub(lambda code: re.sub(r"(?<=[,:])|(?<=[^<]/)", "<wbr>", code[0]), html)
