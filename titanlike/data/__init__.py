"""From text to the batches of a run, in one global order that no mesh changes.

    data = open_data(config, dp_coordinate, dp)
    for batch in data.train_batches(cursor):     # cursor: that of the last batch before, or None
        ...                                      # checkpoint batch.cursor once the batch has been trained on
    for name, validation in data.validation.items():
        for batch in validation.batches(rows): ...

Nothing here is imported before `open_data` is called, so that a config can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanlike.config import Config
    from titanlike.data.opening import Data

__all__ = ["open_data"]


def open_data(config: Config, dp_coordinate: int, dp: int) -> Data:
    """Open the tokenizer and all sources of a run, as seen from one dp coordinate.

    Raises:
        UserError: a file or a source that cannot be used.
    """
    from titanlike.data.opening import Data

    return Data(config, dp_coordinate, dp)
