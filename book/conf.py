"""Sphinx configuration: everything is in `_config.yml`, this only reads it (see config.py)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from book.config import sphinx_settings

globals().update(sphinx_settings())
