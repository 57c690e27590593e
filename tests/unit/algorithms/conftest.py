"""The modules beside this file can be imported, also by processes that a test starts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
