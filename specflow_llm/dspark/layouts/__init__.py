"""Drafters of other projects: the ``speculators`` layout (DSpark, DFlash; read and written) and DeepSpec's (read).

``loading`` (the way in), ``speculators`` and ``deepspec`` (the layouts), ``files`` (tensors, read one by one),
``backbone`` (layers and rotary parameters), ``names`` (tensor names), ``checks`` (what must hold, or the drafter would
be read wrongly and silently draft in vain).
"""

from .checks import COPIES_WITHIN
from .loading import FileLayout, file_layout, load_for_target
from .speculators import export_speculators

__all__ = ["COPIES_WITHIN", "FileLayout", "export_speculators", "file_layout", "load_for_target"]
