"""What rows of every kind say of themselves: name, title, source, notes."""

from typing import Any

from rlcore.objectives._checks import describe


def check_texts(row: Any) -> None:
    """ValueError for a row whose texts are none; a list of notes becomes a tuple.

    name and title must not be blank; source may be empty, where a row has none.
    """
    for field in ("name", "title"):
        text = getattr(row, field)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{field} must be a string that is not empty; got {describe(text)}")
    if not isinstance(row.source, str):
        raise ValueError(f"source must be a string; got {describe(row.source)}")
    notes = row.notes
    strange = [notes]
    if isinstance(notes, tuple | list):
        strange = [note for note in notes if not isinstance(note, str)]
    if strange:
        raise ValueError(f"notes must be a tuple or a list of strings; got {describe(strange[0])}")
    object.__setattr__(row, "notes", tuple(notes))  # a list, where a record was read
