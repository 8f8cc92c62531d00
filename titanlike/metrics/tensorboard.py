"""TensorBoard event files.

torch's SummaryWriter makes an event of each number, which costs milliseconds a step; here all numbers of a step are one
event. TensorBoard's own thread writes it within `FLUSH_S` seconds: what a kill leaves for certain is metrics.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from titanlike.errors import UserError

FLUSH_S = 10


class TensorBoard:
    """Appends to the folder `log_dir`, and hides what an earlier process logged for `first_step` and later steps.

    Raises UserError if the package tensorboard is not installed.
    """

    def __init__(self, log_dir: Path, first_step: int) -> None:
        try:
            # By name, for protobuf makes what is in these modules at run time, where no type checker sees it.
            event_pb2: Any = import_module("tensorboard.compat.proto.event_pb2")
            summary_pb2: Any = import_module("tensorboard.compat.proto.summary_pb2")
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise UserError(
                "metrics.tensorboard needs the package tensorboard: install it, or set metrics.tensorboard = false"
            ) from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(log_dir), max_queue_size=1000, flush_secs=FLUSH_S)
        # A START in the middle of a log tells TensorBoard that the steps from here on are run anew.
        session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=first_step, session_log=session))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of one step."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text, which TensorBoard shows as Markdown."""
        summary_pb2: Any = import_module("tensorboard.compat.proto.summary_pb2")
        tensor_pb2: Any = import_module("tensorboard.compat.proto.tensor_pb2")
        types_pb2: Any = import_module("tensorboard.compat.proto.types_pb2")
        shape_pb2: Any = import_module("tensorboard.compat.proto.tensor_shape_pb2")
        metadata = summary_pb2.SummaryMetadata(plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="text"))
        shape = shape_pb2.TensorShapeProto(dim=[shape_pb2.TensorShapeProto.Dim(size=1)])
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        value = self._summary.Value(tag=name, metadata=metadata, tensor=tensor)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=[value])))

    def close(self) -> None:
        """Write out what is waiting, and close the file."""
        self._writer.close()
