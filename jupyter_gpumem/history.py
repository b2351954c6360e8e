"""Every recorded cell as rows: for the screen, for files, for pandas."""

import csv
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jupyter_gpumem.cells import CellRecord

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class History:
    """The recorded cells, oldest first."""

    records: tuple[CellRecord, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat row for each cell and device; a cell without any device has one row, its sizes None.

        Sizes are in bytes, ``seconds`` in seconds, ``started_at`` in seconds since the epoch.
        """
        rows: list[dict[str, Any]] = []
        for record in self.records:
            cell = record.to_dict()
            del cell["lines"], cell["timeline"]
            devices = cell.pop("devices") or [dict.fromkeys(_DEVICE_COLUMNS)]
            rows.extend({**cell, **device} for device in devices)
        return rows

    def to_csv(self) -> str:
        """Return the rows as CSV, with a header."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [*_CELL_COLUMNS, *_DEVICE_COLUMNS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())
        return text.getvalue()

    def to_json(self) -> str:
        """Return the records as a JSON list, the devices nested."""
        return json.dumps([record.to_dict() for record in self.records], indent=1)

    def to_pandas(self) -> "pd.DataFrame":
        """Return the rows as a DataFrame (pandas is imported here); sizes are whole numbers or missing.

        Raises
        ------
        ImportError
            Where pandas is not installed.
        """
        import pandas as pd

        frame = pd.DataFrame(self.rows(), columns=[*_CELL_COLUMNS, *_DEVICE_COLUMNS])
        # one missing value would make a column of bytes one of floats
        whole = ("number", "device", *(column for column in _DEVICE_COLUMNS if column.endswith("_bytes")))
        return frame.astype(dict.fromkeys(whole, "Int64"))


_CELL_COLUMNS = ("number", "name", "status", "started_at", "seconds", "depth", "simulated", "sizes_read")
_DEVICE_COLUMNS = (
    "device",
    "label",
    "allocated_before_bytes",
    "allocated_after_bytes",
    "allocated_delta_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_exact",
    "reserved_before_bytes",
    "reserved_after_bytes",
    "reserved_delta_bytes",
    "device_used_bytes",
    "device_total_bytes",
)
