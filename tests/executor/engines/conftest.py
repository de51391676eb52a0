"""Modules that ranks of tests import by their names are beside the native engine's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("native")))
