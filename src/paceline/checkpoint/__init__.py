"""Checkpoints that are independent of the plan. Any number of ranks writes them as pieces, and any
other number reads regions of them.
"""

from paceline.base.files import write_json
from paceline.checkpoint.assemble import write_model
from paceline.checkpoint.dtypes import load_tensors
from paceline.checkpoint.index import TensorEntry
from paceline.checkpoint.pieces import Region, TensorPiece, pieces_of
from paceline.checkpoint.read import Checkpoint, newest_checkpoint, open_checkpoint
from paceline.checkpoint.write import Writer

__all__ = [
    "Checkpoint",
    "Region",
    "TensorEntry",
    "TensorPiece",
    "Writer",
    "load_tensors",
    "newest_checkpoint",
    "open_checkpoint",
    "pieces_of",
    "write_json",
    "write_model",
]
