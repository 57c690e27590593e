"""Test modules are imported by file, so what they share is put on the path here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
