"""Read `_config.yml` (Jupyter Book's format) into settings for plain Sphinx.

Jupyter Book 1 is a thin layer over Sphinx and in maintenance. The book uses nothing of it that
Sphinx, myst-nb and the theme lack, so translating the few keys of the file is all that is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from book.bootstrap import ROOT

EXTENSIONS = [
    "myst_nb",
    "sphinx_external_toc",
    "sphinx_togglebutton",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_book_theme",
]
EXECUTE = {
    "execute_notebooks": "nb_execution_mode",
    "timeout": "nb_execution_timeout",
    "allow_errors": "nb_execution_allow_errors",
    "raise_on_error": "nb_execution_raise_on_error",
    "show_tb": "nb_execution_show_tb",
    "stderr_output": "nb_output_stderr",
}
# settings of `sphinx: config:` whose values are paths from the root of the project
PATHS = ("html_static_path", "locale_dirs", "templates_path")


def read(root: Path = ROOT) -> dict[str, Any]:
    """The file as it is."""
    return yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))


def sphinx_settings(root: Path = ROOT) -> dict[str, Any]:
    """The same settings in Sphinx's names, with absolute paths."""
    config = read(root)
    html, repository = config.get("html", {}), config.get("repository", {})
    settings: dict[str, Any] = {
        "project": config["title"],
        "html_title": config["title"],
        "author": config["author"],
        "copyright": config["copyright"],
        "extensions": [*EXTENSIONS, *config["sphinx"].get("extra_extensions", [])],
        "exclude_patterns": config.get("exclude_patterns", []),
        "external_toc_path": str(root / "book" / "_toc.yml"),
        "external_toc_exclude_missing": config.get("only_build_toc_files", False),
        "html_sourcelink_suffix": "",
        "myst_enable_extensions": config["parse"]["myst_enable_extensions"],
    }
    for key, value in config["execute"].items():
        settings[EXECUTE[key]] = value
    bibliography = config.get("bibtex_bibfiles")
    if bibliography:
        settings["extensions"].append("sphinxcontrib.bibtex")
        settings["bibtex_bibfiles"] = [str(root / name) for name in bibliography]
    options = {
        "repository_url": repository.get("url", ""),
        "repository_branch": repository.get("branch", "main"),
        "path_to_docs": repository.get("path_to_book", ""),
        "use_repository_button": html.get("use_repository_button", False),
        "use_issues_button": html.get("use_issues_button", False),
        "use_edit_page_button": html.get("use_edit_page_button", False),
        "home_page_in_toc": html.get("home_page_in_navbar", True),
    }
    for key, value in config["sphinx"]["config"].items():
        if key in PATHS:
            value = [str(root / part) for part in value]
        if key == "html_theme_options":
            value = {**options, **value}
        settings[key] = value
    settings["colab_url"] = config.get("launch_buttons", {}).get("colab_url", "")
    return settings
