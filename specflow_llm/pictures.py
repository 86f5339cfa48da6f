"""Pictures without a screen: the one place that knows matplotlib, which is an optional extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specflow.errors import InvalidSettingError


def new_figure(path: Path, size: tuple[float, float], *, setting: str = "plot", what: str = "matplotlib") -> Any:
    """An empty figure that can be saved to a file.

    Args:
        path: the file; its suffix chooses the format.
        size: width and height in inches.
        setting: the setting that asked for a picture, for the error.
        what: what is needed for it, for the error.

    Raises:
        InvalidSettingError: matplotlib is not installed, or cannot write this format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an optional extra, slow to import
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise InvalidSettingError(
            setting, str(path), f"{what}; install it with pip install 'specflow-engine[bench]'"
        ) from error
    figure = Figure(figsize=size, layout="constrained")
    known = FigureCanvasAgg(figure).get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise InvalidSettingError("plot", str(path), f"a suffix among {', '.join(sorted(known))}")
    return figure
