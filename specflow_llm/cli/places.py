"""Where results go, made sure of before the work that makes them."""

from __future__ import annotations

from pathlib import Path

from ..errors import DataFileError


def folder_for(path: Path) -> Path:
    """Make a folder for results, unless it is there.

    Raises:
        DataFileError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataFileError(path, f"results cannot be written there ({error})", "choose another folder") from error
    return path


def file_for(path: Path) -> Path:
    """Make the folder of a file for results.

    Raises:
        DataFileError: the folder cannot be made, or a folder has the file's name.
    """
    folder_for(path.parent)
    if path.is_dir():
        raise DataFileError(path, "it is a folder", "give the name of a file in it")
    return path


__all__ = ["file_for", "folder_for"]
